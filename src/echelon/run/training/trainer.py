"""The trainer: one loop for every method, strategy and engine."""

import gc
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from echelon.ground.errors import TrainingError
from echelon.ground.quiet_imports import garbage_kept
from echelon.ground.stop_request import StopRequest
from echelon.learn.distributed.mesh import ViewChanged
from echelon.run.training.evaluations import Evaluations
from echelon.run.training.metrics import PendingMetrics
from echelon.run.training.rollback import BadStep, BadStepHandler
from echelon.run.training.run_log import Accounting
from echelon.run.training.state import TrainState
from echelon.run.training.training_step import TrainingStep

if TYPE_CHECKING:
    from echelon.learn.learner import CountedSums, Learner
    from echelon.run.training.saver import Saver

# After so many steps Python's garbage is collected; also after each that samples answers, and after other work.
_COLLECT_EVERY = 50


@dataclass(frozen=True)
class Due:
    """The work that is due after a step; usually none."""

    comparison: bool = False
    evaluation: bool = False
    checkpoint: bool = False
    snapshot: bool = False

    def __bool__(self) -> bool:
        return self.comparison or self.evaluation or self.checkpoint or self.snapshot


WORKS = tuple(work.name for work in fields(Due))
"""The names of all works that may be due."""


@dataclass
class Pauses:
    """Decides what is due after each step, and does it. Every rank must call its methods in the same order."""

    learner: "Learner"
    saver: "Saver"
    evaluations: Evaluations | None
    """None for a run without held-out text."""
    accounting: Accounting
    stop: StopRequest

    def agree_on_due(self, done: int, num_steps: int) -> Due:
        """Return what is due after this step, the same on every rank. Must be called once after each step.

        Collective after some steps. `num_steps`: the last step.
        """
        is_last = done == num_steps
        return Due(
            comparison=any(monitor.needs_pause(done) for monitor in self.accounting.monitors),
            evaluation=self.evaluations is not None and (is_last or self.evaluations.is_due(done)),
            checkpoint=is_last or self.saver.agree_on_save(done),
            snapshot=self.saver.snapshots is not None and self.saver.snapshots.is_due(done),
        )

    def stops_early(self, state: TrainState) -> bool:
        """Whether the loss has not improved for `evaluate.early_stopping` evaluations."""
        patience = self.learner.recipe.evaluate.early_stopping
        return patience is not None and state.evaluations_since_best >= patience

    def run(self, state: TrainState, due: Due) -> TrainState:
        """Do what is due, handle a stop request, and return the new state. Collective.

        The time does not count for any step.

        Raises:
            StoppedError: the ranks have agreed to stop, and the run is saved.
            TrainingError: replicas have different weights, or ranks compute different results.
            CheckpointError: see Saver.
        """
        is_best = False
        for monitor in self.accounting.monitors:
            monitor.on_pause(state.step)
        if self.evaluations is not None and due.evaluation:
            state = self.evaluations.run(state)
            is_best = not state.owes_evaluation and state.best_step == state.step
        if self.stop.agreed is not None:
            self.saver.save_and_leave(state, self.stop.agreed)
        is_saved = due.checkpoint or self.stops_early(state) or (is_best and self.saver.keeps_best)
        if is_saved:
            self.saver.save_and_learn(state)
        if self.saver.snapshots is not None and due.snapshot:  # also after a checkpoint: it is read without the disk
            self.saver.save_snapshot(state, self.saver.snapshots)
        self.accounting.meter.restart()
        return state


@dataclass
class Trainer:
    """Runs the steps, and the work that is due between them. Every rank must call its methods in the same order."""

    train_step: TrainingStep
    accounting: Accounting
    pauses: Pauses
    saver: "Saver"
    recovery: BadStepHandler
    state: TrainState
    num_steps: int = field(init=False)
    """After how many steps it ends: the run's number, unless a caller shortens it."""
    owes_pause: bool = field(default=False, init=False)
    """Whether the work that is due after the last step may be unfinished."""
    owes_save: bool = field(default=False, init=False)
    """Whether a checkpoint was being written when a group of replicas ended."""
    loop: "Callable[[Trainer], None] | None" = field(default=None, init=False)
    """The loop of `train.loop`; None for the trainer's own."""
    _pending: deque[PendingMetrics] = field(default_factory=deque, init=False)
    _due: Due | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.num_steps = self.train_step.num_steps

    @property
    def stop(self) -> StopRequest:
        """The request to stop that this rank listens to."""
        return self.train_step.stop

    def fit(self) -> TrainState:
        """Train to the last step, or until `evaluate.early_stopping` ends the run. Collective.

        Raises:
            TrainingError: a step was bad, was not applied, and the recipe stops there; or replicas differ.
            CheckpointError: a checkpoint could not be written three times in a row.
            StoppedError: a rank received a stop request, or a budget is reached; all ranks have saved the same step.
        """
        self.accounting.tell("on_start", self.state.step)
        try:
            self.recovery.prepare(self.state)
            with _garbage_left():
                self._train_on()
            self.saver.settle(self.state)
        finally:
            self.accounting.tell("on_end")
        return self.state

    @property
    def stopped_early(self) -> bool:
        """Whether the loss has not improved for `evaluate.early_stopping` evaluations."""
        return self.pauses.stops_early(self.state)

    def _train_on(self) -> None:
        """Train to the end, also after bad steps."""
        while True:
            try:
                self._train()
                return
            except BadStep as bad:
                with self.accounting.pausing("recovering"):
                    self.state = self.recovery.recover(bad.metrics, self.state, is_own=self.loop is not None)
                    self.owes_pause = self.owes_save = False

    def _train(self) -> None:
        """Train to the end, or raise BadStep at a bad step that needs recovery. Collective."""
        self._pending.clear()
        self._due = None
        if self.loop is not None:
            self.loop(self)
            if self.num_recorded < self.num_steps and not self.stopped_early:
                raise TrainingError(
                    f"train.loop returned after step {self.num_recorded} of {self.num_steps}; go on to the end of "
                    "run.steps(), or set train.steps to the number of steps that you want."
                )
            return
        for step in self.steps():
            is_suppressed = step + 1 in self.state.suppressed
            try:
                self._pending.append(self.train_step(step, is_suppressed, partial(self.accounting.meter.measure, step)))
            except ViewChanged:  # all processes have finished the steps before this one
                self._account_all()
                raise

    def steps(self) -> Iterator[int]:
        """Yield the index of each step to the end; after each, do what is due and not done yet. Collective.

        Raises BadStep, and the errors of `fit`.
        """
        self.accounting.begin(self.state.step)
        self._make_up()
        samples = self.train_step.learner.recipe.samples_answers
        for step in range(self.state.step, self.num_steps):
            if self.stopped_early:
                break
            with self.accounting.around_step(step):
                yield step
            self.expect(step, is_recorded=True)
            # The host reads metrics one or more steps late, so that it never waits for the step it has just launched.
            if len(self._pending) > self.train_step.sync.lag:
                self._account(self._pending.popleft())
            self.do_due(step)
            if samples or (step + 1) % _COLLECT_EVERY == 0:
                gc.collect()
            self._due = None
        self._account_all()

    @property
    def num_recorded(self) -> int:
        """The number of steps of the run whose metrics are there, or on their way."""
        return self.state.step + len(self._pending)

    def expect(self, step: int, is_recorded: bool) -> None:
        """Raise TrainingError unless this step is the current one, and was recorded or not yet."""
        current = self.num_recorded - is_recorded
        if step != current:
            wrong = "has no run.record yet" if is_recorded else f"is not the current one, {current}"
            raise TrainingError(
                f"train.loop: step {step} {wrong}; call run.record(step, sums, grad_norm) exactly once in each step of "
                "run.steps(), before run.evaluate_if_due and run.save_if_due."
            )

    def record(
        self,
        step: int,
        sums: "CountedSums",
        grad_norm: Tensor,
        learning_rate: float,
        wait_seconds: float,
        further: Mapping[str, Tensor],
    ) -> None:
        """Add the metrics of a step of an own loop. Collective."""
        record = self.train_step.describe(step, sums, grad_norm, learning_rate, wait_seconds, further=further)
        measured = self.accounting.meter.measure(step)
        self._pending.append(PendingMetrics(record, self.train_step.learner.meshes, measured))

    def do_due(self, step: int, names: Sequence[str] = WORKS) -> None:
        """Do those of these works that are due after a step and were not done before. Collective.

        The trainer's own loop asks for all works at once; an own loop may ask for an evaluation, and later for a save.
        """
        self.owes_pause = True  # a replica that is lost from here on leaves this to the next group: `_make_up`
        # Ranks agree once after each step, even if the loop asks twice: agreeing may be a collective.
        due = self.pauses.agree_on_due(step + 1, self.num_steps) if self._due is None else self._due
        now = replace(Due(), **{name: getattr(due, name) for name in names})
        self._due = replace(due, **dict.fromkeys(names, False))
        # A stop is agreed with the metrics of a step, so all ranks see it before the same step and leave together.
        if now or self.stop.agreed is not None:
            self._account_all()  # a checkpoint counts the tokens of all steps before it
            # A checkpoint from before an evaluation says that it is still to be done.
            self.state = replace(self.state, owes_evaluation=self.state.owes_evaluation or self._due.evaluation)
            self.state = self.pauses.run(self.state, now)
            gc.collect()
        self.owes_pause = bool(self._due)

    def _make_up(self) -> None:
        """Do the work after the last step that an earlier start, or an earlier group, has not finished. Collective."""
        due = Due(checkpoint=self.owes_save)
        if self.state.owes_evaluation or self.owes_pause or self.stop.agreed is not None:
            agreed = self.pauses.agree_on_due(self.state.step, self.num_steps)
            due = replace(agreed, checkpoint=agreed.checkpoint or self.owes_save)
        if due or self.stop.agreed is not None:
            self.state = self.pauses.run(self.state, due)
        self.owes_pause = self.owes_save = False

    def _account_all(self) -> None:
        while self._pending:
            self._account(self._pending.popleft())

    def _account(self, pending: PendingMetrics) -> None:
        """Record a finished step and write its row; raise BadStep if it needs recovery. Collective."""
        metrics = pending.read()
        self.state = self.state.advanced(metrics.tokens, metrics.target_tokens)
        finished = self.accounting.book(metrics, pending.finished, self.state)
        self.stop.agreed = self.stop.agreed or metrics.stopped_by
        self.stop.limit = self.stop.limit or finished.stop_cause
        self.accounting.write(finished)
        if metrics.is_bad:
            self.recovery.pass_over(metrics, self.state)


@contextmanager
def _garbage_left() -> Iterator[None]:
    """Let nothing but the trainer collect Python's garbage during the block: after the same steps on all ranks.

    All ranks wait for one that collects, and by itself each would at other moments. What is there now is not looked
    through again.
    """
    gc.collect()
    gc.freeze()
    with garbage_kept():
        try:
            yield
        finally:
            gc.unfreeze()
