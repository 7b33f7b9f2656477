"""How replicas agree: the protocol, and the synchronizers that implement it."""

from echelon.distributed.mesh import Meshes
from echelon.extensions import build_named
from echelon.recipe import SyncConfig
from echelon.recipe.names import SYNCHRONIZERS
from echelon.sync.synchronizer import DataShare, Fill, Replica, Synchronizer

__all__ = ["DataShare", "Fill", "Replica", "Synchronizer", "build_synchronizer"]


def build_synchronizer(config: SyncConfig, replica: Replica, meshes: Meshes) -> Synchronizer:
    """The synchronizer that the recipe names. Collective."""
    made: Synchronizer = build_named(
        "sync.name", config.name, SYNCHRONIZERS, Synchronizer, config, replica, meshes, options=config.options
    )
    return made
