"""Strong and weak scaling on paper: the best plan of a recipe on more and more devices."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from echelon.ground.errors import ConfigError, PlanError
from echelon.planner.axes.axis import Sender
from echelon.planner.axes.table import AXES, divide_shape, rank_loads
from echelon.planner.forecast import HourlyPrice
from echelon.planner.hardware.accelerators import Cluster, DeviceKind
from echelon.planner.model_shape import ModelShape
from echelon.planner.plan import ParallelPlan
from echelon.planner.reliability import Goodput, Reliability, estimate_goodput
from echelon.planner.search import RankedPlan, search_plans

if TYPE_CHECKING:
    from echelon.recipe.document import Recipe


def count_step_bytes(shape: ModelShape, plan: ParallelPlan, kind: DeviceKind = "cuda") -> Mapping[str, float]:
    """Bytes by axis (`dp` between copies of the weights, `shard`, and the others by name), of the rank that sends the
    most.

    Scalars, router losses, gradients of norms whose sequence is divided, and what an optimizer sends are left out.
    """
    part = divide_shape(shape, plan)
    by_rank = []
    for rank, load in enumerate(rank_loads(shape, plan)):
        sender = Sender(part, load, rank, plan, kind)
        by_rank.append({name: count for axis in AXES for name, count in axis.sent_bytes(sender).items()})
    return max(by_rank, key=lambda counts: sum(counts.values()))


Kind = Literal["strong", "weak"]
PAYS = 0.5
"""More machines pay as long as each adds at least this part of the throughput that one of those before it has."""


@dataclass(frozen=True)
class ScalingPoint:
    """The best plan on one number of devices.

    Attributes:
        kind: strong: the global batch of the recipe on every number of devices; weak: in proportion to the devices.
        ranked: the plan, its memory and forecast; None if there is none.
        reason: why there is none.
        sent_bytes: what a rank sends in a step.
        goodput: with failures and stragglers; None if nothing is said about them.
    """

    kind: Kind
    num_devices: int
    num_machines: int
    ranked: RankedPlan | None
    reason: str = ""
    sent_bytes: float = 0.0
    goodput: Goodput | None = None

    @property
    def tokens_per_second(self) -> float:
        """Of all devices, of the whole time if failures and stragglers are known; 0 without a plan."""
        if self.ranked is None:
            return 0.0
        return self.ranked.forecast.tokens_per_second * (1.0 if self.goodput is None else self.goodput.share)

    @property
    def exposed_share(self) -> float:
        """The part of a step that is communication beside which nothing is computed."""
        if self.ranked is None:
            return 0.0
        step = self.ranked.forecast.step
        return step.communication / step.total


@dataclass(frozen=True)
class Scaling:
    """The points of one kind, fewest devices first; those without a plan are included."""

    points: tuple[ScalingPoint, ...]

    @property
    def known(self) -> tuple[ScalingPoint, ...]:
        """Those with a plan that fits."""
        return tuple(point for point in self.points if point.ranked is not None)

    def speedup(self, point: ScalingPoint) -> float:
        """Tokens per second over those of the first point with a plan."""
        return point.tokens_per_second / self.known[0].tokens_per_second

    def efficiency(self, point: ScalingPoint) -> float:
        """The speed-up over the growth of the number of devices."""
        return self.speedup(point) * self.known[0].num_devices / point.num_devices

    def find_gain(self, point: ScalingPoint) -> float | None:
        """What a device adds from the point before to this one, over what each had before; None at the first point."""
        index = self.known.index(point)
        if not index:
            return None
        before = self.known[index - 1]
        added = point.tokens_per_second / before.tokens_per_second - 1
        return added / (point.num_devices / before.num_devices - 1)

    def last_that_pays(self) -> ScalingPoint | None:
        """The last point before the first whose added devices do not pay; None if all do."""
        for before, point in zip(self.known, self.known[1:], strict=False):
            gain = self.find_gain(point)
            assert gain is not None
            if gain < PAYS:
                return before
        return None

    def to_dicts(self) -> Iterator[dict[str, Any]]:
        """The points as in the output of `--json`; None for what is unknown."""
        for point in self.points:
            is_known = point.ranked is not None
            yield {
                "scaling": point.kind,
                "num_devices": point.num_devices,
                "num_machines": point.num_machines,
                "tokens_per_second": point.tokens_per_second if is_known else None,
                "speedup": self.speedup(point) if is_known else None,
                "efficiency": self.efficiency(point) if is_known else None,
                "gain": self.find_gain(point) if is_known else None,
                "exposed_communication": point.exposed_share if is_known else None,
                "sent_bytes": point.sent_bytes if is_known else None,
                "goodput": None if point.goodput is None else point.goodput.share,
                "reason": point.reason or None,
                "plan": None if point.ranked is None else point.ranked.to_dict(),
            }


def scale(
    recipe: "Recipe",
    shape: ModelShape,
    counts: Sequence[int],
    kind: Kind,
    build_cluster: Callable[[int], Cluster],
    price: HourlyPrice | None = None,
    reliability: Reliability | None = None,
) -> Scaling:
    """The fastest plan on each number of devices. build_cluster: the cluster of so many of them.

    Raises PlanError if there is a plan that fits on none of them.
    """
    points = [
        _scale_to(_grow(recipe, count, counts[0]) if kind == "weak" else recipe, shape, kind, build_cluster(count),
                  price, reliability)
        for count in counts
    ]  # fmt: skip
    if all(point.ranked is None for point in points):
        raise PlanError(f"--scaling {','.join(map(str, counts))}: no plan on any of these: {points[-1].reason}")
    return Scaling(tuple(points))


def _grow(recipe: "Recipe", count: int, first: int) -> "Recipe":
    """The recipe with a batch in proportion to the devices, those of the recipe being for the `first` ones."""
    train = recipe.train
    if train.batch_ramp is not None:
        raise ConfigError(
            "train.batch_ramp: weak scaling needs one batch in proportion to the devices; remove the ramp to compare."
        )
    name = "global_batch_size" if train.global_batch_size is not None else "global_batch_tokens"
    size, left = divmod(getattr(train, name) * count, first)
    if left:
        raise ConfigError(
            f"--scaling: train.{name}={getattr(train, name)} on {first} devices is not a whole batch on {count}; use "
            "multiples of the first number of devices."
        )
    return recipe.model_copy(update={"train": train.model_copy(update={name: size})})


def _scale_to(
    recipe: "Recipe",
    shape: ModelShape,
    kind: Kind,
    cluster: Cluster,
    price: HourlyPrice | None,
    reliability: Reliability | None,
) -> ScalingPoint:
    point = ScalingPoint(kind, cluster.num_devices, cluster.num_nodes, None)
    try:
        best = search_plans(recipe, shape, cluster, "time", price)[0]
    except PlanError as error:
        return replace(point, reason=str(error))
    if not best.fits:
        return replace(point, reason="no plan fits in memory")
    sent = count_step_bytes(shape, best.plan, cluster.kind)
    good = None if reliability is None else estimate_goodput(shape, best.plan, cluster.num_nodes, reliability)
    return replace(point, ranked=best, sent_bytes=sum(sent.values()), goodput=good)
