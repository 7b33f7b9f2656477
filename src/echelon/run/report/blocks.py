"""The parts of a report, which are written as HTML and as text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Point = tuple[float, float]
Form = Literal["number", "seconds", "bytes", "percent"]
"""How values of a picture are written."""
Tone = Literal["plain", "advice", "warning"]


@dataclass(frozen=True)
class Pairs:
    """Names with their values."""

    rows: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Table:
    """A table; columns after the first are numbers unless `is_text`."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    is_text: bool = False


@dataclass(frozen=True)
class Series:
    """A named line; `is_marked`: its points are marked. `is_faint`: it is the background of another line."""

    name: str
    points: Sequence[Point]
    is_marked: bool = False
    is_faint: bool = False


@dataclass(frozen=True)
class Curves:
    """Lines over one axis. `form`: of the values."""

    name: str
    axis: str
    series: Sequence[Series]
    form: Form = "number"


@dataclass(frozen=True)
class Bars:
    """Rows of one bar each, on a common scale; a bar is divided into named parts."""

    rows: Sequence[tuple[str, Sequence[tuple[str, float]]]]
    form: Form


@dataclass(frozen=True)
class Mark:
    """A moment on a timeline; `is_bad` for failures."""

    seconds: float
    name: str
    is_bad: bool = False


@dataclass(frozen=True)
class Timeline:
    """Spans and moments in the seconds of a run; the spans are those in which its processes were there."""

    seconds: float
    spans: Sequence[tuple[float, float]]
    marks: Sequence[Mark]


@dataclass(frozen=True)
class HeatMap:
    """Values by row and column; None is unknown. `name` says what a cell is."""

    name: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float | None]]
    form: Form


@dataclass(frozen=True)
class Lines:
    """Sentences."""

    lines: Sequence[str]
    tone: Tone = "plain"


@dataclass(frozen=True)
class Listing:
    """Text as it is, such as a file; hidden until it is opened, and not part of the text report."""

    name: str
    text: str


Block = Pairs | Table | Curves | Bars | Timeline | HeatMap | Lines | Listing


@dataclass(frozen=True)
class ReportSection:
    """A headline with its blocks."""

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Report:
    """A whole report. `status` is a word or two or empty, `summary` a sentence, `figures` the numbers to see first."""

    title: str
    status: str
    is_bad: bool
    summary: str
    figures: Sequence[tuple[str, str]]
    sections: Sequence[ReportSection]
