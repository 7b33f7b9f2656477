"""`echelon plan`: show how a recipe would run, here or elsewhere, and the memory, time and money it would need."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from echelon.cli.commands.arguments import OverridesArgument, read_recipe
from echelon.cli.commands.options import OptionsOf, select
from echelon.cli.commands.terminal import show
from echelon.ground.errors import ConfigError, PlanError

if TYPE_CHECKING:
    from echelon.cli.api.quoting import QuoteReport
    from echelon.recipe.document import Recipe

_SOURCES = OptionsOf(["planning:plan", "searching:search", "planning:read_reliability"], ["reliability", "on_line"])


def plan(
    recipe_path: Annotated[Path | None, typer.Argument(metavar="RECIPE")] = None,
    overrides: OverridesArgument = None,
    *,
    as_json: Annotated[bool, typer.Option("--json")] = False,
    accuracy: bool = False,
    calibrate: bool = False,
    prices: Literal["refresh", "spot"] | None = None,
    scaling: Annotated[str | None, typer.Option(metavar="8,16,32")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.svg")] = None,
    quote: bool = False,
    accept: Annotated[int | None, typer.Option(metavar="N", min=1)] = None,
    dry_run: bool = False,
    **options: Annotated[Any, _SOURCES],
) -> None:
    """Show how a recipe would run, its memory, time and cost.

    Also shows why a recipe is refused. Downloads no weights.

    Args:
        recipe_path: the recipe, a YAML file.
        as_json: search, and print the candidates as JSON.
        accuracy: compare runs with what was predicted: the arguments are run folders.
        calibrate: measure this machine first, in under a minute; later plans use the result.
        prices: first ask AWS for today's prices; spot: also of spot machines. Later plans use them.
        scaling: plan for each of these numbers of devices.
        plot: draw the search or the scaling into this file.
        quote: show hours and dollars on every instance type, each with an error bar.
        accept: launch quote N; the end of its error bar is the budget.
        dry_run: with `accept`: print what would be submitted, and submit nothing.
    """
    # First: the parser takes the next option for the value if the numbers were forgotten.
    counts = None if scaling is None else parse_counts(scaling)
    asks_first = _ask_first(recipe_path, overrides, calibrate, prices)
    if recipe_path is None:
        if asks_first:
            return None
        raise ConfigError("a recipe is missing; write echelon plan RECIPE, or echelon plan --calibrate.")
    if accuracy:
        return _show_accuracy([recipe_path, *map(Path, overrides or [])])
    from echelon.cli.api.planning import plan as plan_here
    from echelon.cli.api.planning import read_reliability

    recipe = read_recipe(recipe_path, overrides)
    options["reliability"] = read_reliability(**select(options, read_reliability))
    if dry_run and accept is None:
        raise ConfigError("--dry-run shows what --accept N would submit; add --accept N, or remove --dry-run.")
    if accept is not None:
        from echelon.cli.commands.jobs import launch

        chosen = _quote(recipe, options).accepted(accept)
        return launch(recipe_path, [*(overrides or []), *chosen], dry_run=dry_run, as_json=as_json)
    found = _quote(recipe, options) if quote else _compare(recipe, counts, plot is not None, as_json, options)
    if found is None:
        plan_here(recipe, **select(options, plan_here), on_line=show)
        return None
    for line in [json.dumps(found.to_dict(), indent=2)] if as_json else found.describe():
        show(line)
    return None if plot is None else _write_picture(plot, found.draw(), as_json)


def parse_counts(text: str) -> list[int]:
    """Parse `--scaling 8,16,32`, numbers of devices. Raises ConfigError."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        taken = f" ({text} was taken for its value)" if text.startswith("-") else ""
        raise ConfigError(
            f"--scaling {text} is not a list of numbers of devices{taken}; write it like --scaling 8,16,32,64."
        )
    return [int(word) for word in words]


def _quote(recipe: "Recipe", options: Mapping[str, Any]) -> "QuoteReport":
    from echelon.cli.api.quoting import quote

    if options.get("devices") is not None or options.get("instance") is not None:
        raise ConfigError("--quote plans for every instance type; remove --devices and --instance.")
    return quote(recipe, options.get("count"))


def _compare(recipe: "Recipe", counts: list[int] | None, draws: bool, as_json: bool, options: Mapping[str, Any]) -> Any:
    """The report on the plans that the options ask to compare; None if they ask for one plan."""
    searches = draws or any(options.get(name) is not None for name in ("by", "budget_usd", "deadline_hours"))
    if options.get("build") and (searches or as_json or counts is not None):
        raise ConfigError("--build divides one plan; remove it, or the options that search plans.")
    if counts is not None:
        from echelon.cli.api.plan_scaling import plan_scaling

        return plan_scaling(recipe, counts, **select(options, plan_scaling))
    if not searches and not as_json:
        return None
    from echelon.cli.api.planning import plan as plan_here
    from echelon.cli.api.searching import plan_untimed, search

    try:
        goal = options.get("by") or ("time" if options.get("deadline_hours") is None else "cost")
        return search(recipe, **select(options, search) | {"by": goal})
    except PlanError as error:
        if searches:
            raise
        return plan_untimed(recipe, select(options, plan_here), error)


def _write_picture(path: Path, picture: str, quiet: bool) -> None:
    try:
        path.write_text(picture, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--plot {path} cannot be written: {error.strerror}; give the path of a new file.") from error
    if not quiet:
        show(f"picture: {path}")


def _show_accuracy(runs: Sequence[Path]) -> None:
    from echelon.run.folder.reckoning import describe_accuracy

    for line in describe_accuracy(runs):
        show(line)


def _ask_first(path: Path | None, overrides: list[str] | None, calibrate: bool, prices: str | None) -> bool:
    """Measure this machine, and ask for prices, if the options say so; returns whether they do."""
    if calibrate:
        from echelon.cli.api.planning import calibrate as measure

        found, file = measure()
        for line in (*found.describe_rates(), f"kept in {file}"):
            show(line)
    if prices is not None:
        from echelon.launch.sagemaker.service import refresh_prices

        region = None if path is None else read_recipe(path, overrides).launch.sagemaker.region
        file, priced, on_spot = refresh_prices(region, prices == "spot")
        spot = f", {on_spot} on spot" if prices == "spot" else ""
        show(f"prices: {priced} types on demand{spot}, kept in {file}")
    return calibrate or prices is not None
