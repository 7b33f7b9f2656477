"""Context parallelism (`cp`): the ranks of a group compute parts of the same sequences."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from echelon.ground.errors import ConfigError, PlanError
from echelon.ground.sizes import join_words
from echelon.planner.axes.axis import Axis, Choices, Sender, find_group, ring_share
from echelon.planner.layer_time import LayerTime, Step
from echelon.planner.model_shape import ModelShape, divisors
from echelon.planner.plan import DTYPE_BYTES, ParallelPlan
from echelon.recipe.training import ParallelConfig

if TYPE_CHECKING:
    from echelon.recipe.document import Recipe

_LONG = 8192  # tokens of a sequence from which a search may divide it
_MAX_TRIED = 8
_FP32_BYTES = 4


class _Context(Axis):
    name = "cp"

    @override
    def settings(self, parallel: ParallelConfig, world: int, shape: ModelShape, sequence_len: int) -> dict[str, Any]:
        return {"cp": parallel.cp, "cp_method": (parallel.cp_method or "allgather") if parallel.cp > 1 else None}

    @override
    def check(self, recipe: "Recipe", shape: ModelShape, plan: ParallelPlan) -> None:
        if plan.cp == 1:
            return
        if recipe.objective.row.answers is not None:
            raise ConfigError(
                f"parallel.cp={plan.cp} does not work with objective.name={recipe.objective.name}: its loss is a "
                "function of the sum over an answer, and each process has only a part of it; use cp: 1, or "
                "objective.name=causal_lm."
            )
        if recipe.objective.teacher_in_memory:
            raise ConfigError(
                f"parallel.cp={plan.cp} does not divide the attention of a teacher; use cp: 1, or prepare its "
                "log-probabilities with objective.top_k."
            )
        heads = shape.num_heads
        if plan.cp_method == "ulysses" and heads % plan.cp:
            fits = join_words([str(degree) for degree in divisors(heads) if degree > 1] or ["1"])
            raise PlanError(
                f"parallel.cp={plan.cp} with cp_method=ulysses does not divide the {heads} attention heads of the "
                f"model; use cp = {fits}, or cp_method: allgather."
            )
        if plan.cp_method == "ring" and shape.parts.attention_dropout:
            raise ConfigError(
                f"parallel.cp={plan.cp} with cp_method=ring has no dropout in attention, and that of the model is "
                f"{shape.parts.attention_dropout:g}; set it to 0 in model.config, or use cp_method: allgather."
            )

    @override
    def kept_bytes(self, shape: ModelShape, plan: ParallelPlan, number: int) -> int:
        # `allgather` keeps keys and values of whole sequences. `ulysses` keeps as many as without context parallelism,
        # unless their heads are repeated. `ring` receives those of others again in the backward pass.
        if plan.cp_method == "ring":
            return 0
        key_value = 2 * shape.num_kv_heads * shape.head_dim * number
        if plan.cp_method == "ulysses":
            return key_value * (math.lcm(shape.num_kv_heads, plan.cp) // shape.num_kv_heads - 1)
        return key_value * (plan.cp - 1)

    @override
    def result_bytes(self, shape: ModelShape, plan: ParallelPlan, number: int) -> float:
        if plan.cp == 1:
            return 0.0
        width = shape.head_dim * number
        if plan.cp_method == "ring":  # the output of attention, which is counted as that of any attention
            return 0.0
        if plan.cp_method == "ulysses":
            return width * (2 * shape.num_heads + 2 * math.lcm(shape.num_kv_heads, plan.cp))
        return width * 2 * shape.num_kv_heads * plan.cp

    @override
    def attention_bytes(self, shape: ModelShape, plan: ParallelPlan, number: int) -> int:
        if plan.cp_method != "ring":
            return 0
        # In the backward pass: keys and values of two ranks, those of one for each query head, and in fp32 the gradient
        # of queries, and of keys and values those of this rank, of the turn, and those received.
        heads, key_value = shape.num_heads, 2 * shape.num_kv_heads
        return shape.head_dim * (number * (2 * key_value + 2 * heads) + _FP32_BYTES * (heads + 3 * key_value))

    @override
    def mask_numbers(self, plan: ParallelPlan) -> tuple[int, int]:
        # Kernels take no causal mask for queries in the middle of the keys: each chunk has one of [chunk, its end], but
        # the very first. Of the ranks, the second one has the most.
        if plan.cp_method != "allgather":
            return 0, 0
        square = (plan.part_len // 2) ** 2
        return square * (2 * plan.cp + 1), square * (2 * plan.cp - 1)

    @override
    def layer_seconds(self, step: Step, layer: LayerTime) -> float:
        plan, shape = step.plan, step.part
        if plan.cp == 1:
            return 0.0
        group = find_group(plan, step.cluster, ("cp",))
        width = DTYPE_BYTES[plan.precision.compute] * shape.head_dim * step.tokens
        if plan.cp_method == "ulysses":
            return 3 * group.all_to_all(width * (2 * shape.num_heads + 2 * shape.num_kv_heads))
        gather = group.all_gather(2 * width * shape.num_kv_heads * plan.cp)
        if plan.cp_method == "ring":
            return step.exposed(gather * (2 + _FP32_BYTES / DTYPE_BYTES[plan.precision.compute]), layer.attention)
        # keys and values go around beside attention
        return step.exposed(3 * gather, layer.attention) if step.software.ring_attention else 3 * gather

    @override
    def sent_bytes(self, sender: Sender) -> dict[str, float]:
        plan, part = sender.plan, sender.part
        heads = 2 * part.num_kv_heads * plan.cp
        if plan.cp_method == "ulysses":
            heads = 2 * part.num_heads + 2 * max(part.num_kv_heads, plan.cp)
        passes = 2 + sender.again
        if plan.cp_method == "ring":  # the gradients of keys and values are sent in fp32
            passes += _FP32_BYTES / sender.number
        times = plan.num_microbatches * sender.layers * passes
        return {"cp": times * ring_share(plan.cp) * sender.tokens * heads * part.head_dim * sender.number}

    @override
    def meetings(self, plan: ParallelPlan, num_layers: int) -> dict[str, tuple[int, int]]:
        return {"cp": (plan.cp, plan.num_microbatches * num_layers * 3)}

    @override
    def degrees(self, choices: Choices) -> list[int]:
        length = choices.recipe.data.sequence_len
        if not choices.divide or length < _LONG:
            return [1]
        counts = divisors(choices.replica.num_devices)
        return [cp for cp in counts if cp <= _MAX_TRIED and (cp == 1 or length % (2 * cp) == 0)]

    @override
    def variants(self, base: ParallelConfig, choices: Choices) -> Iterator[ParallelConfig]:
        if base.cp == 1:
            yield base
            return
        yield base.model_copy(update={"cp_method": "allgather"})
        if choices.shape.num_heads // base.tp % base.cp == 0:  # ulysses divides the heads of a tensor-parallel rank
            yield base.model_copy(update={"cp_method": "ulysses"})


CONTEXT = _Context()
