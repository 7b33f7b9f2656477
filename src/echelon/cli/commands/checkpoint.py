"""`echelon checkpoint`: list, verify and prune the checkpoints of a run."""

from typing import Annotated

import typer

from echelon.cli.commands.arguments import RunArgument
from echelon.cli.commands.options import make_command
from echelon.cli.commands.terminal import show
from echelon.ground.errors import CheckpointError
from echelon.ground.run_files import require_folder

HELP = "List, verify and remove the checkpoints of a run."


def list_run_checkpoints(run: RunArgument) -> None:
    """List the checkpoints of a run. Oldest first; then those in `checkpoint.remote`."""
    require_folder(run)
    from echelon.learn.checkpoint.folder import list_checkpoints
    from echelon.run.folder.remote_start import describe_remote

    checkpoints = list_checkpoints(run)
    for checkpoint in checkpoints:
        show(f"step {checkpoint.step}  {checkpoint.path}")
    if not checkpoints:
        show(f"checkpoint: {run} has none yet")
    for line, _ in describe_remote(run, verify=False):
        show(line)


def verify(run: RunArgument) -> None:
    """Compare every checkpoint with its checksums. Also those in `checkpoint.remote`; exit code 1 if any is damaged."""
    require_folder(run)
    from echelon.ground.checksums import find_faults
    from echelon.learn.checkpoint.folder import find_source, list_checkpoints, require_run
    from echelon.run.folder.remote_start import describe_remote

    require_run(run)
    checkpoints = list_checkpoints(run)
    num_damaged = 0
    for checkpoint in checkpoints:
        faults = find_faults(checkpoint.path, checksums=True)
        if not checkpoint.path.exists():
            continue  # a live run removed it meanwhile
        source = find_source(checkpoint.path)
        state = f"damaged: {'; '.join(faults)}" if faults else f"whole with {source}" if source else "whole"
        show(f"step {checkpoint.step}  {state}")
        num_damaged += bool(faults)
    if not checkpoints:
        show(f"checkpoint: {run} has none yet")
    for line, is_damaged in describe_remote(run, verify=True):
        show(line)
        num_damaged += is_damaged
    if num_damaged:
        raise CheckpointError(f"{run}: damaged checkpoints: {num_damaged}; training resumes from the newest whole one.")


def prune(run: RunArgument, *, keep: Annotated[int, typer.Option(metavar="N", min=1)]) -> None:
    """Remove all but the newest N checkpoints and the best. Damaged ones and partial files are removed too.

    Args:
        keep: number of newest complete checkpoints to keep.
    """
    require_folder(run)
    from echelon.learn.checkpoint.folder import clear_out, require_run
    from echelon.run.folder.run_folder import RunFolder

    require_run(run)
    folder = RunFolder(run)
    folder.lock()
    try:
        for line in clear_out(folder.checkpoints_dir, keep):
            show(line)
    finally:
        folder.unlock()


app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
for name, command in (("list", list_run_checkpoints), ("verify", verify), ("prune", prune)):
    app.command(name)(make_command(command))
