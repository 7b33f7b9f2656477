"""The report of several runs side by side."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from echelon.redaction import redact_text
from echelon.report.blocks import Block, Curves, Report, Section, Series, Table
from echelon.report.points import read_points, smooth
from echelon.report.run_record import RunRecord
from echelon.report.sections import build_report, list_figures

_MANY_POINTS = 50
# These differ in any two runs.
_OWN_KEYS = ("run.name", "run.dir")


def build_comparison(records: Sequence[RunRecord]) -> Report:
    """Build the report of the first run, beginning with a comparison of all."""
    first = build_report(records[0])
    names = _name_apart(records)
    sections = [
        Section("Side by side", [_list_figures(records, names)]),
        Section("Curves", list(_draw_over(records, names))),
        Section("What differs in the recipes", list(_list_differences(records, names))),
    ]
    return Report(
        title=f"{names[0]}, compared with {', '.join(names[1:])}",
        status=first.status,
        is_bad=first.is_bad,
        summary=f"The sections after the comparison are those of {names[0]}: {first.summary}.",
        figures=first.figures,
        sections=[*(section for section in sections if section.blocks), *first.sections],
    )


def _name_apart(records: Sequence[RunRecord]) -> list[str]:
    """The names of the runs; their paths if two have the same name."""
    names = [record.name for record in records]
    return names if len(set(names)) == len(names) else [str(record.summary.path) for record in records]


def _list_figures(records: Sequence[RunRecord], names: Sequence[str]) -> Table:
    figures = [{"status": record.summary.status} | list_figures(record) for record in records]
    return Table(("", *names), [(name, *(each[name] for each in figures)) for name in figures[0]])


def _draw_over(records: Sequence[RunRecord], names: Sequence[str]) -> Iterator[Block]:
    """Losses over tokens, so that runs with other batches compare; over steps if a run has no counts of tokens."""
    has_tokens = all(read_points(record.train_rows, "loss", "tokens") for record in records)
    axis = "tokens" if has_tokens else "step"
    for title, kind, name in (
        ("training loss, smoothed", "train_rows", "loss"),
        ("evaluation loss", "eval_rows", "loss"),
        ("tokens per second, smoothed", "steady_rows", "tokens_per_second"),
    ):
        is_evaluation = kind == "eval_rows"
        along = "step" if is_evaluation else axis
        series = []
        for record, label in zip(records, names, strict=True):
            points = read_points(getattr(record, kind), name, along)
            shown = smooth(points) if len(points) > _MANY_POINTS and not is_evaluation else points
            series.append(Series(label, shown, is_marked=is_evaluation))
        if any(each.points for each in series):
            yield Curves(title, along, series)


def _list_differences(records: Sequence[RunRecord], names: Sequence[str]) -> Iterator[Block]:
    flat = [dict(_flatten(record.recipe)) for record in records]
    keys = sorted({key for each in flat for key in each} - {*_OWN_KEYS})
    rows = [(key, *(redact_text(str(each.get(key, "-"))) for each in flat)) for key in keys]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    if differing:
        yield Table(("", *names), differing, is_text=True)


def _flatten(value: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, each in value.items():
        if isinstance(each, Mapping) and each:
            yield from _flatten(each, f"{path}{key}.")
        else:
            yield f"{path}{key}", each
