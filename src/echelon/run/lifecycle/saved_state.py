"""Where the state of a run is saved: its checkpoints and snapshots, and the newest one of them."""

import logging
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist

from echelon.ground.launch_environment import find_host_dir, shares_files
from echelon.ground.object_store import ObjectStore
from echelon.learn.checkpoint.carrier import Carrier
from echelon.learn.checkpoint.folder import Checkpoint
from echelon.learn.checkpoint.snapshot import HeldSnapshot, PeerMemory, SnapshotsByStep
from echelon.learn.checkpoint.store import CheckpointStore
from echelon.learn.distributed.mesh import Meshes
from echelon.learn.distributed.runtime import Runtime
from echelon.learn.learner import Learner
from echelon.learn.sync import build_synchronizer
from echelon.recipe.document import Recipe
from echelon.run.folder.run_folder import RunFolder
from echelon.run.folder.upload import Uploader
from echelon.run.training.bad_steps import StepJudge
from echelon.run.training.replica_state import HeldState, heal
from echelon.run.training.rollback import find_suppressed
from echelon.run.training.run_log import Accounting
from echelon.run.training.saver import RunContents, SaveInterval, Saver
from echelon.run.training.state import SavedState, TrainState

logger = logging.getLogger(__name__)


def build_store(recipe: Recipe, folder: RunFolder, meshes: Meshes) -> CheckpointStore:
    """The run's checkpoint store, which writes an event for each save and logs faults. Collective."""
    keep_last, asynchronous = recipe.checkpoint.keep_last, recipe.checkpoint.asynchronous

    # On every rank: its packages are imported in the main thread.
    bucket = None if recipe.checkpoint.remote is None or shares_files() else ObjectStore(recipe.checkpoint.remote)
    uploads = None
    if recipe.checkpoint.remote is not None and meshes.is_first:
        uploads = Uploader(recipe.checkpoint.remote, folder, keep_last, folder.rows.append_event)

    def carry(group: dist.ProcessGroup) -> Carrier:
        # Outside the run folder, which may be copied while it is written (SageMaker), including partial files.
        return Carrier(str(find_host_dir()), recipe.prepared_dir / ".carried", group, bucket)

    return CheckpointStore(
        folder.checkpoints_dir,
        keep_last,
        asynchronous,
        folder.rows.append_event,
        uploads,
        None if shares_files() else carry,
        None if meshes.membership is None else meshes.membership.new_group,
    )


@dataclass(frozen=True)
class Restored:
    """What a run goes on from, and where it is saved."""

    contents: RunContents
    store: CheckpointStore
    snapshots: PeerMemory | None
    state: TrainState
    saved: SavedState | None
    """What was loaded; None at the first start."""
    held: HeldState | None
    """What a replica has held since an earlier view of its group; None for a start of the run."""


def restore(
    learner: Learner, folder: RunFolder, runtime: Runtime, held: HeldState | None, memory: SnapshotsByStep | None = None
) -> Restored:
    """Open the store of a run and load the newest checkpoint or snapshot, or the state of a replica. Collective.

    Raises CheckpointError if nothing can be saved, before a step is trained.
    """
    recipe, meshes = learner.recipe, learner.meshes
    sync = build_synchronizer(recipe.sync, learner.engine, meshes)
    contents = RunContents(learner.engine, sync, StepJudge(recipe.fault, learner.device), meshes)
    store = build_store(recipe, folder, meshes)
    snapshots = None
    if memory is not None:
        distance = 1 if runtime.is_one_machine else runtime.local_world_size
        snapshots = PeerMemory(memory, recipe.checkpoint.snapshot_every_steps, distance)
    store.rehearse(contents.tensors())
    held = None if meshes.membership is None else heal(contents, held)
    saved = load_newest(store, snapshots, contents, runtime) if held is None else held.saved
    state = TrainState() if saved is None else saved.train
    state = state.judged_by(recipe.evaluate.select_by).suppressing(find_suppressed(folder, meshes))
    return Restored(contents, store, snapshots, state, saved, held)


def build_saver(learner: Learner, restored: Restored, accounting: Accounting) -> Saver:
    """Build what saves the run from here on."""
    recipe, state = learner.recipe, restored.state
    if accounting.journal is not None and restored.held is None:
        restored.store.upload_newest(state.step, state.best_step if recipe.checkpoint.keep_best else None)
    interval = SaveInterval(recipe, learner.data.train.num_samples, learner.plan.world_size, state.step)
    contents, store, snapshots = restored.contents, restored.store, restored.snapshots
    return Saver(recipe, contents, store, snapshots, interval, accounting, learner.meshes.everyone)


def load_newest(
    store: CheckpointStore, snapshots: PeerMemory | None, contents: RunContents, runtime: Runtime
) -> SavedState | None:
    """Load `contents` from the newest whole checkpoint or snapshot; returns its saved state, or None. Collective."""
    snapshot = None if snapshots is None else snapshots.newest()
    checkpoint = store.newest(beyond=-1 if snapshot is None else snapshot.step) or snapshot
    if checkpoint is None:
        return None
    if snapshots is not None and isinstance(checkpoint, HeldSnapshot):
        saved = contents.load(snapshots.fetch(checkpoint), partial(snapshots.fill, checkpoint.step))
    else:
        assert isinstance(checkpoint, Checkpoint)
        saved = contents.load(checkpoint.read_state(), partial(store.load, checkpoint))
    if runtime.rank == 0:
        held = ", a snapshot in memory" if checkpoint == snapshot else ""
        logger.info(f"Resuming from step-{checkpoint.step:08d}{held}.")
    return saved
