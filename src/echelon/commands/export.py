"""`echelon export`: a checkpoint as an HF folder."""

from pathlib import Path
from typing import Annotated

import typer

from echelon.commands.arguments import CheckpointOption


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
    push: Annotated[
        str | None, typer.Option("--push", metavar="ID", help="Upload the folder to this model repository of the hub.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="With --push: create a private repository.")] = False,
    revision: Annotated[
        str | None, typer.Option("--revision", metavar="BRANCH", help="With --push: the branch to upload to.")
    ] = None,
) -> None:
    """Write a checkpoint as an HF folder. Contains model, config and tokenizer; or the adapter, if it has one."""
    from echelon.api.models import export as export_folder

    export_folder(
        run,
        out,
        dtype=dtype,
        checkpoint=checkpoint,
        merge=merge,
        push=push,
        private=private,
        revision=revision,
    )
