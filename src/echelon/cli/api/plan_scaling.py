"""Strong and weak scaling of a recipe on paper: a plan for each number of devices, as a table, as JSON and drawn."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from echelon.cli.api.planning import find_target
from echelon.cli.api.recipes import RecipeLike, load_recipe
from echelon.ground.errors import ConfigError
from echelon.ground.sizes import render_bytes
from echelon.planner.forecast import HourlyPrice
from echelon.planner.hardware.accelerators import Cluster
from echelon.planner.more_devices import PAYS, Scaling, scale
from echelon.planner.reliability import Reliability
from echelon.run.lifecycle.model_checks import check_model
from echelon.run.report.picture import draw_scaling


@dataclass(frozen=True)
class ScalingReport:
    """The strong scaling of a recipe, and the weak one. `str()` gives the tables."""

    strong: Scaling
    weak: Scaling
    links: str

    def to_dict(self) -> dict[str, Any]:
        """The output of `--json`."""
        ends = {scaling.known[0].kind: scaling.last_that_pays() for scaling in (self.strong, self.weak)}
        return {
            "points": [point for scaling in (self.strong, self.weak) for point in scaling.to_dicts()],
            "pays_up_to": {kind: None if end is None else end.num_devices for kind, end in ends.items()},
            "links": self.links,
        }

    def draw(self) -> str:
        """The picture as SVG."""
        return draw_scaling([self.strong, self.weak])

    @override
    def __str__(self) -> str:
        return "\n".join(self.describe())

    def describe(self) -> Iterator[str]:
        """Two tables, each with the number of devices from which more no longer pay."""
        yield "strong scaling: the batch of the recipe on every number of devices"
        yield from _describe(self.strong)
        first = self.weak.points[0].num_devices
        yield f"weak scaling: the batch grows with the devices; that of the recipe is for {first}"
        yield from _describe(self.weak)
        yield f"  assumes: {self.links}"


def plan_scaling(
    recipe: RecipeLike,
    counts: Sequence[int],
    devices: str | None = None,
    *,
    devices_per_node: int = 8,
    instance: str | None = None,
    reliability: Reliability | None = None,
) -> ScalingReport:
    """Plan a recipe for each number of devices, with its batch and with one in proportion. Downloads no weights.

    Args:
        recipe: a Recipe, the path of its file, or a mapping. What it sets is kept by every plan.
        counts: numbers of devices, in any order; with an instance type, multiples of its GPUs.
        devices: a kind of device, for example `1024xH100@nvlink,efa`; its number does not matter.
        devices_per_node: devices per machine, with `devices`.
        instance: a SageMaker instance type instead.
        reliability: failures of machines and the spread of their steps, which lower the throughput.

    Raises:
        ConfigError, PlanError or DataError: there is no plan, or the speed of the devices is unknown.
    """
    counts = sorted(set(counts))
    if not counts or counts[0] < 1:
        raise ConfigError("--scaling needs numbers of devices, at least one of them: --scaling 8,16,32.")
    recipe = load_recipe(recipe)
    if (devices is None) == (instance is None) or instance == "auto":
        raise ConfigError("--scaling needs the kind of device: --devices 1xH100 or --instance ml.TYPE.")
    shape = check_model(recipe, elsewhere=True).shape

    def build(count: int) -> tuple[Cluster, HourlyPrice | None]:
        if devices is not None:
            kind = devices.partition("x")[2]
            return find_target(recipe, shape, f"{count}x{kind}", devices_per_node, None, None)
        one, price = find_target(recipe, shape, None, devices_per_node, instance, 1)
        machines, left = divmod(count, one.num_devices)
        if left:
            raise ConfigError(
                f"--scaling {count}: {instance} has {one.num_devices} devices; use multiples of {one.num_devices}."
            )
        return find_target(recipe, shape, None, devices_per_node, instance, machines)[0], price

    price = build(counts[-1])[1]
    strong, weak = (
        scale(recipe, shape, counts, kind, lambda count: build(count)[0], price, reliability)
        for kind in ("strong", "weak")
    )
    return ScalingReport(strong, weak, build(counts[-1])[0].known_links.describe())


def _describe(scaling: Scaling) -> Iterator[str]:
    has_goodput = any(point.goodput is not None for point in scaling.points)
    header = ["devices", "tokens/s", "speed-up", "efficiency", "exposed", "sent per rank", "plan"]
    header[5:5] = ["goodput"] if has_goodput else []
    rows = [header]
    for point in scaling.points:
        if point.ranked is None:
            rows.append([str(point.num_devices), point.reason])
            continue
        row = [
            f"{point.num_devices:,}",
            f"{point.tokens_per_second:,.0f}",
            f"{scaling.speedup(point):.2f}",
            f"{scaling.efficiency(point):.0%}",
            f"{point.exposed_share:.1%}",
            render_bytes(round(point.sent_bytes)),
            f"{point.ranked.name()}, micro batch {point.ranked.plan.micro_batch_size}, {point.ranked.activations}",
        ]
        row[5:5] = [] if point.goodput is None else [f"{point.goodput.share:.1%}"]
        rows.append(row)
    widths = [max(len(row[column]) for row in rows if len(row) > 2) for column in range(len(header))]
    for row in rows:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip()
    yield "  " + _describe_end(scaling)


def _describe_end(scaling: Scaling) -> str:
    if (end := scaling.last_that_pays()) is None:
        last = scaling.known[-1].num_devices
        return f"more devices pay up to {last:,}: each adds at least {PAYS:.0%} of what one had before"
    after = scaling.known[scaling.known.index(end) + 1]
    gain = scaling.find_gain(after)
    assert gain is not None
    return (
        f"beyond {end.num_devices:,} more devices no longer pay: each of those up to {after.num_devices:,} adds "
        f"{gain:.0%} of what one had before, less than {PAYS:.0%}"
    )
