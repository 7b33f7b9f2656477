"""Records a run while it trains: time and row of each step, the heartbeat, and the user's callbacks."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from echelon.learn.distributed.stamp import Stamp
from echelon.learn.distributed.traffic import count_traffic
from echelon.run.journal.goodput import GoodputTracker
from echelon.run.training.callbacks import Callback
from echelon.run.training.gpu_meter import GpuMeter
from echelon.run.training.heartbeat import Heartbeat
from echelon.run.training.metrics import Measured, StepMetrics, find_message_wait, peak_memory_bytes, train_row
from echelon.run.training.state import TrainState
from echelon.run.training.straggler import Straggler, read_own_time

if TYPE_CHECKING:
    from echelon.run.journal.journal import Journal

logger = logging.getLogger(__name__)


class Accounting:
    """Measures time on every rank. Rank 0, which has the journal, also writes rows and calls the callbacks."""

    def __init__(
        self,
        device: torch.device,
        log_every: int,
        find_mfu: Callable[[float], float | None],
        goodput: GoodputTracker,
        heartbeat: Heartbeat,
        journal: "Journal | None" = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        """`find_mfu`: returns the MFU at a number of tokens per second over all ranks; None if unknown."""
        self.goodput = goodput
        self.heartbeat = heartbeat
        self.journal = journal
        self._callbacks = callbacks if journal is not None else ()
        self._device = device
        self._log_every = log_every
        self._find_mfu = find_mfu
        self.latest: list[dict[str, Any]] = []
        """The rows of the last step, on every rank: the one that writes them may be lost before it has."""
        self._peak_bytes: int | None = None
        self._mark = Stamp(device)
        self.traffic = count_traffic()
        self._gpu = GpuMeter(device)
        self._measured_at, self._entered = time.perf_counter(), 0.0

    def begin(self, step: int) -> None:
        """Record that training starts or continues after this many steps."""
        self.goodput.turn("training")
        self.heartbeat.beat(f"step {step + 1}")
        self.restart_clock()

    def restart_clock(self) -> None:
        """Start the clock of the next step: time since the last step does not count, nor do bytes sent since then."""
        self.traffic.take()
        self._measured_at = time.perf_counter()
        self._mark = Stamp(self._device)

    def enter(self) -> None:
        """Record that this rank begins a step."""
        self._entered = read_own_time()

    def measure(self, step: int) -> Measured:
        """Return what this rank measured since its last step: peak memory at the first step and at logged ones."""
        is_due = self._peak_bytes is None or (step + 1) % self._log_every == 0
        peak = peak_memory_bytes(self._device) if is_due else None
        busy = 0.0 if self._device.type == "cuda" else read_own_time() - self._entered
        wall, self._measured_at = time.perf_counter() - self._measured_at, time.perf_counter()
        return Measured(peak, self.traffic.take(), wall, busy, self._gpu.take())

    def book(self, metrics: StepMetrics, finished: Stamp) -> float:
        """Record the next finished step; return its duration in seconds."""
        self.heartbeat.step(metrics.step + 2)
        seconds, self._mark = finished.seconds_since(self._mark), finished
        self.goodput.move("training", "data", metrics.data_wait_seconds)
        if not metrics.committed:
            self.goodput.move("training", "skipped", seconds - metrics.data_wait_seconds)
        if metrics.memory_peak_bytes is not None:
            self._peak_bytes = metrics.memory_peak_bytes
        return seconds

    def write(
        self, metrics: StepMetrics, seconds: float, state: TrainState, rank_seconds: Sequence[float] | None = None
    ) -> None:
        """Write the row of a step that `book` has recorded.

        `state`: the state after the step. `rank_seconds`: what each rank needed for its own part of the last steps.
        """
        rate = metrics.tokens / seconds
        row = train_row(
            metrics,
            tokens=state.tokens,
            target_tokens=state.target_tokens,
            tokens_per_second=rate,
            step_seconds=seconds,
            mfu=self._find_mfu(rate),
            memory_peak_bytes=self._peak_bytes,
            message_wait_seconds=None if self._device.type == "cuda" else find_message_wait(metrics),
            rank_seconds=None if rank_seconds is None else [float(f"{seconds:.4g}") for seconds in rank_seconds],
        )
        self.latest = [row]
        if self.journal is not None:
            self.journal.train(row, metrics.further)
            self._tell("on_step_end", row)

    def make_up(self, step: int, rows: Sequence[dict[str, Any]]) -> None:
        """Write those of the rows after this many steps that a lost rank has not written.

        Removes those of later steps: the rank that wrote them may have been lost before another one had the step.
        """
        if self.journal is not None:
            self.journal.cut_beyond(step)
            for row in self.journal.missing(step, rows):
                (self.journal.train if row["kind"] == "train" else self.journal.evaluation)(row)

    def write_evaluation(self, row: dict[str, Any]) -> None:
        """Write the row of an evaluation."""
        self.latest.append(row)
        if self.journal is not None:
            self.journal.evaluation(row)
            self.journal.note("evaluated", row["step"])
            with self.heartbeat.resting():  # a callback may run an evaluation of its own
                self._tell("on_evaluation", row)

    def tell_start(self, step: int) -> None:
        """Start to read the GPU's load, and tell the callbacks that training starts after this many steps."""
        self._gpu.start()
        self._tell("on_start", step)

    def tell_save(self, step: int) -> None:
        """Tell the callbacks of a checkpoint."""
        self._tell("on_save", step)

    def tell_end(self) -> None:
        """Stop reading the GPU's load, and tell the callbacks that training ends."""
        self._gpu.stop()
        self._tell("on_end")

    @contextmanager
    def pausing(self, cause: str) -> Iterator[None]:
        """Scope of a save or a return to a checkpoint: its time counts as `cause`, with no limit of the heartbeat."""
        with self.goodput.spending(cause), self.heartbeat.resting_together():
            yield

    def event(self, name: str, **fields: Any) -> None:
        """Append a line to events.jsonl. Raises OSError if that fails."""
        if self.journal is not None:
            self.journal.event(name, **fields)

    def straggler(self, found: Straggler) -> None:
        """Log a slow rank, and append it to events.jsonl; errors are ignored."""
        if self.journal is not None:
            logger.warning(found.describe())
            with suppress(OSError):
                self.journal.event("straggler", message=found.describe(), **asdict(found))

    def note(self, name: str, step: int) -> None:
        """Append a line to events.jsonl; errors are ignored."""
        if self.journal is not None:
            self.journal.note(name, step)

    def go_back(self, step: int, seconds: dict[str, float]) -> None:
        """Return to the state after this step, with its goodput seconds, and remove the rows of later steps."""
        self.goodput.go_back(seconds)
        if self.journal is not None:
            self.journal.cut_beyond(step)

    def _tell(self, hook: str, *arguments: Any) -> None:
        for callback in self._callbacks:
            getattr(callback, hook)(*arguments)
