"""The progress of a run: the part of a checkpoint that is not a tensor."""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any

from pydantic import ConfigDict, Field, with_config

from echelon.ground.errors import CheckpointError
from echelon.ground.stored import validator_of

# An unknown key means a damaged file, or one of another version.
_STRICT = ConfigDict(extra="forbid")
# What fits in an int64 of a tensor, also summed over many ranks.
Count = Annotated[int, Field(ge=0, lt=2**53)]


@with_config(_STRICT)
@dataclass(frozen=True)
class TrainState:
    """Counters after a number of complete steps.

    Attributes:
        step: optimizer steps done, committed or not.
        tokens: positions fed to the model other than padding, over all ranks.
        target_tokens: positions with a label.
        best_loss: the lowest evaluation loss so far, at `best_step`, of the set `best_set` (None: all sets together).
        evaluations_since_best: number of consecutive evaluations that were not better.
        suppressed: steps, counted from 1, that a rollback excluded: they run but are never applied.
        owes_evaluation: whether a stop prevented or interrupted the evaluation that was due at this step.
    """

    step: Count = 0
    tokens: Count = 0
    target_tokens: Count = 0
    best_loss: float | None = None
    best_step: Count | None = None
    best_set: str | None = None
    evaluations_since_best: Count = 0
    suppressed: tuple[Count, ...] = ()
    owes_evaluation: bool = False

    def advanced(self, tokens: int, target_tokens: int) -> "TrainState":
        """Return the state after one more step."""
        return replace(
            self, step=self.step + 1, tokens=self.tokens + tokens, target_tokens=self.target_tokens + target_tokens
        )

    def evaluated(self, loss: float) -> "TrainState":
        """Return the state after an evaluation at this step."""
        done = replace(self, owes_evaluation=False)
        if math.isfinite(loss) and (self.best_loss is None or loss < self.best_loss):
            return replace(done, best_loss=loss, best_step=self.step, evaluations_since_best=0)
        return replace(done, evaluations_since_best=self.evaluations_since_best + 1)

    def suppressing(self, steps: Iterable[int]) -> "TrainState":
        """Return the state with these steps also excluded."""
        return replace(self, suppressed=tuple(sorted({*self.suppressed, *steps})))

    def judged_by(self, name: str | None) -> "TrainState":
        """Return the state for selection by this validation set; the best loss of another set is discarded."""
        if name == self.best_set:
            return self
        return replace(self, best_loss=None, best_step=None, best_set=name, evaluations_since_best=0)

    def to_dict(self) -> dict[str, Any]:
        """Return the counters as JSON values."""
        return asdict(self)


@with_config(_STRICT)
@dataclass(frozen=True)
class JudgeState:
    """The result of `StepJudge.state_dict`."""

    in_a_row: Count = 0
    norms: tuple[float, ...] = ()


@with_config(_STRICT)
@dataclass(frozen=True)
class GoodputState:
    """The result of `GoodputTracker.state_dict`."""

    seconds: dict[str, float]
    until: float
    stopped: bool


@with_config(_STRICT)
@dataclass(frozen=True)
class SavedState:
    """Everything of a checkpoint that is not a tensor. `judges`: of each replica; `loop`: what `train.loop` keeps."""

    train: TrainState
    judges: Annotated[tuple[JudgeState, ...], Field(min_length=1)] = (JudgeState(),)
    goodput: GoodputState | None = None
    sync: dict[str, Any] = field(default_factory=dict)
    loop: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "SavedState":
        """Parse a saved state. Raises CheckpointError for anything else."""
        names = ["train", "judges", "goodput", "sync", "loop"]
        kept = {name: values[name] for name in names if name in values}
        try:
            return validator_of(cls).validate_json(json.dumps(kept), strict=True)
        except (TypeError, ValueError) as error:
            reason = " ".join(str(error).split())[:200]
            raise CheckpointError(f"state.json has no valid counters of a run ({reason}).") from error
