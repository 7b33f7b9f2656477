"""Opens what records and watches a run on one rank: its journal, its goodput, its monitors; describes the start."""

import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from echelon.learn.data.feed import Feed, describe_source
from echelon.learn.distributed.runtime import Runtime
from echelon.learn.learner import Learner
from echelon.learn.micro_batch import read_widest
from echelon.planner.hardware.detection import describe_peak, find_peak_flops
from echelon.planner.memory import describe_peak_memory
from echelon.run.folder.run_folder import RunFolder
from echelon.run.journal.goodput import GoodputTracker
from echelon.run.journal.journal import Journal
from echelon.run.journal.recovery import RecoveryWatch
from echelon.run.lifecycle.run_learner import note_memory
from echelon.run.lifecycle.run_records import describe_training, open_goodput, open_journal, record_beginning
from echelon.run.lifecycle.saved_state import Restored
from echelon.run.training.evaluations import PromptSampler
from echelon.run.training.heartbeat import Heartbeat
from echelon.run.training.meters import StepMeter
from echelon.run.training.profiler import build_recorder
from echelon.run.training.replicas import build_comparisons
from echelon.run.training.run_log import Accounting
from echelon.run.training.straggler import build_straggler_watch

if TYPE_CHECKING:
    from echelon.run.training.callbacks import Monitor
    from echelon.run.training.saver import Saver

logger = logging.getLogger(__name__)


def open_accounting(
    learner: Learner,
    feed: Feed,
    folder: RunFolder,
    runtime: Runtime,
    recovery: RecoveryWatch | None,
    restored: Restored,
    heartbeat: Heartbeat,
    sampler: PromptSampler | None,
) -> Accounting:
    """Open what records the run; on rank 0, which has `recovery`, record and describe this start. Collective."""
    recipe, device, held = learner.recipe, learner.device, restored.held
    peak_flops = find_peak_flops(device, learner.plan.precision.compute)
    journal, goodput = None, GoodputTracker()
    if recovery is not None:
        recovery.loaded()
        journal, goodput = _open_records(learner, folder, runtime, recovery, restored, peak_flops)
    elif held is not None and held.saved.goodput is not None:
        goodput.resume(held.saved.goodput, last_sign=0.0)
    find_mfu = partial(
        learner.shape.mfu,
        num_devices=learner.meshes.num_devices,
        peak_flops=peak_flops,
        sequence_len=recipe.data.sequence_len,
        num_trained=None if learner.plan.adapter is None else learner.plan.adapter.num_trained_matmul_parameters,
    )
    accounting = Accounting(StepMeter(device, recipe.train.log_every, find_mfu), goodput, heartbeat, journal)
    if held is not None:
        accounting.make_up(restored.state.step, held.rows)
    elif recovery is not None:
        _describe_beginning(learner, feed, sampler, peak_flops)
    return accounting


def build_monitors(
    learner: Learner, folder: RunFolder, runtime: Runtime, accounting: Accounting, saver: "Saver"
) -> list["Monitor"]:
    """Build what watches a run on every rank, in the order in which each hook is called. Collective."""
    recipe, journal, heartbeat = learner.recipe, accounting.journal, accounting.heartbeat
    return [
        accounting.meter,
        accounting.meter.gpu,
        heartbeat,
        saver.interval,
        build_straggler_watch(learner.meshes, recipe.fault.on_straggler, folder.slow_path, journal),
        build_recorder(recipe.profile, folder, runtime, heartbeat.resting),
        *build_comparisons(learner, saver, accounting),
    ]


def _open_records(
    learner: Learner,
    folder: RunFolder,
    runtime: Runtime,
    recovery: RecoveryWatch,
    restored: Restored,
    peak_flops: float,
) -> tuple[Journal, GoodputTracker]:
    """Open the journal and the goodput of the run on rank 0, and record this start."""
    saved, held, step = restored.saved, restored.held, restored.state.step
    if held is not None and held.owes_pause:
        saved = replace(held.saved, train=replace(held.saved.train, owes_evaluation=True))
    goodput = open_goodput(folder, saved, recovery.lost_at)
    if held is None:
        record_beginning(folder, step, learner.data, peak_flops)
    watch = recovery if held is None else None  # a loss of replicas is no restart
    journal = open_journal(learner, folder, runtime, step, watch)
    if held is None:
        note_memory(journal, step, learner)
    return journal, goodput


def _describe_beginning(learner: Learner, feed: Feed, sampler: PromptSampler | None, peak_flops: float) -> None:
    """Log lines about the training. On rank 0."""
    device, stops = learner.device, learner.stops
    has_documents = read_widest(learner.data, learner.plan, learner.meshes, 1).documents is not None
    for line in (
        *describe_training(learner.recipe, learner.plan, learner.config, learner.data, stops),
        *describe_source(learner.recipe, feed),
        *learner.engine.describe(has_documents),
        *(() if sampler is None else (sampler.describe(),)),
    ):
        logger.info(line)
    told = describe_peak_memory(device.type == "cuda")
    logger.info(f"peak_mem in the lines below: {told}; the memory of a plan is that of its tensors alone")
    level = logging.INFO if device.type != "cpu" else logging.DEBUG
    logger.log(level, f"mfu: relative to {peak_flops / 1e12:.3g} TFLOP/s per process, {describe_peak(device)}")
