"""Replicas of quorums and workers of parameter servers are killed at random moments, and what each loss cost.

Each test writes its rows to benchmarks/results/lost-replicas-cpu.jsonl, and the page beside it.
ECHELON_FAULTS_SEED sets the seed.
"""

import json
import os
import platform
import random
import statistics
import time
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.dist.command import RECIPE, read_lines
from tests.faults.test_quorum import (
    JOINED,
    LOST,
    SEED,
    SERVER,
    Job,
    assert_never_restarted,
    assert_same_rows,
    kill_at_random,
    train_alone,
)

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.usefixtures("marked")]

ROWS = Path(__file__).parents[2] / "benchmarks" / "results" / "lost-replicas-cpu.jsonl"
STEPS = 240
LLAMA = RECIPE["model"]["config"]


class Way(NamedTuple):
    """Replicas, the processes of each and how they divide the model; or workers and servers."""

    replicas: int
    size: int = 1
    parallel: Any = "ddp"
    sync: dict | None = None
    servers: int = 0


WAYS = {
    "quorum of 3": Way(3),
    "quorum of 4": Way(4),
    "quorum of 3 x 2, fsdp": Way(3, 2, "fsdp"),
    "quorum of 3 x 2, tp": Way(3, 2, {"tp": 2}),
    "quorum of 3 x 2, pp": Way(3, 2, {"pp": 2}),
    "1 server, 3 workers": Way(3, sync=SERVER, servers=1),
    "2 servers, 4 workers": Way(4, sync={**SERVER, "servers": 2}, servers=2),
}


@pytest.mark.parametrize("way", WAYS)
def test_five_lost_at_random_moments(tmp_path, way):
    """In steps, evaluations and saves. Three of four do not divide the batch evenly."""
    replicas, size, parallel, sync, servers = WAYS[way]
    draw = random.Random(f"{SEED} {way}")
    options = {"train": {"global_batch_size": 8 if replicas == 4 else 12}}
    if size > 1:
        options["model"] = LLAMA
    job = Job(tmp_path, STEPS, replicas, sync=sync, size=size, parallel=parallel, **options).begin()
    kill_at_random(job, sorted(draw.sample(range(2, 200), 5)), draw, servers)
    job.end()
    assert_never_restarted(job, 5)
    assert_same_rows(job.run, train_alone(tmp_path))
    write_report(way, list(describe_losses(way, job)))


def describe_losses(way, job):
    """A row for each loss."""
    changes = job.events(LOST, JOINED)
    for number, lost in enumerate(changes):
        if lost["event"] == LOST:
            later = (each for each in changes[number + 1 :] if each["replica"] == lost["replica"])
            back = next(later, {})
            yield {
                "way": way, "replica": lost["replica"], "step": lost["step"], "left": lost["replicas"],
                "seconds": lost["seconds"], "back_after": back.get("step"),
                "back_seconds": back["time"] - lost["time"] if back else None,
            }  # fmt: skip


def write_report(way, rows):
    """Replace the rows of this way, and write the page from all rows."""
    before = [each for each in (read_lines(ROWS) if ROWS.exists() else []) if each["way"] != way]
    kept = sorted([*before, *rows], key=lambda each: list(WAYS).index(each["way"]))
    ROWS.write_text("".join(f"{json.dumps(each)}\n" for each in kept))
    ROWS.with_suffix(".md").write_text(render_report(kept))


def render_report(rows):
    """The page as Markdown: a line for each way, then every loss."""
    lines = [
        "# Lost replicas and workers, and what they cost",
        "",
        f"`make faults`, seed {SEED}: {len(rows)} kills by SIGKILL in runs of {STEPS} steps of a small GPT-2, or "
        "Llama where a replica is two processes, of replicas of a [quorum](../../docs/quorum.md) and of workers of "
        "[parameter servers]"
        "(../../docs/parameter-server.md). No job restarted. Every row has the `batch_hash` of a single process that "
        "lost nothing, and its loss within 2e-5.",
        "",
        f"Machine: {os.cpu_count()} shared CPU cores ({platform.machine()}), {platform.system()}; Python "
        f"{platform.python_version()}, torch {metadata.version('torch')}, transformers "
        f"{metadata.version('transformers')}; {time.strftime('%Y-%m-%d')}. Other work ran beside it.",
        "",
        "Seconds held up: from the death until the others went on, in a new group. The step that was interrupted is "
        "repeated. Seconds until it was back: of the new process, most of which is its start.",
        "",
        "| | Kills | Seconds held up, median | most | Seconds until it was back, median |",
        "|---|---|---|---|---|",
    ]  # fmt: skip
    for way in dict.fromkeys(each["way"] for each in rows):
        mine = [each for each in rows if each["way"] == way]
        held = [each["seconds"] for each in mine]
        back = [each["back_seconds"] for each in mine if each["back_seconds"] is not None]
        returned = f"{statistics.median(back):.1f}" if back else "-"
        lines.append(f"| {way} | {len(mine)} | {statistics.median(held):.2f} | {max(held):.2f} | {returned} |")
    lines += [
        "",
        "| | Process | Lost after step | Went on | Seconds held up | Back after step |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {each['way']} | {each['replica']} | {each['step']} | {each['left']} | {each['seconds']:.2f} | "
        f"{'-' if each['back_after'] is None else each['back_after']} |"
        for each in rows
    ]
    return "\n".join(lines) + "\n"
