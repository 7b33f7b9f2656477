"""Records a run while it trains: the row of each step, its goodput, and what monitors and callbacks are told."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from echelon.learn.distributed.stamp import Stamp
from echelon.run.journal.goodput import GoodputTracker
from echelon.run.training.callbacks import Callback, FinishedStep, Monitor
from echelon.run.training.heartbeat import Heartbeat
from echelon.run.training.meters import StepMeter
from echelon.run.training.metrics import StepMetrics, train_row
from echelon.run.training.state import TrainState

if TYPE_CHECKING:
    from echelon.run.journal.journal import Journal


class Accounting:
    """Tells the monitors of a run on every rank; on rank 0, also its journal and the user's callbacks."""

    def __init__(
        self, meter: StepMeter, goodput: GoodputTracker, heartbeat: Heartbeat, journal: "Journal | None" = None
    ) -> None:
        self.meter = meter
        self.goodput = goodput
        self.heartbeat = heartbeat
        self.journal = journal
        self.monitors: Sequence[Monitor] = ()
        """What watches the run on every rank, in the order in which each hook is called."""
        self.callbacks: Sequence[Callback] = ()
        """Those of the user, after the monitors; none on other ranks than 0."""
        self.latest: list[dict[str, Any]] = []
        """The rows of the last step, on every rank: the one that writes them may be lost before it has."""

    def begin(self, step: int) -> None:
        """Record that training starts or continues after this many steps."""
        self.goodput.turn("training")
        self.heartbeat.beat(f"step {step + 1}")
        self.meter.restart()

    @contextmanager
    def around_step(self, step: int) -> Iterator[None]:
        """Scope of a step on this rank, by its index from 0: those of all monitors."""
        with ExitStack() as scopes:
            for monitor in self.monitors:
                scopes.enter_context(monitor.around_step(step))
            yield

    def book(self, metrics: StepMetrics, finished: Stamp, state: TrainState) -> FinishedStep:
        """Record the next finished step, and tell the monitors. `state`: the state after it."""
        step = FinishedStep(metrics, self.meter.finish(finished), state)
        self.goodput.move("training", "data", metrics.data_wait_seconds)
        if not metrics.committed:
            self.goodput.move("training", "skipped", step.seconds - metrics.data_wait_seconds)
        for monitor in self.monitors:
            monitor.on_metrics(step)
        return step

    def write(self, step: FinishedStep) -> None:
        """Write the row of a step that `book` has recorded."""
        state = step.state
        row = train_row(step.metrics, tokens=state.tokens, target_tokens=state.target_tokens, **step.measured)
        self.latest = [row]
        if self.journal is not None:
            self.journal.train(row, step.metrics.further)
        self.tell("on_step_end", row)

    def make_up(self, step: int, rows: Sequence[dict[str, Any]]) -> None:
        """Write those of the rows after this many steps that a lost rank has not written.

        Removes those of later steps: the rank that wrote them may have been lost before another one had the step.
        """
        if self.journal is not None:
            self.journal.cut(step)
            for row in self.journal.missing(step, rows):
                (self.journal.train if row["kind"] == "train" else self.journal.evaluation)(row)

    def write_evaluation(self, row: dict[str, Any]) -> None:
        """Write the row of an evaluation."""
        self.latest.append(row)
        if self.journal is not None:
            self.journal.evaluation(row)
            self.journal.note("evaluated", row["step"])
        with self.heartbeat.resting():  # a callback may run an evaluation of its own
            self.tell("on_evaluation", row)

    def tell(self, hook: str, *arguments: Any) -> None:
        """Call a hook of all monitors and callbacks, by its name."""
        for callback in (*self.monitors, *self.callbacks):
            getattr(callback, hook)(*arguments)

    @contextmanager
    def pausing(self, cause: str) -> Iterator[None]:
        """Scope of a save or a return to a checkpoint: its time counts as `cause`, with no limit of the heartbeat."""
        with self.goodput.spending(cause), self.heartbeat.resting_together():
            yield

    def event(self, name: str, **fields: Any) -> None:
        """Append a line to events.jsonl. Raises OSError if that fails."""
        if self.journal is not None:
            self.journal.event(name, **fields)

    def note(self, name: str, step: int) -> None:
        """Append a line to events.jsonl; errors are ignored."""
        if self.journal is not None:
            self.journal.note(name, step)

    def go_back(self, step: int, seconds: dict[str, float]) -> None:
        """Return to the state after this step, with its goodput seconds, and remove the rows of later steps."""
        self.goodput.go_back(seconds)
        if self.journal is not None:
            self.journal.cut(step)
