"""The layout of a strategy from `parallel`, a name or a mapping of degrees, and the batch arithmetic over it."""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from echelon.errors import ConfigError, PlanError
from echelon.hardware.accelerators import Cluster
from echelon.planner.degrees import (
    AXIS_ORDER,
    Degrees,
    check_options,
    join_words,
    nearest,
    resolve_degrees,
    resolve_order,
)
from echelon.planner.model_shape import divisors
from echelon.planner.plan import ReduceGradients
from echelon.recipe.training import AxisName, CpMethod, PipelineSchedule

if TYPE_CHECKING:
    from echelon.recipe import Recipe
    from echelon.recipe.training import ParallelConfig

STRATEGIES = ("ddp", "zero1", "zero2", "fsdp", "hsdp")
# Longer microbatches were not measured to be faster, and only use more memory.
MICRO_BATCH_TOKENS = {"cuda": 16384, "cpu": 8192}


@dataclass(frozen=True)
class Layout:
    """The fields that define a strategy; the plan copies them unchanged, except `microbatches`.

    stages: the decoder layers of each pipeline stage; empty without a pipeline, or if they are not given.
    microbatches: the number of them in a step, if the recipe sets it. num_replicas: of this layout, by `sync`.
    """

    strategy: str
    dp_replicate: int
    dp_shard: int
    reshard_after_forward: bool
    reduce_gradients: ReduceGradients
    cpu_offload: bool = False
    prefetch: int | None = None
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    cp_method: CpMethod | None = None
    schedule: PipelineSchedule | None = None
    stages: tuple[int, ...] = ()
    microbatches: int | None = None
    order: tuple[AxisName, ...] = AXIS_ORDER
    num_replicas: int = 1

    @property
    def dp_size(self) -> int:
        """Ranks of all replicas that read different sequences."""
        return self.num_replicas * self.dp_replicate * self.dp_shard

    @property
    def num_peers(self) -> int:
        """Ranks that read the same sequences, because they share the model or the sequence."""
        return self.cp * self.tp * self.pp


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


def build_layout(parallel: "str | ParallelConfig", cluster: Cluster, num_layers: int) -> Layout:
    """The layout of a strategy name or a mapping of degrees on a cluster, for a model of `num_layers` decoder layers.

    Raises PlanError if the degrees do not fit its processes, ConfigError for values that fit no cluster.
    """
    if isinstance(parallel, str):
        return _named_layout(parallel, cluster)
    return _mapped_layout(parallel, cluster, num_layers)


def _named_layout(name: str, cluster: Cluster) -> Layout:
    world = cluster.num_devices
    match name:
        case "ddp":
            return Layout("ddp", world, 1, reshard_after_forward=False, reduce_gradients="last")
        case "zero1":
            return Layout("zero1", 1, world, reshard_after_forward=False, reduce_gradients="last")
        case "zero2":
            return Layout("zero2", 1, world, reshard_after_forward=False, reduce_gradients="each")
        case "fsdp":
            return Layout("fsdp", 1, world, reshard_after_forward=True, reduce_gradients="each")
        case "hsdp":
            replicate = _hsdp_replicas(cluster)
            return Layout("hsdp", replicate, world // replicate, reshard_after_forward=True, reduce_gradients="each")
    raise ConfigError(
        f"parallel={name!r} is not a strategy; use auto, {', '.join(STRATEGIES)} or a mapping of degrees."
    )


def _hsdp_replicas(cluster: Cluster) -> int:
    """One replica per machine; on one machine two, so that both axes exist."""
    if cluster.num_nodes > 1 or cluster.num_devices == 1:
        return cluster.num_nodes
    if cluster.num_devices % 2:
        raise PlanError(
            "parallel=hsdp on one machine needs an even number of processes for 2 replicas, not "
            f"{cluster.num_devices}; use {cluster.num_devices - 1} or {cluster.num_devices + 1} processes, or "
            "parallel=fsdp."
        )
    return 2


def _mapped_layout(parallel: "ParallelConfig", cluster: Cluster, num_layers: int) -> Layout:
    check_options(parallel, num_layers)
    if parallel.cpu_offload and cluster.kind == "cpu":
        raise PlanError("parallel.cpu_offload=true: on CPUs everything is in host memory already; omit it.")
    degrees = resolve_degrees(parallel, cluster.num_devices)
    reshard, reduce = _choose_switches(parallel, degrees)
    return Layout(
        strategy=_strategy_name(degrees, reshard, reduce),
        dp_replicate=degrees.dp_replicate,
        dp_shard=degrees.dp_shard,
        reshard_after_forward=reshard,
        reduce_gradients=reduce,
        cpu_offload=parallel.cpu_offload,
        prefetch=parallel.prefetch,
        cp=degrees.cp,
        tp=degrees.tp,
        pp=degrees.pp,
        ep=degrees.ep,
        sequence_parallel=bool(parallel.sequence_parallel),
        cp_method=(parallel.cp_method or "allgather") if degrees.cp > 1 else None,
        schedule=(parallel.schedule or "1f1b") if degrees.pp > 1 else None,
        stages=parallel.stages or (),
        microbatches=parallel.microbatches,
        order=resolve_order(parallel, degrees),
    )


def _choose_switches(parallel: "ParallelConfig", degrees: Degrees) -> tuple[bool, ReduceGradients]:
    """Whether gathered parameters are freed after use, and when gradients are reduced."""
    shards = degrees.dp_shard * degrees.cp > 1 or parallel.cpu_offload
    if parallel.prefetch is not None and not shards:
        raise ConfigError(
            f"parallel.prefetch={parallel.prefetch}: every process has all parameters here, so no layer is gathered; "
            "remove the key, or shard the parameters with dp_shard."
        )
    # Beside tensor parallelism, fully_shard also holds what is not sharded: it frees copies after use, at no traffic.
    # A pipeline runs a layer again and again in a step, so gathering it each time would cost too much.
    frees = (shards or degrees.tp > 1) and degrees.pp == 1
    reshard = frees if parallel.reshard_after_forward is None else parallel.reshard_after_forward
    return reshard, parallel.reduce_gradients or ("each" if frees else "last")


def _strategy_name(degrees: Degrees, reshard: bool, reduce: ReduceGradients) -> str:
    """Canonical name of a mapping's degrees and switches: `hsdp`, `pp+fsdp+tp`, or `custom` for the data axes."""
    others = [name for name in ("ep", "cp", "tp") if getattr(degrees, name) > 1]
    pipeline = ["pp"] if degrees.pp > 1 else []
    if not (others or pipeline):
        return _data_strategy_name(degrees, reshard, reduce)
    data = ["fsdp"] if degrees.dp_shard > 1 else ["ddp"] if degrees.dp_replicate > 1 else []
    if degrees.dp_shard > 1 and degrees.dp_replicate > 1:
        data = ["hsdp"]
    return "+".join([*pipeline, *data, *others])


def _data_strategy_name(degrees: Degrees, reshard: bool, reduce: ReduceGradients) -> str:
    if degrees.dp_shard == 1:
        return "ddp" if reduce == "last" and not reshard else "custom"
    if degrees.dp_replicate > 1:
        return "hsdp" if reshard and reduce == "each" else "custom"
    return {(True, "each"): "fsdp", (False, "each"): "zero2", (False, "last"): "zero1"}.get((reshard, reduce), "custom")


def check_batch(recipe: "Recipe", layout: Layout, num_samples: int | None, fill: bool = False) -> int:
    """Sequences per rank of a full global batch; with `fill`, including padding sequences.

    Raises PlanError, naming batches and process counts that divide, for that batch and for every size of a ramp.
    """
    batch: int = recipe.global_batch_size
    dp_size, ranks = layout.dp_size, _describe_ranks(layout)
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
        given = f"train.global_batch_tokens={recipe.train.global_batch_tokens} ({batch} sequences)"
        fits = join_words([f"{multiple * length} ({multiple} sequences)" for multiple in multiples])
    else:
        given, fits = f"train.global_batch_size={batch}", join_words([str(multiple) for multiple in multiples])
    rule = "is less than one sequence for each of" if batch < dp_size else "does not divide by"
    raise PlanError(f"{given} {rule} the {ranks}; use {fits}, or {processes} processes.")


def _describe_ranks(layout: Layout) -> str:
    return f"{layout.dp_size} ranks" if layout.num_peers == 1 else f"{layout.dp_size} data-parallel ranks"


def _check_ramp(recipe: "Recipe", layout: Layout) -> None:
    """Raise PlanError unless every size of the ramp divides, naming those that do not and increments that fit."""
    dp_size = layout.dp_size
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
    given = recipe.train.micro_batch_size
    shares = [-(-size // dp_size) for size in recipe.batches.sizes]
    fitting = divisors(math.gcd(*shares))
    if given == "auto":
        return fitting[::-1]
    if fill:
        return [max(size for size in fitting if size <= given)]
    failing = [share for share in shares if share % given]
    if failing:
        fits = join_words([str(n) for n in nearest(fitting, given, each_side=1)])
        ranks = "the one rank" if dp_size == 1 else f"each of the {dp_size} ranks"
        raise PlanError(
            f"train.micro_batch_size={given} does not divide the {_join_some(failing)} sequences "
            f"{ranks} gets in a step; use {fits}."
        )
    return [given]


def _join_some(numbers: list[int]) -> str:
    """The first three numbers, and how many more there are."""
    words = [str(number) for number in numbers]
    return join_words(words if len(words) <= 4 else [*words[:3], f"{len(words) - 3} more"], last="and")
