"""`echelon plan`: show how a recipe would run, here or elsewhere, and the memory, time and money it would need."""

from typing import Annotated

import typer

from echelon.commands.arguments import OverridesArgument, RecipeArgument, read_recipe
from echelon.commands.terminal import show


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
) -> None:
    """Show how a recipe would run, and the memory, time and money it needs, or why it is refused.

    Downloads no weights.
    """
    from echelon.api.planning import plan as plan_here

    recipe = read_recipe(recipe_path, overrides)
    plan_here(
        recipe,
        devices,
        devices_per_node=devices_per_node,
        instance=instance,
        count=count,
        build=build,
        on_line=show,
    )
