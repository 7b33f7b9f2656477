"""Pipeline parallelism (`pp`): the ranks of a group compute different layers, each for one microbatch after the other.

With p processes in a pipeline, v stages on each and m microbatches in a step.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from echelon.ground.errors import ConfigError, PlanError
from echelon.ground.sizes import join_words
from echelon.planner.axes.axis import Axis, Choices, RankLoad, Sender, find_group, nearest
from echelon.planner.axes.pipeline_schedule import (
    StageTime,
    bubble_seconds,
    fits_schedule,
    microbatches_kept,
    passes_deferred,
    shared_seconds,
    waiting_share,
)
from echelon.planner.layer_time import LayerTime, Step
from echelon.planner.model_shape import ModelShape, divisors
from echelon.planner.plan import AdapterPlan, ParallelPlan
from echelon.recipe.training import ParallelConfig, PipelineSchedule

if TYPE_CHECKING:
    from echelon.recipe.document import Recipe

# Without `parallel.stages`: stages on each process of a pipeline.
_STAGES_PER_RANK = {"interleaved": 2}
# Schedules under which a process may have several stages.
_SEVERAL_STAGES = ("interleaved", "zero_bubble")
# More microbatches make the bubble smaller, and the products of each smaller as well: a bubble of at most 20 %.
WANTED_MICROBATCHES = 4
# What a search tries: `gpipe` waits as long as `1f1b` and keeps more.
_SCHEDULES: tuple[PipelineSchedule, ...] = ("1f1b", "interleaved", "zero_bubble")
_MAX_TRIED = 16


class _Pipeline(Axis):
    name = "pp"

    @override
    def check_options(self, parallel: ParallelConfig, shape: ModelShape) -> None:
        pp, stages, num_layers = parallel.pp, parallel.stages, shape.num_layers
        if pp > num_layers:
            raise ConfigError(
                f"parallel.pp={pp} is more than the {num_layers} decoder layers of the model; use {num_layers} or less."
            )
        if stages is None:
            return
        if sum(stages) != num_layers:
            raise ConfigError(
                f"parallel.stages={list(stages)} has {sum(stages)} layers, but the model has {num_layers}; the numbers "
                f"must add up to {num_layers}."
            )
        if len(stages) != pp and (parallel.schedule not in _SEVERAL_STAGES or len(stages) % pp):
            raise ConfigError(
                f"parallel.stages={list(stages)} has {len(stages)} stages for parallel.pp={pp}; give {pp} of "
                f"them, or a multiple of it with schedule {join_words(_SEVERAL_STAGES)}."
            )

    @override
    def settings(self, parallel: ParallelConfig, world: int, shape: ModelShape, sequence_len: int) -> dict[str, Any]:
        if parallel.pp == 1:
            return {}
        schedule = parallel.schedule or "1f1b"
        stages = parallel.stages or choose_stages(shape, parallel.pp, schedule, sequence_len)
        return {"pp": parallel.pp, "schedule": schedule, "stages": stages}

    @override
    def check(self, recipe: "Recipe", shape: ModelShape, plan: ParallelPlan) -> None:
        if plan.pp > 1:
            _check_settings(recipe, plan)

    @override
    def micro_batch_sizes(self, recipe: "Recipe", plan: ParallelPlan, sizes: list[int], fill: bool) -> list[int]:
        # The recipe may set the size or the number of microbatches. Otherwise the largest sizes that leave each process
        # WANTED_MICROBATCHES; with fewer, processes would wait for a large part of a step. A resumed run takes the
        # nearest size that fits.
        if plan.schedule is None:
            return sizes
        batch, count = recipe.train.micro_batch_size, getattr(recipe.parallel, "microbatches", None)
        shares = [-(-size // plan.num_readers) for size in recipe.batches.sizes]
        if count is not None and batch != "auto":
            raise ConfigError(
                f"parallel.microbatches={count} and train.micro_batch_size={batch} both divide a step; remove one."
            )
        if count is not None and not fill:
            sizes = [_divide_shares(shares, count)]
        fitting = _keep_fitting(plan, shares, sizes)
        enough = [size for size in fitting if min(shares) // size >= WANTED_MICROBATCHES * plan.pp]
        return enough or fitting[-1:]

    @override
    def takes(self, plan: ParallelPlan, num_microbatches: int) -> bool:
        return plan.schedule is None or fits_schedule(plan.schedule, plan.pp, num_microbatches)

    @override
    def describe(self, shape: ModelShape, plan: ParallelPlan) -> list[str]:
        if plan.schedule is None:
            return []
        share = predict_waiting(shape, plan)
        return [
            f"pipeline: stages of {join_words([str(n) for n in plan.stages], last='and')} layers, "
            f"{plan.num_microbatches} microbatches in a step; by its schedule {plan.schedule}, the processes wait for "
            f"others in {share:.1%} of a step"
        ]

    @override
    def sent_bytes(self, sender: Sender) -> dict[str, float]:
        plan, rank = sender.plan, sender.rank
        if plan.pp == 1:
            return {}
        ends = (rank == 0) + (rank == plan.pp - 1)
        return {"pp": (2 * plan.stages_per_rank - ends) * plan.num_microbatches * sender.hidden}

    @override
    def meetings(self, plan: ParallelPlan, num_layers: int) -> dict[str, tuple[int, int]]:
        return {"pp": (plan.pp, 2 * plan.num_microbatches * plan.stages_per_rank)}

    @override
    def degrees(self, choices: Choices) -> list[int]:
        most = min(_MAX_TRIED, choices.shape.num_layers) if choices.divide else 1
        return [pp for pp in divisors(choices.replica.num_devices) if pp <= most]

    @override
    def variants(self, base: ParallelConfig, choices: Choices) -> Iterator[ParallelConfig]:
        if base.pp == 1:
            yield base
            return
        yield from (base.model_copy(update={"schedule": schedule}) for schedule in _SCHEDULES)


PIPELINE = _Pipeline()


def choose_stages(shape: ModelShape, num_ranks: int, schedule: PipelineSchedule, sequence_len: int) -> tuple[int, ...]:
    """Return the decoder layers of each stage, of about equal cost.

    Raises:
        ConfigError: the model has fewer layers than the schedule needs stages.
    """
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
    return (*(least + (stage >= count - 1 - more) for stage in range(count - 1)), last)


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
    if failing := [share for share in shares if share % size]:
        raise PlanError(
            f"parallel.microbatches={wanted} makes microbatches of {size} sequences, which do not divide the "
            f"{failing[0]} that a rank gets in a step of train.batch_ramp; use more microbatches, or another ramp."
        )
    return size


def _keep_fitting(plan: ParallelPlan, shares: Sequence[int], sizes: list[int]) -> list[int]:
    """The sizes with which the schedule takes every step. Raises PlanError with numbers that fit if there are none."""
    schedule, pp = plan.schedule, plan.pp
    fitting = [size for size in sizes if all(PIPELINE.takes(plan, share // size) for share in shares)]
    if fitting:
        return fitting
    counts = [share // size for share in shares for size in sizes]
    count = next(count for count in counts if not PIPELINE.takes(plan, count))
    near = nearest([n for n in range(1, count + pp + 1) if PIPELINE.takes(plan, n)], count, each_side=1)
    fits = join_words([str(n) for n in near])
    raise PlanError(
        f"parallel.schedule={schedule} with parallel.pp={pp} does not take a step of {count} microbatches; use {fits} "
        "(train.micro_batch_size or parallel.microbatches), a larger batch, or schedule: gpipe."
    )


def _check_settings(recipe: "Recipe", plan: ParallelPlan) -> None:
    parallel, train = recipe.parallel, recipe.train
    assert isinstance(parallel, ParallelConfig)
    splits = plan.schedule == "zero_bubble"
    refused = (
        (recipe.objective.scores_texts, f"objective.name={recipe.objective.name}",
         "the head that scores texts is not divided into stages"),
        (recipe.objective.needs_reference, f"objective.name={recipe.objective.name}",
         "its reference needs all layers on each process"),
        (recipe.objective.teacher_in_memory, f"objective.teacher={recipe.objective.teacher} without objective.top_k",
         "the teacher needs all layers on each process"),
        (recipe.adapter.init == "pissa", "adapter.init=pissa", "it broadcasts each layer from the first process"),
        (bool(recipe.model.new_tokens), "model.new_tokens", "their rows would be on two stages"),
        (parallel.reduce_gradients == "each", "parallel.reduce_gradients=each",
         "PyTorch's schedules add up the gradients of all microbatches first"),
        (plan.reshard_after_forward, "parallel.reshard_after_forward=true",
         "PyTorch's schedules keep gathered parameters for a whole step"),
        (bool(train.activation_offloading), "train.activation_offloading=true",
         "a stage keeps the activations of several microbatches at once"),
        (splits and train.compile is True, "train.compile=true with parallel.schedule=zero_bubble",
         "PyTorch cannot split the backward pass of compiled layers; other schedules do not need it"),
    )  # fmt: skip
    for applies, what, reason in refused:
        if applies:
            raise ConfigError(f"{what} does not work with parallel.pp={plan.pp}: {reason}; change it, or use pp: 1.")


def predict_waiting(shape: ModelShape, plan: ParallelPlan) -> float:
    """Return the share of a step in which a process of a pipeline waits, the mean over all; 0.0 without a pipeline.

    The schedule is simulated. A stage takes as long as its layers, the last one also as its head, by their FLOPs;
    forward passes, gradients of activations and gradients of weights take equally long. With equal stages this is the
    formula of the schedule's paper: (p - 1) / (v m + p - 1), for zero bubble (p - 1) / (3 v m + p - 1).
    """
    if plan.schedule is None:
        return 0.0
    costs = [float(count) for count in plan.stages]
    costs[-1] += head_cost(shape, plan.sequence_len)
    return waiting_share(plan.schedule, plan.pp, [StageTime(cost, cost, cost) for cost in costs], plan.num_microbatches)


def rank_layers(plan: ParallelPlan, num_layers: int) -> list[int]:
    """The number of layers of each rank of a pipeline."""
    return [sum(plan.stages[rank :: plan.pp]) for rank in range(plan.pp)] if plan.stages else [num_layers]


def share_outside(step: Step, num_layers: int) -> float:
    """The parameters outside of the layers, which the ranks of a pipeline have by turns, for each layer of a rank."""
    outside = (step.part.num_parameters - step.shape.num_layers * step.part.num_layer_parameters) / step.plan.pp
    return outside / max(1, num_layers)


def border_seconds(step: Step) -> float:
    """Exposed sending of hidden states and their gradients, of one rank of a pipeline and one microbatch."""
    plan = step.plan
    if plan.pp == 1:
        return 0.0
    share = plan.sequence_ranks if step.software.divides_borders else 1
    sent = find_group(plan, step.cluster, ("pp",)).send(step.hidden_bytes / share)
    return 2 * plan.stages_per_rank * sent * (1 - step.rates.overlap)


def time_stages(step: Step, layer: LayerTime, head: LayerTime, sent: float, border: float) -> Iterator[StageTime]:
    """The times of a microbatch in each stage of a pipeline.

    Args:
        sent: seconds in which a layer sends, both ways.
        border: seconds that the stages of a rank take beyond their layers, forward and backward.
    """
    stages = step.plan.stages
    ends, last = border * step.plan.pp / max(1, len(stages)), len(stages) - 1
    for number, count in enumerate(stages):
        behind = head if number == last else LayerTime()
        forward = count * (layer.forward + sent / 2) + behind.forward + ends / 2
        weights = count * layer.weights + behind.weights
        total = count * (layer.total + sent) + behind.total + ends
        yield StageTime(forward, total - forward - weights, weights)


def waiting_seconds(step: Step, stages: Iterator[StageTime]) -> tuple[float, float]:
    """(seconds that the busiest rank of a pipeline waits, the share of the step that is left where ranks share cores).

    A rank that waits leaves its part of a core to others.
    """
    plan, sharing = step.plan, step.rates.sharing
    if plan.schedule is None:
        return 0.0, 1.0
    pipeline = (plan.schedule, plan.pp, list(stages), plan.num_microbatches)
    bubble = bubble_seconds(*pipeline)
    if sharing == 1:
        return bubble, 1.0
    return bubble, shared_seconds(*pipeline, sharing) / shared_seconds(*pipeline, 1.0)


def list_loads(shape: ModelShape, plan: ParallelPlan, hidden_bytes: int) -> list[RankLoad]:
    """Return the load of each rank of a pipeline; without one, a single load with the whole model.

    Args:
        hidden_bytes: of the hidden states of one microbatch.
    """
    if plan.schedule is None:
        return [RankLoad(shape, plan.adapter)]
    per_rank, loads = plan.stages_per_rank, []
    for rank in range(plan.pp):
        is_first, is_last = rank == 0, rank == plan.pp - 1
        num_layers = sum(plan.stages[rank :: plan.pp])
        ends = 2 * per_rank - is_first - is_last  # borders at which hidden states arrive, and gradients
        loads.append(
            RankLoad(
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
        linears=tuple(replace(linear, count=round(linear.count * part)) for linear in shape.linears),
        experts=tuple(replace(expert, count=round(expert.count * part)) for expert in shape.experts),
        num_idle_parameters=round(shape.num_idle_parameters * part),
    )


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
