"""What a learner is built from, beside its recipe: process group, hub files, data, config of the model, and plan."""

from dataclasses import replace

import torch.distributed as dist

from echelon.ground.errors import PlanError
from echelon.learn.data.prepare import find_mask_obstacle, prepare_data
from echelon.learn.data.prepared import PreparedData
from echelon.learn.distributed.mesh import build_mesh
from echelon.learn.distributed.objects import agree
from echelon.learn.distributed.runtime import Runtime, join_group
from echelon.learn.engines import EngineSpec
from echelon.learn.model.build import resolve_config
from echelon.learn.model.hub import fetch_models, find_commits, with_copies
from echelon.learn.teacher import check_teacher, open_taught
from echelon.planner.choose import resolve_plan
from echelon.planner.hardware.detection import describe_cluster
from echelon.planner.model_shape import ModelShape
from echelon.planner.plan import ParallelPlan
from echelon.planner.shape import build_shape
from echelon.recipe.document import Recipe


def open_recipe(recipe: Recipe, plan: ParallelPlan | None) -> tuple[EngineSpec, PreparedData]:
    """Join the process group, and find or prepare what the recipe names. Collective: see `Learner.build`."""
    runtime = join_group()
    commits = agree(lambda: find_commits(recipe, {}))
    fetch_models(recipe, commits)
    local = with_copies(recipe, commits)
    data = prepare_data(local)  # a lock lets one process of a machine prepare, and the others wait
    check_teacher(local, data.tokenizer)
    data = open_taught(local, data)
    config = resolve_config(local, data.vocab_size, data.tokenizer, data.padding)
    if plan is None:
        has_adapter = local.adapter.is_adapter
        plan = agree(lambda: _resolve_plan(local, build_shape(config.to_dict(), has_adapter), data, runtime))
    elif plan.world_size != dist.get_world_size():
        raise PlanError(
            f"the plan is for {plan.world_size} processes, and this job has {dist.get_world_size()}; start as "
            "many as the plan needs, or pass plan=None."
        )
    elif plan.sequence_len != local.data.sequence_len:
        raise PlanError(
            f"the plan is for sequences of {plan.sequence_len} tokens, and data.sequence_len="
            f"{local.data.sequence_len}; give the plan that sequence_len, or pass plan=None."
        )
    meshes = build_mesh(plan, runtime.device.type, runtime.is_one_machine)
    return EngineSpec(local, config, plan, meshes, runtime.device), data


def _resolve_plan(recipe: Recipe, shape: ModelShape, data: PreparedData, runtime: Runtime) -> ParallelPlan:
    """Return the plan of a recipe on the processes of this job."""
    cluster = describe_cluster(runtime.world_size, runtime.local_world_size)
    if recipe.objective.row.answers == "pairs":
        shape = replace(shape, obeys_masks=find_mask_obstacle(recipe) is None)
    return resolve_plan(recipe, shape, cluster, num_samples=data.train.num_samples, are_apart=data.apart)
