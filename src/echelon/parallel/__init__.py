"""Applying a plan to a model: the order of the transforms, from the inside out."""

from collections.abc import Sequence

from torch import nn

from echelon.distributed.mesh import Meshes
from echelon.model.parts import find_layers
from echelon.model.router import Router, RouterTap
from echelon.model.traits import Traits
from echelon.objectives.outputs import ObjectiveModule
from echelon.parallel.activation import apply_activation_checkpointing
from echelon.parallel.compilation import apply_compile
from echelon.parallel.data_parallel import DataParallel, apply_fully_shard, build_data_parallel
from echelon.parallel.offload import apply_activation_offloading
from echelon.planner.plan import ParallelPlan


def shard_model(
    model: nn.Module,
    plan: ParallelPlan,
    meshes: Meshes,
    compile_backend: str,
    traits: Traits,
    routers: Sequence[Router] = (),
) -> ObjectiveModule:
    """Everything that may happen on meta: checkpointing, compilation, offloading and sharding of each decoder layer.

    Checkpointing is innermost, so that a compiled layer recomputes inside its own graph; offloading is around both,
    because it takes what they keep; sharding is outermost, so that its hooks stay outside every graph. Parameter names
    stay those of `transformers` throughout.

    Args:
        traits: those of the model, the same on every rank.
        routers: whose loss is trained; none for a model without one.
    """
    layers = find_layers(model)
    tap = RouterTap(model, routers) if routers else None
    if tap is not None:
        tap.open_inside(layers)
    apply_activation_checkpointing(layers, plan.activation_checkpointing)
    if plan.compile:
        apply_compile(layers, compile_backend)
    if plan.activation_offloading:
        apply_activation_offloading(layers)
    if tap is not None:
        tap.open_outside(layers)
    module = ObjectiveModule(model, tap, traits)
    if plan.compile:
        module.compile_loss(compile_backend)
    if plan.uses_fully_shard:
        apply_fully_shard(module, layers, plan, meshes)
    return module


def parallelize(module: ObjectiveModule, plan: ParallelPlan, meshes: Meshes) -> DataParallel:
    """The data parallelism around a materialised model. Collective: DDP compares the replicas as it is built."""
    return build_data_parallel(module, plan, meshes)
