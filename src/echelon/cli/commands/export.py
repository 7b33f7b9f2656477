"""`echelon export`: a checkpoint as an HF folder."""

from pathlib import Path
from typing import Annotated

import typer

from echelon.cli.commands.arguments import CheckpointOption, ShardsOption, parse_nproc


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    out: Annotated[
        Path | None,
        typer.Argument(metavar="[OUT]", help="The HF folder to write. With --push it may be left out."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="Dtype of a full model: fp32 (the default), bf16 or fp16.")
    ] = None,
    checkpoint: CheckpointOption = None,
    merge: Annotated[bool, typer.Option("--merge", help="Merge the adapter and write the full model.")] = False,
    nproc: ShardsOption = "auto",
    push: Annotated[
        str | None, typer.Option("--push", metavar="ID", help="Upload the folder to this model repository of the hub.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="With --push: create a private repository.")] = False,
    revision: Annotated[
        str | None, typer.Option("--revision", metavar="BRANCH", help="With --push: the branch to upload to.")
    ] = None,
) -> None:
    """Write a checkpoint as an HF folder. Contains model, config and tokenizer; or the adapter, if it has one."""
    from echelon.cli.api.models import export as export_folder
    from echelon.ground.launch_environment import find_host_dir

    num_processes = parse_nproc(nproc)
    if find_host_dir() is not None:  # a process that `compare_in_ranks` started
        from echelon.tools.inference.merge import compare_merged
        from echelon.tools.inference.ranks import run_as_rank

        folder = out
        assert folder is not None
        run_as_rank(lambda team: compare_merged(run, folder, checkpoint, team))
    export_folder(
        run,
        out,
        dtype=dtype,
        checkpoint=checkpoint,
        merge=merge,
        nproc=num_processes,
        push=push,
        private=private,
        revision=revision,
    )
