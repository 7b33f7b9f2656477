"""Degrees of data parallelism from `parallel`, a name or a mapping, and the batch arithmetic over them."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from echelon.errors import ConfigError, PlanError
from echelon.hardware.accelerators import Cluster
from echelon.planner.model_shape import divisors
from echelon.planner.plan import ReduceGradients

if TYPE_CHECKING:
    from echelon.recipe import Recipe
    from echelon.recipe.training import ParallelConfig

UNBUILT_DEGREES = {"cp": "context", "tp": "tensor", "pp": "pipeline", "ep": "expert"}
STRATEGIES = ("ddp", "zero1", "zero2", "fsdp", "hsdp")


@dataclass(frozen=True)
class Layout:
    """The fields that define a strategy; the plan copies them unchanged."""

    strategy: str
    dp_replicate: int
    dp_shard: int
    reshard_after_forward: bool
    reduce_gradients: ReduceGradients
    cpu_offload: bool = False
    prefetch: int | None = None

    @property
    def dp_size(self) -> int:
        """Ranks that read different sequences."""
        return self.dp_replicate * self.dp_shard


def build_layout(parallel: "str | ParallelConfig", cluster: Cluster) -> Layout:
    """The layout of a strategy name or a mapping of degrees on a cluster.

    Raises PlanError if the degrees do not fit its processes, ConfigError for values that fit no cluster.
    """
    if isinstance(parallel, str):
        return _named_layout(parallel, cluster)
    return _mapped_layout(parallel, cluster)


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


def _mapped_layout(parallel: "ParallelConfig", cluster: Cluster) -> Layout:
    for degree, name in UNBUILT_DEGREES.items():
        if getattr(parallel, degree) != 1:
            raise ConfigError(
                f"parallel.{degree}={getattr(parallel, degree)}: {name} parallelism is not built yet; use {degree}=1."
            )
    if parallel.cpu_offload and cluster.kind == "cpu":
        raise PlanError("parallel.cpu_offload=true: on CPUs everything is in host memory already; omit it.")
    replicate, shard = _mapped_degrees(parallel, cluster.num_devices)
    shards = shard > 1 or parallel.cpu_offload
    if parallel.prefetch is not None and not shards:
        raise ConfigError(
            f"parallel.prefetch={parallel.prefetch}: every process has all parameters here, so no layer is gathered; "
            "remove the key, or shard the parameters with dp_shard."
        )
    reshard = shards if parallel.reshard_after_forward is None else parallel.reshard_after_forward
    reduce: ReduceGradients = parallel.reduce_gradients or ("each" if shards else "last")
    strategy = _strategy_name(replicate, shard, reshard, reduce)
    return Layout(strategy, replicate, shard, reshard, reduce, parallel.cpu_offload, parallel.prefetch)


def _mapped_degrees(parallel: "ParallelConfig", world: int) -> tuple[int, int]:
    """(dp_replicate, dp_shard), by default 1; if neither is given, all ranks are replicas; `auto` takes the rest."""
    if parallel.dp_replicate is None and parallel.dp_shard is None:
        return world, 1
    replicate = parallel.dp_replicate or 1
    if parallel.dp_shard == "auto":
        if world % replicate:
            fits = _join([str(n) for n in _near(divisors(world), replicate)])
            raise PlanError(f"parallel.dp_replicate={replicate} does not divide the {world} processes; use {fits}.")
        return replicate, world // replicate
    shard = parallel.dp_shard or 1
    if replicate * shard != world:
        fits = _join([f"{world // n} x {n}" for n in _near(divisors(world), shard)])
        raise PlanError(
            f"parallel: dp_replicate {replicate} x dp_shard {shard} needs {replicate * shard} processes, but there "
            f"{'is' if world == 1 else 'are'} {world}; run {replicate * shard} processes, or use "
            f"dp_replicate x dp_shard = {fits}, or dp_shard: auto."
        )
    return replicate, shard


def _strategy_name(replicate: int, shard: int, reshard: bool, reduce: ReduceGradients) -> str:
    """Canonical name of a mapping's degrees and switches, or "custom"."""
    if shard == 1:
        return "ddp" if reduce == "last" and not reshard else "custom"
    if replicate > 1:
        return "hsdp" if reshard and reduce == "each" else "custom"
    return {(True, "each"): "fsdp", (False, "each"): "zero2", (False, "last"): "zero1"}.get((reshard, reduce), "custom")


def check_batch(recipe: "Recipe", dp_size: int, num_samples: int | None, fill: bool = False) -> int:
    """Sequences per rank of a full global batch; with `fill`, including padding sequences.

    Raises PlanError, naming batches and process counts that divide, for that batch and for every size of a ramp.
    """
    batch: int = recipe.global_batch_size
    if num_samples is not None and num_samples < dp_size:
        raise PlanError(
            f"data.train has {num_samples} samples of data.sequence_len={recipe.data.sequence_len} tokens, fewer than "
            f"the {dp_size} ranks that share them; use at most {num_samples} processes, more text or shorter sequences."
        )
    if fill:
        return -(-batch // dp_size)
    if batch % dp_size == 0:
        _check_ramp(recipe, dp_size)
        return batch // dp_size
    multiples = [multiple for multiple in (batch // dp_size * dp_size, (batch // dp_size + 1) * dp_size) if multiple]
    processes = _join([str(n) for n in _near(divisors(batch), dp_size)])
    if recipe.train.global_batch_tokens is not None:
        length = recipe.data.sequence_len
        given = f"train.global_batch_tokens={recipe.train.global_batch_tokens} ({batch} sequences)"
        fits = _join([f"{multiple * length} ({multiple} sequences)" for multiple in multiples])
    else:
        given, fits = f"train.global_batch_size={batch}", _join([str(multiple) for multiple in multiples])
    rule = "is less than one sequence for each of" if batch < dp_size else "does not divide by"
    raise PlanError(f"{given} {rule} the {dp_size} ranks; use {fits}, or {processes} processes.")


def _check_ramp(recipe: "Recipe", dp_size: int) -> None:
    """Raise PlanError unless every size of the ramp divides, naming those that do not and increments that fit."""
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
        + _join([str(n * dp_size * unit) for n in divisors((size - first) // dp_size)[:4]])
        for first in dict.fromkeys(starts)
    ]
    remedy = ", or ".join(ways) if ways else "one global batch"
    processes = _join([str(n) for n in _near(divisors(math.gcd(*recipe.batches.sizes)), dp_size)])
    raise PlanError(
        f"train.batch_ramp: steps of {_join_some(failing)} sequences do not divide by the {dp_size} ranks; "
        f"use {remedy}, or {processes} processes."
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
        fits = _join([str(n) for n in _near(fitting, given, each_side=1)])
        ranks = "the one rank" if dp_size == 1 else f"each of the {dp_size} ranks"
        raise PlanError(
            f"train.micro_batch_size={given} does not divide the {_join_some(failing)} sequences "
            f"{ranks} gets in a step; use {fits}."
        )
    return [given]


def _near(values: list[int], target: int, each_side: int = 2) -> list[int]:
    """The values closest to a target on both sides, including the target if it is among them, sorted."""
    below, above = [v for v in values if v <= target], [v for v in values if v > target]
    return below[-each_side:] + above[:each_side]


def _join(words: list[str], last: str = "or") -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"


def _join_some(numbers: list[int]) -> str:
    """The first three numbers, and how many more there are."""
    words = [str(number) for number in numbers]
    return _join(words if len(words) <= 4 else [*words[:3], f"{len(words) - 3} more"], last="and")
