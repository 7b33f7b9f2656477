"""TensorBoard: event files under the run's `tensorboard/`."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from echelon.recipe.document import Recipe
from echelon.run.folder.run_folder import RunFolder
from echelon.run.journal.trackers.tracker import Opened, scalars


class TensorBoard:
    """A resumed run continues at its own step: TensorBoard discards the later points of an earlier attempt."""

    name = "tensorboard"
    is_store = False

    def __init__(self, recipe: Recipe, folder: RunFolder, resumed_step: int) -> None:
        self._folder = folder.path / "tensorboard"
        self._resumed_step = resumed_step
        self._writer: Any = None

    def open(self, run_key: str, given: Mapping[str, int]) -> Opened:
        """Start a new event file after the checkpoint that the run resumed from."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._folder), purge_step=self._resumed_step + 1)
        return Opened(
            defaultdict(lambda: self._resumed_step),
            f"tensorboard in {self._folder}; to view it: tensorboard --logdir {self._folder}",
        )

    def send(self, rows: list[dict[str, Any]]) -> None:
        """Write every number of the rows as a scalar."""
        for row in rows:
            for name, value in scalars(row).items():
                self._writer.add_scalar(name, value, row["step"])
        self._writer.flush()

    def finish(self, done: bool) -> None:
        """Close the event file."""
        self._writer.close()
