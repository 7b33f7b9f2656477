"""At least 60 kills at random moments, in every phase of a run: each run ends exactly, and leaves no process.

`make faults` runs all stories; each writes its kills to benchmarks/results/faults-cpu.jsonl, and the page beside it.
`make test` runs two kills.
ECHELON_FAULTS_SEED sets the seed.
"""

import itertools
import json
import os
import platform
import random
import statistics
import time
from collections import Counter
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

import pytest

from tests.dist.command import read_lines
from tests.faults.stories import PHASES, STEPS, Story, Teller, assert_same, train_uninterrupted

pytestmark = pytest.mark.dist

SEED = int(os.environ.get("ECHELON_FAULTS_SEED", "20260801"))
ROWS = Path(__file__).parents[2] / "benchmarks" / "results" / "faults-cpu.jsonl"
# Of a kill, what the report shows.
KEPT = ("signal", "target", "landed", "at_step", "by_itself", "exit_code", "steps_lost", "seconds_to_recover")
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
    story = STORIES[number]
    tell(story)
    about = {"story": number, "ranks": story.ranks, "parallel": story.parallel}
    keep(number, [{**about, **{name: getattr(kill, name) for name in KEPT}} for kill in story.done])


def read_rows():
    return read_lines(ROWS) if ROWS.exists() else []


def keep(number, rows):
    """Replace the kills of a story, so that the stories may run at different times; write the report."""
    kept = sorted([*(row for row in read_rows() if row["story"] != number), *rows], key=lambda row: row["story"])
    ROWS.write_text("".join(f"{json.dumps(row)}\n" for row in kept))
    ROWS.with_suffix(".md").write_text(render_report(kept))


@pytest.mark.slow
def test_every_phase_was_killed_often_in_the_kept_stories():
    rows = read_rows()
    assert {row["story"] for row in rows} == set(range(NUM_STORIES))
    assert len(rows) >= LEAST_KILLS
    landed = Counter(row["landed"] for row in rows)
    assert all(landed[phase] >= LEAST_PER_PHASE for phase in PHASES), landed
    assert sum(row["ranks"] > 2 for row in rows) * 3 >= len(rows)
    assert {(row["signal"], row["target"]) for row in rows} == set(WAYS)


def render_report(rows):
    """The report as Markdown: totals by phase, then every kill."""
    lines = [
        "# Kills, and what they cost",
        "",
        f"`make faults`, seed {SEED}: {len(rows)} kills of runs of {STEPS} steps (a small GPT-2 with dropout, a disk "
        "whose flushes take 20 ms longer), by SIGKILL and SIGTERM. Every run ended in the weights, optimizer state and "
        "metrics of one that was never interrupted, bit for bit, and left no process.",
        "",
        f"Machine: {os.cpu_count()} CPU cores ({platform.machine()}), {platform.system()}; "
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
        of_phase = [row for row in rows if row["landed"] == phase]
        lost = [row["steps_lost"] for row in of_phase] or [0]
        recovered = (row["seconds_to_recover"] for row in of_phase)
        seconds = [value for value in recovered if value is not None] or [0.0]
        by_itself = sum(row["by_itself"] for row in of_phase)
        lines.append(
            f"| {phase} | {len(of_phase)} | {by_itself} | {statistics.median(lost):g} | {max(lost)} | "
            f"{statistics.median(seconds):.1f} | {max(seconds):.1f} |"
        )
    lines += ["", "| Ranks | Plan | Signal | To | Landed in | At step | Exit code | Steps lost | Seconds |"]
    lines += ["|---|---|---|---|---|---|---|---|---|"]
    columns = ("ranks", "parallel", *KEPT[:4])
    for row in rows:
        code = "went on" if row["by_itself"] else row["exit_code"]
        seconds = "-" if row["seconds_to_recover"] is None else f"{row['seconds_to_recover']:.1f}"
        cells = [*(row[name] for name in columns), code, row["steps_lost"], seconds]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"
