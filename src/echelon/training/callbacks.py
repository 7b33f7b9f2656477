"""What a user's own code is told of a run while it trains."""

from collections.abc import Mapping, Sequence
from typing import Any

from echelon.extensions import build_named
from echelon.recipe.training import CallbackConfig


class Callback:
    """Hooks into a run, each of which does nothing here: derive from it and write those that are wanted.

    They are called on rank 0 alone, in the thread that trains, between two steps; the other ranks wait at their next
    collective for as long as a hook takes. So a hook starts no collective and keeps nobody waiting. An error in one is
    an error of the run: training ends with exit code 1, the traceback is in the log of rank 0, and the newest
    checkpoint stays.
    """

    def on_start(self, step: int) -> None:
        """Training begins after this many steps: 0, or where the checkpoint is that it goes on from."""

    def on_step_end(self, row: Mapping[str, Any]) -> None:
        """A step's row of metrics.jsonl. It comes when the step has been read, at least one step later."""

    def on_evaluation(self, row: Mapping[str, Any]) -> None:
        """An evaluation's row of metrics.jsonl."""

    def on_save(self, step: int) -> None:
        """A checkpoint of this step has been copied; it is whole on disk when events.jsonl has its `checkpoint`."""

    def on_end(self) -> None:
        """Training ends, however it does: at its last step, early, on request or by an error."""


def build_callbacks(configs: Sequence[CallbackConfig]) -> list[Callback]:
    """The callbacks of `train.callbacks`, in order. For rank 0 alone."""
    return [
        build_named(f"train.callbacks.{index}.name", each.name, {}, Callback, options=each.options)
        for index, each in enumerate(configs)
    ]
