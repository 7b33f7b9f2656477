"""What a search tries: values of `parallel`, and for each of them micro batches and ways to keep activations.

Left out is what cannot be better by this planner's formulas; each axis says what it leaves out.
`parallel.prefetch` above PyTorch's one layer takes as long and gathers more.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import gcd, prod
from typing import TYPE_CHECKING

from echelon.planner.axes.axis import Axis, Choices
from echelon.planner.axes.data import list_switches
from echelon.planner.axes.expert import EXPERT
from echelon.planner.axes.table import AXES, MODEL_AXES
from echelon.planner.experts import DIVIDED
from echelon.planner.families import FAMILIES
from echelon.planner.hardware.accelerators import Cluster, DeviceKind
from echelon.planner.layout import MICRO_BATCH_TOKENS, find_replica
from echelon.planner.model_shape import ModelShape, divisors
from echelon.planner.plan import ParallelPlan
from echelon.recipe.names import NATIVE, OPTIMIZERS
from echelon.recipe.synchronization import EVERY_STEP
from echelon.recipe.training import ParallelConfig

if TYPE_CHECKING:
    from echelon.recipe.document import Recipe

_LARGEST = 3  # micro batches of each layout that are tried, beside the smallest


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
    agrees_exactly = sync.name == EVERY_STEP and sync.replicas == 1 and sync.compress.method == "none"
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
