"""`--instance auto`: the machines of the catalogue on which a recipe's whole run costs least."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from echelon.ground.errors import ConfigError, PlanError
from echelon.ground.sizes import render_bytes, render_duration
from echelon.ground.variables import find_cache_dir
from echelon.planner.choose import find_usable_bytes, resolve_plan
from echelon.planner.forecast import Forecast, HourlyPrice, forecast_run, read_history, render_usd
from echelon.planner.hardware.accelerators import Cluster
from echelon.planner.hardware.instances import Instance, cluster_of, list_instances
from echelon.planner.hardware.job_machines import find_machines
from echelon.planner.memory import estimate_memory
from echelon.planner.model_shape import ModelShape
from echelon.planner.plan import ParallelPlan

if TYPE_CHECKING:
    from echelon.recipe.document import Recipe

# If the number of machines is not given, each type is tried with these until the plan fits.
_COUNTS = (1, 2, 4, 8, 16)
_SHOWN = 8
# Costs that differ by less are not told apart by a prediction.
_CLOSE = 0.05


@dataclass(frozen=True)
class Candidate:
    """`count` machines of one type, the plan and the bytes it needs on each GPU, or the reason why there is no plan.

    `forecast`: of the run under that plan; None if it does not fit, has no price, or the speed of the GPU is unknown.
    """

    instance: Instance
    count: int
    plan: ParallelPlan | None = None
    needed_bytes: int = 0
    usable_bytes: float = 0.0
    reason: str = ""
    forecast: Forecast | None = None

    @property
    def fits(self) -> bool:
        """Whether the plan leaves the usual headroom on each GPU."""
        return self.plan is not None and self.needed_bytes <= self.usable_bytes

    @property
    def usd_per_hour(self) -> float | None:
        """The price of all its machines together; None if the catalogue has none."""
        price = self.instance.price
        return None if price is None else price.usd_per_hour * self.count

    @property
    def cost(self) -> float | None:
        """Dollars for 10^9 tokens of training, which rank as the whole run does; None without a price or a speed."""
        return None if self.forecast is None else self.forecast.usd_per_billion_tokens

    def describe(self, mark: str = "") -> str:
        """One line of the table; `mark` stands after the price, and is explained above the table."""
        assert self.plan is not None
        forecast = self.forecast
        run = "cost of the run unknown"
        if forecast is not None and forecast.usd is not None and forecast.hours is not None:
            run = f"{render_usd(forecast.usd)} in {render_duration(3600 * forecast.hours)}"
        elif self.cost is not None:
            run = f"${self.cost:,.2f} for 10^9 tokens"
        hourly = "price unknown" if self.usd_per_hour is None else f"${self.usd_per_hour:.2f}/h{mark}"
        devices = f"{self.count * self.instance.gpus} x {self.instance.accelerator}"
        return (
            f"{self.count} x {self.instance.name:<19} {run:<25} {hourly:<11} {devices:<14} {self.plan.strategy:<5} "
            f"needs {render_bytes(self.needed_bytes)} of {render_bytes(self.usable_bytes)}"
            + (f", {self.instance.network_gbits:g} Gbit/s between machines" if self.count > 1 else "")
        )


@dataclass(frozen=True)
class InstanceChoice:
    """The result of `choose_instance`: the cheapest type and all candidates.

    `region`: of the job, None if the recipe does not say.
    """

    best: Candidate
    candidates: tuple[Candidate, ...]
    region: str | None = None

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
        fitting, small = _part(self.candidates, lambda candidate: candidate.fits)
        priced, unknown = _part(fitting, lambda candidate: candidate.usd_per_hour is not None)
        fewer, _ = _part(unknown, lambda candidate: candidate.count < self.count)
        ranked = sorted(priced, key=_rank)
        first = [self.best, *(candidate for candidate in ranked if candidate is not self.best)][:_SHOWN]
        marks = self._mark_prices(first)
        lines = [f"instance auto: {self.count} x {self.instance.name}, {self._explain_choice(ranked)}"]
        lines += self._describe_prices(marks)
        lines += [f"  {candidate.describe(marks[_terms(candidate)])}" for candidate in first]
        if len(priced) > _SHOWN:
            lines.append(f"  and {len(priced) - _SHOWN} more that cost more")
        lines.append(
            "  costs are of all steps, without a start; echelon plan --quote adds 5 min for it, and searches other "
            "plans for types that do not fit"
        )
        if unknown:
            names = _join(f"{candidate.count} x {candidate.instance.name}" for candidate in unknown)
            lines.append(
                f"  fit, but were not considered because their price is unknown: {names}; to use one, set it as the "
                "instance type, and set budget.usd_per_hour; or give its price in a file (docs/cost.md)"
            )
        if fewer:
            lines.append(f"  of these, need fewer machines: {_join_names(fewer)}")
        if small:
            lines.append(f"  do not fit: {_join_names(small)}")
        return lines

    def _explain_choice(self, ranked: Sequence[Candidate]) -> str:
        types = f"of the {len(ranked)} priced types on which the plan fits"
        if self.best.cost is None:
            return f"{types}, the cheapest per hour; the speed of their GPUs is unknown, so the cost of the run is too"
        what = "the whole run" if self.best.forecast and self.best.forecast.usd is not None else "10^9 tokens"
        if self.best is ranked[0]:
            return f"{types}, the cheapest for {what} at the predicted speed"
        return (
            f"{types}, the one with the fewest machines of those within {_CLOSE:.0%} of the cheapest for {what} at the "
            "predicted speed"
        )

    def _mark_prices(self, shown: Sequence[Candidate]) -> dict[str, str]:
        """A mark for the prices of each region and date; none for those of the job's region, else the most frequent."""
        counts = Counter(_terms(candidate) for candidate in shown)
        regions = {
            _terms(candidate): candidate.instance.price.region
            for candidate in shown
            if candidate.instance.price is not None
        }
        order = sorted(counts, key=lambda terms: (regions[terms] != self.region, -counts[terms], terms))
        return {terms: "*" * rank for rank, terms in enumerate(order)}

    def _describe_prices(self, marks: Mapping[str, str]) -> Iterator[str]:
        parts = [f"{mark} {terms}".lstrip() for terms, mark in marks.items()]
        line = f"  prices on demand: {'; '.join(parts)}"
        if len(marks) > 1:
            line += "; prices differ between regions, so rows with another mark may rank otherwise in yours"
        elif self.region is not None and not next(iter(marks)).startswith(self.region):
            line += f"; not those of {self.region}, where the job runs"
        yield line


def choose_instance(recipe: "Recipe", shape: ModelShape, count: int | None = None) -> InstanceChoice:
    """The machines on which the whole run costs least at its predicted speed, `count` of each type or as few as fit it.

    Of machines that cost nearly the same the fewest are taken, as predictions of a network are less certain than those
    of links inside a machine. Only types with a dated price are considered. Raises PlanError if none of them fits.
    """
    types = list_instances(recipe.launch.sagemaker.region)
    instances = [instance for name, instance in types.items() if instance.gpus and name.startswith("ml.")]
    candidates = tuple(_try_type(recipe, shape, instance, count) for instance in instances)
    fitting = [candidate for candidate in candidates if candidate.fits]
    priced = [candidate for candidate in fitting if candidate.usd_per_hour is not None]
    if priced:
        return InstanceChoice(choose_cheapest(priced), candidates, recipe.launch.sagemaker.region)
    machines = f"{count} machine(s)" if count is not None else f"up to {_COUNTS[-1]} machines"
    if fitting:
        raise PlanError(
            f"launch.sagemaker.instance_type=auto: no type with a known price fits on {machines}; set one of: "
            f"{_join_names(fitting)}."
        )
    largest = max(candidates, key=lambda other: other.instance.gpus * (other.instance.gpu_memory_gib or 0.0))
    raise PlanError(
        f"launch.sagemaker.instance_type=auto: the plan does not fit on {machines} of any type; the largest, "
        f"{_explain(largest)}; shard more (parallel: fsdp), set "
        "train.activation_checkpointing: full, or use more machines."
    )


def plan_on(recipe: "Recipe", shape: ModelShape, instance: Instance, count: int) -> Candidate:
    """The plan of the recipe on these machines, whether it fits or not; without a plan, `reason` is the error."""
    try:
        cluster = find_cluster(recipe, instance, count)
        plan = resolve_plan(recipe, shape, cluster)
    except (ConfigError, PlanError) as error:
        return Candidate(instance, count, reason=str(error))
    needed = estimate_memory(shape, plan, cluster.kind).total
    usable = find_usable_bytes(cluster) or 0.0
    candidate = Candidate(instance, count, plan, needed, usable)
    if not candidate.fits or instance.price is None:
        return candidate
    price = HourlyPrice(instance.price.usd_per_hour, instance.price.terms)
    return replace(candidate, forecast=_forecast(recipe, shape, plan, cluster, price))


def _forecast(
    recipe: "Recipe", shape: ModelShape, plan: ParallelPlan, cluster: Cluster, price: HourlyPrice
) -> Forecast | None:
    """The predicted run on a type at its own price; None if the speed of its GPU is unknown."""
    no_price = {"usd_per_hour": None, "spot_usd_per_hour": None}  # of one type
    alone = recipe.model_copy(update={"budget": recipe.budget.model_copy(update=no_price)})
    history = read_history(find_cache_dir(), shape, cluster)
    try:
        return forecast_run(alone, shape, plan, cluster, price, history=history)
    except PlanError:
        return None


def find_cluster(recipe: "Recipe", instance: Instance, count: int) -> Cluster:
    """The cluster of these machines with `launch.nproc_per_node` processes each. Raises ConfigError."""
    nproc = recipe.launch.nproc_per_node
    return cluster_of(instance, count, None if nproc == "auto" else nproc)


def limit_to_weakest(cluster: Cluster, recipe: "Recipe", variables: Mapping[str, str]) -> Cluster:
    """The detected cluster, in a SageMaker job with instance groups with the memory and dtypes of its weakest type.

    The process that plans detects only its own machine. `variables` is the environment.
    """
    if "TRAINING_JOB_NAME" not in variables or not recipe.launch.sagemaker.instance_groups:
        return cluster
    weakest = cluster_of(find_machines(recipe.launch).weakest, cluster.num_nodes, cluster.devices_per_node)
    if weakest.kind != cluster.kind:
        return cluster
    sizes = [devices.accelerator.memory_bytes for devices in (cluster, weakest)]
    memory = min(size for size in sizes if size is not None)
    if cluster.kind == "cpu":
        return replace(cluster, accelerator=replace(cluster.accelerator, memory_bytes=memory))
    # All of the weakest, also its name: after a restart the planning process may be on another type.
    device = replace(weakest.accelerator, memory_bytes=memory)
    return replace(cluster, accelerator=device, bf16_supported=cluster.has_bf16 and weakest.has_bf16)


def _try_type(recipe: "Recipe", shape: ModelShape, instance: Instance, count: int | None) -> Candidate:
    for tried in _COUNTS if count is None else (count,):
        candidate = plan_on(recipe, shape, instance, tried)
        if candidate.fits:
            break
    return candidate


def _part(candidates: Iterable[Candidate], has: Callable[[Candidate], bool]) -> tuple[list[Candidate], list[Candidate]]:
    """Split candidates into those for which `has` is true, and the others."""
    parts: tuple[list[Candidate], list[Candidate]] = ([], [])
    for candidate in candidates:
        parts[not has(candidate)].append(candidate)
    return parts


def _join_names(candidates: Iterable[Candidate]) -> str:
    return _join(candidate.instance.name for candidate in candidates)


def _join(names: Iterable[str]) -> str:
    """The first names, and how many more there are."""
    every = list(names)
    more = f" and {len(every) - _SHOWN} more" if len(every) > _SHOWN else ""
    return f"{', '.join(every[:_SHOWN])}{more}"


def choose_cheapest(priced: Sequence[Candidate]) -> Candidate:
    """The cheapest; of those that cost nearly the same, the one with the fewest machines."""
    first = min(priced, key=_rank)
    if first.cost is None:
        return first
    close = [
        candidate for candidate in priced if candidate.cost is not None and candidate.cost <= (1 + _CLOSE) * first.cost
    ]
    return min(close, key=lambda candidate: (candidate.count, *_rank(candidate)))


def _rank(candidate: Candidate) -> tuple[float, float, str]:
    cost = math.inf if candidate.cost is None else candidate.cost
    return cost, candidate.usd_per_hour or 0.0, candidate.instance.name


def _terms(candidate: Candidate) -> str:
    """Region and date of its price."""
    assert candidate.instance.price is not None
    return candidate.instance.price.terms


def _explain(candidate: Candidate) -> str:
    if candidate.plan is None:
        return f"{candidate.instance.name}: {candidate.reason.rstrip('.')}"
    return (
        f"{candidate.instance.name}, has {render_bytes(candidate.usable_bytes)} available per GPU, and the plan "
        f"needs {render_bytes(candidate.needed_bytes)}"
    )
