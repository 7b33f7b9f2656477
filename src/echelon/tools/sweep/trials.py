"""The running trials: each is a job of a launcher, which is started, adopted, watched and stopped here, on its share of
this machine's devices and cores."""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from echelon.ground.cores import num_cores
from echelon.ground.errors import BusyError, ConfigError, LaunchError
from echelon.ground.launch_environment import exported
from echelon.ground.variables import read_environment
from echelon.launch.job import (
    FINAL_STATES,
    ArrayLauncher,
    JobRecord,
    JobSpec,
    JobStatus,
    Launcher,
    RemoteLauncher,
)
from echelon.launch.records import name_job, record_job, submit_job
from echelon.recipe.document import Recipe
from echelon.run.folder.run_folder import RunFolder
from echelon.tools.sweep.results import MetricsReader, measure, read_rows
from echelon.tools.sweep.space import Space, Values
from echelon.tools.sweep.study import BILLED, PRUNED, SLOT, STOPPED, SweepStudy
from echelon.tools.sweep.sweep_file import Sweep
from echelon.tools.sweep.sweep_folder import SweepFolder

Item = TypeVar("Item")

_VISIBLE = "CUDA_VISIBLE_DEVICES"
logger = logging.getLogger(__name__)

# Characters of the sweep's name in the names of its jobs, which also have the trial, the start and the time.
_NAME_LENGTH = 36

# `echelon train`'s message about a locked run folder: a killed sweep may have left a job without a record.
_IN_USE = "is in use by a live run"


@dataclass(frozen=True)
class TrialSlot:
    """A slot for one trial at a time: its GPUs as in CUDA_VISIBLE_DEVICES, and its core numbers.

    Both are empty if nothing is assigned, as at other targets.
    """

    index: int
    devices: tuple[str, ...] = ()
    cores: tuple[int, ...] = ()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Restrict processes started in the block to this slot's devices and cores."""
        before = os.sched_getaffinity(0) if self.cores else None
        try:
            if self.cores:
                os.sched_setaffinity(0, self.cores)
            with exported({_VISIBLE: ",".join(self.devices)} if self.devices else {}):
                yield
        finally:
            if before is not None:
                os.sched_setaffinity(0, before)

    def describe(self) -> str:
        """`slot 0: GPUs 0,1; cores 0-7`."""
        parts = [f"{len(self.devices)} GPU(s) {','.join(self.devices)}"] if self.devices else []
        parts += [f"{len(self.cores)} core(s) {_ranges(self.cores)}"] if self.cores else []
        return f"slot {self.index}: {'; '.join(parts) or 'not pinned'}"


def share_machine(count: int) -> tuple[TrialSlot, ...]:
    """Divide this machine into `count` slots, as equal as possible. Raises ConfigError if there are too few GPUs.

    On systems without core pinning (macOS) the slots have no cores.
    """
    devices = _find_devices()
    if devices and len(devices) < count:
        raise ConfigError(
            f"sweep.parallel={count}: each trial needs its own GPU, but this machine has {len(devices)}; use "
            f"parallel: {len(devices)} or less."
        )
    pins = hasattr(os, "sched_getaffinity")
    cores = tuple(sorted(os.sched_getaffinity(0))[: num_cores()]) if pins else ()
    return tuple(
        TrialSlot(index, find_share(devices, index, count), find_share(cores, index, count)) for index in range(count)
    )


def _find_devices() -> tuple[str, ...]:
    import torch

    visible = read_environment().get(_VISIBLE)
    if not torch.cuda.is_available():
        return ()
    count = torch.cuda.device_count()
    names = [name.strip() for name in visible.split(",")] if visible else [str(index) for index in range(count)]
    return tuple(names[:count])


def find_share(items: tuple[Item, ...], index: int, count: int) -> tuple[Item, ...]:
    """Return the items of a slot of `count`: a stretch of them, or one that slots share."""
    if len(items) < count:  # only cores: some trials share one
        return (items[index % len(items)],) if items else ()
    return items[index * len(items) // count : (index + 1) * len(items) // count]


def _ranges(numbers: tuple[int, ...]) -> str:
    """`0-3,8`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


@dataclass
class Running:
    """A running trial. `slot` is None if its target starts it. `step` is its last step when it was submitted."""

    number: int
    recipe: Recipe
    slot: TrialSlot | None
    record: JobRecord
    reader: MetricsReader
    step: int = 0
    pruned: bool = False
    unreachable: bool = False


@dataclass(frozen=True)
class Ended:
    """How a trial ended. `message` is that of a failed one; `again`: it only stopped and must be started again."""

    value: float | None = None
    pruned: bool = False
    message: str = ""
    again: bool = False


class Trials:
    """Runs trials as jobs; talks to the target only through its Launcher."""

    def __init__(
        self,
        sweep: Sweep,
        space: Space,
        base: Recipe,
        folder: SweepFolder,
        study: SweepStudy,
        find_launcher: Callable[[str], Launcher],
        workdir: Path,
    ) -> None:
        self._sweep, self._space, self._base, self._folder, self._study = sweep, space, base, folder, study
        self._find_launcher, self._workdir = find_launcher, workdir

    def job(self, number: int, values: Values) -> JobSpec:
        """The job of a trial's next start. Raises ConfigError if the recipe refuses the values."""
        return self._build_job(number, values, self._folder.next_job_dir(number))

    def _build_job(self, number: int, values: Values, folder: Path) -> JobSpec:
        """The job of this folder. Its name depends only on the sweep and the folder, so that it can be found again."""
        recipe = trial_recipe(self._space, self._base, values, self._sweep.sweep.name, number, self._folder)
        name = name_job(f"{self._sweep.sweep.name[:_NAME_LENGTH]}-{folder.name}", self._folder.began())
        return JobSpec(name, recipe, folder, self._workdir)

    def start(self, number: int, values: Values, slot: TrialSlot) -> Running:
        """Submit the trial's job in this slot. Raises EchelonError if it is refused, here or by the target."""
        job = self.job(number, values)
        assert job.recipe.launch.to is not None
        launcher = self._find_launcher(job.recipe.launch.to)
        launcher.check(job)
        self._study.note(number, SLOT, slot.index)
        with slot.held():
            record = _submit(job, launcher)
        return _watch(number, job.recipe, slot, record)

    def start_array(self, jobs: Mapping[int, JobSpec], parallel: int) -> list[Running]:
        """Submit the jobs of these trials, all or none, as one array, which runs `parallel` of them at a time.

        Raises EchelonError if they are refused. The launcher must be an ArrayLauncher.
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

    def adopt(self, number: int, values: Values, slot: TrialSlot | None) -> Running | None:
        """The trial's earlier job if it still runs, or has ended with a result; None if it must be started again.

        Raises LaunchError if an unrecorded job may be at a target that does not answer.
        """
        record = self._folder.last_job(number) or self._find_unrecorded(number, values)
        if record is None:
            return None
        recipe = trial_recipe(self._space, self._base, values, self._sweep.sweep.name, number, self._folder)
        running = _watch(number, recipe, slot, record)
        if self._study.recall(number, PRUNED):
            running.pruned = True
            self.cancel(running)  # the earlier request may not have arrived
            return running
        status = self._status(running)
        if status is None or status.state == "done":
            return running
        failed = status.state == "failed"
        killed = failed and (status.exit_code is None or _IN_USE in self._find_message(running, status))
        was_stopped = status.state in FINAL_STATES and self._study.recall(number, STOPPED) == record.folder.name
        return None if status.state == "stopped" or killed or was_stopped else running

    def _find_unrecorded(self, number: int, values: Values) -> JobRecord | None:
        """Record the trial's newest job if the sweep was killed after its target accepted it; None if there is none."""
        if not (folders := self._folder.jobs(number)):
            return None
        job = self._build_job(number, values, folders[-1])
        assert job.recipe.launch.to is not None
        return _find_submitted(job, self._find_launcher(job.recipe.launch.to))

    def look(self, running: Running) -> Ended | None:
        """Report the trial's new values and cancel it if it is pruned; returns how it ended, None while it runs."""
        if (status := self._status(running)) is None:
            return None
        if not running.pruned and self._sweep.sweep.pruner != "none":
            self._report(running)
        if status.state not in FINAL_STATES:
            return None
        if running.pruned and status.state != "done":
            return Ended(pruned=True)
        if status.state == "done":
            value = measure(read_rows(Path(running.record.run_dir)), self._sweep.sweep)
            metric = self._sweep.sweep.metric
            return Ended(value, message="" if value is not None else f"it ended without a value of {metric}")
        message = self._find_message(running, status)
        if status.state == "stopped":
            goes_on = RunFolder(Path(running.record.run_dir)).rows.last_step() > running.step
            return Ended(again=goes_on, message=f"it stopped without progress: {message}")
        return Ended(again=True) if _IN_USE in message else Ended(message=message)

    def stop(self, running: Running) -> None:
        """Ask a trial to save and end; the next start of the sweep resumes it, whatever its exit code."""
        self._study.note(running.number, STOPPED, running.record.folder.name)
        self.cancel(running)

    def cancel(self, running: Running) -> None:
        """Ask a trial to save and end; has no effect if it has already ended."""
        with suppress(LaunchError):
            self._find_launcher(running.record.target).cancel(running.record)

    def _status(self, running: Running) -> JobStatus | None:
        launcher = self._find_launcher(running.record.target)
        try:
            status = launcher.status(running.record)
            ended = status.state in FINAL_STATES
            if isinstance(launcher, RemoteLauncher) and (ended or self._sweep.sweep.pruner != "none"):
                launcher.fetch_records(running.record)
        except LaunchError as error:  # the job may still run at its target
            if not running.unreachable:
                logger.warning(f"trial {running.number}: {error}; trying again")
            running.unreachable = True
            return None
        running.unreachable = False
        if ended and status.billed_usd is not None:
            billed = self._study.recall(running.number, BILLED) or {}
            self._study.note(running.number, BILLED, {**billed, running.record.folder.name: status.billed_usd})
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
        """The job's error message: its last line that starts with `echelon: `, else its last line."""
        try:
            lines = list(self._find_launcher(running.record.target).logs(running.record, False))
        except (LaunchError, OSError):
            lines = []
        messages = [line.removeprefix("echelon: ") for line in lines if line.startswith("echelon: ")]
        printed = messages or [line for line in lines if line.strip()]
        return (printed[-1] if printed else status.detail) or "it printed nothing"


def _submit(job: JobSpec, launcher: Launcher) -> JobRecord:
    """Submit a job; if the answer was lost, but the target has the job, its record. Raises EchelonError."""
    try:
        return submit_job(job, launcher, launcher.render(job))
    except BusyError:
        raise
    except LaunchError:
        if (record := _find_submitted(job, launcher)) is None:
            raise
        return record


def _find_submitted(job: JobSpec, launcher: Launcher) -> JobRecord | None:
    """Record a job that its target accepted without a record here; None if it did not. Raises LaunchError."""
    submitted = launcher.find_submitted(job) if isinstance(launcher, RemoteLauncher) else None
    return None if submitted is None else record_job(job, submitted)


def _watch(number: int, recipe: Recipe, slot: TrialSlot | None, record: JobRecord) -> Running:
    run = RunFolder(Path(record.run_dir))
    return Running(number, recipe, slot, record, MetricsReader(run.path), run.rows.last_step())


def trial_recipe(space: Space, base: Recipe, values: Values, name: str, number: int, folder: SweepFolder) -> Recipe:
    """The recipe of a trial: its values, its own run folder, and the prepared data that all trials share."""
    keys = _own_keys(base, f"{name}-{number:03d}", folder.trial_dir(number))
    sagemaker = base.launch.sagemaker
    if base.launch.to == "sagemaker" and (sagemaker.checkpoint_uri or sagemaker.bucket):
        # Another sweep of this name must not find the checkpoints of this one.
        parent = sagemaker.checkpoint_uri or f"{sagemaker.bucket}/checkpoints"
        keys["launch.sagemaker.checkpoint_uri"] = f"{parent}/{name_job(name, folder.began())}/{number:03d}"
    return space.recipe(values, {**keys, "launch.to": base.launch.to or "local"})


def best_recipe(space: Space, base: Recipe, values: Values, name: str) -> Recipe:
    """The recipe of the best trial as a separate run, in a folder next to the base recipe's run."""
    return space.recipe(values, _own_keys(base, f"{name}-best", base.run.dir.parent / f"{name}-best"))


def _own_keys(base: Recipe, name: str, run_dir: Path) -> dict[str, str]:
    """The keys that differ between all runs of a sweep, and the folder of the shared prepared data."""
    remote = base.checkpoint.remote
    return {
        "run.name": name,
        "run.dir": str(run_dir),
        "data.prepared_dir": str(base.prepared_dir),
        **({} if remote is None else {"checkpoint.remote": f"{remote}/{name}"}),
    }
