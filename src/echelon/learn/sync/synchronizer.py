"""How replicas agree: the seam for local SGD, parameter servers and quorums. The default agrees at every step."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

if TYPE_CHECKING:
    from echelon.learn.optimizer import Served


StateFill = Callable[[Mapping[str, Tensor]], None]
"""Writes saved values into the given tensors, whole or sharded, in place, by name. Collective."""


class DataShare(NamedTuple):
    """Which part of every batch this rank reads: that of place `rank` among `size` ranks that read different data."""

    rank: int
    size: int


class Replica(Protocol):
    """What a synchronizer may read and change of the model that this rank trains. Every method is collective."""

    served: "Served | None"
    """What this rank owns of the weights as a parameter server; None unless the plan has such servers."""

    def weights(self) -> dict[str, Tensor]:
        """What trains, live, as this rank holds it, under names that no plan changes."""

    def gradients(self) -> dict[str, Tensor]:
        """The gradients of what trains, live, under the names of `weights`; between forward_backward and step."""

    def clip(self, max_norm: float | None) -> Tensor:
        """Scale gradients to at most `max_norm` (None: only measure); return the global norm before clipping."""

    def step(self, learning_rate: float, commit: Tensor) -> None:
        """Apply the gradients where `commit` (a boolean scalar on the device) is true, and drop them in any case."""


class Synchronizer(Protocol):
    """What happens around a step so that replicas stay, or become, one model. Every method is called by every rank.

    A step calls `shares`, then for each of them `clip`, `should_commit` and `apply`, and `end_step`, in this order. If
    `lag` is 0 and it is a `StepVote` too, `agree` comes before `apply`.
    """

    lag: int
    """How many further steps are launched before a step's metrics are read: 1 keeps the host from waiting.

    0: they are known before `apply` is called.
    """

    def shares(self, step: int) -> Iterable[DataShare]:
        """What this rank reads of this step's batch, one share after the other: usually one.

        The gradients of a share are applied before the next one is asked for. A rank may have none in a step.
        """

    def clip(self, step: int, num_targets: Tensor, max_norm: float | None) -> Tensor:
        """Clip the gradients of the step, and return their norm, a scalar on the device: usually `Replica.clip`.

        Args:
            num_targets: an int64 scalar on the device, by which the gradients of this replica were divided.
            max_norm: of the gradients; None: they are only measured.
        """

    def should_commit(self, grad_norm: Tensor) -> Tensor:
        """Whether to apply this step: a boolean scalar on the device that every rank of a replica agrees on."""

    def apply(self, step: int, learning_rate: float, commit: Tensor) -> None:
        """Have the gradients applied, or dropped: calls `Replica.step` exactly once for each share.

        `commit`: what is left of `should_commit` once the step was judged; false for a bad step.
        """

    def end_step(self, step: int, is_last: bool) -> bool:
        """Finish the step, which may be the run's last one.

        False: it changed nothing and runs again, for example because a replica was lost meanwhile.

        In that case `apply` must have called `Replica.step` with a false `commit`, so that the gradients are dropped.
        """

    def agreed(self) -> AbstractContextManager[None]:
        """Scope in which every replica has the agreed weights: those that are evaluated and exported."""

    def tensors(self, engine_state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What a checkpoint holds: the engine's tensors, and the synchronizer's own under other names.

        A checkpoint keeps one value per name. So a tensor that differs between replicas needs the replica's index in
        its name: see `learn/distributed/replica_names.py`.
        """

    def load(self, engine_state: Mapping[str, Tensor], fill: StateFill) -> None:
        """Fill everything that `tensors` names, after `load_state_dict`. Names that were not saved are an error."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs besides tensors: JSON values, the same on every rank."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a saved state, as a run resumes or goes back; `{}` where none was saved. Raises CheckpointError."""


@runtime_checkable
class StepVote(Protocol):
    """What a synchronizer has besides if replicas may be lost: the sum of a step's metrics is the vote on the step."""

    def agree(self, values: Tensor) -> Tensor:
        """Return what this rank goes on with of the sums of a step over all ranks: its metrics, fp64, on the host.

        If the sum failed on some ranks of a replica, what it returns is the same on all of them. Raises the error of
        the sum if it failed on all.
        """
