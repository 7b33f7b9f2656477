"""`echelon plan`: show how a recipe would run, here or elsewhere, and the memory, time and money it would need."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.cli.commands import plan_options as options
from echelon.cli.commands.arguments import OverridesArgument, read_recipe
from echelon.cli.commands.terminal import show
from echelon.ground.errors import ConfigError

if TYPE_CHECKING:
    from echelon.recipe.document import Recipe


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
    prices: options.Prices = None,
    scaling: options.Scaling = None,
    plot: options.Plot = None,
    mtbf_hours: options.MtbfHours = None,
    restart_seconds: options.RestartSeconds = None,
    replace_hours: options.ReplaceHours = None,
    step_spread: options.StepSpread = None,
    quote: options.Quote = False,
    accept: options.Accept = None,
    dry_run: options.DryRun = False,
) -> None:
    """Show how a recipe would run, its memory, time and cost.

    Also shows why a recipe is refused. Downloads no weights.
    """
    # First: the parser takes the next option for the value if the numbers were forgotten.
    counts = None if scaling is None else options.parse_counts(scaling)
    asks_first = _ask_first(recipe_path, overrides, calibrate, prices)
    if recipe_path is None:
        if asks_first:
            return None
        raise ConfigError("a recipe is missing; write echelon plan RECIPE, or echelon plan --calibrate.")
    if accuracy:
        return _show_accuracy([recipe_path, *map(Path, overrides or [])])
    from echelon.cli.commands.plan_search import find_plans, read_reliability, show_found, show_json

    recipe = read_recipe(recipe_path, overrides)
    asked: dict[str, Any] = {
        "devices": devices,
        "devices_per_node": devices_per_node,
        "instance": instance,
        "reliability": read_reliability(mtbf_hours, restart_seconds, replace_hours, step_spread),
    }
    if any((quote, accept, dry_run)):
        return _quote(recipe_path, overrides or [], recipe, asked, count, (accept, dry_run), as_json, plot)
    searches = any(option is not None for option in (by, budget_usd, deadline_hours, plot))
    if build and any((searches, as_json, counts is not None)):
        raise ConfigError("--build divides one plan; remove it, or the options that search plans.")
    if counts is not None:
        from echelon.cli.api.plan_scaling import plan_scaling

        return show_found(plan_scaling(recipe, counts, **asked), as_json, plot)
    asked["count"] = count
    if searches:
        return show_found(find_plans(recipe, asked, by, budget_usd, deadline_hours), as_json, plot)
    if as_json:
        return show_json(recipe, asked)
    from echelon.cli.api.planning import plan as plan_here

    plan_here(recipe, **asked, build=build, engines=engines, on_line=show)
    return None


def _quote(
    path: Path,
    overrides: list[str],
    recipe: "Recipe",
    asked: Mapping[str, Any],
    count: int | None,
    accept: tuple[int | None, bool],
    as_json: bool,
    plot: Path | None,
) -> None:
    """Show the quotes of a recipe, or launch one. `accept`: its number, and whether to submit nothing."""
    from echelon.cli.api.quoting import quote
    from echelon.cli.commands.launch import launch
    from echelon.cli.commands.plan_search import show_found

    number, dry_run = accept
    if dry_run and number is None:
        raise ConfigError("--dry-run shows what --accept N would submit; add --accept N, or remove --dry-run.")
    if (asked["devices"], asked["instance"]) != (None, None):
        raise ConfigError("--quote plans for every instance type; remove --devices and --instance.")
    quotes = quote(recipe, count)
    if number is None:
        return show_found(quotes, as_json, plot)
    return launch(path, [*overrides, *quotes.accepted(number)], dry_run=dry_run, as_json=as_json)


def _show_accuracy(runs: Sequence[Path]) -> None:
    from echelon.run.folder.reckoning import describe_accuracy

    for line in describe_accuracy(runs):
        show(line)


def _ask_first(path: Path | None, overrides: list[str] | None, calibrate: bool, prices: str | None) -> bool:
    """Measure this machine, and ask for prices, if the options say so; returns whether they do."""
    if calibrate:
        _calibrate()
    if prices is not None:
        _refresh_prices(None if path is None else read_recipe(path, overrides), prices)
    return calibrate or prices is not None


def _refresh_prices(recipe: "Recipe | None", which: str) -> None:
    from echelon.launch.sagemaker.price_list import refresh_prices

    region = None if recipe is None else recipe.launch.sagemaker.region
    path, priced, on_spot = refresh_prices(region, which == "spot")
    show(
        f"prices: {priced} types on demand" + (f", {on_spot} on spot" if which == "spot" else "") + f", kept in {path}"
    )


def _calibrate() -> None:
    from echelon.cli.api.machine_rates import calibrate

    found, path = calibrate()
    for line in (*found.describe_rates(), f"kept in {path}"):
        show(line)
