"""Builds the native engine: the model on meta, its shards with initial weights, and its optimizer. In the order of
`build_native_engine`. Or what one rank of a plan holds, on meta: a check of a plan before it costs anything.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch.distributed as dist
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from echelon.learn.checkpoint.first_weights import open_weights
from echelon.learn.data.loader import choose_padding
from echelon.learn.distributed.mesh import build_mesh
from echelon.learn.engines.engine import EngineSpec
from echelon.learn.engines.native import NativeEngine, NativeParts
from echelon.learn.engines.prepared_layers import (
    choose_attention_kernel,
    choose_liger,
    place_buffers,
    prepare_layers,
    store_parameters,
)
from echelon.learn.model.adapters import initialize_adapter
from echelon.learn.model.build import build_on_meta, load_config, materialize
from echelon.learn.model.copy_checks import check_divides
from echelon.learn.model.quantization import describe_errors, share_scales
from echelon.learn.model.router import choose_router_loss
from echelon.learn.model.sharding import local_part
from echelon.learn.model.traits import Traits, apply_plain_causal, find_traits
from echelon.learn.objectives.outputs import ObjectiveModule
from echelon.learn.optimizer import LossScale, Optimizer, Served, build_optimizer, build_served
from echelon.learn.parallel import Parallelize, connect_stages, parallelize, shard_model, shard_stages
from echelon.planner.axes.pipeline import predict_waiting
from echelon.planner.memory_parts import StoredBytes
from echelon.planner.plan import ParallelPlan
from echelon.planner.shape import build_shape
from echelon.recipe.document import Recipe
from echelon.recipe.inputs import ModelConfig
from echelon.recipe.synchronization import PARAMETER_SERVER


def build_teacher(spec: EngineSpec) -> ObjectiveModule:
    """Build the frozen teacher of the recipe, divided and sharded as the model is. Collective.

    Raises ConfigError if its config cannot be read, or the plan cannot divide it.
    """
    recipe = spec.recipe
    source, trusted = recipe.objective.teacher, recipe.model.trust_remote_code
    assert source is not None
    model = ModelConfig(checkpoint=source, trust_remote_code=trusted)
    spec = replace(spec, recipe=recipe.model_copy(update={"model": model}), config=load_config(source, trusted))
    skeleton = build_on_meta(spec.config, None, trusted)
    traits, _ = choose_attention_kernel(skeleton, spec.recipe, spec.plan, spec.meshes, spec.device)
    return build_reference(skeleton, spec, traits)


def build_reference(skeleton: PreTrainedModel, spec: EngineSpec, traits: Traits) -> ObjectiveModule:
    """Build a frozen copy of the initial weights of `spec.recipe`, sharded like the model. Collective.

    Under every plan a rank keeps only its shard between forward passes: there is no backward pass to free the rest.
    With `fully_shard` the copy is stored in the compute dtype, else in the dtype of the trained model, so that autocast
    computes the same.
    """
    plan = spec.plan
    model = copy.deepcopy(skeleton).requires_grad_(False)
    compute = plan.precision.compute if plan.uses_fully_shard else plan.precision.param
    store_parameters(model, replace(plan.precision, compute=compute))
    frozen = replace(plan, reshard_after_forward=True, activation_checkpointing="none", activation_offloading=False)
    module = shard_model(model, frozen, spec.meshes, spec.compile_backend, traits)
    materialize(module, "cpu" if plan.cpu_offload else spec.device)
    place_buffers(model, spec.device)
    open_weights(skeleton, spec.recipe)(model)
    return module.eval()


def _build_optimizer(model: nn.Module, spec: EngineSpec) -> Optimizer:
    """Build the optimizer of a sharded model. Collective where it is sharded.

    Ranks with a copy of the model divide the work of a step only on one machine: between machines, results may take
    longer to send than to compute. Updates are compiled where layers are, and not on the host of a GPU.
    """
    recipe, plan = spec.recipe, spec.plan
    copies = spec.meshes.loss if spec.meshes.is_one_machine and not plan.uses_fully_shard else None
    backend = spec.compile_backend if plan.compile and not plan.cpu_offload else None
    return build_optimizer(model, recipe.optim, recipe.train.master_weights, recipe.run.seed, copies, backend)


def _build_served(model: nn.Module, spec: EngineSpec) -> Served | None:
    """Build what this rank owns as a parameter server; None under a plan without such servers."""
    recipe, plan = spec.recipe, spec.plan
    if plan.sync.name != PARAMETER_SERVER:
        return None
    backend = spec.compile_backend if plan.compile else None
    master, seed, server = recipe.train.master_weights, recipe.run.seed, spec.meshes.number
    return build_served(model, recipe.optim, master, seed, plan.sync.servers, server, backend)


def _describe_stages(spec: EngineSpec) -> tuple[int | None, float]:
    """The width of what pipeline stages send, and the share of a step in which they wait; else None and 0."""
    if spec.plan.pp == 1:
        return None, 0.0
    shape = build_shape(spec.config.to_dict(), has_adapter=False)
    return shape.hidden_size, predict_waiting(shape, spec.plan)


def build_native_engine(
    spec: EngineSpec, parallelize: Parallelize = parallelize, description: Sequence[str] = ()
) -> NativeEngine:
    """Build the model on meta, shard, materialise and initialise it, and wrap it in an engine. Collective.

    No rank ever holds more than its shard of the model and one full unit.

    Args:
        parallelize: builds the data parallelism.
        description: further lines of `Engine.describe`.
    """
    recipe, config, plan, meshes, device = spec.recipe, spec.config, spec.plan, spec.meshes, spec.device
    # On meta a model has shapes and no memory: everything that can be refused is refused before any is allocated.
    skeleton = build_on_meta(config, recipe.model.attn_implementation, recipe.model.trust_remote_code)
    traits, attention = choose_attention_kernel(skeleton, recipe, plan, meshes, device)
    if plan.cp_method is not None:
        check_divides(skeleton, plan.cp_method, traits, recipe.data.sequence_len)
    uses_liger, kernels = choose_liger(skeleton, recipe, plan, meshes, device)
    model = prepare_layers(skeleton, recipe, plan, device.type, uses_liger, spec.new_token_ids)
    router = choose_router_loss(skeleton, model, recipe.objective.router_loss)
    routers = () if router.loss is None else router.loss.routers
    stages = shard_stages(model, skeleton, plan, meshes, spec.compile_backend, traits, routers)
    # Each rank allocates its shard alone, and fills it with its part of the weights.
    for module in stages.modules:
        materialize(module, "cpu" if plan.cpu_offload else device)
    place_buffers(model, device)
    open_weights(skeleton, recipe)(model)
    principal = initialize_adapter(model, recipe.adapter, recipe.run.seed) if recipe.adapter.is_adapter else None
    # With an adapter, the model without it is the reference: no copy is needed.
    if recipe.objective.teacher_in_memory:
        [module] = stages.modules
        module.refer_to(build_teacher(spec))
    elif spec.needs_reference and not recipe.adapter.is_adapter:
        [module] = stages.modules
        module.refer_to(build_reference(skeleton, spec, traits))
    for module in stages.modules:
        module.train()
    hidden_size, waiting = _describe_stages(spec)
    parallel, forward_backward = connect_stages(
        stages, plan, meshes, hidden_size, device, recipe.run.seed, router.loss, parallelize
    )
    served = _build_served(model, spec)
    return NativeEngine(
        NativeParts(
            parallel,
            model,
            _build_optimizer(model, spec) if served is None else served.optimizer,
            forward_backward,
            traits,
            meshes.everyone,
            meshes,
            meshes.pp,
            LossScale(device) if plan.precision.compute == "float16" else None,
            served,
            principal,
            choose_padding(plan),
            [line for line in (attention, kernels, router.line, describe_errors(model), *description) if line],
            partial(share_scales, model) if plan.gathers_float8 else lambda: None,
            waiting,
            stages.modules[0].reference,
        )
    )


def build_rank(recipe: Recipe, config: PretrainedConfig, plan: ParallelPlan, rank: int) -> StoredBytes:
    """Build a rank of a plan, and return the bytes that it would store. No memory is allocated for weights.

    This process must not have a process group, and can build one rank only: PyTorch keeps meshes of the first one.

    Raises:
        ConfigError: the model cannot be divided as planned.
    """
    skeleton = build_on_meta(config, recipe.model.attn_implementation, recipe.model.trust_remote_code)
    traits = find_traits(skeleton, recipe.data.sequence_len)
    apply_plain_causal(skeleton, traits)
    if plan.cp_method is not None:
        check_divides(skeleton, plan.cp_method, traits, recipe.data.sequence_len)
    with _pretended_ranks(rank, plan.world_size):
        meshes = build_mesh(plan, "cpu")
        new_tokens = range(len(recipe.model.new_tokens))  # sizes depend on their number, not on their ids
        model = prepare_layers(skeleton, recipe, plan, "cpu", False, new_tokens)
        router = choose_router_loss(skeleton, model, recipe.objective.router_loss).loss
        shard_stages(model, skeleton, plan, meshes, "inductor", traits, () if router is None else router.routers)
        optimizer = build_optimizer(model, recipe.optim, recipe.train.master_weights, recipe.run.seed)
        return StoredBytes(
            parameters=_count_bytes(model.parameters()),
            gradients=_count_bytes(parameter for parameter in model.parameters() if parameter.requires_grad),
            optimizer=_count_bytes(tensor for _, tensor in optimizer.tensors()),
        )


def _count_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(local_part(tensor.detach()).nbytes for tensor in tensors)


@contextmanager
def _pretended_ranks(rank: int, world_size: int) -> Iterator[None]:
    """A scope in which this process is one rank of a job whose other ranks do not exist."""
    # PyTorch has it nowhere else. Its collectives return without sending.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
