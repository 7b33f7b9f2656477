"""Ranks under another launcher: rank 0 prepares, the others wait, and every ending is reported once.

torchrun itself is in test_elastic.py, mpirun and srun are in tests/launchers.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from echelon.ground.sockets import find_free_port
from tests.dist.command import LAUNCHER_KEYS, read_lines, write_recipe

pytestmark = pytest.mark.dist

STUB = Path(__file__).with_name("stub_rank.py")


def run_ranks(mode, directories):
    """Run one process in each working directory; return their exit codes and stderr."""
    port = str(find_free_port("127.0.0.1"))
    ranks = []
    for rank, directory in enumerate(directories):
        env = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(directories)),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        command = [sys.executable, str(STUB), mode]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        ranks.append(subprocess.Popen(command, env=env, cwd=directory, **pipes))
    results = [rank.communicate(timeout=90) for rank in ranks]
    return [rank.returncode for rank in ranks], [out for out, _ in results], [err for _, err in results]


@pytest.mark.slow
def test_others_wait_for_rank_zero(tmp_path):
    codes, outputs, errors = run_ranks("train", [tmp_path, tmp_path])
    assert codes == [0, 0], errors
    assert outputs == ["rank 0: 2 ranks trained tiny\n", ""]
    assert (tmp_path / "run" / "logs" / "rank-00001.log").read_text().endswith("rank 1: 2 ranks trained tiny\n")


@pytest.mark.slow
def test_refusal_is_printed_once_and_ends_every_rank(tmp_path):
    codes, _, errors = run_ranks("refuse", [tmp_path, tmp_path])
    assert codes == [2, 2]
    assert errors == ["echelon: data.train: text.txt is empty; give a file with text.\n", ""]


@pytest.mark.slow
def test_run_folder_that_a_rank_does_not_see_is_refused(tmp_path):
    here, elsewhere = tmp_path / "a", tmp_path / "b"
    here.mkdir()
    elsewhere.mkdir()
    codes, _, errors = run_ranks("train", [here, elsewhere])
    assert codes == [2, 2]
    assert "rank 1 does not see the recipe.yaml and plan.json" in errors[0]
    assert errors[1] == ""


@pytest.mark.slow
@pytest.mark.parametrize("option", [[], ["--use-env"]], ids=["--local-rank", "--use-env"])
def test_torch_distributed_launch_trains(tmp_path, option):
    """`python -m torch.distributed.launch` passes the local rank as an argument by default."""
    write_recipe(tmp_path)
    port = str(find_free_port("127.0.0.1"))
    command = [
        sys.executable, "-m", "torch.distributed.launch", *option, "--nproc-per-node", "2", "--master-port", port,
        "-m", "echelon", "train", "recipe.json",
    ]  # fmt: skip
    env = {key: value for key, value in os.environ.items() if key not in LAUNCHER_KEYS} | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=180, check=False)
    assert result.returncode == 0, result
    run = tmp_path / "runs" / "tiny"
    rows = read_lines(run / "metrics.jsonl")
    assert [row["step"] for row in rows if row["kind"] == "train"] == [1, 2, 3, 4, 5, 6]
    variables = json.loads((run / "environment.json").read_text())["variables"]
    assert variables["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert result.stdout.count("step 6/6") == 1
