"""How many connections a rank has when the groups of hundreds of ranks have formed, under a limit of open files.

    python benchmarks/groups_of_512_ranks.py [--ranks 64,128,256,512] [--limit 1024] [--save] [--output FILE.jsonl]

Each rank is a process of this machine, forked from one that has imported torch. It does what a rank of `echelon train`
does before its first step: it joins the others, and forms the groups of a plan (HSDP, 8 copies) and of the checkpoints.
Then all sum a number over the group of the loss, and rank 0 gathers an object of each, as for a save. `--save`: a save
is rehearsed and made too; on two cores that takes many minutes with hundreds of ranks. Written down after each of
these: the seconds since all began, the sockets of a rank, the most and the median, and the most open files. Where a
rank fails, the line that echelon has for it.
"""

import argparse
import json
import os
import resource
import select
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"  # no threads before the forks

import torch
import torch.distributed as dist

from echelon.ground.errors import first_line
from echelon.ground.launch_environment import store_environment
from echelon.ground.open_files import explain_open_files
from echelon.ground.sockets import find_free_port, host_store, listen_at
from echelon.learn.checkpoint.store import CheckpointStore
from echelon.learn.distributed.mesh import build_mesh
from echelon.planner.plan import ParallelPlan
from echelon.run.lifecycle.process_group import open_store, start_runtime
from echelon.run.supervise.outcome import ProcessDeath, find_cause
from measuring import describe_machine

ADDRESS = "127.0.0.1"
COPIES = 8
PHASES = ("groups", "checkpoint groups", "summed", "gathered", "saved")
# Of a phase: hundreds of processes share a few cores.
PATIENCE_SECONDS = 600
# From the error of a rank to the end of the process that it lost.
PEER_SECONDS = 2


def count_sockets():
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:  # that of the list itself
            continue
    return sum(link.startswith("socket:") for link in links), len(links)


def start(tell, folder, ranks, saves):
    """What a rank does."""
    runtime = start_runtime(store=open_store(PATIENCE_SECONDS))
    meshes = build_mesh(ParallelPlan("hsdp", dp_replicate=COPIES, dp_shard=ranks // COPIES), "cpu")
    tell("groups")
    groups = [dist.new_group(backend="gloo") for _ in range(2)]
    store = CheckpointStore(folder, 1, asynchronous=True, new_group=iter(groups).__next__)
    tell("checkpoint groups")
    total, mine = torch.ones(()), {f"part {runtime.rank}": torch.ones(8)}
    meshes.sum_over_readers(total)
    assert total == ranks
    dist.barrier(meshes.everyone)
    tell("summed")
    gathered = [None] * ranks if meshes.is_first else None
    dist.gather_object(runtime.rank, gathered, group=groups[0], group_dst=0)
    assert gathered in (None, list(range(ranks)))
    dist.barrier(meshes.everyone)
    tell("gathered")
    if saves:
        store.rehearse(mine)
        store.save(1, mine, {"step": 1})
        store.close()
        tell("saved")
    time.sleep(PATIENCE_SECONDS)  # until all have told: the end of a rank is an error for the others


def run_rank(rank, ranks, limit, saves, port, pipe, folder):
    def tell(phase, **fields):
        sockets, files = count_sockets()
        row = {"phase": phase, "rank": rank, "sockets": sockets, "files": files, "time": time.monotonic(), **fields}
        os.write(pipe, (json.dumps(row) + "\n").encode())  # whole: shorter than PIPE_BUF

    log = os.open(folder / f"rank-{rank:05d}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 2)
    os.close(log)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    size = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    place = {"RANK": rank, "LOCAL_RANK": rank, **size, **store_environment(ADDRESS, port)}
    os.environ.update({name: str(value) for name, value in place.items()})
    try:
        start(tell, folder / "checkpoints", ranks, saves)
    except BaseException as error:
        os.write(pipe, (json.dumps({"rank": rank, "error": describe(error)}) + "\n").encode())
    finally:
        os._exit(0)


def describe(error):
    """As a rank of `echelon train` says it."""
    return explain_open_files(error) or f"{type(error).__name__}: {first_line(error)}"[:500]


def find_abort(pids, folder):
    """The rank whose process a thread of gloo has aborted, if any, and what the agent of `echelon train` says of it."""
    for rank, pid in enumerate(pids):
        info = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if info is not None and info.si_status == signal.SIGABRT:
            death = ProcessDeath(rank, pid, -signal.SIGABRT, time.time())
            return {"rank": rank, "error": find_cause([], [death], folder).outcome.message}
    return None


def read_lines(pipe, seconds):
    """The lines of all ranks, until none comes for so long."""
    rest = b""
    while select.select([pipe], [], [], seconds)[0] and (part := os.read(pipe, 2**16)):
        *lines, rest = (rest + part).split(b"\n")
        yield from map(json.loads, lines)


def measure(ranks, limit, saves=False):
    """Rows of the phases; the last one is an error if a rank has failed."""
    ours, its = os.pipe()
    gate, opened = os.pipe()
    pids, port = [], find_free_port(ADDRESS)
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(ranks):
                if (pid := os.fork()) == 0:
                    os.close(ours)
                    os.close(opened)
                    os.read(gate, 1)  # nothing, once all are there
                    run_rank(rank, ranks, limit, saves, port, its, Path(folder))
                pids.append(pid)
            os.close(its)
            store = host_store(listen_at(ADDRESS, port), PATIENCE_SECONDS)  # as in the agent; it has threads
            began = time.monotonic()
            os.close(opened)
            rows = {phase: [] for phase in PHASES}
            for line in read_lines(ours, PATIENCE_SECONDS):
                if "error" in line:
                    time.sleep(PEER_SECONDS)
                    yield {"ranks": ranks, "limit": limit, **(find_abort(pids, Path(folder)) or line)}
                    return
                rows[line["phase"]].append(line)
                if len(reported := rows[line["phase"]]) == ranks:
                    sockets = [row["sockets"] for row in reported]
                    yield {
                        "ranks": ranks,
                        "limit": limit,
                        "phase": line["phase"],
                        "seconds": round(max(row["time"] for row in reported) - began, 1),
                        "most_sockets": max(sockets),
                        "median_sockets": statistics.median(sockets),
                        "most_files": max(row["files"] for row in reported),
                    }
                    if line["phase"] == PHASES[-1 if saves else -2]:
                        return
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            for pid in pids:
                os.waitpid(pid, 0)
            os.close(ours)
            os.close(gate)
            del store


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="64,128,256,512")
    parser.add_argument("--limit", type=int, default=1024)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (options.limit, hard))  # as the agent has it, which says why a rank died
    for ranks in map(int, options.ranks.split(",")):
        for row in measure(ranks, options.limit, options.save):
            print(json.dumps(row), flush=True)
            if options.output is not None:
                with options.output.open("a") as file:
                    file.write(json.dumps({**row, "machine": describe_machine("torch")}) + "\n")


if __name__ == "__main__":
    sys.exit(main())
