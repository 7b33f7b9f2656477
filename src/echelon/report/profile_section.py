"""The section of a report about profiled steps: where their time went, what was sent, what recording cost."""

import statistics
from collections.abc import Iterator, Sequence

from echelon.report.blocks import Bars, Block, HeatMap, Lines, Table
from echelon.report.nested import read_number
from echelon.report.numbers import render_percent, render_rate, render_seconds
from echelon.report.run_record import RunRecord
from echelon.report.trace import PARTS, Trace
from echelon.sizes import render_bytes

_NAME_WIDTH = 70


def build_profile(record: RunRecord) -> Iterator[Block]:
    """Yield the blocks of the section; none without traces."""
    traces = record.traces
    if not traces:
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
    yield from _list_collectives(traces[0])
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
    return next((each.seconds for each in trace.steps if each.step == step), None)


def _describe_cost(record: RunRecord, steps: Sequence[int]) -> Iterator[str]:
    """Compare the profiled steps with the others of the run, by their rows."""
    profiled = [
        value
        for row in record.train_rows
        if row["step"] in steps and (value := read_number(row, "step_seconds")) is not None
    ]
    others = record.values("step_seconds")
    if profiled and others:
        taken, usual = statistics.median(profiled), statistics.median(others)
        yield (
            f"A step took {render_seconds(taken)} while it was recorded, and {render_seconds(usual)} otherwise: "
            f"recording costs {render_percent(taken / usual - 1)}."
        )


def _list_collectives(trace: Trace) -> Iterator[Block]:
    if not trace.collectives:
        return
    count = len(trace.steps)
    yield Table(
        (f"collectives of rank {trace.rank}, per step", "calls", "its input", "time", "bus bandwidth"),
        [
            (
                each.name,
                f"{each.count / count:.1f}",
                "unknown" if each.bytes is None else render_bytes(each.bytes / count),
                render_seconds(each.seconds / count),
                "unknown" if each.bus_rate is None else render_rate(each.bus_rate),
            )
            for each in trace.collectives
        ],
    )
    yield Lines(
        [
            "The time of a collective includes waiting for the other ranks. The bus bandwidth is what each link of a "
            "ring would carry, so that it compares with the bandwidth of the network whatever the number of ranks."
        ]
    )
