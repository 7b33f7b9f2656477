"""The section of a report about benchmarks that ran during training: their metrics over time, first and last."""

from collections.abc import Iterator

from echelon.run.report.blocks import Block, Curves, Series, Table
from echelon.run.report.nested import read_number
from echelon.run.report.numbers import render_number
from echelon.run.report.run_record import RunRecord

_ERROR = "_stderr"


def build_benchmarks(record: RunRecord) -> Iterator[Block]:
    """Yield the blocks of the section; none for a run without benchmarks."""
    series, rows = [], []
    for task, metric in _list_metrics(record):
        values = [(row["step"], read_number(row, "tasks", task, metric)) for row in record.task_rows]
        points = [(step, value) for step, value in values if value is not None]
        if not points:
            continue
        series.append(Series(f"{task} {metric}", points, is_marked=True))
        chosen, comma, rest = metric.partition(",")
        error = read_number(record.task_rows[-1], "tasks", task, f"{chosen}{_ERROR}{comma}{rest}")
        rows.append((task, metric, *(render_number(points[place][1]) for place in (0, -1)), render_number(error)))
    if series:
        yield Curves("benchmarks", "step", series)
        yield Table(("task", "metric", "first", "last", "standard error of the last"), rows, is_text=True)


def _list_metrics(record: RunRecord) -> Iterator[tuple[str, str]]:
    """Yield each task with each of its metrics, without their standard errors."""
    found = {
        (task, name): None
        for row in record.task_rows
        for task, values in (row.get("tasks") or {}).items()
        for name in values
    }
    yield from ((task, name) for task, name in found if not name.partition(",")[0].endswith(_ERROR))
