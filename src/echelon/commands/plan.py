"""`echelon plan`: show how a recipe would run, here or elsewhere, and the memory, time and money it would need."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from echelon.commands.arguments import OverridesArgument, RecipeArgument, read_recipe
from echelon.commands.terminal import show
from echelon.errors import ConfigError


def plan(
    recipe_path: RecipeArgument,
    overrides: OverridesArgument = None,
    devices: Annotated[
        str | None, typer.Option("--devices", metavar="64xH100", help="Plan for these devices. Default: this machine.")
    ] = None,
    devices_per_node: Annotated[int, typer.Option("--devices-per-node", help="Number of devices per machine.")] = 8,
    instance: Annotated[
        str | None,
        typer.Option(
            "--instance", metavar="ml.TYPE|auto", help="Plan for SageMaker machines; auto: the cheapest type."
        ),
    ] = None,
    count: Annotated[
        int | None,
        typer.Option(
            "--count", min=1, help="Number of machines, with --instance. Default: 1; with auto: as few as possible."
        ),
    ] = None,
    build: Annotated[
        bool,
        typer.Option("--build", help="Divide the real model as planned, without devices, and count what ranks store."),
    ] = False,
    by: Annotated[
        Literal["time", "cost", "memory"] | None,
        typer.Option("--by", help="Search all plans that the recipe allows, and rank them by this."),
    ] = None,
    budget_usd: Annotated[
        float | None, typer.Option("--budget-usd", min=0, help="Search plans whose run costs at most this.")
    ] = None,
    deadline_hours: Annotated[
        float | None, typer.Option("--deadline-hours", min=0, help="Search plans whose run takes at most this.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Search, and print the candidates as JSON.")] = False,
    accuracy: Annotated[
        bool, typer.Option("--accuracy", help="Compare runs with what was predicted: the arguments are run folders.")
    ] = False,
) -> None:
    """Show how a recipe would run, its memory, time and cost.

    Also shows why a recipe is refused. Downloads no weights.
    """
    if accuracy:
        from echelon.runs.reckoning import describe_accuracy

        for line in describe_accuracy([recipe_path, *map(Path, overrides or [])]):
            show(line)
        return
    recipe = read_recipe(recipe_path, overrides, quiet=as_json)
    if by is not None or budget_usd is not None or deadline_hours is not None or as_json:
        from echelon.api.searching import search

        if build:
            raise ConfigError("--build divides one plan; remove it, or the options that search plans.")
        found = search(
            recipe,
            devices,
            devices_per_node=devices_per_node,
            instance=instance,
            count=count,
            by=by or ("time" if deadline_hours is None else "cost"),
            budget_usd=budget_usd,
            deadline_hours=deadline_hours,
        )
        for line in [json.dumps(found.to_dict(), indent=2)] if as_json else found.describe():
            show(line)
        return
    from echelon.api.planning import plan as plan_here

    plan_here(
        recipe,
        devices,
        devices_per_node=devices_per_node,
        instance=instance,
        count=count,
        build=build,
        on_line=show,
    )
