"""Can torchft carry `fault.on_lost_process: continue`? Three replicas train, one is killed in the middle of a step.

Each step's batch is a function of torchft's count of committed steps, and divided among the replicas that take part, as
in echelon; torchft's own examples read on in their data. Gradients are computed for each sequence and summed in double
precision, in which the order does not matter, so that the rows of the replicas that are left can be compared bit for
bit with those of one process. Needs `pip install torchft==0.2.0` in an environment of its own, and no GPU:

    python benchmarks/torchft_experiment.py [NUMBER of kills at random moments, by default 6]
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

STEPS, LOST_AT, BATCH, REPLICAS, VICTIM = 12, 5, 12, 3, 1
MOMENTS = (
    "before the sums",
    "between two sums",
    "after the sums",
    "after the sums, of which replica 2 misses one",
    "never",
)
"""When the victim is killed in its step: it sums each gradient, and then the loss, with the others."""

RANDOM = "at random"


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same model and optimizer everywhere."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def compute(model: nn.Module, step: int, index: int, count: int) -> list[torch.Tensor]:
    """The summed gradients and the summed loss of one of `count` shares of the batch of a step."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(BATCH, 16, generator=generator)
    labels = torch.randint(8, (BATCH,), generator=generator)
    sums = [torch.zeros(p.shape, dtype=torch.float64) for p in model.parameters()] + [
        torch.zeros((), dtype=torch.float64)
    ]
    for sample in range(index * BATCH // count, (index + 1) * BATCH // count):
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs[sample]), labels[sample])
        loss.backward()
        for total, part in zip(sums, [*(p.grad for p in model.parameters()), loss.detach()], strict=True):
            total += part
    return sums


def update(model: nn.Module, optimizer: torch.optim.Optimizer, sums: list[torch.Tensor]) -> None:
    """Apply the mean gradient of the whole batch."""
    for parameter, total in zip(model.parameters(), sums, strict=False):
        parameter.grad = (total / BATCH).float()
    optimizer.step()


def train_alone() -> list[float]:
    """The losses of one process."""
    model, optimizer = build()
    losses = []
    for step in range(STEPS):
        sums = compute(model, step, 0, 1)
        update(model, optimizer, sums)
        losses.append(sums[-1].item() / BATCH)
    return losses


def train_replica(index: int, folder: Path, moment: str, lighthouse: str) -> None:
    """Train one replica under torchft; write a line for each attempt of a step."""
    from torch.distributed import ReduceOp, TCPStore
    from torchft import Manager, ProcessGroupGloo

    model, optimizer = build()
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def load_state(state: dict) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        write({"healed": True})

    def write(row: dict) -> None:
        with (folder / f"rows-{index}.jsonl").open("a") as file:
            file.write(json.dumps(row | {"time": time.time()}) + "\n")

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        load_state_dict=load_state,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        use_async_quorum=False,  # the shares of the batch must be known before the forward pass
        init_sync=False,
        timeout=timedelta(seconds=10),
        quorum_timeout=timedelta(seconds=10),
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"replica_{index}",
    )
    (folder / f"ready-{index}").touch()
    while len(list(folder.glob("ready-*"))) < REPLICAS:
        time.sleep(0.05)
    while manager.current_step() < STEPS:
        manager.start_quorum()
        step = manager.current_step()  # later than before, if this replica has loaded the state of another one
        count, rank = manager.num_participants(), manager.participating_rank()
        sums = compute(model, step, rank, count)
        dies = moment if index == VICTIM and step == LOST_AT else ""
        for number, tensor in enumerate(sums):
            if (dies, number) in ((MOMENTS[0], 0), (MOMENTS[1], 2)):
                os.kill(os.getpid(), signal.SIGKILL)
            manager.allreduce(tensor, reduce_op=ReduceOp.SUM).wait()
        if dies in MOMENTS[2:4]:
            os.kill(os.getpid(), signal.SIGKILL)
        if moment == MOMENTS[3] and index == 2 and step == LOST_AT:
            manager.report_error(RuntimeError("as if the last sum had failed on this replica alone"))
        if commits := manager.should_commit():
            update(model, optimizer, sums)
        write({"step": step, "count": count, "loss": sums[-1].item() / BATCH, "commits": commits})
    manager.shutdown()
    sys.stdout.flush()
    os._exit(0)  # threads of torchft may still wait for the lost replica


def run(moment: str) -> None:
    """Train three replicas, of which one is killed, and compare."""
    from torchft.coordination import LighthouseServer

    folder = Path(tempfile.mkdtemp(prefix="torchft-run-"))
    # It waits for all replicas that send heartbeats; torchft's default for their timeout is 5 s.
    limits = {"min_replicas": 2, "join_timeout_ms": 60_000, "quorum_tick_ms": 50, "heartbeat_timeout_ms": 1000}
    lighthouse = LighthouseServer(bind="[::]:0", **limits)
    replicas = []
    for index in range(REPLICAS):
        words = [sys.executable, __file__, "--replica", str(index), str(folder), moment, lighthouse.address()]
        with (folder / f"log-{index}").open("w") as log:
            replicas.append(subprocess.Popen(words, stdout=log, stderr=log))
    if moment == RANDOM:
        rows = folder / f"rows-{VICTIM}.jsonl"
        while not rows.exists():
            time.sleep(0.01)
        time.sleep(random.random() * 0.4)
        replicas[VICTIM].kill()
    codes = [replica.wait(timeout=150) for replica in replicas]
    lighthouse.shutdown()
    print(f"killed: {moment}; exit codes {codes}")
    for index in (0, 2) if codes[VICTIM] == -signal.SIGKILL else (0, 1, 2):
        attempts = [json.loads(line) for line in (folder / f"rows-{index}.jsonl").read_text().splitlines()]
        rows = {row["step"]: row for row in attempts if row.get("commits")}
        dropped = [row["step"] for row in attempts if row.get("commits") is False]
        times, alone = [row["time"] for row in rows.values()], train_alone()
        print(
            f"  replica {index}: replicas in each step {[row['count'] for row in rows.values()]}, dropped {dropped}, "
            f"loads of a peer's state {sum('healed' in row for row in attempts)}, "
            f"rows of one process bit for bit {all(row['loss'] == alone[step] for step, row in rows.items())} "
            f"({len(rows)} of {STEPS}), longest pause {max(b - a for a, b in pairwise(times)):.1f} s",
            flush=True,
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    if "--replica" in sys.argv:
        train_replica(int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], sys.argv[5])
    else:
        for each in [*MOMENTS, *[RANDOM] * int((sys.argv[1:] or ["6"])[0])]:
            run(each)
