"""`echelon sweep`: checks the sweep, runs or shows it, and reports the results."""

import logging
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from echelon.ground.errors import ConfigError
from echelon.launch.job import ArrayLauncher, JobSpec
from echelon.launch.targets import find_launcher
from echelon.recipe.document import Recipe
from echelon.tools.sweep.conductor import Conductor, StopWord, SweepEnding
from echelon.tools.sweep.results import (
    draw_plots,
    list_results,
    render_table,
    results_mapping,
    write_best,
    write_results,
)
from echelon.tools.sweep.slots import TrialSlot, share_machine
from echelon.tools.sweep.space import Space, show_values
from echelon.tools.sweep.study import BILLED, SweepStudy, require_optuna
from echelon.tools.sweep.sweep_file import Sweep, load_sweep
from echelon.tools.sweep.sweep_folder import SweepFolder
from echelon.tools.sweep.trials import Trials, best_recipe

logger = logging.getLogger(__name__)

_MOST_SHOWN = 20
# Trials in one array; each poll queries the target for every one of them.
_MOST_AT_ONCE = 200
# Samplers whose values do not depend on results.
_INDEPENDENT = ("grid", "random", "qmc")


@dataclass(frozen=True)
class CheckedSweep:
    """A sweep whose values were checked against the recipe."""

    sweep: Sweep
    space: Space
    base: Recipe
    num_trials: int
    folder: SweepFolder


def check_sweep(path: Path, to: str | None = None) -> CheckedSweep:
    """Read the sweep file and check its values against the recipe. Raises ConfigError; writes nothing.

    `to` replaces `launch.to` of all trials.
    """
    sweep = load_sweep(path)
    if to is not None:
        sweep = sweep.model_copy(update={"fixed": {**sweep.fixed, "launch.to": to}})
    require_optuna(sweep)
    space = Space(sweep, path)
    base = space.base_recipe()
    if base.launch.to == "sagemaker" and base.launch.sagemaker.instance_type == "auto":
        raise ConfigError(
            f"{path}: launch.sagemaker.instance_type=auto is chosen at a launch, and a sweep has many; set the type "
            "that `echelon plan --instance auto` prints."
        )
    if not find_launcher(base.launch.to or "local").keeps_runs:
        raise ConfigError(
            f"{path}: launch.to={base.launch.to}: the results of trials are deleted with their machines; use another "
            "target."
        )
    is_grid = sweep.sweep.sampler == "grid"
    num_trials = sweep.sweep.trials
    if is_grid:
        num_points = len(space.grid())
        num_trials = num_points if num_trials is None else num_trials
        if num_trials > num_points:
            raise ConfigError(
                f"{path}: sweep.trials={num_trials} is more than the {num_points} points of the grid; remove it."
            )
    assert num_trials is not None
    space.check(is_grid)
    return CheckedSweep(sweep, space, base, num_trials, SweepFolder(sweep.sweep.dir))


def plan_arrays(checked: CheckedSweep) -> tuple[int, str]:
    """The number of trials submitted together (1: one by one), and a line with the reason.

    The line is empty if the target has no arrays.
    """
    settings, target = checked.sweep.sweep, checked.base.launch.to or "local"
    if not isinstance(find_launcher(target), ArrayLauncher):
        return 1, ""
    asked = [dimension.key for dimension in checked.space.dimensions if dimension.key.startswith(("launch.", "fault."))]
    obstacle = ""
    if settings.sampler not in _INDEPENDENT:
        obstacle = f"the values of sweep.sampler={settings.sampler} depend on earlier results"
    elif settings.pruner != "none":
        obstacle = f"sweep.pruner={settings.pruner} compares trials with earlier ones"
    elif asked:
        obstacle = f"the jobs of a {target} array must request the same resources, but {asked[0]} is searched"
    if obstacle:
        return 1, f"jobs: one by one, without an array, because {obstacle}"
    count = min(checked.num_trials, _MOST_AT_ONCE)
    if count == 1:
        return 1, "jobs: one, for one trial"
    return count, f"jobs: an array of up to {count}, because no trial depends on another's result"


def render_first_array(checked: CheckedSweep) -> dict[str, str]:
    """The files of the first array, exactly as submitted; empty if trials are submitted one by one. Writes nothing."""
    count, _ = plan_arrays(checked)
    launcher = find_launcher(checked.base.launch.to or "local")
    if count == 1 or not isinstance(launcher, ArrayLauncher):
        return {}
    study = SweepStudy(checked.sweep, checked.space, checked.base, None)
    trials = _build_trials(checked, study)
    jobs = [trials.job(*study.begin()) for _ in range(count)]
    return launcher.render_array(jobs, min(checked.sweep.sweep.parallel, count))


def describe_sweep(checked: CheckedSweep, slots: tuple[TrialSlot, ...]) -> list[str]:
    """Lines for the user about the search and the slots."""
    settings = checked.sweep.sweep
    at_once, line = plan_arrays(checked)
    pruner = "" if settings.pruner == "none" else f", pruned by {settings.pruner}"
    return [
        f"sweep: {checked.num_trials} trials by {settings.sampler}{pruner}, {settings.parallel} at a time, to "
        f"{settings.better} {settings.metric}, in {checked.folder.path}",
        *(f"search: {dimension.describe()}" for dimension in checked.space.dimensions),
        *([line] if line else []),
        *(slot.describe() for slot in slots if at_once == 1),
    ]


def share_slots(checked: CheckedSweep) -> tuple[TrialSlot, ...]:
    """The slots: shares of this machine for local trials; other targets assign resources themselves."""
    count = checked.sweep.sweep.parallel
    if checked.base.launch.to in (None, "local"):
        return share_machine(count)
    return tuple(TrialSlot(index) for index in range(count))


def first_job(checked: CheckedSweep) -> tuple[JobSpec, list[str]]:
    """The job of the first trial, with the sampler's values, and lines about the trials. Writes nothing."""
    study = SweepStudy(checked.sweep, checked.space, checked.base, None)
    trials = _build_trials(checked, study)
    number, values = study.begin()
    lines = [f"trial {number}: {show_values(values)}"]
    if checked.sweep.sweep.sampler in _INDEPENDENT:
        for _ in range(1, min(checked.num_trials, _MOST_SHOWN)):
            other, others = study.begin()
            lines.append(f"trial {other}: {show_values(others)}")
        if checked.num_trials > _MOST_SHOWN:
            lines.append(f"and {checked.num_trials - _MOST_SHOWN} more")
    return trials.job(number, values), lines


def run_sweep(
    checked: CheckedSweep, slots: tuple[TrialSlot, ...], stop: StopWord
) -> tuple[SweepEnding, dict[str, Any]]:
    """Run or resume the sweep in its folder; returns how it ended, and the contents of results.json.

    Raises ConfigError if the folder is in use or belongs to another sweep.
    """
    sweep, folder = checked.sweep, checked.folder
    folder.lock()
    try:
        folder.agree(sweep, checked.base)
        study = SweepStudy(sweep, checked.space, checked.base, folder.journal_path)
        if begun := len(study.trials()):
            left = len(study.unfinished())
            logger.info(f"sweep: resumes in {folder.path}: {begun - left} trials have ended, {left} were running")

        def write_down() -> None:
            write_results(sweep, list_results(sweep, checked.space, study, folder), folder)

        look_seconds = find_launcher(checked.base.launch.to or "local").look_seconds
        trials = _build_trials(checked, study)
        conductor = Conductor(
            study, trials, slots, checked.num_trials, sweep.sweep.max_failures, look_seconds, write_down,
            plan_arrays(checked)[0],
        )  # fmt: skip
        ending = conductor.run(stop)
        return ending, _conclude(checked, study, ending)
    finally:
        folder.unlock()


def _conclude(checked: CheckedSweep, study: SweepStudy, ending: SweepEnding) -> dict[str, Any]:
    """Print the table, and write the result files and plots of a sweep that has ended."""
    sweep, folder = checked.sweep, checked.folder
    results = list_results(sweep, checked.space, study, folder)
    write_results(sweep, results, folder)
    for line in render_table(sweep, results):
        logger.info(line)
    bills = [bill for trial in study.trials() for bill in trial.user_attrs.get(BILLED, {}).values()]
    if bills:
        logger.info(f"cost: ${math.fsum(bills):.2f} billed for {len(bills)} jobs")
    best = next((result for result in results if result.rank == 1), None)
    if best is not None:
        recipe = best_recipe(checked.space, checked.base, best.values, sweep.sweep.name)
        write_best(sweep, best, recipe, folder)
        logger.info(f"best: trial {best.trial}, {show_values(best.values)}; its recipe is {folder.best_path}")
        if ending.state == "done":
            written, missing = draw_plots(study.study, sweep.sweep.metric, folder)
            for line in (f"plots: {', '.join(map(str, written))}", *missing):
                logger.info(line)
    return results_mapping(sweep, results)


def _build_trials(checked: CheckedSweep, study: SweepStudy) -> Trials:
    return Trials(checked.sweep, checked.space, checked.base, checked.folder, study, cache(find_launcher), Path.cwd())
