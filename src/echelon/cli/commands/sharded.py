"""Runs the work of a command that needs a model: here, or in several processes with a shard of the model each."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from echelon.cli.commands.failure import report_failure

if TYPE_CHECKING:
    from echelon.learn.distributed.runtime import Runtime as Team


def run_with_model(target: Path, num_processes: int | None, work: Callable[["Team | None"], None]) -> None:
    """Run the work in this process, or the same command in several. Only the first of them prints.

    Under torchrun, mpirun or srun this process is one of several.

    Args:
        num_processes: the result of `parse_nproc`; None: one, or one per GPU if the model does not fit on one.
        work: gets the processes that share the model; None for this one alone.
    """
    from echelon.ground.launch_environment import launch_role

    if launch_role() == "worker":
        from echelon.tools.inference.ranks import run_as_rank

        run_as_rank(work)
    if num_processes == 1:
        return work(None)
    from echelon.tools.inference.ranks import choose_num_processes, start_ranks

    count = choose_num_processes(target) if num_processes is None else num_processes
    if count == 1:
        return work(None)
    outcome = start_ranks(sys.argv[1:], count)
    if outcome.message:
        report_failure(outcome.message, outcome.code)
    if outcome.code:
        raise typer.Exit(outcome.code)
    return None
