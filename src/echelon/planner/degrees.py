"""The degrees of parallelism of a mapping `parallel`, and its options that belong to one of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, get_args

from echelon.errors import ConfigError, PlanError
from echelon.planner.model_shape import divisors
from echelon.recipe.training import AxisName

if TYPE_CHECKING:
    from echelon.recipe.training import ParallelConfig

AXIS_ORDER: tuple[AxisName, ...] = get_args(AxisName)
# SageMaker's placement strategies, outermost axis first: DPT and TPD, of data, pipeline and tensor parallelism.
_PLACEMENTS: dict[str, tuple[AxisName, ...]] = {
    "cluster": ("dp_replicate", "dp_shard", "cp", "pp", "tp"),
    "spread": ("tp", "pp", "dp_replicate", "dp_shard", "cp"),
}
# The degree without which an option has no effect.
_NEEDED = {"sequence_parallel": "tp", "cp_method": "cp", "schedule": "pp", "stages": "pp", "microbatches": "pp"}
# Schedules under which a process may have several stages.
_SEVERAL_STAGES = ("interleaved", "zero_bubble")


@dataclass(frozen=True)
class Degrees:
    """The number of processes along each axis; their product without `ep` is the number of processes."""

    dp_replicate: int
    dp_shard: int
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1


def resolve_degrees(parallel: "ParallelConfig", world: int) -> Degrees:
    """The degrees of a mapping for `world` processes.

    Without any dp_* key dp_replicate takes the processes that the other degrees leave; `dp_shard: auto` takes them by
    sharding. Raises PlanError, with numbers that fit, if the product is not `world`; ConfigError for `ep` without
    dp_shard.
    """
    replicate, shard = _resolve_data_degrees(parallel, world)
    if parallel.ep > 1 and parallel.dp_shard is None:
        raise ConfigError(
            f"parallel.ep={parallel.ep} needs parallel.dp_shard: the processes that share the experts are among those "
            f"that shard the model; set for example dp_shard: {parallel.ep}."
        )
    if shard * parallel.cp % parallel.ep:
        fits = join_words([str(n) for n in nearest(divisors(shard * parallel.cp), parallel.ep)])
        raise PlanError(
            f"parallel.ep={parallel.ep} does not divide dp_shard {shard} x cp {parallel.cp} = {shard * parallel.cp}; "
            f"use ep = {fits}."
        )
    return Degrees(replicate, shard, parallel.cp, parallel.tp, parallel.pp, parallel.ep)


def _resolve_data_degrees(parallel: "ParallelConfig", world: int) -> tuple[int, int]:
    """(dp_replicate, dp_shard): the processes that cp, tp and pp leave, by default all as replicas."""
    inner = {name: degree for name in ("pp", "cp", "tp") if (degree := getattr(parallel, name)) > 1}
    rest = _divide_world(world, inner)
    if parallel.dp_replicate is None and parallel.dp_shard is None:
        return rest, 1
    if parallel.dp_replicate == "auto":
        return _divide_rest(parallel.dp_shard or 1, rest, inner, world)
    replicate = parallel.dp_replicate or 1
    if parallel.dp_shard == "auto":
        if rest % replicate:
            fits = join_words([str(n) for n in nearest(divisors(rest), replicate)])
            left = f" that {_show(inner)} leaves of {world}" if inner else ""
            raise PlanError(
                f"parallel.dp_replicate={replicate} does not divide the {rest} processes{left}; use {fits}."
            )
        return replicate, rest // replicate
    shard = parallel.dp_shard or 1
    if replicate * shard != rest:
        degrees = {"dp_replicate": replicate, "dp_shard": shard, **inner}
        needed = prod(degrees.values())
        fits = join_words([f"{rest // n} x {n}" for n in nearest(divisors(rest), shard)])
        raise PlanError(
            f"parallel: {_show(degrees)} needs {needed} processes, but {_count(world)}; run {needed} processes, or use "
            f"dp_replicate x dp_shard = {fits}, or dp_shard: auto."
        )
    return replicate, shard


def _divide_rest(shard: int | str, rest: int, inner: dict[str, int], world: int) -> tuple[int, int]:
    """(dp_replicate, dp_shard) if replicas take what shards and the degrees in `inner` leave."""
    if isinstance(shard, str):
        raise ConfigError(
            "parallel.dp_replicate=auto and parallel.dp_shard=auto would both take what is left; give one of them a "
            "number."
        )
    if rest % shard:
        fits = join_words([str(n) for n in nearest(divisors(rest), shard)])
        left = f" that {_show(inner)} leaves of {world}" if inner else ""
        raise PlanError(f"parallel.dp_shard={shard} does not divide the {rest} processes{left}; use {fits}.")
    return rest // shard, shard


def _divide_world(world: int, inner: dict[str, int]) -> int:
    """The number of processes of each place along the axes in `inner`."""
    shared = prod(inner.values())
    if world % shared:
        counts = [str(n) for n in (world // shared * shared, (world // shared + 1) * shared) if n]
        products = join_words([str(n) for n in nearest(divisors(world), shared)])
        what = f"{next(iter(inner))} =" if len(inner) == 1 else "degrees whose product is"
        raise PlanError(
            f"parallel: {_show(inner)} needs a multiple of {shared} processes, but {_count(world)}; run "
            f"{join_words(counts)} processes, or use {what} {products}."
        )
    return world // shared


def check_options(parallel: "ParallelConfig", num_layers: int) -> None:
    """Raise ConfigError for an option without the degree that it belongs to, or stages that do not fit the model."""
    for option, degree in _NEEDED.items():
        value = getattr(parallel, option)
        if value and getattr(parallel, degree) == 1:
            shown = list(value) if isinstance(value, tuple) else str(value).lower()
            raise ConfigError(
                f"parallel.{option}={shown} has an effect only with parallel.{degree} above 1; set {degree}, or remove "
                f"{option}."
            )
    pp, stages = parallel.pp, parallel.stages
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
        several = f", or a multiple of it with schedule {join_words(_SEVERAL_STAGES)}"
        raise ConfigError(
            f"parallel.stages={list(stages)} has {len(stages)} stages for parallel.pp={pp}; give {pp} of them{several}."
        )


def resolve_order(parallel: "ParallelConfig", degrees: Degrees) -> tuple[AxisName, ...]:
    """All axes, outermost first. Raises ConfigError for an order that repeats an axis or leaves out one above 1."""
    if parallel.order is None:
        return AXIS_ORDER if parallel.placement is None else _PLACEMENTS[parallel.placement]
    shown = f"parallel.order=[{', '.join(parallel.order)}]"
    if parallel.placement is not None:
        raise ConfigError(f"{shown} and parallel.placement={parallel.placement} both arrange the axes; remove one.")
    if len(set(parallel.order)) < len(parallel.order):
        raise ConfigError(f"{shown} names an axis twice; name each once.")
    absent = [axis for axis in AXIS_ORDER if axis not in parallel.order]
    missing = [axis for axis in absent if getattr(degrees, axis) > 1]
    if missing:
        raise ConfigError(f"{shown} leaves out {join_words(missing, 'and')}; name every axis with a degree above 1.")
    return (*absent, *parallel.order)


def _count(world: int) -> str:
    return f"there {'is' if world == 1 else 'are'} {world}"


def _show(degrees: dict[str, int]) -> str:
    return " x ".join(f"{name} {degree}" for name, degree in degrees.items())


def nearest(values: list[int], target: int, each_side: int = 2) -> list[int]:
    """The values closest to a target on both sides, including the target if it is among them, sorted."""
    below, above = [v for v in values if v <= target], [v for v in values if v > target]
    return below[-each_side:] + above[:each_side]


def join_words(words: Sequence[str], last: str = "or") -> str:
    """The words as a list in a sentence: `1, 2 or 4`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} {last} {words[-1]}"
