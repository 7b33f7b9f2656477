"""`echelon plan`: show how a recipe would run, here or elsewhere, and the memory, time and money it would need."""

from pathlib import Path

from echelon.commands import plan_options as options
from echelon.commands.arguments import OverridesArgument, read_recipe
from echelon.commands.terminal import show
from echelon.errors import ConfigError


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
    engines: options.Engines = False,
    accuracy: options.Accuracy = False,
    calibrate: options.Calibrate = False,
    scaling: options.Scaling = None,
    plot: options.Plot = None,
    mtbf_hours: options.MtbfHours = None,
    restart_seconds: options.RestartSeconds = None,
    step_spread: options.StepSpread = None,
) -> None:
    """Show how a recipe would run, its memory, time and cost.

    Also shows why a recipe is refused. Downloads no weights.
    """
    # First: the parser takes the next option for the value if the numbers were forgotten.
    counts = None if scaling is None else options.parse_counts(scaling)
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
    from echelon.commands.plan_search import read_reliability, show_scaling, show_search

    recipe = read_recipe(recipe_path, overrides, quiet=as_json)
    reliability = read_reliability(mtbf_hours, restart_seconds, step_spread)
    searches = any(each is not None for each in (by, budget_usd, deadline_hours, plot)) or as_json
    if build and (searches or counts is not None):
        raise ConfigError("--build divides one plan; remove it, or the options that search plans.")
    if counts is not None:
        show_scaling(recipe, counts, devices, devices_per_node, instance, reliability, as_json, plot)
        return
    if searches:
        limits = (by, budget_usd, deadline_hours)
        show_search(recipe, devices, devices_per_node, instance, count, *limits, reliability, as_json, plot)
        return
    from echelon.api.planning import plan as plan_here

    plan_here(
        recipe,
        devices,
        devices_per_node=devices_per_node,
        instance=instance,
        count=count,
        build=build,
        reliability=reliability,
        engines=engines,
        on_line=show,
    )


def _calibrate() -> None:
    from echelon.api.machine_rates import calibrate

    found, path = calibrate()
    for line in (*found.describe_rates(), f"kept in {path}"):
        show(line)
