"""At least 60 kills at random moments, in every phase of a run: each run ends exactly, and leaves no process.

`make faults` runs all stories and writes its report to benchmarks/results; `make test` runs two kills.
ECHELON_FAULTS_SEED sets the seed.
"""

import itertools
import json
import os
import platform
import random
import statistics
import time
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

import pytest

from tests.faults.stories import PHASES, STEPS, Story, Teller, assert_same, train_uninterrupted

pytestmark = pytest.mark.dist

SEED = int(os.environ.get("ECHELON_FAULTS_SEED", "20260801"))
REPORT = Path(__file__).parents[2] / "benchmarks" / "results" / "faults-cpu.md"
LEAST_KILLS, LEAST_PER_PHASE = 60, 5

# A signal and its target for each kill, used in turn, so that every pair occurs in many phases.
WAYS = list(itertools.product(("SIGKILL", "SIGTERM"), ("rank 0", "another rank", "all", "agent")))
KINDS = [(2, "ddp"), (3, "fsdp"), (2, "ddp"), (4, "hsdp"), (2, "zero1"), (2, "ddp")]
NUM_STORIES = 11


def draw_stories():
    """Stories of six kills, one in each phase: data preparation and start first, then any order."""
    draw = random.Random(SEED)
    ways = itertools.cycle(WAYS)
    stories = []
    for ranks, parallel in itertools.islice(itertools.cycle(KINDS), NUM_STORIES):
        later = ["step", "save", "publish", "evaluation"]
        draw.shuffle(later)
        kills = [(phase, *next(ways)) for phase in ("data preparation", "start", *later)]
        next(ways)  # a story uses six of eight pairs; without this shift, a phase would always get the same ones
        stories.append(Story(ranks, parallel, kills, draw.randrange(2**32)))
    return stories


STORIES = draw_stories()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The uninterrupted run of each kind, trained once."""
    runs = {}

    def train(*kind):
        if kind not in runs:
            runs[kind] = train_uninterrupted(tmp_path_factory.mktemp("whole"), *kind)
        return runs[kind]

    return train


@pytest.fixture
def tell(tmp_path, monkeypatch, uninterrupted):
    """Runs a story and compares its result."""
    monkeypatch.setenv("ECHELON_TEST_MARK", str(tmp_path))

    def run(story):
        teller = Teller(tmp_path, story)
        teller.tell()
        assert_same(teller.run, uninterrupted(*story.kind), story.steps)

    return run


def test_a_run_with_two_kills_equals_an_uninterrupted_one(tell):
    """Kills the agent and a rank: the run continues by itself, or after the same command."""
    story = Story(2, "ddp", [("publish", "SIGKILL", "rank 0"), ("step", "SIGTERM", "agent")], SEED, steps=80)
    tell(story)
    assert len(story.done) == 2
    print(json.dumps([asdict(kill) for kill in story.done], indent=1))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(NUM_STORIES))
def test_stories_of_kills(tell, number):
    tell(STORIES[number])


@pytest.mark.slow
def test_every_phase_was_killed_often_and_the_report_is_complete():
    kills = [(story, kill) for story in STORIES for kill in story.done]
    assert len(kills) >= LEAST_KILLS
    landed = [kill.landed for _, kill in kills]
    assert all(landed.count(phase) >= LEAST_PER_PHASE for phase in PHASES), {
        each: landed.count(each) for each in PHASES
    }
    assert sum(story.ranks > 2 for story, _ in kills) * 3 >= len(kills)
    assert {(kill.signal, kill.target) for _, kill in kills} == set(WAYS)
    REPORT.write_text(render_report(kills))


def render_report(kills):
    """The report as Markdown: totals by phase, then every kill."""
    lines = [
        "# Kills, and what they cost",
        "",
        f"`make faults`, seed {SEED}: {len(kills)} kills of runs of {STEPS} steps (a small GPT-2 with dropout, a disk "
        "whose flushes take 20 ms longer), by SIGKILL and SIGTERM. Every run ended in the weights, optimizer state and "
        "metrics of one that was never interrupted, bit for bit, and left no process.",
        "",
        f"Machine: {os.cpu_count()} CPU cores ({platform.machine()}), {platform.system()} {platform.release()}; "
        f"Python {platform.python_version()}, torch {metadata.version('torch')}, "
        f"transformers {metadata.version('transformers')}; {time.strftime('%Y-%m-%d')}.",
        "",
        "Seconds to recover: from the kill until the new processes had loaded the newest checkpoint, the start of the "
        "command included where it was run again. Steps lost: done before the kill, done again after it. While data is "
        "prepared there are no ranks: a process that tokenizes stands for them.",
        "",
        "| Phase | Kills | By itself | Steps lost, median | most | Seconds to recover, median | most |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for phase in PHASES:
        of_phase = [kill for _, kill in kills if kill.landed == phase]
        lost = [kill.steps_lost for kill in of_phase] or [0]
        seconds = [kill.seconds_to_recover for kill in of_phase if kill.seconds_to_recover is not None] or [0.0]
        lines.append(
            f"| {phase} | {len(of_phase)} | {sum(kill.by_itself for kill in of_phase)} | {statistics.median(lost):g} | "
            f"{max(lost)} | {statistics.median(seconds):.1f} | {max(seconds):.1f} |"
        )
    lines += ["", "| Ranks | Plan | Signal | To | Landed in | At step | Exit code | Steps lost | Seconds |"]
    lines += ["|---|---|---|---|---|---|---|---|---|"]
    for story, kill in kills:
        code = "went on" if kill.by_itself else kill.exit_code
        seconds = "-" if kill.seconds_to_recover is None else f"{kill.seconds_to_recover:.1f}"
        lines.append(
            f"| {story.ranks} | {story.parallel} | {kill.signal} | {kill.target} | {kill.landed} | {kill.at_step} | "
            f"{code} | {kill.steps_lost} | {seconds} |"
        )
    return "\n".join(lines) + "\n"
