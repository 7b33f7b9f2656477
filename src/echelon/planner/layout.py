"""The layout of a strategy from `parallel`, a name or a mapping of degrees; its batches; and what a search tries.

A layout is a plan before the micro batch is chosen and without the policies of its recipe. A search tries layouts, and
for each of them micro batches and ways to keep activations. Left out is what cannot be better by this planner's
formulas; each axis says what it leaves out. `parallel.prefetch` above PyTorch's one layer takes as long and gathers
more.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import gcd, prod
from typing import TYPE_CHECKING

from echelon.ground.errors import ConfigError, PlanError
from echelon.ground.sizes import join_words
from echelon.planner.axes.axis import Axis, Choices, nearest
from echelon.planner.axes.data import choose_switches, list_switches, name_layout, name_strategy
from echelon.planner.axes.expert import EXPERT
from echelon.planner.axes.table import AXES, MODEL_AXES
from echelon.planner.families import FAMILIES
from echelon.planner.hardware.accelerators import Cluster, DeviceKind
from echelon.planner.model_shape import ModelShape, divisors
from echelon.planner.plan import AXIS_ORDER, ParallelPlan
from echelon.recipe.names import NATIVE, OPTIMIZERS
from echelon.recipe.synchronization import EVERY_STEP
from echelon.recipe.training import AxisName, ParallelConfig

if TYPE_CHECKING:
    from echelon.recipe.document import Recipe

# Longer microbatches would only use more memory: the products are large enough, and what a microbatch costs beside them
# is small.
MICRO_BATCH_TOKENS = {"cuda": 32768, "cpu": 8192}
_LARGEST = 3  # micro batches of each layout that are tried, beside the smallest

DIVIDED = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3")
"""The mixtures whose experts `parallel: auto` divides."""


def find_replica(recipe: "Recipe", cluster: Cluster) -> Cluster:
    """The part of a cluster that one replica has. Raises PlanError, with numbers that fit, if they do not divide it."""
    replicas, count = recipe.num_replicas, cluster.num_devices
    if count % replicas:
        fits = join_words([str(n) for n in (count // replicas * replicas, (count // replicas + 1) * replicas) if n])
        others = [str(n) for n in nearest(divisors(count), replicas) if n > 1]
        instead = f", or use {join_words(others)} replicas" if others else ""
        raise PlanError(
            f"sync.replicas={replicas} does not divide {count} process{'' if count == 1 else 'es'}; run {fits} "
            f"processes{instead}."
        )
    size = count // replicas
    return replace(cluster, num_devices=size, devices_per_node=gcd(size, cluster.devices_per_node))


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
    counts = nearest(divisors(gcd(*recipe.batches.sizes)), dp_size)
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
    fitting = divisors(gcd(*shares))
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


def list_layouts(recipe: "Recipe", shape: ModelShape, cluster: Cluster, divide: bool) -> Iterator[str | ParallelConfig]:
    """The values of `parallel` to try; the recipe's own if it has one. Some of them may be refused by `resolve_plan`.

    Args:
        divide: also divide layers among stages, and long sequences.
    """
    if recipe.parallel != "auto":
        yield recipe.parallel
        return
    replica = find_replica(recipe, cluster)
    yield from ("ddp", "zero1", "zero2", "fsdp")
    if replica.num_nodes > 1:
        yield "hsdp"
    choices = Choices(recipe, shape, replica, divide)
    for degrees in product(*(axis.degrees(choices) for axis in MODEL_AXES)):
        if replica.num_devices % prod(degrees) == 0:
            base = ParallelConfig(**{axis.name: degree for axis, degree in zip(MODEL_AXES, degrees, strict=True)})
            yield from _list_mappings(base, choices)


def _list_mappings(base: ParallelConfig, choices: Choices) -> Iterator[ParallelConfig]:
    """The mappings with the degrees of `base` and all that the axes try beside them."""
    mappings = [base]
    for axis in AXES:
        mappings = [variant for mapping in mappings for variant in axis.variants(mapping, choices)]
    for mapping in mappings:
        if mapping.schedule is not None:
            yield mapping
        else:
            yield from list_switches(mapping, choices.replica, _count_axes(mapping) == 0 and mapping.ep == 1)


def list_divided(recipe: "Recipe", shape: ModelShape, cluster: Cluster) -> list[ParallelConfig]:
    """The mappings that `parallel: auto` weighs against the named strategies, the fewest axes and the smallest degrees
    first. They divide the model or sequences along one or two axes, or the experts of a mixture alone. `resolve_plan`
    may refuse some of them.

    Offloading, ZeRO-1 and `zero_bubble` beside them are used only if a recipe says so.
    """
    if not _can_divide(recipe, shape):
        return []
    layouts = [
        layout
        for layout in list_layouts(recipe, shape, cluster, divide=True)
        if isinstance(layout, ParallelConfig) and _is_weighed(layout, shape) and not layout.cpu_offload
        if layout.reduce_gradients != "last" and layout.schedule != "zero_bubble"
    ]
    return sorted(
        layouts, key=lambda layout: (_count_axes(layout), prod(getattr(layout, axis.name) for axis in MODEL_AXES))
    )


def _can_divide(recipe: "Recipe", shape: ModelShape) -> bool:
    """Whether every part of a recipe is one that works with all `MODEL_AXES`, or the mixture with divided experts.

    Other engines, adapters, other objectives than `causal_lm`, replicas that agree by `sync`, optimizers and models of
    the user's own and an attention that the recipe names work with some of them at most.
    """
    sync, model = recipe.sync, recipe.model
    agrees_exactly = sync.name == EVERY_STEP and recipe.num_replicas == 1 and sync.compress.method == "none"
    is_usual = recipe.engine == NATIVE and recipe.objective.name == "causal_lm" and not recipe.adapter.is_adapter
    is_known = (
        shape.model_type in {*FAMILIES, *DIVIDED} and not model.trust_remote_code and model.attn_implementation is None
    )
    return agrees_exactly and is_usual and is_known and recipe.optim.name in OPTIMIZERS


def weighed_axes(shape: ModelShape) -> Sequence[Axis]:
    """The axes along which `parallel: auto` divides a model that it knows: of a mixture the experts alone."""
    return MODEL_AXES if shape.model_type in FAMILIES else [EXPERT]


def _is_weighed(parallel: ParallelConfig, shape: ModelShape) -> bool:
    """Whether a mapping divides along one or two of these axes, and no other."""
    divided = [axis for axis in (*MODEL_AXES, EXPERT) if getattr(parallel, axis.name) > 1]
    return len(divided) in (1, 2) and all(axis in weighed_axes(shape) for axis in divided)


def _count_axes(parallel: ParallelConfig) -> int:
    """Along how many axes layers, matrices or sequences are divided."""
    return sum(getattr(parallel, axis.name) > 1 for axis in MODEL_AXES)


def list_micro_batches(recipe: "Recipe", first: ParallelPlan, kind: DeviceKind) -> list[ParallelPlan]:
    """The plan with the largest micro batches and the smallest one, where the recipe leaves them to echelon."""
    shares = [size // first.num_readers for size in recipe.batches.sizes]
    cap = max(1, MICRO_BATCH_TOKENS[kind] * first.cp // recipe.data.sequence_len)
    sizes = [size for size in divisors(gcd(*shares)) if size <= cap]
    sizes = [size for size in sizes if all(axis.takes(first, share // size) for axis in AXES for share in shares)][::-1]
    if recipe.train.micro_batch_size != "auto" or getattr(recipe.parallel, "microbatches", None) or not sizes:
        return [first]
    chosen = dict.fromkeys((*sizes[:_LARGEST], sizes[-1]))
    return [replace(first, micro_batch_size=size, num_microbatches=max(shares) // size) for size in chosen]


def list_policies(recipe: "Recipe", plan: ParallelPlan, kind: DeviceKind) -> list[list[ParallelPlan]]:
    """The plan with each way to keep activations, where the recipe leaves it to echelon.

    Every plan in a list is faster and needs more memory than those in later lists, but for offloading: whether copies
    or repeated forward passes take longer depends on the model.
    """
    train = recipe.train
    if train.activation_checkpointing != "auto" or plan.schedule == "zero_bubble":  # which takes none
        return [[plan]]
    none, selective, full = (replace(plan, activation_checkpointing=name) for name in ("none", "selective", "full"))
    if train.activation_offloading:  # selective checkpointing does not work with it
        return [[plan], [full]] if plan.activation_checkpointing != "full" else [[plan]]
    some = [selective, replace(full, checkpoint_every=2)]
    last = []
    if kind == "cuda" and not plan.stages and "activation_offloading" not in train.model_fields_set:
        if train.compile is not True and not plan.precision.float8:
            some.append(replace(none, activation_offloading=True, compile=False))
        last = [[replace(full, activation_offloading=True)]]
    return [[none], some, [full], *last]
