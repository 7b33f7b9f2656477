"""A quorum: as with `every_step`, and a step is applied only once all replicas of the group have its gradients."""

from collections.abc import Iterable

from torch import Tensor
from typing_extensions import override

from echelon.learn.distributed.mesh import Meshes
from echelon.learn.sync.every_step import EveryStep
from echelon.learn.sync.synchronizer import DataShare, Replica, StepVote
from echelon.recipe.synchronization import SyncConfig


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
