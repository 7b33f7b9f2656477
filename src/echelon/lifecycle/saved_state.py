"""Where the state of a run is saved: its checkpoints and snapshots, and the newest one of them."""

import logging

import torch.distributed as dist

from echelon.checkpoint.carrier import Carrier
from echelon.checkpoint.snapshot import Snapshots
from echelon.checkpoint.store import CheckpointStore
from echelon.checkpoint.upload import Uploader
from echelon.distributed.membership import Membership
from echelon.distributed.runtime import Runtime
from echelon.recipe import Recipe
from echelon.runs.run_folder import RunFolder
from echelon.supervise.launch_environment import find_host_dir, find_snapshot_dir, shares_files
from echelon.training.contents import RunContents
from echelon.training.state import SavedState

logger = logging.getLogger(__name__)


def build_store(recipe: Recipe, folder: RunFolder, membership: Membership | None) -> CheckpointStore:
    """The run's checkpoint store, which writes an event for each save and logs faults. Collective."""
    keep_last, asynchronous = recipe.checkpoint.keep_last, recipe.checkpoint.asynchronous

    uploads = None
    if recipe.checkpoint.remote is not None and dist.get_rank() == 0:
        uploads = Uploader(recipe.checkpoint.remote, folder, keep_last, folder.rows.append_event)

    def carry(group: dist.ProcessGroup) -> Carrier:
        # Outside the run folder, which may be copied while it is written (SageMaker), including partial files.
        return Carrier(str(find_host_dir()), recipe.prepared_dir / ".carried", group)

    return CheckpointStore(
        folder.checkpoints_dir,
        keep_last,
        asynchronous,
        folder.rows.append_event,
        uploads,
        None if shares_files() else carry,
        None if membership is None else membership.new_group,
    )


def build_snapshots(recipe: Recipe, membership: Membership | None) -> Snapshots:
    """The run's snapshots, if the recipe enables them. Collective."""
    every_steps = recipe.checkpoint.snapshot_every_steps
    return Snapshots(find_snapshot_dir(), every_steps, None if membership is None else membership.new_group)


def load_newest(
    store: CheckpointStore,
    snapshots: Snapshots,
    contents: RunContents,
    runtime: Runtime,
) -> SavedState | None:
    """Load `contents` from the newest whole checkpoint or snapshot; returns its saved state, or None. Collective."""
    snapshot = snapshots.newest()
    checkpoint = store.newest(beyond=-1 if snapshot is None else snapshot.step) or snapshot
    if checkpoint is None:
        return None
    saved = contents.load(checkpoint, store)
    if runtime.rank == 0:
        held = ", a snapshot in memory" if checkpoint == snapshot else ""
        logger.info(f"Resuming from {checkpoint.path.name}{held}.")
    return saved
