"""Arguments and options shared by several commands, and their parsing."""

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from echelon.ground.errors import ConfigError

if TYPE_CHECKING:
    from echelon.recipe.document import Recipe

logger = logging.getLogger(__name__)


RecipeArgument = Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe, a YAML file.")]
OverridesArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Overrides of recipe keys, dotted: train.steps=50.")
]
NprocOption = Annotated[
    str, typer.Option("--nproc", metavar="N|auto", help="Processes; auto: one per GPU, or per two CPU cores.")
]
FreshOption = Annotated[bool, typer.Option("--fresh", help="Move an existing run aside instead of resuming it.")]
ShardsOption = Annotated[
    str,
    typer.Option(
        "--nproc",
        metavar="N|auto",
        help="Processes, each with a shard of the model; auto: one, or one per GPU if it does not fit on one.",
    ),
]
TargetArgument = Annotated[Path, typer.Argument(metavar="RUN_OR_MODEL", help="A run folder or an HF model folder.")]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines; errors too.")]


def read_recipe(path: Path, overrides: list[str] | None, quiet: bool = False) -> "Recipe":
    """Read the recipe and log its notes."""
    from echelon.ground.extensions import find_from_here
    from echelon.recipe.load import load_recipe
    from echelon.run.lifecycle.extension_checks import list_extensions

    recipe, notes = load_recipe(path, overrides or [])
    find_from_here(extension.name for extension in list_extensions(recipe))
    for note in [] if quiet else notes:
        logger.info(note)
    return recipe


def parse_nproc(text: str) -> int | None:
    """Parse `--nproc`: a number, or None for auto. Raises ConfigError."""
    if text == "auto":
        return None
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"--nproc {text} is neither a number of processes nor auto; use --nproc 2, for example.")
    return int(text)


def parse_hosts(text: str) -> str:
    """Parse `--hosts a,b` to a recipe override. Raises ConfigError."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigError(f"--hosts {text!r} has no host; write it like --hosts a,b.")
    return f"launch.torchrun.hosts={json.dumps(names)}"
