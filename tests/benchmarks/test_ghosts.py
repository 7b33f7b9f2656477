"""Collectives of ghosts have this rank's numbers, and take the time of their bytes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from echelon.planner.hardware.links import usual_links

PROGRAM = """
import json, torch, ghosts, torch.distributed as dist
line, part, whole = ghosts.form_group(8), torch.tensor([1.0, 2.0]), torch.zeros(16)
dist.all_gather_into_tensor(whole, part)
dist.all_reduce(part, group=dist.new_group([0, 1]))
dist.reduce_scatter_tensor(part, torch.arange(16.0))
seconds, everyone = line.seconds, [None] * 8
dist.all_gather_object(everyone, "here")
print(json.dumps([whole.tolist(), part.tolist(), everyone, seconds]))
"""


def test_ghosts_repeat_this_rank_and_take_the_time_of_the_link():
    path = os.pathsep.join([str(Path(__file__).parents[2] / "benchmarks"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    whole, part, everyone, seconds = json.loads(done.stdout)
    assert (whole, part, everyone) == ([1.0, 2.0] * 8, [0.0, 1.0], ["here"] * 8)
    link = usual_links("H100").inside
    sent = 64 * 7 / 8 + 2 * 8 / 2 + 64 * 7 / 8  # bytes, by NCCL's formulas for rings
    assert seconds == pytest.approx(3 * link.latency + sent / link.bandwidth, rel=1e-9)
