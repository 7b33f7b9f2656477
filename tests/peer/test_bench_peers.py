"""The comparison with other trainers and the table of scaling, from end to end with a tiny model."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

pytestmark = pytest.mark.slow


def run(script, *options):
    command = [sys.executable, BENCHMARKS / script, "--size", "tiny", *options]
    return subprocess.run([str(each) for each in command], capture_output=True, text=True, timeout=1500)


@pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed: pip install accelerate")
def test_peers_train_the_same_work(tmp_path):
    out = tmp_path / "peers"
    short = ["--turns", "2", "--steps", "3", "--loss-steps", "20", "--search-turns", "0", "--together", "3"]
    done = run("peers.py", "--sides", "echelon", "hf-trainer", "accelerate", "expert", *short, "--out", out)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(out.with_suffix(".json").read_text())
    assert [side["name"] for side in results["sides"]] == [
        f"{engine}, {mode}, usual"
        for engine in ("echelon", "hf-trainer", "accelerate", "expert")
        for mode in ("ddp", "fsdp")
    ]
    for name, runs in results["runs"].items():
        assert len(runs) == (2 if name.startswith("echelon") else 1), name  # two groups, echelon in both
        assert all([len(turn) for turn in each["turns"]] == [3, 3] for each in runs), name
        assert all(len(each["losses"]) >= 20 for each in runs), name
        assert all(each["peak"] > 2**26 and each["start"] > 0 for each in runs), name
    assert len(results["limits"]) == 8  # a round of turns of each group
    table = out.with_suffix(".md").read_text()
    assert all(f"| {side['name']} |" in table for side in results["sides"])
    assert out.with_suffix(".svg").read_text().startswith("<svg")


def test_scaling_counts_what_the_sockets_send(tmp_path):
    done = run("scaling.py", "--processes", "1", "2", "--steps", "2", "--rounds", "1", "--out", tmp_path / "scaling.md")
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line for line in (tmp_path / "scaling.md").read_text().splitlines() if line.startswith(("| 1 |", "| 2 |"))]
    names = (
        "one process",
        "ddp",
        "zero1",
        "zero2",
        "fsdp",
        "tp",
        "tp, sequence parallel",
        "cp, allgather",
        "cp, ulysses",
    )
    assert [row.split("|")[2].strip() for row in rows] == [*names, "ep", "pp"]
    allowed = {"ep": 0.05}  # the router does not choose all experts equally often
    for name, ratio in ((row.split("|")[2].strip(), float(row.split("|")[5])) for row in rows[1:]):
        assert abs(ratio - 1) <= allowed.get(name, 0.02), (name, ratio)
