"""Planted hangs in real process groups: the verdict names the rank, the group and the collective."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from echelon.run.supervise.hangs import explain_hang, read_records
from tests.flight_analyser import ADDITION, analyse

PROGRAM = (
    f"{ADDITION}\n"
    + """
import os, sys, time, torch, threading
from torch.distributed.device_mesh import init_device_mesh
from echelon.run.training.flight_record import write_record

folder, rank, fault = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
keep_dumps(folder)
dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=4)
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "shard"))
shard, value = mesh.get_group("shard"), torch.ones(4)
dist.all_reduce(value, group=shard)
dist.all_reduce(value)
print("ready", flush=True)

def record():
    sys.stdin.readline()
    write_record(folder, rank)
    print("recorded", flush=True)
    sys.stdin.readline()
    os._exit(0)

threading.Thread(target=record, daemon=True).start()

def read_batch():
    time.sleep(600)

if rank == 3 and fault == "sleeps":
    read_batch()
elif rank == 3 and fault == "other":
    dist.reduce(value, 2, group=shard)
    read_batch()
dist.all_reduce(value, group=shard)
print("passed", flush=True)
dist.all_reduce(value)
time.sleep(600)
"""
)


def hang(tmp_path: Path, fault: str, silent: tuple[int, ...] = ()) -> str:
    """Run four ranks until all are ready, let those that are not silent record, and return the verdict."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(program), str(tmp_path), str(rank), fault],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TORCH_FR_BUFFER_SIZE": "2000", "OMP_NUM_THREADS": "1"},
        )
        for rank in range(4)
    ]
    try:
        for each in ranks:
            assert each.stdout.readline() == "ready\n"
        for each in ranks[:2]:  # the pair without rank 3
            assert each.stdout.readline() == "passed\n"
        for rank in silent:
            ranks[rank].send_signal(signal.SIGSTOP)
        time.sleep(1)
        for rank, each in enumerate(ranks):
            if rank not in silent:
                each.stdin.write("record\n")
                each.stdin.flush()
        for rank, each in enumerate(ranks):
            if rank not in silent:
                assert each.stdout.readline() == "recorded\n"
        return explain_hang(read_records(tmp_path), silent)
    finally:
        for each in ranks:
            each.kill()
            each.wait()


@pytest.mark.slow
def test_a_rank_that_sleeps_is_named_with_its_place(tmp_path):
    """Ranks 0 and 1 wait for all ranks, and rank 2 for rank 3: only rank 3 waits for nobody."""
    verdict = hang(tmp_path, "sleeps")
    assert verdict.startswith("rank 3 never entered all_reduce 2 of group dp_shard (ranks 2, 3); it is at ")
    assert verdict.endswith("(read_batch)"), verdict
    # torch's analyser lists every late rank; rank 3 is the only one that is late in each group.
    assert analyse(tmp_path) == {("shard", 2): {3}, ("everyone", 2): {2, 3}}


@pytest.mark.slow
def test_another_collective_is_named(tmp_path):
    """Rank 3 reduces to rank 2, which sums."""
    verdict = hang(tmp_path, "other")
    assert verdict.startswith(
        "collective 2 of group dp_shard is all_reduce of sizes [[4]] on rank 2, but reduce of sizes"
    )
    assert "on rank 3" in verdict
    assert analyse(tmp_path)[("shard", 2)] == {3}


@pytest.mark.slow
def test_peers_name_a_suspended_rank(tmp_path):
    """A suspended rank leaves no record."""
    verdict = hang(tmp_path, "sleeps", silent=(3,))
    assert "rank 2 waits for it in all_reduce 2 of group dp_shard (ranks 2, 3)" in verdict, verdict
    assert analyse(tmp_path) == {}, "torch's analyser needs the record of every rank"
