"""The synchronizers that agree at every step, so that replicas are one model throughout: all of them, or a quorum."""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from echelon.learn.distributed.mesh import Meshes
from echelon.learn.sync.synchronizer import DataShare, Replica, StateFill, StepVote, Synchronizer
from echelon.recipe.synchronization import SyncConfig


class EveryStep(Synchronizer):
    """Gradients are reduced over all ranks at every step; a step commits when the global norm is finite.

    Synchronizers that agree in another way override what they do differently.
    """

    lag = 1

    def __init__(self, config: SyncConfig, replica: Replica, meshes: Meshes) -> None:
        self._replica = replica
        self._share = DataShare(meshes.data_rank, meshes.data_size)

    @override
    def shares(self, step: int) -> Iterable[DataShare]:
        """The same at every step."""
        return (self._share,)

    @override
    def clip(self, step: int, num_targets: Tensor, max_norm: float | None) -> Tensor:
        return self._replica.clip(max_norm)

    @override
    def should_commit(self, grad_norm: Tensor) -> Tensor:
        """Finite on one rank is finite on all: the norm is already the global one."""
        return torch.isfinite(grad_norm)

    @override
    def apply(self, step: int, learning_rate: float, commit: Tensor) -> None:
        """Gradients are already the sum over all ranks."""
        self._replica.step(learning_rate, commit)

    @override
    def end_step(self, step: int, is_last: bool) -> bool:
        """Nothing to settle."""
        return True

    @override
    def agreed(self) -> AbstractContextManager[None]:
        """The weights are always the agreed ones."""
        return nullcontext()

    @override
    def tensors(self, engine_state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """No tensors of its own."""
        return dict(engine_state)

    @override
    def load(self, engine_state: Mapping[str, Tensor], fill: StateFill) -> None:
        """No tensors of its own."""
        fill(engine_state)

    @override
    def state_dict(self) -> dict[str, Any]:
        """No state."""
        return {}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """No state."""


class Quorum(EveryStep, StepVote):
    """The engine sums gradients over the replicas that are there. The sum of the step's metrics, after that, is a vote.

    A replica applies the step once it has this sum, to which all have contributed. So all replicas of a group hold the
    same weights. When one is lost during this sum, others may have it and others not: these are then a step behind,
    and get the state from one that is not.
    """

    lag = 0

    def __init__(self, config: SyncConfig, replica: Replica, meshes: Meshes) -> None:
        super().__init__(config, replica, meshes)
        self._membership = meshes.membership

    @override
    def shares(self, step: int) -> Iterable[DataShare]:
        """The same at every step of a view. Raises ViewChanged if a replica was lost, or waits to join."""
        if self._membership is not None:
            self._membership.check()
            self._membership.begin_step()
        return super().shares(step)

    @override
    def agree(self, values: Tensor) -> Tensor:
        """Raises an error if a replica was lost before any process of this one had the values."""
        return values if self._membership is None else self._membership.agree(values)
