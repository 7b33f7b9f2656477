"""How replicas agree: the protocol, and the synchronizers that implement it."""

from echelon.ground.extensions import build_named
from echelon.learn.distributed.mesh import Meshes
from echelon.learn.sync.synchronizer import DataShare, Replica, StateFill, StepVote, Synchronizer
from echelon.recipe.names import SYNCHRONIZERS
from echelon.recipe.synchronization import QUORUM, SyncConfig

__all__ = ["DataShare", "Replica", "StateFill", "StepVote", "Synchronizer", "build_synchronizer"]


def build_synchronizer(config: SyncConfig, replica: Replica, meshes: Meshes) -> Synchronizer:
    """The synchronizer that the recipe names, or that of replicas of which one may be lost. Collective."""
    name = QUORUM if meshes.is_one_model else config.name
    made: Synchronizer = build_named(
        "sync.name", name, SYNCHRONIZERS, Synchronizer, config, replica, meshes, options=config.options
    )
    return made
