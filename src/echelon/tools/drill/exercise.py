"""The drill: one undisturbed run, and one run for each fault, compared with it."""

import logging
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from echelon.ground.errors import ConfigError, TrainingError
from echelon.ground.sizes import render_duration
from echelon.recipe.document import Recipe
from echelon.recipe.synchronization import PARAMETER_SERVER
from echelon.run.folder.run_folder import RunFolder
from echelon.run.lifecycle.model_checks import check_model
from echelon.tools.drill.crew import LINK_FAULTS, MACHINE_FAULTS, Crew, CrewTrial
from echelon.tools.drill.faults import FAULTS, SAVES, InjectedFault, shrink
from echelon.tools.drill.trial import DrillInterrupted, Likeness, RunningCommand, Trial

logger = logging.getLogger(__name__)

# Target duration of a run: long enough to inject a fault in the middle, short enough to wait for.
_RUN_SECONDS = 8.0
_FEWEST_STEPS, _MOST_STEPS = 24, 2000
_STRIKE_AT = 0.6  # fraction of the steps
_MOST_STARTS = 4
# Fraction of a run's steps that are repeated after a fault, from the checkpoint before it.
_REPEATED = 0.1


@dataclass(frozen=True)
class FaultEffect:
    """The effect of one fault on the run.

    Attributes:
        fault: the name of the fault.
        noticed_seconds: from the fault to the first sign of its detection; None: it was not detected.
        recovered_seconds: from the fault, or the damage, to the first step after that of the fault.
        lost_steps: steps that were repeated.
        starts: how often the command was run, including the first time.
        identical: whether the run ended as the undisturbed one.
        compared: what of both was compared.
        folder: the run folder, which was removed if the fault was survived.
        trouble: why the run did not finish, if it did not.
    """

    fault: str
    noticed_seconds: float | None
    recovered_seconds: float | None
    lost_steps: int
    starts: int
    identical: bool
    compared: Likeness
    folder: str
    trouble: str | None = None


def run_drill(
    recipe: Recipe,
    path: Path,
    overrides: list[str],
    num_processes: int,
    asked: Callable[[], str | None] = lambda: None,
    crew: Crew | None = None,
    has_links: bool = False,
    only: Sequence[str] = (),
) -> Iterator[FaultEffect]:
    """Inject every fault into a small run of the recipe at `path`, and yield the finding of each fault.

    The runs are in a folder next to the recipe's run folder. They are removed, except those that did not survive their
    fault. `asked` returns the signal that asked the drill to stop, or None. `crew`: the machines on which it is run,
    with faults of machines; with `has_links` also faults of the network between them. `only`: the names of the faults;
    empty: all.

    Raises:
        ConfigError, PlanError or DataError: `echelon train` refuses the recipe on any machine; or no fault has a name.
        TrainingError: the recipe does not train, even without a fault.
        Interrupted: the drill was asked to stop.
    """
    faults = _choose_faults(recipe, crew, has_links, only)
    check_model(recipe, elsewhere=True)  # the small run may not need what this machine lacks
    root = recipe.run.dir.with_name(f"{recipe.run.dir.name}-drill")
    shutil.rmtree(root, ignore_errors=True)

    def build(name: str, num_steps: int) -> Trial:
        folder = root / name.replace(" ", "-")
        small = shrink(recipe, folder, num_processes, num_steps)
        command = ("train", str(path), *overrides, *small, "--nproc")
        if crew is None:
            return Trial(RunFolder(folder), (*command, str(num_processes)), num_steps, asked)
        return CrewTrial(RunFolder(folder), (*command, str(crew.num_processes)), num_steps, asked, crew=crew)

    all_well = True
    try:
        logger.info("drill: a short run to measure the step time")
        start_seconds, step_seconds = _measure(build("pilot", _FEWEST_STEPS))
        num_steps = min(_MOST_STEPS, max(_FEWEST_STEPS, round(_RUN_SECONDS / step_seconds)))
        num_steps -= num_steps % SAVES
        alone = [fault for fault in faults if num_processes == 1 and fault.needs_peer]
        faults = [fault for fault in faults if fault not in alone]
        minutes = estimate_seconds(faults, start_seconds, num_steps * step_seconds) / 60
        logger.info(f"drill: {len(faults)} faults, about {render_duration(60 * minutes)} in total")
        for fault in alone:
            logger.info(f"drill: skipped with one process: {fault.name}, which only another rank could detect")
        logger.info(
            f"drill: {num_steps} steps on {num_processes} processes, saved every {num_steps // SAVES}; undisturbed"
        )
        whole = build("whole", num_steps)
        whole.complete()
        for fault in faults:
            trial = build(fault.name, num_steps)
            finding = _strike(fault, trial, whole, choose_likeness(recipe, fault, num_processes, crew))
            if finding.identical:
                shutil.rmtree(trial.run.path)
            all_well &= finding.identical
            yield finding
    except DrillInterrupted:
        if all_well:
            shutil.rmtree(root)
        raise
    if all_well:
        shutil.rmtree(root)


def _choose_faults(recipe: Recipe, crew: Crew | None, has_links: bool, only: Sequence[str]) -> list[InjectedFault]:
    """The faults for a recipe. Raises ConfigError if one of the names is no fault."""
    faults = FAULTS if crew is None else (*MACHINE_FAULTS, *(LINK_FAULTS if has_links else ()))
    if unknown := set(only) - {fault.name for fault in faults}:
        names = ", ".join(fault.name for fault in faults)
        raise ConfigError(f"--only {unknown.pop()!r} is no fault of this drill; it has: {names}.")
    has_rewards = bool(recipe.reward) or recipe.rollout.environment is not None
    chosen = [fault for fault in faults if not only or fault.name in only]
    return [fault for fault in chosen if has_rewards or not fault.needs_rewards]


def choose_likeness(recipe: Recipe, fault: InjectedFault, num_processes: int, crew: Crew | None = None) -> Likeness:
    """What of a run with this fault can be expected to equal the undisturbed one."""
    if fault.needs_rewards:
        return Likeness.STEPS
    sync = recipe.sync
    if sync.name == PARAMETER_SERVER and sync.max_staleness != 0:
        return Likeness.BATCHES  # the order of updates depends on time
    goes_on = recipe.goes_on is not None and num_processes > max(1, sync.num_essential)
    if crew is not None and crew.may_shrink and fault.loses_machine:
        return Likeness.ROUNDING
    return Likeness.ROUNDING if goes_on and fault.loses_rank else Likeness.BITS


def estimate_seconds(faults: Sequence[InjectedFault], start_seconds: float, run_seconds: float) -> float:
    """The total duration of the undisturbed run and the runs with faults.

    `start_seconds` is the duration of a start of the command and its ranks, `run_seconds` that of the steps of one run;
    a restarted run repeats some steps.
    """
    whole = start_seconds + run_seconds
    return whole + sum(
        fault.starts * start_seconds + (1 + _REPEATED * (fault.starts - 1)) * run_seconds + fault.idle_seconds
        for fault in faults
    )


def _measure(pilot: Trial) -> tuple[float, float]:
    """The seconds of a start, and of a step after the first ones."""
    started = time.monotonic()
    pilot.complete()
    seconds = time.monotonic() - started
    steps = [row["step_seconds"] for row in pilot.rows()]
    later = steps[len(steps) // 2 :]
    return max(0.0, seconds - sum(steps)), sum(later) / len(later)


def _strike(fault: InjectedFault, trial: Trial, whole: Trial, likeness: Likeness) -> FaultEffect:
    watch = _Watch(trial, fault, likeness)
    try:
        with trial.started() as job:
            watch.struck(job.wait_for_step(round(_STRIKE_AT * trial.num_steps)))
            fault.strike(job)
            code = watch.see_to_the_end(job)
        if fault.damage is not None:
            fault.damage(trial)
            watch.struck(watch.step)
        while code != 0:
            if watch.starts == _MOST_STARTS:
                raise TrainingError(trial.last_words())
            if watch.starts == 2 and fault.repair is not None:
                fault.repair(trial)
            with trial.started() as job:
                code = watch.see_to_the_end(job)
    except TrainingError as error:
        return watch.report(False, str(error))
    return watch.report(trial.equals(whole, likeness))


class _Watch:
    """Measures when a run detects its fault, and when it has recovered."""

    def __init__(self, trial: Trial, fault: InjectedFault, likeness: Likeness) -> None:
        self._trial = trial
        self._fault = fault
        self._likeness = likeness
        self._moment = 0.0
        self.step = 0
        self.starts = 0
        self.noticed: float | None = None
        self.recovered: float | None = None

    def struck(self, step: int) -> None:
        """Record that the fault happens now, at this step."""
        self._moment, self.step = time.time(), step
        self.noticed = self.recovered = None

    @property
    def lost(self) -> int:
        """The number of steps between the checkpoint that the run resumed from and the fault."""
        resumed = [event["step"] for event in self._trial.events(self._moment) if event["event"] in ("resume", "start")]
        return max(0, self.step - resumed[-1]) if resumed else 0

    def see_to_the_end(self, job: RunningCommand) -> int:
        """Wait for the command's end while watching the run; returns its exit code."""
        self.starts += 1
        code = job.wait(self._look)
        if self.noticed is None:
            self.noticed = time.time() - self._moment
        assert code is not None
        return code

    def report(self, identical: bool, trouble: str | None = None) -> FaultEffect:
        """The finding."""
        folder, times = str(self._trial.run.path), (self.noticed, self.recovered)
        compared = self._likeness
        return FaultEffect(self._fault.name, *times, self.lost, self.starts, identical, compared, folder, trouble)

    def _look(self) -> bool:
        events = self._trial.events(self._moment)
        if self.noticed is None and any(event["event"] in self._fault.noticed_by for event in events):
            self.noticed = time.time() - self._moment
        has_resumed = any(event["event"] in self._fault.over_by for event in events)
        if (
            self.recovered is None
            and self.noticed is not None
            and has_resumed
            and self._trial.run.rows.last_step() > self.step
        ):
            self.recovered = time.time() - self._moment
        return False
