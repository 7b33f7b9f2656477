"""Expert parallelism (`ep`): ranks among those that shard each hold some experts, and send each other their tokens.

Here are also the formulas for experts that tensor parallelism divides: its ranks hold whole experts, too.
"""

from collections.abc import Iterator
from dataclasses import replace
from math import gcd, prod
from typing import TYPE_CHECKING

from typing_extensions import override

from echelon.ground.errors import ConfigError, PlanError
from echelon.ground.sizes import join_words
from echelon.planner.axes.axis import Axis, Choices, Sender, find_group, nearest, ring_share
from echelon.planner.hardware.accelerators import DeviceKind
from echelon.planner.layer_time import LayerTime, Step
from echelon.planner.model_shape import ModelShape, divisors
from echelon.planner.plan import DTYPE_BYTES, SHARDING, ParallelPlan
from echelon.recipe.training import ParallelConfig

if TYPE_CHECKING:
    from echelon.recipe.document import Recipe


class _Expert(Axis):
    name = "ep"

    @override
    def check_options(self, parallel: ParallelConfig, shape: ModelShape) -> None:
        if parallel.ep > 1 and parallel.dp_shard is None:
            raise ConfigError(
                f"parallel.ep={parallel.ep} needs parallel.dp_shard: the processes that share the experts are among "
                f"those that shard the model; set for example dp_shard: {parallel.ep}."
            )

    @override
    def check(self, recipe: "Recipe", shape: ModelShape, plan: ParallelPlan) -> None:
        ep, tp = plan.ep, plan.tp
        if ep > 1:
            _check_degree(shape, plan)
        elif tp == 1 or not shape.experts:
            return
        key, ranks = f"parallel.ep={ep}" if ep > 1 else f"parallel.tp={tp}", plan.num_shards // ep
        for weight in shape.experts:
            if weight.rows % ranks:
                raise ConfigError(
                    f"{key} leaves {ranks} processes to share each expert, which do not divide the {weight.rows} "
                    f"rows of {weight.name}; use a larger {'ep' if ep > 1 else 'tp'}, or fewer processes in dp_shard."
                )
        adapter = recipe.adapter
        field = "target_parameters" if adapter.target_parameters else None
        field = "quantize_experts" if adapter.quantize_experts else field
        if field is not None:
            raise ConfigError(
                f"{key} does not work with adapter.{field}: PEFT wraps the experts and replaces their weights in each "
                f"forward pass; remove adapter.{field} to adapt linear layers alone, or {key.partition('=')[0]}."
            )

    @override
    def count_absent(self, shape: ModelShape, plan: ParallelPlan) -> int:
        return shape.num_layer_experts - shape.num_layer_experts // plan.ep

    @override
    def buffer_bytes(self, shape: ModelShape, plan: ParallelPlan, tokens: int, kind: DeviceKind) -> int:
        if plan.ep == plan.tp == 1:
            return 0
        rows = tokens * shape.num_chosen_experts  # sent, and as many received, if the load is even
        return 2 * rows * shape.hidden_size * DTYPE_BYTES[plan.precision.compute]

    @override
    def result_bytes(self, shape: ModelShape, plan: ParallelPlan, number: int) -> float:
        share, _ = shape.expert_widths
        return 0.0 if plan.ep == 1 else 2 * share * shape.num_chosen_experts * shape.hidden_size * number

    @override
    def layer_seconds(self, step: Step, layer: LayerTime) -> float:
        plan, shape = step.plan, step.shape
        share, _ = shape.expert_widths
        if plan.ep == 1 or not share:
            return 0.0
        group = find_group(plan, step.cluster, SHARDING)
        group = replace(group, size=plan.ep, local=min(plan.ep, group.local))
        # the rows of a microbatch to their experts and back, forward and backward
        return share * 4 * group.all_to_all(step.hidden_bytes * shape.num_chosen_experts)

    @override
    def sent_bytes(self, sender: Sender) -> dict[str, float]:
        plan, part = sender.plan, sender.part
        experts, _ = part.expert_widths
        rows = sender.tokens * part.num_chosen_experts * ring_share(plan.ep)
        times = plan.num_microbatches * sender.layers * experts * (4 + 2 * sender.again)
        return {"ep": times * rows * part.hidden_size * sender.number}

    @override
    def meetings(self, plan: ParallelPlan, num_layers: int) -> dict[str, tuple[int, int]]:
        return {"ep": (plan.ep, plan.num_microbatches * num_layers * 4)}

    @override
    def variants(self, base: ParallelConfig, choices: Choices) -> Iterator[ParallelConfig]:
        experts = choices.shape.experts
        shards = prod(getattr(base, axis) for axis in SHARDING)
        degrees = divisors(gcd(shards, *(weight.num_experts for weight in experts))) if experts else [1]
        yield from (base.model_copy(update={"ep": ep}) for ep in degrees)


EXPERT = _Expert()


def _check_degree(shape: ModelShape, plan: ParallelPlan) -> None:
    """Raise ConfigError or PlanError unless `ep` divides the experts and the processes that share them."""
    ep = plan.ep
    if plan.num_shards % ep:
        fits = join_words([str(n) for n in nearest(divisors(plan.num_shards), ep)])
        shown = " x ".join(f"{axis} {getattr(plan, axis)}" for axis in SHARDING)
        raise PlanError(f"parallel.ep={ep} does not divide {shown} = {plan.num_shards}; use ep = {fits}.")
    if not shape.experts:
        raise ConfigError(
            f"parallel.ep={ep}: {shape.model_type} has no experts in stacked weights [experts, rows, columns], so "
            "there is nothing to divide; remove parallel.ep."
        )
    num_experts = min(weight.num_experts for weight in shape.experts)
    fits_experts = [degree for degree in divisors(plan.num_shards) if num_experts % degree == 0]
    if num_experts % ep:
        raise ConfigError(
            f"parallel.ep={ep} does not divide the {num_experts} experts of the model; use ep = "
            f"{join_words([str(degree) for degree in nearest(fits_experts, ep)])}."
        )
