"""How replicas agree: the protocol, and the synchronizers that implement it."""

from echelon.distributed.mesh import Meshes
from echelon.extensions import find_named
from echelon.recipe import SyncConfig
from echelon.sync.synchronizer import DataShare, Fill, Replica, Synchronizer

__all__ = ["SYNCHRONIZERS", "DataShare", "Fill", "Replica", "Synchronizer", "build_synchronizer"]

SYNCHRONIZERS: dict[str, str] = {"every_step": "echelon.sync.every_step:EveryStep"}
"""What `sync.name` can be. Each is called with the recipe's section, the replica and the meshes."""


def build_synchronizer(config: SyncConfig, replica: Replica, meshes: Meshes) -> Synchronizer:
    """The synchronizer that the recipe names. Collective."""
    made: Synchronizer = find_named("sync.name", config.name, SYNCHRONIZERS)(config, replica, meshes)
    return made
