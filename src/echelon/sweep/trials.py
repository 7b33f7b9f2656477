"""The trials under way: each a job of a launcher, started, adopted, watched and stopped."""

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from echelon.errors import LaunchError
from echelon.launch.job import FINAL_STATES, ArrayLauncher, JobRecord, JobSpec, JobStatus, Launcher
from echelon.launch.records import name_job, submit_job
from echelon.recipe import Recipe
from echelon.recipe.launching import Target
from echelon.runs.run_folder import RunFolder
from echelon.sweep.measure import MetricsReader, measure, read_rows
from echelon.sweep.slots import Slot
from echelon.sweep.space import Space, Values
from echelon.sweep.study import PRUNED, SLOT, STOPPED, SweepStudy
from echelon.sweep.sweep_file import Sweep
from echelon.sweep.sweep_folder import SweepFolder

logger = logging.getLogger(__name__)

# What `echelon train` says when a run folder is locked: by the job of a sweep that died before it could note the job.
_IN_USE = "is in use by a live run"


@dataclass
class Running:
    """A trial under way. `slot`: None where its target starts it. `step`: where it stood when it was submitted."""

    number: int
    recipe: Recipe
    slot: Slot | None
    record: JobRecord
    reader: MetricsReader
    step: int = 0
    pruned: bool = False
    unreachable: bool = False


@dataclass(frozen=True)
class Ended:
    """How a trial ended. `message` for one that failed; `again`: it only stopped, and has to be started again."""

    value: float | None = None
    pruned: bool = False
    message: str = ""
    again: bool = False


class Trials:
    """Makes jobs of trials. What is asked of the target goes through its Launcher alone, whichever it is."""

    def __init__(
        self,
        sweep: Sweep,
        space: Space,
        base: Recipe,
        folder: SweepFolder,
        study: SweepStudy,
        find_launcher: Callable[[Target], Launcher],
        workdir: Path,
    ) -> None:
        self._sweep, self._space, self._base, self._folder, self._study = sweep, space, base, folder, study
        self._find_launcher, self._workdir = find_launcher, workdir

    def job(self, number: int, values: Values) -> JobSpec:
        """The job of a trial's next start. Raises ConfigError where the recipe refuses the values."""
        recipe = trial_recipe(self._space, self._base, values, self._sweep.sweep.name, number, self._folder)
        return JobSpec(name_job(recipe), recipe, self._folder.next_job_dir(number), self._workdir)

    def start(self, number: int, values: Values, slot: Slot) -> Running:
        """Submit the trial's job, in this slot. Raises EchelonError where it is refused, here or by the target."""
        job = self.job(number, values)
        assert job.recipe.launch.to is not None
        launcher = self._find_launcher(job.recipe.launch.to)
        launcher.check(job)
        self._study.note(number, SLOT, slot.index)
        with slot.held():
            record = submit_job(job, launcher, launcher.render(job))
        return _watch(number, job.recipe, slot, record)

    def start_array(self, jobs: Mapping[int, JobSpec], parallel: int) -> list[Running]:
        """Submit the jobs of these trials as one array, which runs `parallel` of them at a time: all, or none.

        Raises EchelonError where they are refused. The launcher must be an ArrayLauncher.
        """
        target = next(iter(jobs.values())).recipe.launch.to
        assert target is not None
        launcher = self._find_launcher(target)
        assert isinstance(launcher, ArrayLauncher)
        records = launcher.launch_array(list(jobs.values()), parallel)
        return [
            _watch(number, job.recipe, None, record)
            for (number, job), record in zip(jobs.items(), records, strict=True)
        ]

    def adopt(self, number: int, values: Values, slot: Slot | None) -> Running | None:
        """The trial's job where one was submitted that still runs, or ended while nobody looked; else None."""
        record = self._folder.last_job(number)
        if record is None:
            return None
        recipe = trial_recipe(self._space, self._base, values, self._sweep.sweep.name, number, self._folder)
        running = _watch(number, recipe, slot, record)
        if self._study.recall(number, PRUNED):
            running.pruned = True
            self.cancel(running)  # the word may not have got there
            return running
        status = self._status(running)
        if status is None or status.state == "done":
            return running
        failed = status.state == "failed"
        killed = failed and (status.exit_code is None or _IN_USE in self._find_message(running, status))
        was_stopped = status.state in FINAL_STATES and self._study.recall(number, STOPPED) == record.folder.name
        return None if status.state == "stopped" or killed or was_stopped else running

    def look(self, running: Running) -> Ended | None:
        """Report what the trial has reached, ask it to end where it is pruned; how it ended, once it has."""
        status = self._status(running)
        if status is None:
            return None
        if not running.pruned and self._sweep.sweep.pruner != "none":
            self._report(running)
        if status.state not in FINAL_STATES:
            return None
        if running.pruned and status.state != "done":
            return Ended(pruned=True)
        if status.state == "done":
            value = measure(read_rows(Path(running.record.run_dir)), self._sweep.sweep)
            wanted = self._sweep.sweep.metric
            return Ended(value, message="" if value is not None else f"it ended without a number for {wanted}")
        message = self._find_message(running, status)
        if status.state == "stopped":
            goes_on = RunFolder(Path(running.record.run_dir)).rows.last_step() > running.step
            return Ended(again=goes_on, message=f"it stopped and got no further: {message}")
        return Ended(again=True) if _IN_USE in message else Ended(message=message)

    def stop(self, running: Running) -> None:
        """Ask a trial to save and end, so that the next start of the sweep goes on with it, however it takes it."""
        self._study.note(running.number, STOPPED, running.record.folder.name)
        self.cancel(running)

    def cancel(self, running: Running) -> None:
        """Ask a trial to save and end; one that has ended already is left alone."""
        with suppress(LaunchError):
            self._find_launcher(running.record.target).cancel(running.record)

    def _status(self, running: Running) -> JobStatus | None:
        try:
            status = self._find_launcher(running.record.target).status(running.record)
        except LaunchError as error:  # the job runs on at its target, whether it answers or not
            if not running.unreachable:
                logger.warning(f"trial {running.number}: {error}; asking again")
            running.unreachable = True
            return None
        running.unreachable = False
        return status

    def _report(self, running: Running) -> None:
        for row in running.reader.read_new():
            value = measure([row], self._sweep.sweep)
            if value is None or running.pruned:
                continue
            if self._study.report(running.number, int(row["step"]), value):
                running.pruned = True
                self._study.note(running.number, PRUNED, True)
                self.cancel(running)

    def _find_message(self, running: Running, status: JobStatus) -> str:
        """The first line of the error: echelon's own last one, or else the last thing the job printed."""
        try:
            lines = list(self._find_launcher(running.record.target).logs(running.record, False))
        except (LaunchError, OSError):
            lines = []
        own = [line.removeprefix("echelon: ") for line in lines if line.startswith("echelon: ")]
        spoken = own or [line for line in lines if line.strip()]
        return (spoken[-1] if spoken else status.detail) or "it said nothing"


def _watch(number: int, recipe: Recipe, slot: Slot | None, record: JobRecord) -> Running:
    run = RunFolder(Path(record.run_dir))
    return Running(number, recipe, slot, record, MetricsReader(run.path), run.rows.last_step())


def trial_recipe(space: Space, base: Recipe, values: Values, name: str, number: int, folder: SweepFolder) -> Recipe:
    """The recipe of a trial: its values, a run folder of its own, and the prepared text that all trials share."""
    own = _own_keys(base, f"{name}-{number:03d}", folder.trial_dir(number))
    return space.recipe(values, {**own, "launch.to": base.launch.to or "local"})


def best_recipe(space: Space, base: Recipe, values: Values, name: str) -> Recipe:
    """The recipe of the best trial, to be trained by itself: beside the base recipe's run."""
    return space.recipe(values, _own_keys(base, f"{name}-best", base.run.dir.parent / f"{name}-best"))


def _own_keys(base: Recipe, name: str, run_dir: Path) -> dict[str, str]:
    """What no two runs of a sweep have in common, and where all find the text."""
    remote = base.checkpoint.remote
    return {
        "run.name": name,
        "run.dir": str(run_dir),
        "data.prepared_dir": str(base.prepared_dir),
        **({} if remote is None else {"checkpoint.remote": f"{remote}/{name}"}),
    }
