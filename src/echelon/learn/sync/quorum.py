"""A quorum: as with `every_step`, and each step is applied only once all replicas of the group have finished it."""

from collections.abc import Iterable

from torch import Tensor
from typing_extensions import override

from echelon.learn.distributed.mesh import Meshes
from echelon.learn.sync.every_step import EveryStep
from echelon.learn.sync.synchronizer import DataShare, Replica
from echelon.recipe import SyncConfig


class Quorum(EveryStep):
    """The engine sums gradients over the replicas that are there; the weights change only after a vote.

    So when a replica is lost, either every other one has applied the step or none has, and all hold the same weights.
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
    def apply(self, step: int, learning_rate: float, commit: Tensor) -> None:
        """Vote, then apply the gradients. Raises ViewChanged if a replica was lost before it had voted."""
        if self._membership is not None:
            self._membership.vote()
        super().apply(step, learning_rate, commit)
