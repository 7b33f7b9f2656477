"""The parts of `echelon plan` that compare plans: the search, and the scaling over numbers of devices."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from echelon.commands.terminal import show
from echelon.errors import ConfigError
from echelon.planner.reliability import RESTART_SECONDS, Reliability
from echelon.recipe import Recipe


def read_reliability(
    mtbf_hours: float | None, restart_seconds: float | None, step_spread: float | None
) -> Reliability | None:
    """What the options say about failures and stragglers; None if they say nothing. Raises ConfigError."""
    if restart_seconds is not None and mtbf_hours is None:
        raise ConfigError(f"--restart-seconds {restart_seconds:g} needs --mtbf-hours; add it, or remove the option.")
    if mtbf_hours is None and step_spread is None:
        return None
    if mtbf_hours is not None and mtbf_hours <= 0:
        raise ConfigError(f"--mtbf-hours {mtbf_hours:g}: give the mean hours between failures of a machine, above 0.")
    return Reliability(mtbf_hours, RESTART_SECONDS if restart_seconds is None else restart_seconds, step_spread or 0.0)


def show_search(
    recipe: Recipe,
    devices: str | None,
    devices_per_node: int,
    instance: str | None,
    count: int | None,
    by: Literal["time", "cost", "memory"] | None,
    budget_usd: float | None,
    deadline_hours: float | None,
    reliability: Reliability | None,
    as_json: bool,
    plot: Path | None,
) -> None:
    """Search the plans of a recipe, print them and draw them."""
    from echelon.api.plan_pictures import draw_search
    from echelon.api.searching import search

    found = search(
        recipe,
        devices,
        devices_per_node=devices_per_node,
        instance=instance,
        count=count,
        by=by or ("time" if deadline_hours is None else "cost"),
        budget_usd=budget_usd,
        deadline_hours=deadline_hours,
        reliability=reliability,
    )
    for line in [json.dumps(found.to_dict(), indent=2)] if as_json else found.describe():
        show(line)
    if plot is not None:
        _write_picture(plot, draw_search(found.allowed), as_json)


def show_scaling(
    recipe: Recipe,
    counts: Sequence[int],
    devices: str | None,
    devices_per_node: int,
    instance: str | None,
    reliability: Reliability | None,
    as_json: bool,
    plot: Path | None,
) -> None:
    """Plan a recipe for each number of devices, print the tables and draw them."""
    from echelon.api.plan_scaling import plan_scaling

    found = plan_scaling(
        recipe, counts, devices, devices_per_node=devices_per_node, instance=instance, reliability=reliability
    )
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
