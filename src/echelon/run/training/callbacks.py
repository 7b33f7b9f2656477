"""Callbacks: hooks for user code in a training run, and for the monitors that watch the run on every rank."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from echelon.ground.extensions import build_named
from echelon.recipe.training import CallbackConfig

if TYPE_CHECKING:
    from echelon.run.training.metrics import StepMetrics
    from echelon.run.training.state import TrainState


class Callback:
    """Base class for callbacks. Every hook does nothing; override the ones you need.

    Unless it is a monitor, hooks are called only on rank 0, in the training thread, between two steps; the other ranks
    wait at their next collective until the hook returns. A hook must not start a collective, and should be fast. An
    exception ends training with exit code 1; the traceback is in the log of rank 0, and the newest checkpoint is kept.
    """

    def on_start(self, step: int) -> None:
        """Training starts after this many steps: 0, or the step of the checkpoint that it resumes from."""

    def on_step_end(self, row: Mapping[str, Any]) -> None:
        """Receives a step's row of metrics.jsonl, at least one step later, when its metrics have been read."""

    def on_evaluation(self, row: Mapping[str, Any]) -> None:
        """Receives an evaluation's row of metrics.jsonl."""

    def on_save(self, step: int) -> None:
        """A save of this step has begun; the checkpoint is on disk when events.jsonl has its `checkpoint` event."""

    def on_end(self) -> None:
        """Training ends for any reason: at its last step, early, on request or by an error."""


@dataclass
class FinishedStep:
    """A step that all ranks have finished, as monitors see it before its row is written.

    `metrics`: over all ranks. `seconds`: its duration on this rank. `state`: the counters after it. `measured`: what
    monitors add to its row in metrics.jsonl. `stop_cause`: why the run stops soon, on any rank: one of `stop_request`.
    """

    metrics: "StepMetrics"
    seconds: float
    state: "TrainState"
    measured: dict[str, Any] = field(default_factory=dict)
    stop_cause: str | None = None


class Monitor(Callback):
    """Base class of what watches a run on every rank. Its hooks are those of a callback, and these.

    A hook may be collective if every rank then calls it: it must depend only on what all ranks know.
    """

    def around_step(self, step: int) -> AbstractContextManager[None]:
        """Return the scope of a step on this rank, by its index from 0."""
        return nullcontext()

    def on_metrics(self, step: FinishedStep) -> None:
        """Receives a step at least one step later, and may add to its row, or give a cause to stop."""

    def needs_pause(self, done: int) -> bool:
        """Whether training must pause after this many steps, for `on_pause`. The same on every rank."""
        return False

    def on_pause(self, step: int) -> None:
        """Training pauses after this many steps, before any evaluation or save. Raises TrainingError to end the run."""


def build_callbacks(configs: Sequence[CallbackConfig]) -> list[Callback]:
    """Build the callbacks of `train.callbacks`, in order. Only on rank 0."""
    return [
        build_named(f"train.callbacks.{index}.name", config.name, {}, Callback, options=config.options)
        for index, config in enumerate(configs)
    ]
