"""Runs `eval`, `generate` and the comparison of a merge in several processes that each hold a shard of the model.

The processes run the same command line again. Under echelon's own agent they report to the parent, which prints one
message; under another launcher they print it themselves.
"""

import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from echelon.ground.errors import EchelonError, first_line, render_traceback
from echelon.ground.hosts import THIS_MACHINE
from echelon.ground.launch_environment import (
    find_host_dir,
    find_log_level,
    find_place,
    hosted_environment,
    worker_environment,
)
from echelon.ground.logs import log_to_console
from echelon.ground.redaction import redact_text
from echelon.ground.scratch import keep, scratch_folder
from echelon.ground.sizes import render_bytes
from echelon.ground.stored import open_to_append
from echelon.learn.distributed.runtime import Runtime, stop_runtime
from echelon.learn.opened import count_bytes
from echelon.planner.hardware.heap import return_freed_memory
from echelon.run.folder.run_folder import RunFolder
from echelon.run.lifecycle.process_group import start_runtime, watch_starter
from echelon.run.lifecycle.worker import RankProcess, leave
from echelon.run.supervise.agent import Agent, worker_argv
from echelon.run.supervise.outcome import DONE, FAILED, REFUSED, Outcome, is_secondary, report, write_outcome
from echelon.run.supervise.workers import Workers

logger = logging.getLogger(__name__)

# What a forward pass needs in addition to the weights, as a part of them.
_ROOM = 0.2


def choose_num_processes(target: Path) -> int:
    """Return one process, or one per GPU if the target's weights do not fit on one of several GPUs."""
    import torch

    count = torch.cuda.device_count()
    if count < 2:
        return 1
    needed, memory = count_bytes(target) * (1 + _ROOM), torch.cuda.get_device_properties(0).total_memory
    if needed <= memory:
        return 1
    logger.info(
        f"{target} needs about {render_bytes(needed)}, and one GPU has {render_bytes(memory)}: its weights are sharded "
        f"over {count} processes, one per GPU (--nproc)"
    )
    return count


def start_ranks(arguments: Sequence[str], count: int) -> Outcome:
    """Run `echelon ARGUMENTS` in `count` processes on this machine, and wait for their end. None outlives the call.

    The output of rank 0 is that of this process. After an unexpected error the logs of all ranks are kept.
    """
    with scratch_folder("ranks") as place:
        folder = RunFolder(place, place / "outcomes")
        folder.create()
        variables = {**worker_environment(count), **hosted_environment(folder.outcomes_dir, True)}
        outcome = Agent(THIS_MACHINE).submit(Workers(worker_argv("echelon", *arguments), count, folder, variables))
        if outcome.code == FAILED and str(place) in outcome.message:
            keep(place)
    return outcome


def compare_in_ranks(run: Path, out: Path, which: str | None, count: int) -> None:
    """Compare a merged model with its adapter in `count` processes (see `compare_merged`).

    Raises EchelonError if that fails.
    """
    options = [] if which is None else ["--checkpoint", which]
    outcome = start_ranks(["export", str(run), str(out), "--merge", *options], count)
    if outcome.code != DONE:
        raise EchelonError(outcome.message)


def run_as_rank(work: Callable[[Runtime], object]) -> NoReturn:
    """Do this rank's part of the work, and end the process. Only rank 0 prints. Collective: every rank calls it."""
    watch_starter()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the parent reports it
    rank, outcomes = find_place().rank, find_host_dir()
    folder = None if outcomes is None else RunFolder(outcomes.parent, outcomes)
    messages = _redirect(rank, folder)
    if folder is not None:
        RankProcess(folder).leave_after_peers()
    outcome = report(rank, DONE, "")
    try:
        runtime = start_runtime()
        return_freed_memory()
        work(runtime)
    except EchelonError as error:
        outcome = report(rank, error.exit_code, str(error), is_secondary(error), final=True)
    except Exception as error:
        sys.stderr.write(render_traceback(error))
        where = "" if folder is None else f"; see {folder.log_path(rank)}"
        message = f"rank {rank} failed: {type(error).__name__}: {redact_text(first_line(error))}{where}"
        outcome = report(rank, FAILED, message, is_secondary(error), final=True)
    if folder is not None:
        write_outcome(folder.outcomes_dir, outcome)
    elif outcome.message and not outcome.secondary and (rank == 0 or outcome.code != REFUSED):
        messages(f"echelon: {outcome.message}\n")
    stop_runtime(failed=outcome.code != DONE)
    leave(outcome.code)


def _redirect(rank: int, folder: RunFolder | None) -> Callable[[str], object]:
    """Silence the output of ranks other than 0. Of a rank with a folder, stderr goes to its log, but not log records.

    Returns the function that writes to the former stderr.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    stderr = os.fdopen(os.dup(2), "w", buffering=1, encoding="utf-8")
    if rank > 0:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.close(null)
    if folder is not None:
        with open_to_append(folder.log_path(rank)) as log:
            os.dup2(log.fileno(), 2)
    log_to_console(find_log_level() if rank == 0 else logging.CRITICAL, stderr)
    return stderr.write
