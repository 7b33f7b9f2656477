"""What a search tries: values of `parallel`, and for each of them micro batches and ways to keep activations.

Left out is what cannot be better by this planner's formulas: `gpipe` waits as long as `1f1b` and keeps more;
`parallel.prefetch` above PyTorch's one layer takes as long and gathers more; `tp` without sequence parallelism sends as
much and keeps more.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import gcd
from typing import TYPE_CHECKING

from echelon.hardware.accelerators import Cluster, DeviceKind
from echelon.planner.families import FAMILIES
from echelon.planner.layout import MICRO_BATCH_TOKENS, find_replica
from echelon.planner.model_shape import ModelShape, divisors
from echelon.planner.plan import ParallelPlan
from echelon.planner.stages import fits_schedule
from echelon.recipe.engines import NATIVE
from echelon.recipe.names import OPTIMIZERS
from echelon.recipe.synchronization import EVERY_STEP
from echelon.recipe.training import CpMethod, ParallelConfig, PipelineSchedule

if TYPE_CHECKING:
    from echelon.recipe import Recipe

_LARGEST = 3  # micro batches of each layout that are tried, beside the smallest
_LONG = 8192  # tokens of a sequence from which it may be divided among devices
_MAX_STAGES, _MAX_CONTEXT = 16, 8
# What a layout may do with gathered parameters and with gradients: as FSDP, ZeRO-2 and ZeRO-1 do.
_SWITCHES: tuple[dict[str, object], ...] = (
    {},
    {"reshard_after_forward": False},
    {"reshard_after_forward": False, "reduce_gradients": "last"},
)
_SCHEDULES: tuple[PipelineSchedule, ...] = ("1f1b", "interleaved", "zero_bubble")


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
    local, world = replica.devices_per_node, replica.num_devices
    lengths = [each for each in divisors(world) if each <= _MAX_CONTEXT]
    lengths = lengths if divide and recipe.data.sequence_len >= _LONG else [1]
    stages = [each for each in divisors(world) if each <= min(_MAX_STAGES, shape.num_layers)] if divide else [1]
    for tp, cp, pp in product(divisors(local), lengths, stages):
        rest, left = divmod(world, tp * cp * pp)
        if not left and (cp == 1 or recipe.data.sequence_len % (2 * cp) == 0):
            yield from _list_mappings(recipe, shape, replica, (tp, cp, pp, rest))


def list_divided(recipe: "Recipe", shape: ModelShape, cluster: Cluster) -> list[ParallelConfig]:
    """The mappings that `parallel: auto` weighs against the named strategies: those with one or two of `tp`, `cp` and
    `pp`, the fewest axes and the smallest degrees first. `resolve_plan` may refuse some of them.

    Offloading, ZeRO-1 and `zero_bubble` beside them are used only if a recipe says so.
    """
    if not _can_divide(recipe, shape):
        return []
    found = [
        each
        for each in list_layouts(recipe, shape, cluster, divide=True)
        if isinstance(each, ParallelConfig) and _count_axes(each) in (1, 2) and not each.cpu_offload
        if each.reduce_gradients != "last" and each.schedule != "zero_bubble"
    ]
    return sorted(found, key=lambda each: (_count_axes(each), each.tp * each.cp * each.pp))


def _can_divide(recipe: "Recipe", shape: ModelShape) -> bool:
    """Whether every part of a recipe is one that works with `tp`, `cp` and `pp`.

    Other engines, adapters, other objectives than `causal_lm`, replicas that agree by `sync`, optimizers and models of
    the user's own and an attention that the recipe names work with some of them at most.
    """
    sync, model = recipe.sync, recipe.model
    agrees_exactly = sync.name == EVERY_STEP and sync.replicas == 1 and sync.compress.method == "none"
    is_usual = recipe.engine == NATIVE and recipe.objective.name == "causal_lm" and not recipe.adapter.is_adapter
    is_known = shape.model_type in FAMILIES and not model.trust_remote_code and model.attn_implementation is None
    return agrees_exactly and is_usual and is_known and recipe.optim.name in OPTIMIZERS


def _count_axes(parallel: ParallelConfig) -> int:
    """Along how many axes layers, matrices or sequences are divided."""
    return sum(degree > 1 for degree in (parallel.tp, parallel.cp, parallel.pp))


def _list_mappings(
    recipe: "Recipe", shape: ModelShape, replica: Cluster, degrees: tuple[int, int, int, int]
) -> Iterator[ParallelConfig]:
    """The mappings of (tp, cp, pp, the ranks that are left for data parallelism)."""
    tp, cp, pp, rest = degrees
    inside = max(1, replica.devices_per_node // tp // cp)
    shares = {(1, rest), (rest, 1)} | ({(rest // inside, inside)} if rest % inside == 0 else set())
    chunks = 2 * cp if cp > 1 else 1
    sequence = True if tp > 1 and recipe.data.sequence_len // chunks % tp == 0 else None
    for (replicate, shard), method in product(sorted(shares), _list_methods(shape, tp, cp)):
        for experts in _list_experts(shape, shard * cp):
            fields = {"tp": tp, "cp": cp, "pp": pp, "ep": experts, "dp_replicate": replicate, "dp_shard": shard}
            base = ParallelConfig(**fields, sequence_parallel=sequence, cp_method=method)
            if pp > 1:
                yield from (base.model_copy(update={"schedule": each}) for each in _SCHEDULES)
            else:
                yield from _list_switches(base, replica)


def _list_methods(shape: ModelShape, tp: int, cp: int) -> tuple[CpMethod | None, ...]:
    """The ways to divide sequences; `ulysses` divides the heads that tensor parallelism leaves to a rank."""
    if cp == 1:
        return (None,)
    return ("allgather", "ulysses") if shape.num_heads // tp % cp == 0 else ("allgather",)


def _list_switches(base: ParallelConfig, replica: Cluster) -> Iterator[ParallelConfig]:
    """The mapping as FSDP, ZeRO-2 and ZeRO-1, and offloaded; without those that a name stands for."""
    assert isinstance(base.dp_shard, int)
    shards = base.dp_shard * base.cp > 1
    is_named = base.tp == base.cp == base.ep == 1
    if not is_named:
        yield from (base.model_copy(update=switch) for switch in (_SWITCHES if shards else _SWITCHES[:1]))
    if replica.kind == "cuda" and (shards or replica.num_devices == 1):
        yield base.model_copy(update={"cpu_offload": True})


def _list_experts(shape: ModelShape, ranks: int) -> list[int]:
    """Degrees of expert parallelism that divide the experts and the ranks that share them."""
    if not shape.experts:
        return [1]
    return divisors(gcd(ranks, *(each.num_experts for each in shape.experts)))


def list_micro_batches(recipe: "Recipe", first: ParallelPlan, kind: DeviceKind) -> list[ParallelPlan]:
    """The plan with the largest micro batches and the smallest one, where the recipe leaves them to echelon."""
    ranks = first.num_replicas * first.dp_size
    shares = [size // ranks for size in recipe.batches.sizes]
    cap = max(1, MICRO_BATCH_TOKENS[kind] * first.cp // recipe.data.sequence_len)
    sizes = [size for size in divisors(gcd(*shares)) if size <= cap and _takes(first, shares, size)][::-1]
    if recipe.train.micro_batch_size != "auto" or getattr(recipe.parallel, "microbatches", None) or not sizes:
        return [first]
    chosen = dict.fromkeys((*sizes[:_LARGEST], sizes[-1]))
    return [replace(first, micro_batch_size=size, num_microbatches=max(shares) // size) for size in chosen]


def _takes(plan: ParallelPlan, shares: Sequence[int], size: int) -> bool:
    """Whether the schedule of a pipeline takes every step with this micro batch."""
    return plan.schedule is None or all(fits_schedule(plan.schedule, plan.pp, share // size) for share in shares)


def list_policies(recipe: "Recipe", plan: ParallelPlan, kind: DeviceKind) -> list[list[ParallelPlan]]:
    """The plan with each way to keep activations, where the recipe leaves it to echelon.

    Every plan in a list is faster and needs more memory than those in later lists, but for offloading: whether copies
    or repeated forward passes take longer depends on the model.
    """
    train = recipe.train
    if "activation_checkpointing" in train.model_fields_set or plan.schedule == "zero_bubble":  # which takes none
        return [[plan]]
    none, selective, full = (replace(plan, activation_checkpointing=each) for each in ("none", "selective", "full"))
    if train.activation_offloading:  # selective checkpointing does not work with it
        return [[plan], [full]] if plan.activation_checkpointing != "full" else [[plan]]
    some = [selective, replace(full, checkpoint_every=2)]
    last = []
    if kind == "cuda" and plan.pp == 1 and "activation_offloading" not in train.model_fields_set:
        if train.compile is not True and not plan.precision.float8:
            some.append(replace(none, activation_offloading=True, compile=False))
        last = [[replace(full, activation_offloading=True)]]
    return [[none], some, [full], *last]
