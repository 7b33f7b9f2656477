"""Applying a plan to a model: the order of the transforms, from the inside out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from echelon.learn.distributed.mesh import Meshes
from echelon.learn.distributed.peers import GroupPeers
from echelon.learn.model.compilation import apply_compile
from echelon.learn.model.context_attention import Context, find_attention, use_context
from echelon.learn.model.parts import find_layers
from echelon.learn.model.router import Router, RouterLoss, RouterTap
from echelon.learn.model.stage import StageRange, cut, find_ends, find_shared, own_layers, stage_ranges, view_stage
from echelon.learn.model.traits import Traits
from echelon.learn.objectives.outputs import ObjectiveModule
from echelon.learn.parallel.data_parallel import apply_fully_shard, build_data_parallel
from echelon.learn.parallel.expert import divide_experts, find_experts
from echelon.learn.parallel.kept_activations import (
    KEPT_OPERATIONS,
    checkpoint_activations,
    compile_selective,
    offload_activations,
)
from echelon.learn.parallel.pipeline import Pipeline, StagePart
from echelon.learn.parallel.step import DataParallel, ForwardBackward, Parallel, SingleStage
from echelon.planner.plan import ParallelPlan


def shard_model(
    model: nn.Module,
    plan: ParallelPlan,
    meshes: Meshes,
    compile_backend: str,
    traits: Traits,
    routers: Sequence[Router] = (),
    context: Context | None = None,
) -> ObjectiveModule:
    """Divide the model, then checkpoint, compile, offload and shard each decoder layer. All of it may happen on meta.

    Division comes first, of the tensors, then the experts; `shard_stages` has divided the sequence and cut the stage.
    Offloading is around what is checkpointed and compiled, because it takes what these keep; sharding is outermost, so
    that its hooks stay outside every graph. Parameter names stay those of `transformers` throughout.

    Args:
        model: the whole model, or a pipeline stage of it.
        traits: those of the model, the same on every rank.
        routers: whose loss is trained; none for a model without one.
        context: how its attention has been divided, if it has been.
    """
    if plan.tp > 1:
        from echelon.learn.parallel.tensor import apply_tensor_parallel

        apply_tensor_parallel(model, plan, meshes)
    has_experts = bool(find_experts(model))
    if plan.ep > 1 or (plan.tp > 1 and has_experts):
        divide_experts(model, plan, meshes)
    layers = own_layers(model)
    tap = RouterTap(model, routers) if routers else None
    if tap is not None:
        tap.open_inside(layers)
    checkpoint_and_compile(layers, plan, compile_backend, plan.divides_graphs(has_experts))
    if plan.activation_offloading:
        offload_activations(find_layers(model), horizon=plan.activation_loading_horizon)
    if tap is not None:
        tap.open_outside(layers)
    vocabulary_ranks = None if meshes.tp is None else meshes.tp.get_group()
    module = ObjectiveModule(model, tap, traits, context, vocabulary_ranks)
    if plan.compile:
        module.compile_loss(compile_backend)
    if plan.uses_fully_shard:
        apply_fully_shard(module, layers, plan, meshes)
    return module


def checkpoint_and_compile(layers: Sequence[nn.Module], plan: ParallelPlan, backend: str, is_divided: bool) -> None:
    """Checkpoint and compile decoder layers as the plan says.

    A checkpoint is inside of what is compiled, so that a layer recomputes in its own graph. But torch compiles nothing
    of a checkpoint in which a graph ends (pytorch/pytorch#139989): if a layer `is_divided` into several graphs, a full
    checkpoint is around them, and for a selective one each recomputes by itself what it does not keep.
    """
    policy, every, compiles = plan.activation_checkpointing, plan.checkpoint_every, plan.compile
    kept = layers[every - 1 :: every] if compiles and is_divided and policy == "selective" else []
    is_inside = compiles and is_divided and policy == "full"
    if not (kept or is_inside):
        checkpoint_activations(layers, policy, every)
    if compiles:
        apply_compile([layer for layer in layers if layer not in kept], backend, plan.activation_memory_budget)
    if kept:
        compile_selective(kept, backend)
    if is_inside:
        checkpoint_activations(layers, policy, every)


@dataclass(frozen=True)
class Stages:
    """The pipeline stages of a rank after their transforms.

    Attributes:
        places: where they are in the pipeline; empty without one.
        modules: one for each; without a pipeline, one for the whole model.
        shared: names of the weights that both the first and the last stage have.
    """

    places: Sequence[StageRange]
    modules: Sequence[ObjectiveModule]
    shared: tuple[str, ...] = ()


def shard_stages(
    model: PreTrainedModel,
    skeleton: PreTrainedModel,
    plan: ParallelPlan,
    meshes: Meshes,
    compile_backend: str,
    traits: Traits,
    routers: Sequence[Router] = (),
) -> Stages:
    """Remove from a model on meta what other ranks of its pipeline have, and apply `shard_model` to each stage here.

    Args:
        skeleton: the same model without any transform.

    Raises:
        ConfigError: the model cannot be cut into stages.
    """
    backend = compile_backend if plan.compile else None
    context = apply_context(model, plan, meshes, backend)  # once, as stages share the config that names the attention
    if plan.pp == 1:
        return Stages((), [shard_model(model, plan, meshes, compile_backend, traits, routers, context)])
    ends = find_ends(skeleton)
    places, shared = stage_ranges(plan.stages)[meshes.place["pp"] :: plan.pp], find_shared(model, ends)
    cut(model, places, ends)
    views = [view_stage(model, stage, ends) for stage in places]
    modules = [shard_model(view, plan, meshes, compile_backend, traits, routers, context) for view in views]
    return Stages(places, modules, shared)


def apply_context(model: Any, plan: ParallelPlan, meshes: Meshes, backend: str | None) -> Context | None:
    """Divide the attention of a model, on meta or not, as the plan says; None without context parallelism.

    Microbatches must be cut by `meshes.sequence_part`. Parameters keep their names and shapes.
    """
    if meshes.cp is None or plan.cp_method is None:
        return None
    context = Context(GroupPeers(meshes.cp), plan.cp_method, find_attention(model), backend)
    if plan.cp_method == "ring":  # by then its operation is defined
        KEPT_OPERATIONS.add(torch.ops.echelon.ring_attention.default)
    use_context(model, context)
    return context


def parallelize(module: ObjectiveModule, plan: ParallelPlan, meshes: Meshes, seed: int) -> DataParallel:
    """The data parallelism around a materialised model. Collective: DDP compares the replicas as it is built."""
    return build_data_parallel(module, plan, meshes, seed)


Parallelize = Callable[[ObjectiveModule, ParallelPlan, Meshes, int], DataParallel]
"""What has the arguments and the result of `parallelize`."""


def connect_stages(
    stages: Stages,
    plan: ParallelPlan,
    meshes: Meshes,
    hidden_size: int | None,
    device: torch.device,
    seed: int,
    router: RouterLoss | None = None,
    parallelize: Parallelize = parallelize,
) -> tuple[Parallel, ForwardBackward]:
    """Return the parallelism around materialised stages, and what runs the microbatches of a step. Collective.

    Args:
        hidden_size: of what pipeline stages send each other; None without a pipeline.
        seed: of dropout, and of random choices of `sync.compress`.
        router: the router loss that is trained.
        parallelize: builds the data parallelism of a stage.
    """
    parallels = [parallelize(module, plan, meshes, seed) for module in stages.modules]
    strength = None if router is None else router.strength
    if plan.pp == 1:
        [parallel] = parallels
        return parallel, SingleStage(parallel, seed, strength, stages.modules[0].tap)
    assert meshes.pp is not None and hidden_size is not None
    parts = [StagePart(*part) for part in zip(stages.places, stages.modules, parallels, strict=True)]
    pipeline = Pipeline(parts, plan, meshes.pp, hidden_size, device, seed, strength, stages.shared)
    return pipeline, pipeline
