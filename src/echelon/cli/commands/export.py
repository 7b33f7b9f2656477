"""`echelon export`: a checkpoint as an HF folder."""

from pathlib import Path
from typing import Annotated, Any

import typer

from echelon.cli.commands.arguments import RunArgument, ShardsOption, parse_nproc
from echelon.cli.commands.options import OptionsOf


def export(
    run: RunArgument,
    out: Annotated[Path | None, typer.Argument(metavar="[OUT]")] = None,
    *,
    nproc: ShardsOption = "auto",
    **options: Annotated[Any, OptionsOf(["models:export"])],
) -> None:
    """Write a checkpoint as an HF folder. Contains model, config and tokenizer; or the adapter, if it has one.

    Args:
        out: the HF folder to write. With `--push` it may be left out.
    """
    from echelon.cli.api.models import export as export_folder
    from echelon.ground.launch_environment import find_host_dir

    num_processes = parse_nproc(nproc)
    if find_host_dir() is not None:  # a process that `compare_in_ranks` started
        from echelon.tools.inference.merge import compare_merged
        from echelon.tools.inference.ranks import run_as_rank

        folder = out
        assert folder is not None
        run_as_rank(lambda team: compare_merged(run, folder, options["checkpoint"], team))
    export_folder(run, out, nproc=num_processes, **options)
