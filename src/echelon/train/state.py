"""What a run has done so far: the part of a checkpoint that is not a tensor."""

from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class TrainState:
    """Counters after a number of whole steps.

    Attributes:
        step: optimizer steps done, committed or not.
        tokens: positions fed to the model other than padding, over all ranks.
        target_tokens: positions with a label.
    """

    step: int = 0
    tokens: int = 0
    target_tokens: int = 0

    def advanced(self, tokens: int, target_tokens: int) -> "TrainState":
        """The state one step later."""
        return replace(
            self, step=self.step + 1, tokens=self.tokens + tokens, target_tokens=self.target_tokens + target_tokens
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "TrainState":
        """The state that `to_dict` described."""
        return cls(**values)
