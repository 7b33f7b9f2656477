"""The section of a report about profiled steps: where their time went, what was sent, what recording cost."""

import statistics
from collections.abc import Iterator, Sequence

from echelon.ground.redaction import redact_text
from echelon.ground.sizes import render_bytes, render_rate, render_seconds
from echelon.planner.hardware.links import usual_links
from echelon.run.report.blocks import Bars, Block, HeatMap, Lines, Table
from echelon.run.report.run_record import RunRecord
from echelon.run.report.trace import PARTS, Collectives, Trace
from echelon.run.report.values import read_mapping, read_number, read_numbers, read_value, render_percent

_NAME_WIDTH = 70
# The speed of a machine drifts, so recorded steps are compared with so many steps before and after them.
_NEAR_STEPS = 20


def build_profile(record: RunRecord) -> Iterator[Block]:
    """Yield the blocks of the section; none without traces."""
    if not (traces := record.traces):
        return
    steps = [step.step for step in traces[0].steps]
    yield Bars([(f"rank {trace.rank}, mean step", list(mean_parts(trace).items())) for trace in traces], "seconds")
    yield Table(
        ("part of a step", *(f"rank {trace.rank}" for trace in traces)),
        [(name, *(_show_part(trace, name) for trace in traces)) for name in PARTS],
    )
    hidden = [statistics.mean(step.hidden for step in trace.steps) for trace in traces]
    yield Lines(
        [
            f"Communication behind computation, on average per step: {', '.join(map(render_seconds, hidden))}.",
            *_describe_cost(record, steps),
        ]
    )
    if len(traces) > 1:
        yield HeatMap(
            "time of a step",
            [f"rank {trace.rank}" for trace in traces],
            [f"step {step}" for step in steps],
            [[_find_seconds(trace, step) for step in steps] for trace in traces],
            "seconds",
        )
    yield from _list_collectives(traces[0], record)
    yield _list_kernels(traces[0])


def _list_kernels(trace: Trace) -> Table:
    whole = sum(step.seconds for step in trace.steps) or 1.0
    return Table(
        (f"the longest kernels or operators of rank {trace.rank}", "calls", "time", "of the steps"),
        [
            (
                name if len(name) <= _NAME_WIDTH else f"{name[:_NAME_WIDTH]}...",
                f"{count:,}",
                render_seconds(seconds),
                render_percent(seconds / whole),
            )
            for name, count, seconds in trace.kernels
        ],
    )


def mean_parts(trace: Trace) -> dict[str, float]:
    """Return the seconds of each part, on average over the profiled steps of a rank."""
    return {name: statistics.mean(step.parts[name] for step in trace.steps) for name in PARTS}


def _show_part(trace: Trace, name: str) -> str:
    parts = mean_parts(trace)
    return f"{render_seconds(parts[name])} ({render_percent(parts[name] / (sum(parts.values()) or 1.0))})"


def _find_seconds(trace: Trace, step: int) -> float | None:
    return next((traced.seconds for traced in trace.steps if traced.step == step), None)


def _describe_cost(record: RunRecord, steps: Sequence[int]) -> Iterator[str]:
    """Compare the profiled steps with those around them, by their rows."""
    near = range(min(steps) - _NEAR_STEPS, max(steps) + _NEAR_STEPS + 1)
    profiled = read_numbers((row for row in record.train_rows if row["step"] in steps), "step_seconds")
    others = read_numbers((row for row in record.steady_rows if row["step"] in near), "step_seconds")
    if profiled and others:
        taken, usual = statistics.median(profiled), statistics.median(others)
        yield (
            f"A step took {render_seconds(taken)} while it was recorded, and {render_seconds(usual)} before and after: "
            f"recording costs {render_percent(taken / usual - 1)}."
        )


def _list_collectives(trace: Trace, record: RunRecord) -> Iterator[Block]:
    if not trace.collectives:
        return
    count = len(trace.steps)
    yield Table(
        (f"collectives of rank {trace.rank}, per step", "calls", "its input", "time", "bus bandwidth", "link"),
        [
            (
                collective.name
                if collective.ends is None
                else f"{collective.name}, ranks {collective.ends[0]} to {collective.ends[1]}",
                f"{collective.count / count:.1f}",
                "unknown" if collective.bytes is None else render_bytes(collective.bytes / count),
                render_seconds(collective.seconds / count),
                "unknown" if collective.bus_rate is None else render_rate(collective.bus_rate),
                _compare_with_link(collective, record),
            )
            for collective in trace.collectives
        ],
    )
    yield Lines(
        [
            "The time of a collective includes waiting for the other ranks. The bus bandwidth is what each link of a "
            "ring would carry, so that it compares with the bandwidth of the network whatever the number of ranks; "
            "the link is the slowest one between the ranks, with the bandwidth that large collectives reach on it."
        ]
    )


def _compare_with_link(sent: Collectives, record: RunRecord) -> str:
    """Return the share that a collective used of the slowest link between its ranks."""
    cluster = read_mapping(record.environment, "cluster")
    count, per_machine = read_number(cluster, "num_devices"), read_number(cluster, "devices_per_node")
    if not count or not per_machine:
        return "unknown"
    if count <= per_machine:
        level = "inside"
    elif sent.ends is None:
        return "unknown"
    else:
        level = "inside" if sent.ends[0] // per_machine == sent.ends[1] // per_machine else "between"
    name, bandwidth = read_value(cluster, "links", level, "name"), read_number(cluster, "links", level, "bandwidth")
    if bandwidth is None and read_value(cluster, "kind") == "cuda":
        links = usual_links(str(read_value(cluster, "accelerator", "name")))
        link = links.inside if level == "inside" else links.between
        name, bandwidth = link.name, link.bandwidth
    if bandwidth is None or sent.bus_rate is None:
        return "unknown"
    share, of = render_percent(sent.bus_rate / bandwidth), redact_text(str(name))
    return f"{share} of {of} ({render_rate(bandwidth)})"
