"""The sections of a report about what was predicted: time and cost beside those measured, and the memory by part."""

from collections.abc import Iterator, Sequence

from echelon.ground.sizes import render_bytes, render_seconds
from echelon.planner.memory import describe_peak_memory
from echelon.run.folder.reckoning import describe_difference, list_compared
from echelon.run.report.blocks import Bars, Block, Lines, Pairs, Table
from echelon.run.report.nested import read_mapping, read_number, read_value
from echelon.run.report.run_record import RunRecord, percentile

_SMALL = 0.001  # parts of all memory below this share, planned and measured, have no row


def build_prediction(record: RunRecord) -> Iterator[Block]:
    """Yield time and money as predicted before the first step, beside those measured."""
    events = record.find_events("reckoning")
    found = events[-1] if events else record.estimate.get("reckoning")
    sides = [
        {name: value for name in read_mapping(found, side) if (value := read_number(found, side, name)) is not None}
        for side in ("predicted", "measured")
    ]
    rows = [row for row in list_compared(*sides) if not row[0].startswith("memory")]  # it has a section of its own
    if rows:
        yield Table(("", "predicted", "measured", "difference"), rows)
    predicted, times = read_number(record.estimate, "seconds", "step"), record.values("step_seconds")
    if not rows and predicted and times:
        median = percentile(times, 0.5)
        yield Lines(
            [
                f"The plan predicted {render_seconds(predicted)} for a step; the median is {render_seconds(median)} "
                f"({describe_difference(predicted, median, is_time=True)})."
            ]
        )


def build_memory(record: RunRecord) -> Iterator[Block]:
    """Yield the memory of the tensors of a process by part, as planned and measured, and the peak of all its memory."""
    events = record.find_events("memory")
    planned, measured = (read_mapping(events[-1] if events else {}, side) for side in ("planned", "measured"))
    names = [name for name in planned if read_number(planned, name) is not None]
    if names and measured:
        yield from _compare_parts(
            names, *([read_number(side, name) or 0.0 for name in names] for side in (planned, measured))
        )
    elif (total := _estimated_bytes(record)) is not None:
        yield Pairs([("planned for the tensors of one process", render_bytes(total))])
    if peaks := list_peaks(record):
        yield Lines([_describe_peak(record, max(peaks))])


def _compare_parts(names: Sequence[str], planned: Sequence[float], measured: Sequence[float]) -> Iterator[Block]:
    sides = (("planned", planned), ("measured", measured))
    yield Bars([(label, list(zip(names, side, strict=True))) for label, side in sides], "bytes")
    totals = sum(planned), sum(measured)
    parts = [row for row in zip(names, planned, measured, strict=True) if max(row[1:]) >= _SMALL * max(totals)]
    rows = [_compare_bytes(*row) for row in (*parts, ("total", *totals))]
    yield Table(("tensors of one process", "planned", "measured", "difference"), rows)


def list_peaks(record: RunRecord) -> list[float]:
    """Return the peak memory of a process after each step, where it is known."""
    return [peak for row in record.train_rows if (peak := read_number(row, "memory_peak_bytes")) is not None]


def _describe_peak(record: RunRecord, peak: float) -> str:
    is_gpu = read_value(record.environment, "cluster", "kind") == "cuda"
    what = describe_peak_memory(is_gpu)
    capacity = read_number(record.environment, "cluster", "accelerator", "memory_bytes")
    of = "" if capacity is None else f" of {render_bytes(capacity)} available"
    return f"The largest peak (peak_mem on the console) was {render_bytes(peak)}{of}: {what}."


def _compare_bytes(name: str, planned: float, measured: float) -> tuple[str, str, str, str]:
    return name, render_bytes(planned), render_bytes(measured), describe_difference(planned, measured)


def _estimated_bytes(record: RunRecord) -> float | None:
    names = ("parameters", "gradients", "optimizer", "activations", "logits", "buffers")
    parts = [read_number(record.estimate, "memory", name) for name in names]
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None
