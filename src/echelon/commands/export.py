"""`echelon export`: a checkpoint as an HF folder."""

from pathlib import Path
from typing import Annotated

import typer

from echelon.commands.arguments import CheckpointOption, require_model
from echelon.commands.terminal import say
from echelon.errors import ConfigError


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The HF folder to write.")],
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="Of a whole model: fp32 (the default), bf16 or fp16.")
    ] = None,
    checkpoint: CheckpointOption = None,
    merge: Annotated[bool, typer.Option("--merge", help="Of a run that trained an adapter: the whole model.")] = False,
) -> None:
    """Write a checkpoint as an HF folder: safetensors, config, tokenizer; of a run with an adapter, the adapter."""
    require_model(run)
    from echelon.checkpoint.adapted import read_run_recipe
    from echelon.checkpoint.export import export_adapter, export_run
    from echelon.inference.merging import merge_run

    if merge:
        merge_run(run, out, dtype or "fp32", checkpoint, say)
    elif read_run_recipe(run).adapter.is_adapter:
        if dtype is not None:
            raise ConfigError(
                f"--dtype {dtype} is of a whole model, and an adapter is written as it was trained; add --merge, or "
                "leave it out."
            )
        num_bytes = export_adapter(run, out, checkpoint)
        say(f"export: {out} is ready for peft's PeftModel.from_pretrained, {num_bytes / 1e6:.2f} MB of weights")
        return
    else:
        export_run(run, out, dtype or "fp32", checkpoint)
    say(f"export: {out} is ready for transformers' from_pretrained")
