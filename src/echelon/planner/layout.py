"""The layout of a strategy from `parallel`, a name or a mapping of degrees, and the batch arithmetic over it.

A layout is a plan before the micro batch is chosen and without the policies of its recipe.
"""

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from echelon.ground.errors import ConfigError, PlanError
from echelon.planner.axes.data import choose_switches, name_layout, name_strategy
from echelon.planner.axes.table import AXES
from echelon.planner.hardware.accelerators import Cluster
from echelon.planner.model_shape import ModelShape, divisors, nearest
from echelon.planner.plan import AXIS_ORDER, ParallelPlan
from echelon.recipe.key_limits import join_words
from echelon.recipe.training import AxisName, ParallelConfig

if TYPE_CHECKING:
    from echelon.recipe.document import Recipe

# Longer microbatches would only use more memory: the products are large enough, and what a microbatch costs beside them
# is small.
MICRO_BATCH_TOKENS = {"cuda": 32768, "cpu": 8192}


def find_replica(recipe: "Recipe", cluster: Cluster) -> Cluster:
    """The part of a cluster that one replica has. Raises PlanError, with numbers that fit, if they do not divide it."""
    replicas, count = recipe.sync.replicas, cluster.num_devices
    if count % replicas:
        fits = join_words([str(n) for n in (count // replicas * replicas, (count // replicas + 1) * replicas) if n])
        others = [str(n) for n in nearest(divisors(count), replicas) if n > 1]
        instead = f", or use {join_words(others)} replicas" if others else ""
        raise PlanError(
            f"sync.replicas={replicas} does not divide {count} process{'' if count == 1 else 'es'}; run {fits} "
            f"processes{instead}."
        )
    size = count // replicas
    return replace(cluster, num_devices=size, devices_per_node=math.gcd(size, cluster.devices_per_node))


def build_layout(
    parallel: str | ParallelConfig, cluster: Cluster, shape: ModelShape, sequence_len: int
) -> ParallelPlan:
    """The layout of a strategy name or a mapping of degrees on a cluster, for a model and the length of its sequences.

    Raises PlanError if the degrees do not fit its processes, ConfigError for values that fit no cluster.
    """
    if isinstance(parallel, str):
        return replace(name_layout(parallel, cluster), sequence_len=sequence_len)
    for axis in AXES:
        axis.check_options(parallel, shape)
    if parallel.cpu_offload and cluster.kind == "cpu":
        raise PlanError("parallel.cpu_offload=true: on CPUs everything is in host memory already; omit it.")
    offload = parallel.cpu_offload
    plan = ParallelPlan("", sequence_len=sequence_len, cpu_offload=offload, prefetch=parallel.prefetch)
    for axis in AXES:
        plan = replace(plan, **axis.settings(parallel, cluster.num_devices, shape, sequence_len))
    reshard, reduce = choose_switches(parallel, plan)
    plan = replace(plan, reshard_after_forward=reshard, reduce_gradients=reduce, order=_resolve_order(parallel, plan))
    divided = [axis.name for axis in AXES[:0:-1] if getattr(plan, axis.name) > 1]
    return replace(plan, strategy=name_strategy(plan, divided))


def _resolve_order(parallel: ParallelConfig, plan: ParallelPlan) -> tuple[AxisName, ...]:
    """All axes, outermost first. Raises ConfigError for an order that repeats an axis or leaves out one above 1."""
    if parallel.order is None:
        return AXIS_ORDER
    shown = f"parallel.order=[{', '.join(parallel.order)}]"
    if len(set(parallel.order)) < len(parallel.order):
        raise ConfigError(f"{shown} names an axis twice; name each once.")
    absent = [axis for axis in AXIS_ORDER if axis not in parallel.order]
    missing = [axis for axis in absent if getattr(plan, axis) > 1]
    if missing:
        raise ConfigError(f"{shown} leaves out {join_words(missing, 'and')}; name every axis with a degree above 1.")
    return (*absent, *parallel.order)


def check_batch(recipe: "Recipe", layout: ParallelPlan, num_samples: int | None, fill: bool = False) -> int:
    """Sequences per rank of a full global batch; with `fill`, including padding sequences.

    Raises PlanError, naming batches and process counts that divide, for that batch and for every size of a ramp.
    """
    batch: int = recipe.global_batch_size
    dp_size, ranks = layout.num_readers, _describe_ranks(layout)
    if num_samples is not None and num_samples < dp_size:
        raise PlanError(
            f"data.train has {num_samples} samples of data.sequence_len={recipe.data.sequence_len} tokens, fewer than "
            f"the {ranks} that share them; use at most {num_samples * layout.num_peers} processes, more text or "
            "shorter sequences."
        )
    if fill:
        return -(-batch // dp_size)
    if batch % dp_size == 0:
        _check_ramp(recipe, layout)
        return batch // dp_size
    multiples = [multiple for multiple in (batch // dp_size * dp_size, (batch // dp_size + 1) * dp_size) if multiple]
    processes = join_words([str(n * layout.num_peers) for n in nearest(divisors(batch), dp_size)])
    if recipe.train.global_batch_tokens is not None:
        length = recipe.data.sequence_len
        shown = f"train.global_batch_tokens={recipe.train.global_batch_tokens} ({batch} sequences)"
        fits = join_words([f"{multiple * length} ({multiple} sequences)" for multiple in multiples])
    else:
        shown, fits = f"train.global_batch_size={batch}", join_words([str(multiple) for multiple in multiples])
    rule = "is less than one sequence for each of" if batch < dp_size else "does not divide by"
    raise PlanError(f"{shown} {rule} the {ranks}; use {fits}, or {processes} processes.")


def _describe_ranks(layout: ParallelPlan) -> str:
    return f"{layout.num_readers} ranks" if layout.num_peers == 1 else f"{layout.num_readers} data-parallel ranks"


def _check_ramp(recipe: "Recipe", layout: ParallelPlan) -> None:
    """Raise PlanError unless every size of the ramp divides, naming those that do not and increments that fit."""
    dp_size = layout.num_readers
    failing = [size for size in recipe.batches.sizes if size % dp_size]
    ramp = recipe.train.batch_ramp
    if ramp is None or not failing:
        return
    size = recipe.global_batch_size
    unit = recipe.data.sequence_len if recipe.train.global_batch_tokens is not None else 1
    start = ramp.start // unit
    starts = [n for n in (start // dp_size * dp_size, -(-start // dp_size) * dp_size) if 0 < n < size]
    # The whole batch divides: so does every size, if the first one and the increment do.
    ways = [
        f"from: {first * unit} with an increment of "
        + join_words([str(n * dp_size * unit) for n in divisors((size - first) // dp_size)[:4]])
        for first in dict.fromkeys(starts)
    ]
    remedy = ", or ".join(ways) if ways else "one global batch"
    counts = nearest(divisors(math.gcd(*recipe.batches.sizes)), dp_size)
    processes = join_words([str(n * layout.num_peers) for n in counts])
    raise PlanError(
        f"train.batch_ramp: steps of {_join_some(failing)} sequences do not divide by the "
        f"{_describe_ranks(layout)}; use {remedy}, or {processes} processes."
    )


def micro_batch_sizes(recipe: "Recipe", dp_size: int, fill: bool = False) -> list[int]:
    """Micro batch sizes to choose from, largest first: the one given, or all that divide a rank's share of every step.

    Raises PlanError naming the nearest sizes that divide; with `fill`, the next smaller one is taken instead.
    """
    setting = recipe.train.micro_batch_size
    shares = [-(-size // dp_size) for size in recipe.batches.sizes]
    fitting = divisors(math.gcd(*shares))
    if setting == "auto":
        return fitting[::-1]
    if fill:
        return [max(size for size in fitting if size <= setting)]
    failing = [share for share in shares if share % setting]
    if failing:
        fits = join_words([str(n) for n in nearest(fitting, setting, each_side=1)])
        ranks = "the one rank" if dp_size == 1 else f"each of the {dp_size} ranks"
        raise PlanError(
            f"train.micro_batch_size={setting} does not divide the {_join_some(failing)} sequences "
            f"{ranks} gets in a step; use {fits}."
        )
    return [setting]


def _join_some(numbers: list[int]) -> str:
    """The first three numbers, and how many more there are."""
    words = [str(number) for number in numbers]
    return join_words(words if len(words) <= 4 else [*words[:3], f"{len(words) - 3} more"], last="and")
