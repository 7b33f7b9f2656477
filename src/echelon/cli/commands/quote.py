"""`echelon quote`: what a run costs on every instance type; `--accept` launches one of them."""

from pathlib import Path
from typing import Annotated

import typer

from echelon.cli.commands.arguments import JsonOption, OverridesArgument, RecipeArgument, read_recipe


def quote(
    recipe_path: RecipeArgument,
    overrides: OverridesArgument = None,
    count: Annotated[
        int | None, typer.Option("--count", min=1, help="Number of machines. Default: 1, 2, 4 and 8 of each type.")
    ] = None,
    as_json: JsonOption = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE.svg", help="Draw hours against dollars into this file.")
    ] = None,
    accept: Annotated[
        int | None,
        typer.Option("--accept", metavar="N", min=1, help="Launch quote N; the end of its error bar is the budget."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --accept: print what would be submitted, and submit nothing.")
    ] = False,
) -> None:
    """Show hours and dollars of a run on every instance type.

    Each has an error bar. Types without a known price are named, and not quoted.

    The cheapest to the fastest come first. Downloads no weights.
    """
    from echelon.cli.api.quoting import quote as find_quotes
    from echelon.cli.commands.launch import launch
    from echelon.cli.commands.plan_search import show_found

    found = find_quotes(read_recipe(recipe_path, overrides), count)
    if accept is None:
        return show_found(found, as_json, plot)
    accepted = found.accepted(accept)
    return launch(recipe_path, [*(overrides or []), *accepted], dry_run=dry_run, as_json=as_json)
