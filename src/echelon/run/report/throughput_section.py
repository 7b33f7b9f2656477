"""The section of a report about speed: tokens per second, the load of GPUs, and the ranks' own times of a step."""

import statistics
from collections.abc import Iterator, Sequence

from echelon.ground.redaction import redact_text
from echelon.ground.sizes import render_seconds
from echelon.run.report.blocks import Block, Curves, HeatMap, Lines, Table
from echelon.run.report.nested import read_number, read_value
from echelon.run.report.numbers import render_number, render_percent
from echelon.run.report.points import draw_lines, read_points
from echelon.run.report.run_record import RunRecord, percentile

_PERCENTILES = (("slowest 5 %", 0.05), ("median", 0.5), ("fastest 5 %", 0.95))
# Of more ranks, the slowest are drawn; of more moments, medians of neighbours.
_MAX_RANKS, _MAX_COLUMNS = 32, 100


def build_throughput(record: RunRecord) -> Iterator[Block]:
    """Yield the blocks of the section; none without a step."""
    points = read_points(record.steady_rows, "tokens_per_second")
    if not points:
        return
    yield Curves("tokens per second", "step", draw_lines("", points))
    speeds, times, mfus = (record.values(name) for name in ("tokens_per_second", "step_seconds", "mfu"))
    yield Table(
        ("", *(name for name, _ in _PERCENTILES)),
        [
            ("tokens per second", *(render_number(percentile(speeds, share), 3) for _, share in _PERCENTILES)),
            *(
                [("step", *(render_seconds(percentile(times, 1 - share)) for _, share in _PERCENTILES))]
                if times
                else []
            ),
            *([("MFU", *(render_percent(percentile(mfus, share)) for _, share in _PERCENTILES))] if mfus else []),
        ],
    )
    waits = sum(record.values("data_wait_seconds"))
    left_out = len(record.starts)
    lines = [f"Steps waited for data for {render_percent(waits / sum(times))} of their time."] if times else []
    if left_out:
        first = "The first step of the start is" if left_out == 1 else f"The first steps of {left_out} starts are"
        lines.append(f"{first} slower, and left out here{', as are profiled steps' if record.traces else ''}.")
    yield Lines([*lines, *_describe_gpus(record), *_list_measured(record)])
    yield from _map_ranks(record)


def _describe_gpus(record: RunRecord) -> Iterator[str]:
    """The load of a GPU as NVML reports it; nothing without GPUs."""
    loads, watts = record.values("gpu_utilization"), record.values("gpu_watts")
    if loads and watts:
        yield (
            f"A GPU ran kernels for {render_percent(statistics.mean(loads))} of the time, with "
            f"{render_number(statistics.mean(watts), 3)} W on average. MFU says how well the kernels use it."
        )


def _list_measured(record: RunRecord) -> list[str]:
    """Return what the run said of its compiled graphs and its pipeline at its end."""
    told = [line for row in record.find_events("measured")[-1:] for line in row.get("lines") or ()]
    return [redact_text(line) for line in told if isinstance(line, str)]


def _map_ranks(record: RunRecord) -> Iterator[Block]:
    """Yield a heat map of the ranks' own seconds per step: which one the others wait for, and since when."""
    rows = [(row["step"], times) for row in record.train_rows if (times := _read_times(row.get("rank_seconds")))]
    size = -(-len(rows) // _MAX_COLUMNS) or 1
    groups = [rows[place : place + size] for place in range(0, len(rows), size)]
    count = max((len(times) for _, times in rows), default=0)  # a run can be resumed with another number of ranks
    values = [[_find_median([times for _, times in group], rank) for group in groups] for rank in range(count)]
    slowest = _find_slowest(values)
    if not slowest:
        return
    is_gpu = read_value(record.environment, "cluster", "kind") == "cuda"
    what = "waiting for data" if is_gpu else "a rank's own part of a step"
    few = f", the slowest {_MAX_RANKS} of {count} ranks" if count > _MAX_RANKS else ""
    yield HeatMap(
        f"seconds of {what}{few}",
        [f"rank {rank}" for rank in slowest],
        [f"step {group[-1][0]}" for group in groups],
        [values[rank] for rank in slowest],
        "seconds",
    )


def _find_slowest(values: Sequence[Sequence[float | None]]) -> list[int]:
    """Return the ranks with the largest values, in order; without those of which nothing is known."""
    known = [[value for value in row if value is not None] for row in values]
    ranks = [rank for rank, row in enumerate(known) if row]
    return sorted(sorted(ranks, key=lambda rank: -max(known[rank]))[:_MAX_RANKS])


def _read_times(value: object) -> list[float | None]:
    return [read_number({"": item}, "") for item in value] if isinstance(value, list) else []


def _find_median(rows: Sequence[Sequence[float | None]], rank: int) -> float | None:
    known = [value for row in rows if rank < len(row) and (value := row[rank]) is not None]
    return statistics.median(known) if known else None
