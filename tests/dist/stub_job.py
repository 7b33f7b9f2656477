"""A job whose workers do almost nothing, to see how endings travel: `stub_job.py parent RUN COUNT MODE RESTARTS`,
and HOST:PORT for the only agent of a group that would meet there.

The workers run this same file. They use echelon's worker code, with a collective instead of training.
"""

import logging
import os
import signal
import sys
import time
from pathlib import Path

from echelon.ground.errors import ConfigError
from echelon.ground.hosts import THIS_MACHINE, parse_group
from echelon.ground.launch_environment import managed_environment, worker_environment
from echelon.ground.logs import log_to_console
from echelon.learn.distributed.runtime import stop_runtime
from echelon.run.folder.run_folder import RunFolder
from echelon.run.lifecycle.process_group import start_runtime, watch_starter
from echelon.run.lifecycle.worker import OutcomeReport, RankProcess, leave, redirect_output
from echelon.run.supervise.agent import Agent
from echelon.run.supervise.workers import Workers


def run_parent(run_dir, count, mode, restarts, rendezvous=None):
    log_to_console()
    argv = (sys.executable, __file__, "worker", run_dir, mode)
    folder = RunFolder(Path(run_dir))
    folder.create()
    environment = worker_environment(int(count)) | managed_environment()
    job = Workers(argv, int(count), folder, environment, int(restarts))
    group = THIS_MACHINE if rendezvous is None else parse_group("1", rendezvous)
    outcome = Agent(group).submit(job)
    print(f"message: {outcome.message}", flush=True)
    return outcome.code


def run_worker(run_dir, mode):
    watch_starter()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    folder = RunFolder(Path(run_dir))
    RankProcess(folder).leave_after_peers()
    redirect_output(folder)
    with OutcomeReport(folder, int(os.environ["RANK"])) as report:
        runtime = start_runtime(timeout_seconds=60)
        logging.getLogger("echelon").info(f"rank {runtime.rank} of {runtime.world_size} is up")
        meet()
        (folder.path / f"pid-{runtime.rank}").write_text(str(os.getpid()))
        behave(runtime.rank, mode)
        meet()
    stop_runtime(failed=report.outcome.code != 0)
    return leave(1 if report.outcome.code == 1 else 0)


def kill_once(rank):
    """Rank 1 kills itself at the first start; its peer reacts only to the file that reports a death."""
    first = not Path(os.environ["STUB_KILLED"]).exists()
    meet()
    if first and rank == 1:
        Path(os.environ["STUB_KILLED"]).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if first:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)


def meet():
    import torch
    import torch.distributed as dist

    total = torch.ones(1)
    dist.all_reduce(total)
    assert int(total) == dist.get_world_size()


def behave(rank, mode):
    if mode == "refuse":
        raise ConfigError("train.steps=0 is no length; give 1 or more.")
    if mode == "raise" and rank == 1:
        raise ValueError("the seventh tensor is missing")
    if mode == "kill" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "kill once":
        kill_once(rank)
    while mode == "work":
        meet()
        time.sleep(0.05)


if __name__ == "__main__":
    role, *arguments = sys.argv[1:]
    sys.exit(run_parent(*arguments) if role == "parent" else run_worker(*arguments))
