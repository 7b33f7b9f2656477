"""The Optuna study of a sweep: sampler, pruner, and the journal of all trials."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.ground.errors import ConfigError
from echelon.ground.extras import missing_package
from echelon.ground.stored import MAX_ROWS_BYTES, read_bytes
from echelon.recipe.document import Recipe
from echelon.tools.sweep.space import Space, Values
from echelon.tools.sweep.sweep_file import Sweep

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial

_NEEDED = {"optuna": "", "matplotlib": "", "sklearn": "", "cmaes": "cmaes", "scipy": "qmc gp"}

# Attributes of a trial in the journal.
BILLED, MESSAGE, PRUNED, SLOT, STOPPED = "billed", "message", "pruned", "slot", "stopped"


def require_optuna(sweep: Sweep) -> None:
    """Raise ConfigError if a package that this sweep needs is missing."""
    for name, samplers in _NEEDED.items():
        if find_spec(name) is None and (not samplers or sweep.sweep.sampler in samplers.split()):
            why = f"sweep.sampler={sweep.sweep.sampler}" if samplers else "echelon sweep"
            raise missing_package(why, name, "sweep")


class SweepStudy:
    """The trials of a sweep; kept in memory if there is no journal.

    A trial keeps the number and values that it gets when it begins, also when the sweep is killed and restarted.
    """

    def __init__(self, sweep: Sweep, space: Space, recipe: Recipe, journal: Path | None) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._sweep, self._space = sweep, space
        with _quiet():
            self._study: Study = optuna.create_study(
                storage=None if journal is None else _open_journal(journal),
                study_name=sweep.sweep.name,
                direction=sweep.sweep.better,
                pruner=_build_pruner(sweep, recipe),
                sampler=optuna.samplers.RandomSampler(),
                load_if_exists=True,
            )
        self._open: dict[int, Trial] = {}

    @property
    def study(self) -> "Study":
        """For Optuna's plots."""
        return self._study

    def trials(self) -> "list[FrozenTrial]":
        """All trials, by number."""
        return self._study.get_trials(deepcopy=False)

    def unfinished(self) -> list[int]:
        """The numbers of the trials that began but have not ended."""
        return [trial.number for trial in self.trials() if not trial.state.is_finished()]

    def begin(self, number: int | None = None) -> tuple[int, Values]:
        """Begin a new trial, or reopen an unfinished one; returns its number and values.

        The sampler's values depend only on the seed, the trial's number and the earlier trials, so a killed sweep
        draws the same values when it is restarted.
        """
        from optuna import Trial
        from optuna.samplers import RandomSampler

        with _quiet():
            upcoming = len(self.trials()) if number is None else number
            self._study.sampler = _build_sampler(self._sweep, self._space, upcoming)
            if number is None:
                trial = self._study.ask()
            else:
                trial = Trial(self._study, self.trials()[number]._trial_id)
            values = {dimension.key: dimension.suggest(trial) for dimension in self._space.dimensions}
            # Only used to draw: told of its last point, a GridSampler would stop an Optuna optimization loop.
            self._study.sampler = RandomSampler()
        self._open[trial.number] = trial
        return trial.number, values

    def note(self, number: int, name: str, value: Any) -> None:
        """Store an attribute of an unfinished trial."""
        self._open[number].set_user_attr(name, value)

    def recall(self, number: int, name: str) -> Any:
        """An attribute stored by `note`, or None."""
        return self.trials()[number].user_attrs.get(name)

    def report(self, number: int, step: int, value: float) -> bool:
        """Report an intermediate value; returns whether the trial should be pruned."""
        with _quiet():
            if step not in self.trials()[number].intermediate_values:
                self._open[number].report(value, step)
            return self._open[number].should_prune()

    def complete(self, number: int, value: float) -> None:
        """Record that the trial completed, with its value."""
        with _quiet():
            self._study.tell(self._open.pop(number), value)

    def prune(self, number: int) -> None:
        """Record that the trial was pruned."""
        from optuna.trial import TrialState

        with _quiet():
            self._study.tell(self._open.pop(number), state=TrialState.PRUNED)

    def fail(self, number: int, message: str) -> None:
        """Record that the trial failed, with a message."""
        from optuna.trial import TrialState

        self.note(number, MESSAGE, message)
        with _quiet():
            self._study.tell(self._open.pop(number), state=TrialState.FAIL)

    def best(self) -> "FrozenTrial | None":
        """The best completed trial; the first of several equal ones."""
        from optuna.trial import TrialState

        done = [trial for trial in self.trials() if trial.state == TrialState.COMPLETE]
        sign = 1 if self._sweep.sweep.better == "minimize" else -1
        return min(done, key=lambda trial: sign * (trial.value or 0.0), default=None)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress Optuna's warnings about experimental features, which do not concern the user."""
    from optuna.exceptions import ExperimentalWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        yield


def _open_journal(path: Path) -> Any:
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

    # The sweep's folder is locked, so this process is alone: remove a killed sweep's lock file and incomplete line.
    path.with_name(f"{path.name}.lock").unlink(missing_ok=True)
    if path.exists():
        try:
            text = read_bytes(path, MAX_ROWS_BYTES)
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be read: {error.strerror}; restore it, or choose a new folder."
            ) from error
        with path.open("r+b") as file:
            file.truncate(text.rfind(b"\n") + 1)
    return JournalStorage(JournalFileBackend(str(path), lock_obj=JournalFileOpenLock(str(path))))


def _build_sampler(sweep: Sweep, space: Space, number: int) -> "BaseSampler":
    from optuna import samplers

    settings = sweep.sweep
    # A separate sampler for each trial; otherwise a resumed sweep would draw its first values again.
    seed = (settings.seed * 1_000_003 + number) % 2**32
    match settings.sampler:
        case "grid":
            points = {
                dimension.key: [dimension.label(value) for value in dimension.points() or ()]
                for dimension in space.dimensions
            }
            return samplers.GridSampler(points, seed=settings.seed)
        case "random":
            return samplers.RandomSampler(seed=seed)
        case "tpe":
            return samplers.TPESampler(seed=seed, constant_liar=settings.parallel > 1)
        case "cmaes":
            return samplers.CmaEsSampler(seed=seed, warn_independent_sampling=False)
        case "gp":
            return samplers.GPSampler(seed=seed)
        case "qmc":
            return samplers.QMCSampler(  # one sequence; the journal has the position in it
                seed=settings.seed, scramble=True, warn_independent_sampling=False,
                independent_sampler=samplers.RandomSampler(seed=seed),
            )  # fmt: skip


def _build_pruner(sweep: Sweep, recipe: Recipe) -> "BasePruner":
    from optuna import pruners

    if sweep.sweep.pruner == "none":
        return pruners.NopPruner()
    every = recipe.train.eval_every
    # The others count steps; the steps of epochs are known only after the data is prepared.
    if sweep.sweep.pruner == "median" and every is not None:
        return pruners.MedianPruner()
    if not isinstance(every, int):
        raise ConfigError(
            f"sweep.pruner={sweep.sweep.pruner} compares evaluations of the same step, but train.eval_every is "
            f"{every or 'null'}; set it to a number of steps, or use pruner: none."
        )
    if sweep.sweep.pruner == "asha":
        return pruners.SuccessiveHalvingPruner(min_resource=every)
    # The number of steps is unknown if train keys are searched or the run is measured in epochs.
    lengths = any(key.startswith("train.") for key in sweep.search) or recipe.train.epochs is not None
    steps = None if lengths else recipe.num_steps(0)
    return pruners.HyperbandPruner(min_resource=every, max_resource="auto" if steps is None else steps)
