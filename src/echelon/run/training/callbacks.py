"""Callbacks: hooks for user code in a training run."""

from collections.abc import Mapping, Sequence
from typing import Any

from echelon.ground.extensions import build_named
from echelon.recipe.training import CallbackConfig


class Callback:
    """Base class for callbacks. Every hook does nothing; override the ones you need.

    Hooks are called only on rank 0, in the training thread, between two steps; the other ranks wait at their next
    collective until the hook returns. A hook must not start a collective, and should be fast. An exception in a hook
    ends training with exit code 1; the traceback is in the log of rank 0, and the newest checkpoint is kept.
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


def build_callbacks(configs: Sequence[CallbackConfig]) -> list[Callback]:
    """Build the callbacks of `train.callbacks`, in order. Only on rank 0."""
    return [
        build_named(f"train.callbacks.{index}.name", config.name, {}, Callback, options=config.options)
        for index, config in enumerate(configs)
    ]
