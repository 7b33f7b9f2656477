"""Tensor parallelism (`tp`), also with sequence parallelism: the ranks of a group compute parts of each matrix."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from echelon.ground.errors import ConfigError, PlanError
from echelon.ground.sizes import join_words
from echelon.planner.axes.axis import Axis, Choices, Sender, find_group, nearest, ring_share
from echelon.planner.layer_time import LayerTime, Step
from echelon.planner.model_shape import PACKED_MATRICES, SCORE_HEAD, ModelShape, count_idle, divisors
from echelon.planner.plan import ParallelPlan
from echelon.recipe.training import ParallelConfig

if TYPE_CHECKING:
    from echelon.recipe.document import Recipe


class _Tensor(Axis):
    name = "tp"

    @override
    def settings(self, parallel: ParallelConfig, world: int, shape: ModelShape, sequence_len: int) -> dict[str, Any]:
        return {"tp": parallel.tp, "sequence_parallel": bool(parallel.sequence_parallel)}

    @override
    def check(self, recipe: "Recipe", shape: ModelShape, plan: ParallelPlan) -> None:
        if plan.tp > 1:
            _check_sizes(recipe, shape, plan)
            _check_settings(recipe, shape, plan.tp)

    @override
    def divide(self, shape: ModelShape, plan: ParallelPlan) -> ModelShape:
        # Its heads, its part of the MLP and of the vocabulary, and some of the experts: it computes as many of them for
        # a token as it could need. Norms, biases, routers and the hidden size stay whole.
        return shape if plan.tp == 1 else _divide(shape, plan.tp)

    @override
    def result_bytes(self, shape: ModelShape, plan: ParallelPlan, number: int) -> float:
        if plan.tp == 1:
            return 0.0
        return 2 * shape.hidden_size * number * (1 + 1 / plan.tp if plan.sequence_parallel else 1)

    @override
    def layer_seconds(self, step: Step, layer: LayerTime) -> float:
        # Two all-gathers and two reduce-scatters in each direction under sequence parallelism, else two all-reduces,
        # which move as much (Korthikanti et al. 2022, section 4.2).
        plan = step.plan
        if plan.tp == 1:
            return 0.0
        repeated = count_repeated(plan)
        if step.software.recomputes_ends and repeated:
            repeated = 4.0
        group = find_group(plan, step.cluster, ("tp",))
        packed = step.hidden_bytes * _count_packed(step.shape) / step.shape.hidden_size
        hidden, outputs = group.all_gather(step.hidden_bytes), group.all_gather(packed)
        return ((8 + repeated) * hidden + (2 + bool(repeated)) * outputs) * (1 - step.software.tp_overlap)

    @override
    def sent_bytes(self, sender: Sender) -> dict[str, float]:
        plan = sender.plan
        passes = 1.5 if plan.sequence_parallel and sender.kind == "cpu" else 1.0  # gloo's reduce-scatter: an all-reduce
        num_ends = sender.load.has_head + (sender.rank == 0)  # the embedding and the head send, too
        times = passes * plan.num_microbatches * (sender.layers * (8 + count_repeated(plan)) + 2 * num_ends)
        gathers = 2 + (plan.activation_checkpointing == "full") / plan.checkpoint_every
        packed = gathers * plan.num_microbatches * sender.layers * _count_packed(sender.part) / sender.part.hidden_size
        return {"tp": (times + packed) * ring_share(plan.tp) * sender.hidden}

    @override
    def meetings(self, plan: ParallelPlan, num_layers: int) -> dict[str, tuple[int, int]]:
        passes = 3 if plan.activation_checkpointing == "full" else 2
        times = plan.num_microbatches * num_layers * passes * (4 if plan.sequence_parallel else 2)
        return {"tp": (plan.tp, times)}

    @override
    def degrees(self, choices: Choices) -> list[int]:
        return divisors(choices.replica.devices_per_node)

    @override
    def variants(self, base: ParallelConfig, choices: Choices) -> Iterator[ParallelConfig]:
        # Without sequence parallelism it sends as much and keeps more.
        chunks = 2 * base.cp if base.cp > 1 else 1
        divides = base.tp > 1 and choices.recipe.data.sequence_len // chunks % base.tp == 0
        yield base.model_copy(update={"sequence_parallel": True}) if divides else base


TENSOR = _Tensor()


def count_repeated(plan: ParallelPlan) -> float:
    """All-gathers and reduce-scatters that the recomputation of a layer repeats, of the four of its forward pass; an
    all-reduce is two. Selective checkpointing keeps their results.

    PyTorch stops before the last one, which sums what the layer returns.
    """
    if plan.activation_checkpointing != "full":
        return 0.0
    return (3 if plan.sequence_parallel else 2) / plan.checkpoint_every


def _count_packed(shape: ModelShape) -> float:
    """Return the outputs of a layer's packed matrices, on average: gathered, and their gradients added up."""
    packed = (linear.count * linear.out_features for linear in shape.linears if linear.name in PACKED_MATRICES)
    return sum(packed) / shape.num_layers


@lru_cache(maxsize=64)
def _divide(shape: ModelShape, tp: int) -> ModelShape:
    linears = sum(linear.count * linear.size for linear in shape.linears)
    matrices = (linears + shape.num_expert_parameters) // shape.num_layers
    layer = shape.num_layer_parameters - matrices + matrices // tp
    experts = tuple(replace(expert, num_experts=expert.num_experts // tp) for expert in shape.experts)
    tables = shape.num_embedding_parameters * shape.num_tables
    outside = shape.num_parameters - shape.num_layers * shape.num_layer_parameters - tables + tables // tp
    return replace(
        shape,
        num_heads=shape.num_heads // tp,
        num_kv_heads=shape.num_kv_heads // tp,
        intermediate_size=shape.intermediate_size // tp,
        vocab_size=shape.vocab_size // tp,
        num_parameters=outside + shape.num_layers * layer,
        num_embedding_parameters=shape.num_embedding_parameters // tp,
        num_layer_parameters=layer,
        experts=experts,
        num_idle_parameters=count_idle(experts, shape.num_chosen_experts),
    )


def _check_sizes(recipe: "Recipe", shape: ModelShape, plan: ParallelPlan) -> None:
    sizes = {
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "vocab_size": shape.vocab_size,
    }
    if shape.expert_widths[0] < 1:
        sizes["intermediate_size"] = shape.intermediate_size
    if shape.experts:
        sizes["the number of experts" + (f" / {plan.ep}" if plan.ep > 1 else "")] = (
            shape.experts[0].num_experts // plan.ep
        )
    if plan.sequence_parallel:
        chunks = 2 * plan.cp if plan.cp > 1 else 1
        sizes["data.sequence_len" + (f" / {chunks}" if chunks > 1 else "")] = recipe.data.sequence_len // chunks
    failing = {name: size for name, size in sizes.items() if size % plan.tp}
    if failing:
        name, size = next(iter(failing.items()))
        fits = join_words([str(n) for n in nearest(divisors(math.gcd(*sizes.values())), plan.tp)])
        hint = " or set model.config.vocab_size to a multiple" if [*failing] == ["vocab_size"] else ""
        raise PlanError(f"parallel.tp={plan.tp} does not divide {name}={size}; use tp = {fits}{hint}.")


def _check_settings(recipe: "Recipe", shape: ModelShape, tp: int) -> None:
    adapter, parts, has_adapter = recipe.adapter, shape.parts, recipe.adapter.is_adapter
    dropout = "each rank would drop other values; set it to 0"
    obstacles = [
        (parts.attention_dropout + parts.residual_dropout, "a model with attention or residual dropout", dropout),
        (has_adapter and adapter.dropout, f"adapter.dropout={adapter.dropout}", dropout),
        (adapter.method == "qlora", "adapter.method=qlora", "its 4-bit blocks are those of whole matrices; use lora"),
        (has_adapter and adapter.init == "pissa", "adapter.init=pissa", "it decomposes whole matrices; use default"),
        (has_adapter and {*adapter.modules_to_save} - {SCORE_HEAD}, "adapter.modules_to_save",
         "these modules are divided; remove it"),
        (has_adapter and recipe.model.new_tokens, "model.new_tokens of an adapter", "the embedding is divided"),
        (recipe.optim.name == "adamw_8bit", "optim.name=adamw_8bit", "its blocks are of whole rows; use adamw"),
        (getattr(recipe.train.activation_checkpointing, "mlp_tiles", None),
         "train.activation_checkpointing.mlp_tiles", "it divides the MLP itself; use full"),
        ("fp8" in recipe.train.precision, "train.precision=fp8", "its scales are those of whole matrices; use bf16"),
    ]  # fmt: skip
    for is_used, what, why in obstacles:
        if is_used:
            raise ConfigError(f"parallel.tp={tp} does not work with {what}: {why}, or use tp=1.")
