"""The content of a run's checkpoint, and how it is loaded."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from echelon.learn.distributed.mesh import Meshes
from echelon.learn.distributed.objects import gather_objects
from echelon.learn.engines import Engine
from echelon.learn.sync import Synchronizer
from echelon.learn.sync.synchronizer import StateFill
from echelon.run.journal.goodput import GoodputTracker
from echelon.run.training.bad_steps import StepJudge
from echelon.run.training.state import SavedState, TrainState


@dataclass
class LoopContents:
    """What a loop of `train.loop` keeps between two steps, as JSON values."""

    describe: Callable[[], dict[str, Any]] = dict
    """Called when a checkpoint is saved, on every rank."""
    loaded: dict[str, Any] = field(default_factory=dict)
    """What was saved with the checkpoint that the run goes on from."""


@dataclass(frozen=True)
class RunContents:
    """The parts of a run that are saved in a checkpoint, other than counters. Every method is collective."""

    engine: Engine
    sync: Synchronizer
    judge: StepJudge
    meshes: Meshes
    loop: LoopContents = field(default_factory=LoopContents)

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor of a checkpoint: the engine's and the synchronizer's."""
        return self.sync.tensors(self.engine.state_dict())

    def describe(self, state: TrainState, goodput: GoodputTracker) -> dict[str, Any]:
        """Return the content that is not a tensor, as JSON values."""
        return {
            "train": state.to_dict(),
            "sync": self.sync.state_dict(),
            "judges": self._gather_judges(),
            "goodput": goodput.state_dict(),
            "loop": self.loop.describe(),
        }

    def load(self, state: dict[str, Any], fill: StateFill) -> SavedState:
        """Load a checkpoint into every part; return its content that is not a tensor.

        `state`: that content, as JSON values. `fill`: fills tensors from the checkpoint.

        Raises:
            CheckpointError: it is hostile, or does not belong to this run. The run cannot continue after this.
        """
        saved = SavedState.from_dict(state)
        self.sync.load_state_dict(saved.sync)
        self.loop.loaded = saved.loop
        self.engine.load(lambda tensors: self.sync.load(tensors, fill))
        judges = saved.judges
        self.judge.load_state_dict(asdict(judges[self.meshes.place["replica"] % len(judges)]))
        return saved

    def _gather_judges(self) -> list[dict[str, Any]]:
        """Return the state of each model's judge: one, or that of each replica. Collective."""
        state, outer = self.judge.state_dict(), self.meshes.outer
        return [state] if outer is None or self.meshes.is_one_model else gather_objects(state, outer)
