"""The report of several runs side by side."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from echelon.ground.redaction import redact_text
from echelon.run.report.blocks import (
    UNKNOWN,
    Block,
    Curves,
    Lines,
    Point,
    Report,
    ReportSection,
    Series,
    Table,
    read_number,
    read_points,
    read_value,
    smooth,
)
from echelon.run.report.judgement import judge_run
from echelon.run.report.run_record import RunRecord
from echelon.run.report.sections import list_figures

_MANY_POINTS = 50
# These differ in any two runs.
_OWN_KEYS = ("run.name", "run.dir")
_ABSENT = "-"  # a value that a recipe does not have, or has as null or empty
# What decides which quantity the training loss is.
_LOSS_KEYS = (("objective",), ("train", "loop"))
# What decides which text is held out, where a run has not recorded its size.
_TEXT_KEYS = ("data.train", "data.validation", "data.validation_fraction")


def build_comparison(records: Sequence[RunRecord]) -> Report:
    """Build the report that compares these runs; that of each run is a page of its own."""
    names = _name_apart(records)
    warnings = list(_list_warnings(records, names))
    sections = [
        ReportSection("What does not compare", [Lines(warnings, "warning")] if warnings else []),
        ReportSection("Side by side", [_list_figures(records, names)]),
        ReportSection("Verdict", list(_list_verdicts(records, names))),
        ReportSection("Curves", list(_draw_over(records, names))),
        ReportSection("What differs in the recipes", list(_list_differences(records, names))),
    ]
    return Report(
        title=f"{names[0]}, compared with {', '.join(names[1:])}",
        status="",
        is_bad=False,
        summary=f"{len(records)} runs side by side. `echelon report RUN` has all about one of them.",
        figures=[],
        sections=[section for section in sections if section.blocks],
    )


def name_comparison(records: Sequence[RunRecord]) -> str:
    """The name of the page in the folder of the first run: each comparison has its own."""
    return f"report-compare-{'-'.join(record.name for record in records[1:])[:100]}.html"


def _name_apart(records: Sequence[RunRecord]) -> list[str]:
    """The names of the runs; their paths if two have the same name."""
    names = [record.name for record in records]
    return names if len(set(names)) == len(names) else [str(record.summary.path) for record in records]


def _list_warnings(records: Sequence[RunRecord], names: Sequence[str]) -> Iterator[str]:
    """Sentences about losses that must not be compared: other objectives, tokenizers, held-out texts."""
    if len({str([read_value(record.recipe, *key) for key in _LOSS_KEYS]) for record in records}) > 1:
        yield (
            "The runs have different objectives or loops, so their training losses are different quantities: compare "
            "evaluations of one kind, or `echelon eval RUN --data FILE`."
        )
    has_one_tokenizer = len({_find_tokenizer(record) for record in records}) == 1
    if not has_one_tokenizer:
        yield (
            "The runs have different tokenizers. A loss or a perplexity is one per token, and their tokens are not the "
            "same: compare the bits per byte of the same text instead."
        )
    if len({_find_text(record, has_one_tokenizer) for record in records}) > 1:
        sizes = [
            f"{name} {size:,.0f} bytes"
            for record, name in zip(records, names, strict=True)
            if (size := _read_start(record, "held_out_bytes")) is not None
        ]
        shown = f" ({', '.join(sizes)})" if len(set(sizes)) == len(records) else ""
        yield (
            f"The runs were evaluated on different held-out texts{shown}, of which one may be easier: neither "
            "evaluation losses nor bits per byte say which model is better. "
            "`echelon eval RUN --data FILE` evaluates each on one text."
        )


def _find_tokenizer(record: RunRecord) -> str:
    """What identifies the tokenizer of a run: its fingerprint, or what the recipe says of it."""
    identity = _read_start(record, "tokenizer")
    return str(identity or (read_value(record.recipe, "tokenizer"), read_value(record.recipe, "model", "checkpoint")))


def _find_text(record: RunRecord, has_one_tokenizer: bool) -> str:
    """What identifies the held-out text of a run: its tokens, or their size in bytes, or what the recipe says of it."""
    recorded = _read_start(record, "held_out" if has_one_tokenizer else "held_out_bytes")
    return str(recorded or [read_value(record.recipe, *key.split(".")) for key in _TEXT_KEYS])


def _read_start(record: RunRecord, name: str) -> Any:
    """A value of the newest start that has it; None if none has."""
    return next((value for row in reversed(record.starts) if (value := row.get(name)) is not None), None)


def _list_figures(records: Sequence[RunRecord], names: Sequence[str]) -> Table:
    figures = [{"status": record.summary.status} | list_figures(record) for record in records]
    rows = [(name, *(figure[name] for figure in figures)) for name in figures[0]]
    return Table(("", *names), [row for row in rows if set(row[1:]) != {UNKNOWN}])


def _list_verdicts(records: Sequence[RunRecord], names: Sequence[str]) -> Iterator[Block]:
    rows = [(name, " ".join(judge_run(record))) for name, record in zip(names, records, strict=True)]
    if any(told for _, told in rows):
        yield Table(("run", "verdict"), rows, is_text=True)


def _draw_over(records: Sequence[RunRecord], names: Sequence[str]) -> Iterator[Block]:
    """Losses over tokens, so that runs with other batches compare; over steps if a run has no counts of tokens."""
    has_tokens = all(read_points(record.train_rows, "loss", "tokens") for record in records)
    axis = "tokens" if has_tokens else "step"
    for title, kind, name in (
        ("training loss, smoothed", "train_rows", "loss"),
        ("evaluation loss", "eval_rows", "loss"),
        ("bits per byte of the held-out text", "eval_rows", "bits_per_byte"),
        ("tokens per second, smoothed", "steady_rows", "tokens_per_second"),
    ):
        is_evaluation = kind == "eval_rows"
        series = []
        for record, label in zip(records, names, strict=True):
            if is_evaluation:
                points = _place_evaluations(record, name, has_tokens)
            else:
                points = read_points(getattr(record, kind), name, axis)
                points = smooth(points) if len(points) > _MANY_POINTS else points
            series.append(Series(label, points, is_marked=is_evaluation))
        if any(line.points for line in series):
            yield Curves(title, axis, series)


def _place_evaluations(record: RunRecord, name: str, has_tokens: bool) -> list[Point]:
    """The points of a field of the evaluations, over the tokens of their steps, or over steps."""
    points = read_points(record.eval_rows, name)
    if not has_tokens:
        return points
    tokens = {0.0: 0.0} | dict(read_points(record.train_rows, "tokens"))
    return [(tokens[step], value) for step, value in points if step in tokens]


def _list_differences(records: Sequence[RunRecord], names: Sequence[str]) -> Iterator[Block]:
    flat = [dict(_flatten(record.recipe)) for record in records]
    keys = sorted({key for values in flat for key in values} - {*_OWN_KEYS})
    rows = [(key, *(redact_text(values.get(key, _ABSENT)) for values in flat)) for key in keys]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    if differing:
        yield Table(("", *names), differing, is_text=True)


def _flatten(value: object, path: str = "") -> Iterator[tuple[str, str]]:
    """The values of a recipe by key, as they are written on a command line: data.train.0.path, true, 0.9, 0.95."""
    if isinstance(value, Mapping) and value:
        for key, part in value.items():
            yield from _flatten(part, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and any(isinstance(part, Mapping | list) for part in value):
        for index, part in enumerate(value):
            yield from _flatten(part, f"{path}.{index}")
    elif isinstance(value, list):
        yield path, ", ".join(map(_render, value)) or _ABSENT
    else:
        yield path, _render(value)


def _render(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if read_number({"": value}, "") is not None:
        return f"{value:g}" if isinstance(value, float) else str(value)
    return _ABSENT if value is None or value == {} else str(value)
