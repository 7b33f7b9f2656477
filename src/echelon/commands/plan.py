"""`echelon plan`: show how a recipe would run, here or elsewhere, and the memory, time and money it would need."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.commands import plan_options as options
from echelon.commands.arguments import OverridesArgument, read_recipe
from echelon.commands.terminal import show
from echelon.errors import ConfigError

if TYPE_CHECKING:
    from echelon.api.searching import SearchReport


def plan(
    recipe_path: options.PlannedRecipe = None,
    overrides: OverridesArgument = None,
    devices: options.Devices = None,
    devices_per_node: options.DevicesPerNode = 8,
    instance: options.Instance = None,
    count: options.Count = None,
    build: options.Build = False,
    by: options.By = None,
    budget_usd: options.BudgetUsd = None,
    deadline_hours: options.DeadlineHours = None,
    as_json: options.AsJson = False,
    accuracy: options.Accuracy = False,
    calibrate: options.Calibrate = False,
) -> None:
    """Show how a recipe would run, its memory, time and cost.

    Also shows why a recipe is refused. Downloads no weights.
    """
    if calibrate:
        _calibrate()
        if recipe_path is None:
            return
    if recipe_path is None:
        raise ConfigError("a recipe is missing; write echelon plan RECIPE, or echelon plan --calibrate.")
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
        _show_search(found, as_json)
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


def _show_search(found: "SearchReport", as_json: bool) -> None:
    for line in [json.dumps(found.to_dict(), indent=2)] if as_json else found.describe():
        show(line)


def _calibrate() -> None:
    from echelon.api.machine_rates import calibrate

    found, path = calibrate()
    for line in (*found.describe_rates(), f"kept in {path}"):
        show(line)
