"""Pipeline stages: their decoder layers, the microbatches that a schedule takes, its bubble, and what ranks hold.

With p processes in a pipeline, v stages on each and m microbatches in a step.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from echelon.errors import ConfigError, PlanError
from echelon.planner.degrees import join_words, nearest
from echelon.planner.layout import Layout
from echelon.planner.model_shape import ModelShape, divisors
from echelon.planner.pipeline_time import StageTime, waiting_share
from echelon.planner.plan import AdapterPlan, ParallelPlan
from echelon.recipe.training import ParallelConfig, PipelineSchedule

if TYPE_CHECKING:
    from echelon.recipe import Recipe

# Without `parallel.stages`: stages on each process of a pipeline.
_STAGES_PER_RANK = {"interleaved": 2}
# More microbatches make the bubble smaller, and the products of each smaller as well: a bubble of at most 20 %.
WANTED_MICROBATCHES = 4


def choose_stages(
    shape: ModelShape, num_ranks: int, schedule: PipelineSchedule, sequence_len: int, given: Sequence[int] = ()
) -> tuple[int, ...]:
    """Return the decoder layers of each stage: those given, or stages of about equal cost.

    Raises:
        ConfigError: the model has fewer layers than the schedule needs stages.
    """
    if given:
        return tuple(given)
    count = num_ranks * _STAGES_PER_RANK.get(schedule, 1)
    if count > shape.num_layers:
        raise ConfigError(
            f"parallel.schedule={schedule} puts {count // num_ranks} stages on each of the {num_ranks} processes of a "
            f"pipeline, but the model has only {shape.num_layers} decoder layers; use schedule: 1f1b, or a smaller pp."
        )
    return balance_layers(shape.num_layers, count, head_cost(shape, sequence_len))


def head_cost(shape: ModelShape, sequence_len: int) -> float:
    """Return what the head costs, in decoder layers, by FLOPs per token: those of `ModelShape.flops_per_token`.

    The embedding is a look-up and costs nothing.
    """
    active = shape.num_layer_parameters - shape.num_idle_parameters / shape.num_layers
    return 6.0 * shape.vocab_size * shape.hidden_size / (6.0 * active + 12.0 * shape.hidden_size * sequence_len)


def balance_layers(num_layers: int, count: int, last_cost: float) -> tuple[int, ...]:
    """Divide layers of equal cost among stages so that the slowest stage is as fast as possible.

    Layers that do not divide evenly go to late stages, which keep the activations of fewer microbatches.

    Args:
        last_cost: what the last stage computes beside its layers, in layers.
    """
    if count == 1:
        return (num_layers,)

    def slowest(last: int) -> float:
        return max(-(-(num_layers - last) // (count - 1)), last + last_cost)

    last = min(range(1, num_layers - count + 2), key=lambda size: (slowest(size), -size))
    least, more = divmod(num_layers - last, count - 1)
    return (*(least + (place >= count - 1 - more) for place in range(count - 1)), last)


def fits_schedule(schedule: PipelineSchedule, num_ranks: int, num_microbatches: int) -> bool:
    """Whether PyTorch's schedule takes this number of microbatches."""
    match schedule:
        case "gpipe":
            return True
        case "1f1b":
            return num_microbatches >= num_ranks
        case "interleaved" | "zero_bubble":
            return num_microbatches % max(1, num_microbatches // num_ranks) == 0


def pipeline_sizes(recipe: "Recipe", layout: Layout, sizes: list[int], fill: bool = False) -> list[int]:
    """Return the micro batch sizes of a pipeline to choose from, best first.

    The recipe may set the size or the number of microbatches. Otherwise the largest sizes that leave each process of
    the pipeline WANTED_MICROBATCHES; with fewer, processes would wait for a large part of a step.

    Args:
        sizes: that divide a rank's share of every step, largest first.
        fill: a resumed run, which takes the nearest size that fits.

    Raises:
        ConfigError: the recipe sets both.
        PlanError: the schedule does not take such a number of microbatches; the message has numbers that fit.
    """
    assert layout.schedule is not None
    given, wanted = recipe.train.micro_batch_size, layout.microbatches
    shares = [-(-size // layout.dp_size) for size in recipe.batches.sizes]
    if wanted is not None and given != "auto":
        raise ConfigError(
            f"parallel.microbatches={wanted} and train.micro_batch_size={given} both divide a step; remove one."
        )
    if wanted is not None and not fill:
        sizes = [_divide_shares(shares, wanted)]
    fitting = [size for size in sizes if _fits_all(layout, shares, size)]
    if not fitting:
        raise PlanError(_describe_misfit(layout, [share // size for share in shares for size in sizes]))
    enough = [size for size in fitting if min(shares) // size >= WANTED_MICROBATCHES * layout.pp]
    return enough or fitting[-1:]


def _fits_all(layout: Layout, shares: Sequence[int], size: int) -> bool:
    """Whether the schedule takes every step with this micro batch."""
    assert layout.schedule is not None
    return all(fits_schedule(layout.schedule, layout.pp, share // size) for share in shares)


def _divide_shares(shares: Sequence[int], wanted: int) -> int:
    """The sequences of each of the wanted microbatches of a rank's largest share, which must divide the others."""
    share = max(shares)
    if share % wanted:
        fits = join_words([str(n) for n in nearest(divisors(share), wanted)])
        raise PlanError(
            f"parallel.microbatches={wanted} does not divide the {share} sequences that a rank gets in a step; use "
            f"{fits}."
        )
    size = share // wanted
    if failing := [each for each in shares if each % size]:
        raise PlanError(
            f"parallel.microbatches={wanted} makes microbatches of {size} sequences, which do not divide the "
            f"{failing[0]} that a rank gets in a step of train.batch_ramp; use more microbatches, or another ramp."
        )
    return size


def _describe_misfit(layout: Layout, counts: Iterable[int]) -> str:
    assert layout.schedule is not None
    count = next(each for each in counts if not fits_schedule(layout.schedule, layout.pp, each))
    near = [n for n in range(1, count + layout.pp + 1) if fits_schedule(layout.schedule, layout.pp, n)]
    words = [str(n) for n in [*[n for n in near if n < count][-1:], *[n for n in near if n > count][:1]]]
    return (
        f"parallel.schedule={layout.schedule} with parallel.pp={layout.pp} does not take a step of {count} "
        f"microbatches; use {join_words(words)} (train.micro_batch_size or parallel.microbatches), a larger batch, or "
        "schedule: gpipe."
    )


def check_pipeline(recipe: "Recipe", layout: Layout) -> None:
    """Raise ConfigError for what does not work in a pipeline, with the reason and what does."""
    if layout.pp == 1:
        return
    parallel, train = recipe.parallel, recipe.train
    assert isinstance(parallel, ParallelConfig)
    splits = layout.schedule == "zero_bubble"
    refused = (
        (recipe.objective.name == "dpo", "objective.name=dpo", "its reference needs all layers on each process"),
        (recipe.adapter.init == "pissa", "adapter.init=pissa", "it broadcasts each layer from the first process"),
        (bool(recipe.model.new_tokens), "model.new_tokens", "their rows would be on two stages"),
        (parallel.reduce_gradients == "each", "parallel.reduce_gradients=each",
         "PyTorch's schedules add up the gradients of all microbatches first"),
        (layout.reshard_after_forward, "parallel.reshard_after_forward=true",
         "PyTorch's schedules keep gathered parameters for a whole step"),
        (train.activation_offloading, "train.activation_offloading=true",
         "a stage keeps the activations of several microbatches at once"),
        (splits and train.compile is True, "train.compile=true with parallel.schedule=zero_bubble",
         "PyTorch cannot split the backward pass of compiled layers; other schedules do not need it"),
    )  # fmt: skip
    for applies, what, reason in refused:
        if applies:
            raise ConfigError(f"{what} does not work with parallel.pp={layout.pp}: {reason}; change it, or use pp: 1.")


def describe_pipeline(shape: ModelShape, plan: ParallelPlan, sequence_len: int) -> list[str]:
    """Return the line about the stages of a plan and its bubble; none without a pipeline."""
    if plan.schedule is None:
        return []
    share = predict_waiting(shape, plan, sequence_len)
    return [
        f"pipeline: stages of {join_words([str(n) for n in plan.stages], last='and')} layers, "
        f"{plan.num_microbatches} microbatches in a step; by its schedule {plan.schedule}, the processes wait for "
        f"others in {share:.1%} of a step"
    ]


def predict_waiting(shape: ModelShape, plan: ParallelPlan, sequence_len: int) -> float:
    """Return the share of a step in which a process of a pipeline waits, the mean over all; 0.0 without a pipeline.

    The schedule is simulated. A stage takes as long as its layers, the last one also as its head, by their FLOPs;
    forward passes, gradients of activations and gradients of weights take equally long. With equal stages this is the
    formula of the schedule's paper: (p - 1) / (v m + p - 1), for zero bubble (p - 1) / (3 v m + p - 1).
    """
    if plan.schedule is None:
        return 0.0
    costs = [float(count) for count in plan.stages]
    costs[-1] += head_cost(shape, sequence_len)
    return waiting_share(plan.schedule, plan.pp, [StageTime(each, each, each) for each in costs], plan.num_microbatches)


def microbatches_kept(
    schedule: PipelineSchedule, num_ranks: int, rank: int, stages_per_rank: int, num_microbatches: int
) -> int:
    """Return how many microbatches each stage of a process keeps the activations of at once, at most.

    Args:
        rank: of the process in its pipeline.
    """
    behind = num_ranks - 1 - rank
    match schedule:
        case "gpipe":
            kept = num_microbatches
        case "1f1b":
            kept = behind + 1
        case "interleaved":
            per_round = num_microbatches // max(1, num_microbatches // num_ranks)
            kept = -(-((stages_per_rank - 1) * per_round + 2 * behind + 1) // stages_per_rank)
        case "zero_bubble":
            kept = num_ranks  # weights' gradients wait until the others are sent
    return min(kept, num_microbatches)


def passes_deferred(schedule: PipelineSchedule, rank: int, stages_per_rank: int, num_microbatches: int) -> int:
    """Return how many backward passes of a process wait at once for the gradients of their weights.

    Only `zero_bubble` computes these later than the gradients of activations: rank 0 directly after them, every
    following rank one microbatch later than the rank before. The first stage has no gradients of activations to send.
    """
    if schedule != "zero_bubble" or (rank == 0 and stages_per_rank == 1):
        return 0
    return min(rank + 1, stages_per_rank * num_microbatches)


@dataclass(frozen=True)
class StageLoad:
    """What one rank of a pipeline has to hold.

    shape: the model with this rank's layers alone. adapter: the part of the plan's adapter there. num_kept: the
    microbatches whose activations are kept at once. num_deferred: the backward passes that wait at once for the
    gradients of their weights, each through one of the rank's `num_stages` stages. has_head: whether the loss is
    computed here. received_bytes: of the buffers for hidden states and their gradients.
    """

    shape: ModelShape
    adapter: AdapterPlan | None
    num_kept: int = 1
    num_deferred: int = 0
    num_stages: int = 1
    has_head: bool = True
    received_bytes: int = 0


def stage_loads(shape: ModelShape, plan: ParallelPlan, hidden_bytes: int) -> list[StageLoad]:
    """Return the load of each rank of a pipeline; without one, a single load with the whole model.

    Args:
        hidden_bytes: of the hidden states of one microbatch.
    """
    if plan.schedule is None:
        return [StageLoad(shape, plan.adapter)]
    per_rank, loads = len(plan.stages) // plan.pp, []
    for rank in range(plan.pp):
        is_first, is_last = rank == 0, rank == plan.pp - 1
        num_layers = sum(plan.stages[rank :: plan.pp])
        ends = 2 * per_rank - is_first - is_last  # borders at which hidden states arrive, and gradients
        loads.append(
            StageLoad(
                _stage_shape(shape, num_layers, is_first, is_last),
                None if plan.adapter is None else _stage_adapter(plan.adapter, num_layers / shape.num_layers),
                microbatches_kept(plan.schedule, plan.pp, rank, per_rank, plan.num_microbatches),
                passes_deferred(plan.schedule, rank, per_rank, plan.num_microbatches),
                per_rank,
                is_last,
                ends * plan.num_microbatches * hidden_bytes,
            )
        )
    return loads


@lru_cache(maxsize=1024)
def _stage_shape(shape: ModelShape, num_layers: int, is_first: bool, is_last: bool) -> ModelShape:
    """The shape of some layers, with the look-up tables in front or the head behind; a tied head is on both ends."""
    part = num_layers / shape.num_layers
    tables = shape.num_embedding_parameters + shape.num_position_parameters
    behind = shape.num_parameters - shape.num_layers * shape.num_layer_parameters - tables
    head = behind + (shape.num_embedding_parameters if shape.tied_embeddings else 0)
    has_table = is_first or (is_last and shape.tied_embeddings)
    return replace(
        shape,
        num_layers=num_layers,
        num_parameters=num_layers * shape.num_layer_parameters + is_first * tables + is_last * head,
        num_embedding_parameters=shape.num_embedding_parameters if has_table else 0,
        num_position_parameters=shape.num_position_parameters if is_first else 0,
        linears=tuple(replace(each, count=round(each.count * part)) for each in shape.linears),
        experts=tuple(replace(each, count=round(each.count * part)) for each in shape.experts),
        num_idle_parameters=round(shape.num_idle_parameters * part),
    )


def keep_heaviest(loads: Iterable[StageLoad]) -> list[StageLoad]:
    """Of ranks with the same part of the model, the one that keeps the activations of the most microbatches."""
    most: dict[tuple[int, bool, int], StageLoad] = {}
    for each in loads:
        key = (id(each.shape), each.has_head, each.received_bytes)  # equal stages have the same shape object
        if key not in most or most[key].num_kept < each.num_kept:
            most[key] = each
    return list(most.values())


def _stage_adapter(adapter: AdapterPlan, part: float) -> AdapterPlan:
    """The share of an adapter in this part of the layers; what is trained in full outside of them counts everywhere."""
    inside = adapter.num_trained_parameters - adapter.num_saved_outside
    return replace(
        adapter,
        num_trained_parameters=round(inside * part) + adapter.num_saved_outside,
        num_frozen_parameters=round(adapter.num_frozen_parameters * part),
        num_quantized_parameters=round(adapter.num_quantized_parameters * part),
        num_saved_inside=round(adapter.num_saved_inside * part),
        num_adapted_experts=round(adapter.num_adapted_experts * part),
        num_quantized_experts=round(adapter.num_quantized_experts * part),
    )
