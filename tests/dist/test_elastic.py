"""torchrun agents as machines that are lost and rejoin: the run shrinks, grows, and feeds the same batches."""

import os
import re
import subprocess
import sys
import time

import pytest

from echelon.ground.sockets import find_free_port
from echelon.run.folder.run_folder import RunFolder
from tests.dist.command import await_line, finish, read_events, train_rows, write_recipe
from tests.parity.training import LOSS
from tests.waiting import wait_until

pytestmark = [pytest.mark.dist, pytest.mark.slow]

STEPS = 1500
ORPHAN_SECONDS = 10
# A rendezvous store outside the agents, as in docs/elastic.md.
STORE = """
import sys, time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
print("serving", flush=True)
time.sleep(3600)
"""
# Imports torchrun, then waits for the file before it runs.
AGENT = """
import os, sys, time
from torch.distributed.run import main
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
main(sys.argv[2:])
"""


@pytest.fixture
def port():
    return find_free_port("127.0.0.1")


def start_agent(folder, name, port, hosts, ready=True):
    """Start torchrun as one of up to two machines with a rank each; it waits for `folder/name.go` unless `ready`."""
    if ready:
        (folder / f"{name}.go").touch()
    conf = f"is_host={int(hosts)},last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
    options = [
        "--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--monitor-interval", "0.2",
        "--rdzv-backend", "c10d", "--rdzv-id", "job", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-conf", conf,
        "--local-addr", "127.0.0.1", "-m", "echelon", "train", "recipe.json",
    ]  # fmt: skip
    env = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", AGENT, str(folder / f"{name}.go"), *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=folder, env=env, **pipes)


def test_a_lost_agent_shrinks_the_run_and_a_new_one_grows_it(echelon, tmp_path, port):
    """The batch has 3 sequences, so it is padded with an empty one when the run continues on two ranks."""
    recipe = write_recipe(
        tmp_path,
        train={"steps": STEPS, "log_every": 500, "global_batch_size": 3},
        checkpoint={"every": 50},
        optim={"learning_rate": 1e-4},
    )
    assert echelon("train", recipe, "run.dir=runs/whole", "--nproc", "1").code == 0
    whole, run = RunFolder(tmp_path / "runs" / "whole"), RunFolder(tmp_path / "runs" / "tiny")
    store = subprocess.Popen([sys.executable, "-c", STORE, str(port)], stdout=subprocess.PIPE, text=True)
    assert store.stdout.readline() == "serving\n"
    lasting = start_agent(tmp_path, "lasting", port, hosts=False)
    second, third = (start_agent(tmp_path, name, port, hosts=False, ready=False) for name in ("second", "third"))
    try:
        await_line(run.metrics_path, '"step": 60,', lasting, 120)  # alone: 3 sequences
        (tmp_path / "second.go").touch()
        await_count(run, "recovered", 1, lasting)  # grown
        assert read_events(run, "recovered")[0]["repeated_steps"] == 0  # saved on the agent's SIGTERM
        await_line(run.metrics_path, f'"step": {run.rows.last_step() + 60},', lasting, 120)
        killed_at = time.time()
        second.kill()
        await_count(run, "recovered", 2, lasting)  # shrunk
        assert read_events(run, "recovered")[1]["time"] - killed_at < 60
        (tmp_path / "third.go").touch()
        endings = [finish(each, 300) for each in (lasting, third)]
        assert [each.code for each in endings] == [0, 0], endings
    finally:
        for process in (store, lasting, second, third):
            process.kill()
            process.communicate()
    sizes = re.findall(r"plan: ddp on (\d) process", endings[0].out + endings[1].out)
    assert sorted(sizes) == ["1", "1", "2", "2"]
    padding = "3 sequences = 2 ranks x 1 microbatch x 2 sequences - 1 padding sequence"
    assert f"{padding} (25.0% of the computation is wasted)" in endings[0].out
    ours, theirs = train_rows(run), train_rows(whole)
    assert [row["step"] for row in ours] == list(range(1, STEPS + 1))
    for key in ("batch_hash", "tokens", "learning_rate"):
        assert [row[key] for row in ours] == [row[key] for row in theirs], key
    grown_at = read_events(run, "recovered")[0]["step"] - 1
    differences = [abs(a["loss"] - b["loss"]) for a, b in zip(ours, theirs, strict=True)]
    assert max(differences[:grown_at]) == 0
    assert 0 < max(differences) <= LOSS


def await_count(run, name, count, process, seconds=150):
    wait_until(lambda: len(read_events(run, name)) >= count, seconds, process, say=lambda: f"no {count} {name}")
