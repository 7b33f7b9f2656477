"""Arguments and options shared by several commands, their parsing, and the processes of a command that needs a
model."""

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from echelon.cli.commands.terminal import report_failure
from echelon.ground.errors import ConfigError

if TYPE_CHECKING:
    from echelon.learn.distributed.runtime import Runtime as Team
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
