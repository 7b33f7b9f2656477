"""The parts of `echelon plan` that compare plans: the search, and the scaling over numbers of devices."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.cli.commands.terminal import show
from echelon.ground.errors import ConfigError, PlanError
from echelon.planner.reliability import RESTART_SECONDS, Reliability
from echelon.recipe.document import Recipe

if TYPE_CHECKING:
    from echelon.cli.api.plan_scaling import ScalingReport
    from echelon.cli.api.quoting import QuoteReport
    from echelon.cli.api.searching import SearchReport
    from echelon.planner.search import Goal


def read_reliability(
    mtbf_hours: float | None, restart_seconds: float | None, replace_hours: float | None, step_spread: float | None
) -> Reliability | None:
    """What the options say about failures and stragglers; None if they say nothing. Raises ConfigError."""
    for option, value in (("--restart-seconds", restart_seconds), ("--replace-hours", replace_hours)):
        if value is not None and mtbf_hours is None:
            raise ConfigError(f"{option} {value:g} needs --mtbf-hours; add it, or remove the option.")
    if mtbf_hours is None and step_spread is None:
        return None
    if mtbf_hours is not None and mtbf_hours <= 0:
        raise ConfigError(f"--mtbf-hours {mtbf_hours:g}: give the mean hours between failures of a machine, above 0.")
    restart = RESTART_SECONDS if restart_seconds is None else restart_seconds
    return Reliability(mtbf_hours, restart, step_spread or 0.0, replace_hours or 0.0)


def find_plans(
    recipe: Recipe, asked: Mapping[str, Any], by: "Goal | None", budget_usd: float | None, deadline_hours: float | None
) -> "SearchReport":
    """Search the plans of a recipe. `asked`: the machines and their reliability, as arguments of `search`."""
    from echelon.cli.api.searching import search

    goal = by or ("time" if deadline_hours is None else "cost")
    return search(recipe, **asked, by=goal, budget_usd=budget_usd, deadline_hours=deadline_hours)


def show_json(recipe: Recipe, asked: Mapping[str, Any]) -> None:
    """Print the plans of a recipe as JSON; for devices of unknown speed, the plan and its memory alone."""
    from echelon.cli.api.searching import plan_untimed, search

    try:
        content = search(recipe, **asked).to_dict()
    except PlanError as error:
        content = plan_untimed(recipe, asked, error).to_dict()
    show(json.dumps(content, indent=2))


def show_found(found: "SearchReport | ScalingReport | QuoteReport", as_json: bool, plot: Path | None) -> None:
    """Print the result of a search, of a scaling or of a quote, and draw it into the file `plot`."""
    for line in [json.dumps(found.to_dict(), indent=2)] if as_json else found.describe():
        show(line)
    if plot is not None:
        _write_picture(plot, found.draw(), as_json)


def _write_picture(path: Path, picture: str, quiet: bool) -> None:
    try:
        path.write_text(picture, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--plot {path} cannot be written: {error.strerror}; give the path of a new file.") from error
    if not quiet:
        show(f"picture: {path}")
