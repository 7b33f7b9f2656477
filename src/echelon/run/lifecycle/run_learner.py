"""Builds the learner of a run on one rank, from the files of its run folder, and pins the plan that was found."""

from dataclasses import asdict, replace
from typing import Any

from echelon.ground.stored import read_as, write_json
from echelon.learn.checkpoint.given_models import keep_given_models
from echelon.learn.data.prepared import open_prepared
from echelon.learn.data.stream.options import stream_options
from echelon.learn.distributed.mesh import build_mesh
from echelon.learn.distributed.runtime import Runtime
from echelon.learn.engines import EngineSpec
from echelon.learn.learner import Learner
from echelon.learn.micro_batch import build_rehearsed
from echelon.learn.model.build import resolve_config
from echelon.learn.model.hub import read_commits, with_copies
from echelon.learn.model.model_folder import write_model_folder
from echelon.learn.teacher import open_taught
from echelon.planner.hardware.accelerators import DeviceKind
from echelon.planner.memory import estimate_memory, estimate_parts
from echelon.planner.plan import ParallelPlan
from echelon.recipe.document import Recipe
from echelon.run.folder.run_folder import RunFolder
from echelon.run.journal.journal import Journal


def pin_plan(folder: RunFolder, planned: ParallelPlan, learner: Learner) -> None:
    """Write the plan and its estimate into the run folder if the rehearsal changed it. On rank 0."""
    if learner.plan == planned:
        return
    estimate = estimate_memory(learner.shape, learner.plan, _kind_of(learner))
    stored = read_as(folder.estimate_path, dict[str, Any])
    write_json(folder.estimate_path, stored | {"memory": asdict(estimate), "seconds": None})
    write_json(folder.plan_path, learner.plan.to_dict())


def note_memory(journal: Journal, step: int, learner: Learner) -> None:
    """Write the measured memory to the journal, if it is known, with what was planned. On rank 0."""
    if learner.memory is not None:
        planned = estimate_parts(learner.shape, learner.plan, _kind_of(learner))
        journal.memory(step, planned, learner.memory)


def _kind_of(learner: Learner) -> DeviceKind:
    return "cuda" if learner.device.type == "cuda" else "cpu"


def build_run_learner(
    recipe: Recipe,
    plan: ParallelPlan,
    folder: RunFolder,
    runtime: Runtime,
    compile_backend: str,
    is_first: bool,
    number: int | None = None,
    is_known: bool = False,
) -> Learner:
    """Open the data that the run was prepared with, build the engine, and rehearse a step. Collective.

    Args:
        is_first: whether this rank compares the given models with those of the first start, and writes the model's
            folder, and the plan if the rehearsal changes it.
        number: that of this replica in the run, where replicas are built alone; None: that of its place in the group.
        is_known: whether a step of this plan has already run in this job, and is not rehearsed again.
    """
    meshes = build_mesh(plan, runtime.device.type, runtime.is_one_machine)
    if number is not None:
        meshes = replace(meshes, number=number)
    prepared = folder.text.read_prepared_path()
    data = open_prepared(
        prepared, recipe.sample_len, recipe.data.document_mask, was_opened=True, stream=stream_options(recipe)
    )
    # The hub is not asked again: the run keeps the commits of its first start.
    local_recipe = with_copies(recipe, read_commits(folder.hub_path))
    data = open_taught(local_recipe, data)
    config = resolve_config(local_recipe, data.vocab_size, data.tokenizer, data.padding)
    if is_first:
        keep_given_models(folder.path, local_recipe)
        write_model_folder(folder.model_dir, config, data.tokenizer, data.manifest.stops)
    spec = EngineSpec(local_recipe, config, plan, meshes, runtime.device, compile_backend)
    engine, rehearsed, memory = build_rehearsed(recipe, spec, data, is_known)
    # The recipe as the user wrote it: that of the engine names this machine's copies of hub files.
    learner = Learner(recipe, rehearsed, config, meshes, runtime.device, engine, data, memory)
    if is_first:
        pin_plan(folder, plan, learner)
    return learner
