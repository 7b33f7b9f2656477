"""`--instance auto`: the cheapest machines of the catalogue on which a recipe's plan fits."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from echelon.errors import ConfigError, PlanError
from echelon.hardware.accelerators import Cluster
from echelon.hardware.instances import Instance, cluster_of, list_instances
from echelon.hardware.job_machines import find_machines
from echelon.planner.choose import MEMORY_HEADROOM, resolve_plan
from echelon.planner.memory import estimate_memory
from echelon.planner.model_shape import ModelShape
from echelon.planner.plan import ParallelPlan
from echelon.sizes import render_bytes

if TYPE_CHECKING:
    from echelon.recipe import Recipe

# If the number of machines is not given, each type is tried with these until the plan fits.
_COUNTS = (1, 2, 4, 8, 16)
_SHOWN = 8


@dataclass(frozen=True)
class Candidate:
    """`count` machines of one type, the plan and the bytes it needs on each GPU, or the reason why there is no plan."""

    instance: Instance
    count: int
    plan: ParallelPlan | None = None
    needed_bytes: int = 0
    usable_bytes: float = 0.0
    reason: str = ""

    @property
    def fits(self) -> bool:
        """Whether the plan leaves the usual headroom on each GPU."""
        return self.plan is not None and self.needed_bytes <= self.usable_bytes

    @property
    def usd_per_hour(self) -> float | None:
        """The price of all its machines together; None if the catalogue has none."""
        price = self.instance.price
        return None if price is None else price.usd_per_hour * self.count

    def describe(self) -> str:
        """One line of the table."""
        assert self.plan is not None
        price, cost = self.instance.price, self.usd_per_hour
        dollars = "price unknown" if price is None else f"${cost:.2f}/h ({price.terms})"
        devices = f"{self.count * self.instance.gpus} x {self.instance.accelerator}"
        return (
            f"{self.count} x {self.instance.name:<19} {dollars:<33} {devices:<14} {self.plan.strategy:<5} needs "
            f"{render_bytes(self.needed_bytes)} of {render_bytes(self.usable_bytes)}"
            + (f", {self.instance.network_gbits:g} Gbit/s between machines" if self.count > 1 else "")
        )


@dataclass(frozen=True)
class Choice:
    """The result of `choose_instance`: the cheapest type and all candidates."""

    best: Candidate
    candidates: tuple[Candidate, ...]

    @property
    def instance(self) -> Instance:
        """The chosen type."""
        return self.best.instance

    @property
    def count(self) -> int:
        """The number of machines."""
        return self.best.count

    def describe(self) -> list[str]:
        """Lines for the user: the choice and its reason, the other candidates, and the types that were left out."""
        fitting, small = _part(self.candidates, lambda each: each.fits)
        priced, unknown = _part(fitting, lambda each: each.usd_per_hour is not None)
        fewer, _ = _part(unknown, lambda each: each.count < self.count)
        lines = [
            f"instance auto: {self.count} x {self.instance.name}, the fewest machines on which the plan fits, and of "
            f"{len(priced)} priced types the cheapest per hour; a faster type may be cheaper for the whole run"
        ]
        lines += [f"  {each.describe()}" for each in sorted(priced, key=_rank)[:_SHOWN]]
        if len(priced) > _SHOWN:
            lines.append(f"  and {len(priced) - _SHOWN} more that need more machines or cost more")
        if unknown:
            names = _join(f"{each.count} x {each.instance.name}" for each in unknown)
            lines.append(
                f"  fit, but were not considered because their price is unknown: {names}; to use one, set it as the "
                "instance type, and set budget.usd_per_hour; or give its price in launch.sagemaker.extra_types"
            )
        if fewer:
            lines.append(f"  of these, need fewer machines: {_join_names(fewer)}")
        if small:
            lines.append(f"  do not fit: {_join_names(small)}")
        return lines


def choose_instance(recipe: "Recipe", shape: ModelShape, count: int | None = None) -> Choice:
    """The cheapest machines per hour on which the plan fits in memory, `count` of them or as few as possible.

    One larger machine is preferred to several small ones, as the network is far slower than links inside a machine.
    Only types with a dated price are considered. Raises PlanError if none of them fits.
    """
    known = list_instances(recipe.launch.sagemaker.extra_types)
    candidates = tuple(_try_type(recipe, shape, each, count) for each in known.values() if each.gpus)
    fitting = [each for each in candidates if each.fits]
    priced = [each for each in fitting if each.usd_per_hour is not None]
    if priced:
        return Choice(min(priced, key=_rank), candidates)
    machines = f"{count} machine(s)" if count is not None else f"up to {_COUNTS[-1]} machines"
    if fitting:
        raise PlanError(
            f"launch.sagemaker.instance_type=auto: no type with a known price fits on {machines}; set one of: "
            f"{_join_names(fitting)}."
        )
    raise PlanError(
        f"launch.sagemaker.instance_type=auto: the plan does not fit on {machines} of any type; the largest, "
        f"{_explain(max(candidates, key=_memory))}; shard more (parallel: fsdp), set "
        "train.activation_checkpointing: full, or use more machines."
    )


def plan_on(recipe: "Recipe", shape: ModelShape, instance: Instance, count: int) -> Candidate:
    """The plan of the recipe on these machines, whether it fits or not; without a plan, `reason` is the error."""
    try:
        cluster = find_cluster(recipe, instance, count)
        plan = resolve_plan(recipe, shape, cluster)
    except (ConfigError, PlanError) as error:
        return Candidate(instance, count, reason=str(error))
    needed = estimate_memory(shape, plan, recipe.data.sequence_len, cluster.kind).total
    usable = (cluster.accelerator.memory_bytes or 0) * (1 - MEMORY_HEADROOM)
    return Candidate(instance, count, plan, needed, usable)


def find_cluster(recipe: "Recipe", instance: Instance, count: int) -> Cluster:
    """The cluster of these machines with `launch.nproc_per_node` processes each. Raises ConfigError."""
    wanted = recipe.launch.nproc_per_node
    return cluster_of(instance, count, None if wanted == "auto" else wanted)


def limit_to_weakest(cluster: Cluster, recipe: "Recipe", variables: Mapping[str, str]) -> Cluster:
    """The detected cluster, in a SageMaker job with instance groups with the memory and dtypes of its weakest type.

    The process that plans detects only its own machine. `variables` is the environment.
    """
    if "TRAINING_JOB_NAME" not in variables or not recipe.launch.sagemaker.instance_groups:
        return cluster
    weakest = cluster_of(find_machines(recipe.launch).weakest, cluster.num_nodes, cluster.devices_per_node)
    if weakest.kind != cluster.kind:
        return cluster
    sizes = [each.accelerator.memory_bytes for each in (cluster, weakest)]
    memory = min(size for size in sizes if size is not None)
    if cluster.kind == "cpu":
        return replace(cluster, accelerator=replace(cluster.accelerator, memory_bytes=memory))
    # All of the weakest, also its name: after a restart the planning process may be on another type.
    device = replace(weakest.accelerator, memory_bytes=memory)
    return replace(cluster, accelerator=device, bf16_supported=cluster.has_bf16 and weakest.has_bf16)


def _try_type(recipe: "Recipe", shape: ModelShape, instance: Instance, count: int | None) -> Candidate:
    tried = _tries(recipe, shape, instance, _COUNTS if count is None else (count,))
    last = next(tried)
    for each in tried:
        if last.fits:
            break
        last = each
    return last


def _tries(recipe: "Recipe", shape: ModelShape, instance: Instance, counts: tuple[int, ...]) -> Iterator[Candidate]:
    return (plan_on(recipe, shape, instance, count) for count in counts)


def _part(candidates: Iterable[Candidate], has: Callable[[Candidate], bool]) -> tuple[list[Candidate], list[Candidate]]:
    """Split candidates into those for which `has` is true, and the others."""
    found: tuple[list[Candidate], list[Candidate]] = ([], [])
    for each in candidates:
        found[not has(each)].append(each)
    return found


def _join_names(candidates: Iterable[Candidate]) -> str:
    return _join(each.instance.name for each in candidates)


def _join(names: Iterable[str]) -> str:
    """The first names, and how many more there are."""
    every = list(names)
    more = f" and {len(every) - _SHOWN} more" if len(every) > _SHOWN else ""
    return f"{', '.join(every[:_SHOWN])}{more}"


def _rank(candidate: Candidate) -> tuple[int, float, str]:
    return candidate.count, candidate.usd_per_hour or 0.0, candidate.instance.name


def _memory(candidate: Candidate) -> float:
    return candidate.instance.gpus * (candidate.instance.gpu_memory_gib or 0.0)


def _explain(candidate: Candidate) -> str:
    if candidate.plan is None:
        return f"{candidate.instance.name}: {candidate.reason.rstrip('.')}"
    return (
        f"{candidate.instance.name}, has {render_bytes(candidate.usable_bytes)} available per GPU, and the plan "
        f"needs {render_bytes(candidate.needed_bytes)}"
    )
