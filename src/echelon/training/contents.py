"""What a checkpoint of a run holds, and where each part of it goes."""

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from torch import Tensor

from echelon.checkpoint.folder import Checkpoint
from echelon.checkpoint.store import CheckpointStore
from echelon.engines import Engine
from echelon.reporting.goodput import GoodputTracker
from echelon.sync import Synchronizer
from echelon.training.bad_steps import StepJudge
from echelon.training.state import SavedState, TrainState


@dataclass(frozen=True)
class RunContents:
    """The parts of a run that a checkpoint is made of and loaded into, besides counters. Every method is collective."""

    engine: Engine
    sync: Synchronizer
    judge: StepJudge

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of a checkpoint: the engine's and the synchronizer's."""
        return self.sync.tensors(self.engine.state_dict())

    def describe(self, state: TrainState, goodput: GoodputTracker) -> dict[str, Any]:
        """What is no tensor, as JSON values."""
        return {
            "train": state.to_dict(),
            "sync": self.sync.state_dict(),
            "judge": self.judge.state_dict(),
            "goodput": goodput.state_dict(),
        }

    def load(self, checkpoint: Checkpoint, store: CheckpointStore) -> SavedState:
        """Put every part where a checkpoint has it; everything in it that is no tensor.

        Raises:
            CheckpointError: it is hostile, or of something else than this run. The run cannot go on from here.
        """
        saved = SavedState.from_dict(checkpoint.read_state())
        fill = partial(store.load, checkpoint)
        self.sync.load_state_dict(saved.sync)
        self.engine.load(lambda tensors: self.sync.load(tensors, fill))
        self.judge.load_state_dict(asdict(saved.judge))
        return saved
