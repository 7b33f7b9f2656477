"""`echelon sweep`: checks the sweep, runs or shows it, and reports the results.

The main loop starts trials in free slots and watches them until enough have ended.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from echelon.ground.errors import BusyError, ConfigError, EchelonError, LaunchError
from echelon.launch.job import ArrayLauncher, JobSpec, find_launcher
from echelon.recipe.document import Recipe
from echelon.tools.sweep.results import (
    draw_plots,
    list_results,
    render_table,
    results_mapping,
    write_best,
    write_results,
)
from echelon.tools.sweep.space import Space, Values, show_values
from echelon.tools.sweep.study import BILLED, SLOT, SweepStudy, require_optuna
from echelon.tools.sweep.sweep_file import Sweep, load_sweep
from echelon.tools.sweep.sweep_folder import SweepFolder
from echelon.tools.sweep.trials import Ended, Running, Trials, TrialSlot, best_recipe, share_machine

# Added to a trial's time to save, before the sweep stops waiting for it.
_GRACE_SECONDS = 60.0
_NAP_SECONDS = 0.1
logger = logging.getLogger(__name__)

_MOST_SHOWN = 20
# Trials in one array; each poll queries the target for every one of them.
_MOST_AT_ONCE = 200
# Samplers whose values do not depend on results.
_INDEPENDENT = ("grid", "random", "qmc")


@dataclass(frozen=True)
class SweepEnding:
    """How a sweep ended: `done`, `stopped` by a signal, or `failed` by too many failures in a row."""

    state: Literal["done", "stopped", "failed"]
    message: str = ""


class StopWord:
    """A stop request: the signal handler stores the signal's name here."""

    def __init__(self) -> None:
        self.name: str | None = None

    def wait(self, seconds: float) -> None:
        """Wait for a stop request, for at most `seconds`."""
        deadline = time.monotonic() + seconds
        while self.name is None and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, _NAP_SECONDS))


class Conductor:
    """Runs trials until `num_trials` have ended, one per slot at a time. A failed trial does not affect others."""

    def __init__(
        self,
        study: SweepStudy,
        trials: Trials,
        slots: Sequence[TrialSlot],
        num_trials: int,
        max_failures: int,
        look_seconds: float,
        ended: Callable[[], None] = lambda: None,
        at_once: int = 1,
    ) -> None:
        """`ended` is called whenever a trial ends, and may write intermediate results.

        `at_once` is the maximum number of trials submitted together as an array, which the target starts itself.
        """
        self._study, self._trials, self._slots = study, trials, tuple(slots)
        self._num_trials, self._max_failures = num_trials, max_failures
        self._look_seconds, self._ended = look_seconds, ended
        self._at_once = at_once
        self._running: dict[int, Running] = {}
        self._left: list[int] = []
        self._failures: list[str] = []
        self._is_full = False

    def run(self, stop: StopWord) -> SweepEnding:
        """Run all trials to their end. On a stop request, running trials save, and the next start resumes them.

        Raises LaunchError if the target refuses a job while no trial is running; this is not counted as a failed trial.
        """
        self._adopt()
        self._look()  # frees the slots of trials that have ended meanwhile
        while stop.name is None and not self._has_failed():
            if not self._fill() and not self._running:
                return SweepEnding("done")
            self._look()
            if self._running:
                stop.wait(self._look_seconds)
        if stop.name is None:
            ending = SweepEnding("failed", f"{len(self._failures)} failures in a row, the last: {self._failures[-1]}")
            self._stop_all()
            return ending
        self._stop_all()
        late = [str(trial.number) for trial in self._running.values()]
        trials = f"trials {', '.join(late)} have not ended yet" if late else "its trials have saved"
        return SweepEnding("stopped", f"stopped by {stop.name}; {trials}; the same command resumes the sweep")

    def _has_failed(self) -> bool:
        """Whether too many trials failed in a row while there are trials left."""
        return len(self._failures) >= self._max_failures and (bool(self._running) or self._has_more())

    def _num_new(self) -> int:
        return self._num_trials - len(self._study.trials())

    def _has_more(self) -> bool:
        return bool(self._left) or self._num_new() > 0

    def _adopt(self) -> None:
        """Take over the jobs of an earlier start of this sweep, each in its former slot."""
        for number in self._study.unfinished():
            _, values = self._study.begin(number)
            before = self._study.recall(number, SLOT)
            slot = next((slot for slot in self._slots if slot.index == before), None)
            try:
                running = self._trials.adopt(number, values, slot)
            except LaunchError:  # an unrecorded job may run there
                raise
            except EchelonError as error:
                self._fail(number, str(error))
                continue
            if running is None:
                self._left.append(number)
            else:
                self._enter(running, "continues", values)

    def _fill(self) -> bool:
        """Start trials in the free slots, unfinished ones first; returns whether any was started."""
        begun = False
        while self._has_room() and not self._has_failed():
            begun = True
            count = min(self._at_once, len(self._left) + self._num_new())
            if count > 1 and not self._running:
                self._start_array(count)
            else:
                self._start(*self._begin())
        return begun

    def _has_room(self) -> bool:
        """Whether a trial can start now. While an array runs, only unfinished trials are started again."""
        if self._is_full:
            return False
        waits = self._at_once > 1 and bool(self._running)
        return len(self._running) < len(self._slots) and (bool(self._left) if waits else self._has_more())

    def _begin(self) -> tuple[int, Values]:
        return self._study.begin(self._left.pop(0) if self._left else None)

    def _start(self, number: int, values: Values) -> None:
        held = {running.slot for running in self._running.values()}
        free = [slot for slot in self._slots if slot not in held]
        before = self._study.recall(number, SLOT)  # an unrecorded job of a killed sweep may still run there
        slot = next((slot for slot in free if slot.index == before), free[0])
        try:
            running = self._trials.start(number, values, slot)
        except EchelonError as error:
            if isinstance(error, LaunchError) and not self._running:
                raise
            if isinstance(error, BusyError):
                logger.warning(f"trial {number} waits for another one to end: {error}")
                self._left.insert(0, number)
                self._is_full = True
                return
            self._fail(number, str(error))
            return
        self._enter(running, "starts", values)

    def _start_array(self, count: int) -> None:
        """Submit an array. Trials that the recipe refuses fail; if the target refuses the array, submit one by one."""
        values: dict[int, Values] = {}
        jobs: dict[int, JobSpec] = {}
        for _ in range(count):
            number, values[number] = self._begin()
            try:
                jobs[number] = self._trials.job(number, values[number])
            except EchelonError as error:
                self._fail(number, str(error))
        if not jobs:
            return
        try:
            array = self._trials.start_array(jobs, min(len(self._slots), len(jobs)))
        except LaunchError as error:
            logger.warning(f"jobs: one by one, because the array was refused: {error}")
            self._at_once, self._left = 1, [*jobs, *self._left]
            return
        for running in array:
            self._enter(running, f"is submitted as {running.record.id}", values[running.number])

    def _enter(self, running: Running, word: str, values: Values) -> None:
        self._running[running.number] = running
        where = "" if running.slot is None else f" in slot {running.slot.index}"
        logger.info(f"trial {running.number} {word}{where}: {show_values(values)}")

    def _look(self) -> None:
        for number, running in list(self._running.items()):
            if (ended := self._trials.look(running)) is not None:
                del self._running[number]
                self._is_full = False
                self._finish(running, ended)

    def _finish(self, running: Running, ended: Ended) -> None:
        number = running.number
        if ended.again:
            self._left.insert(0, number)
        elif ended.pruned:
            self._failures = []
            self._study.prune(number)
            logger.info(f"trial {number} pruned")
            self._ended()
        elif ended.value is not None:
            self._failures = []
            self._study.complete(number, ended.value)
            best = self._study.best()
            assert best is not None
            beside = "the best so far" if best.number == number else f"best: trial {best.number}, {best.value:.6g}"
            logger.info(f"trial {number} done: {ended.value:.6g}, {beside}")
            self._ended()
        else:
            self._fail(number, ended.message)

    def _fail(self, number: int, message: str) -> None:
        message = message.splitlines()[0]
        self._failures.append(f"trial {number}: {message}")
        self._study.fail(number, message)
        logger.warning(f"trial {number} failed: {message}")
        self._ended()

    def _stop_all(self) -> None:
        """Ask every trial to save and end, and wait for it; a trial that completes meanwhile is done."""
        for running in reversed(self._running.values()):  # pending trials of an array first, or they would start now
            self._trials.stop(running)
        notice = max((trial.recipe.fault.notice_seconds for trial in self._running.values()), default=0.0)
        deadline = time.monotonic() + notice + _GRACE_SECONDS
        while self._running and time.monotonic() < deadline:
            for number, running in list(self._running.items()):
                if (ended := self._trials.look(running)) is not None:
                    del self._running[number]
                    if ended.value is not None or ended.pruned:
                        self._finish(running, ended)
            time.sleep(min(self._look_seconds, 0.5))


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
