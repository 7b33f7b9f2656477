"""Where the time of profiled steps went: reads the traces of torch's profiler, of gloo and NCCL, without torch.

Each moment of a step belongs to exactly one part, so the parts of a step add up to its wall time. On a GPU they are
those of its streams; on a CPU, those of the operators of any thread.
"""

import gzip
import math
import os
import re
import zlib
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from echelon.ground.errors import first_line
from echelon.ground.sizes import render_bytes
from echelon.ground.stored import open_regular, parse_json, read_up_to
from echelon.run.folder.run_folder import STEP_MARK
from echelon.run.report.blocks import read_mapping, read_number, read_value

Interval = tuple[float, float]

PARTS = (
    "attention", "matrix products", "copies", "other kernels", "exposed communication", "waiting for data", "host",
)  # fmt: skip
"""The parts of a step. Of several at one moment the first counts: communication is exposed where nothing is computed.
`host` is the rest: Python, launches, and waiting."""

MAX_TRACE_BYTES = 2**28
"""The largest trace that is read, unpacked; its analysis takes about ten times as much memory."""

_DATA = "echelon data"
_ATTENTION = re.compile(r"attention|flash|fmha|_sdpa", re.IGNORECASE)
_MATMUL = re.compile(
    r"gemm|cutlass|nvjet|\bcublas|wgmma|aten::(addmm|mm|bmm|baddbmm|_scaled_mm|_int_mm)$|mkldnn_linear"
)
_COPY = re.compile(r"aten::(copy_|_to_copy|clone|contiguous)$")
_COMMUNICATION = re.compile(r"^nccl(Dev|Kernel)|^gloo:")
_GPU_CATEGORIES = {"kernel", "gpu_memcpy", "gpu_memset"}
# Bytes of one element, by the names of types in traces of gloo and of NCCL.
_WIDTHS = {
    "float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2, "long int": 8, "long": 8, "int": 4, "unsigned char": 1,
    "Float": 4, "Double": 8, "BFloat16": 2, "Half": 2, "Long": 8, "Int": 4, "Byte": 1, "Char": 1, "Bool": 1, "bool": 1,
}  # fmt: skip
_SECONDS = 1e-6  # traces are in microseconds


@dataclass(frozen=True)
class Collectives:
    """All collectives of one kind, over the same ranks, in a trace.

    Attributes:
        bytes: of the inputs, together; None if a size is unknown.
        bus_rate: bytes per second on the slowest link of a ring, by the factors of NCCL's tests; None if unknown.
        ends: the first and the last rank that take part; None if unknown.
    """

    name: str
    count: int
    seconds: float
    bytes: int | None
    bus_rate: float | None
    ends: tuple[int, int] | None = None


@dataclass(frozen=True)
class StepTime:
    """A profiled step of a rank. `parts` are seconds by PARTS, and add up to `seconds`.

    `hidden`: seconds of communication during which something else was computed.
    """

    step: int
    seconds: float
    parts: Mapping[str, float]
    hidden: float


@dataclass(frozen=True)
class Trace:
    """What the trace of one rank says about its steps. `kernels`: the largest by time, with count and seconds."""

    rank: int
    steps: Sequence[StepTime]
    collectives: Sequence[Collectives]
    kernels: Sequence[tuple[str, int, float]]


@dataclass(frozen=True)
class _Event:
    name: str
    category: str
    start: float
    end: float
    place: tuple[Any, Any]
    details: Mapping[str, Any]

    @property
    def span(self) -> Interval:
        return self.start, self.end


def read_traces(run: Path) -> tuple[list[Trace], list[str]]:
    """Read the traces of a run's newest profile, by rank; return them, and a line about each that was left out."""
    files = [(path, match) for path in (run / "profile").glob("*.json.gz") if (match := _parse_name(path.name))]
    newest = max((int(match[1]) for _, match in files), default=0)
    traces, faults = [], []
    for path, match in sorted(files):
        if int(match[1]) == newest:
            try:
                trace = analyse(parse_json(_unpack(path)), int(match[2]))
            except (OSError, EOFError, ValueError, zlib.error, RecursionError, MemoryError) as error:
                faults.append(f"{path} is left out: {_explain(error)}")
            else:
                traces += [trace] if trace.steps else []
    return traces, faults


def _unpack(path: Path) -> bytes:
    """Return the content of a trace. Raises ValueError if it has more than MAX_TRACE_BYTES."""
    with open_regular(path) as packed, gzip.GzipFile(fileobj=packed) as file:
        content = read_up_to(file, MAX_TRACE_BYTES)
        size = os.fstat(packed.fileno()).st_size
    if len(content) > MAX_TRACE_BYTES:
        raise ValueError(
            f"its {render_bytes(size)} unpack to more than {render_bytes(MAX_TRACE_BYTES)}; record fewer steps with "
            "profile.steps"
        )
    return content


def _explain(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "there is not enough memory to read it; record fewer steps with profile.steps."
    reason = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
    return f"{reason}."


def analyse(content: object, rank: int) -> Trace:
    """Analyse the JSON of a trace of torch's profiler."""
    events = list(_read_events(content))
    regions = [event for event in events if event.category == "user_annotation"]
    marks = [event for event in regions if re.fullmatch(STEP_MARK + "[0-9]+", event.name)]
    sends, work = _find_work(events)
    kinds = _classify(work)
    kinds["exposed communication"] = [event.span for event in sends]
    kinds["waiting for data"] = [event.span for event in regions if event.name == _DATA]
    is_inside = _in_steps([mark.span for mark in marks])
    return Trace(
        rank,
        _divide_steps(sorted(marks, key=lambda event: event.start), kinds),
        _count_collectives(
            list(filter(is_inside, sends)),
            _find_group_size(content),
            read_number(content, "distributedInfo", "world_size"),
        ),
        _find_largest(list(filter(is_inside, work))),
    )


def _find_work(events: Sequence[_Event]) -> tuple[list[_Event], list[_Event]]:
    """Return the communication, and the other work on tensors: on a GPU if there is one, else on the host."""
    on_device = [event for event in events if event.category in _GPU_CATEGORIES]
    operators = (
        event for event in events if event.category == "cpu_op" and event.name.startswith(("aten::", "mkldnn"))
    )
    sends = [event for event in on_device or events if _COMMUNICATION.match(event.name)]
    return sends, [event for event in on_device or operators if not _COMMUNICATION.match(event.name)]


def _divide_steps(marks: Sequence[_Event], kinds: Mapping[str, Sequence[Interval]]) -> list[StepTime]:
    """Divide the time of each step among its parts, the last of which is what no interval covers."""
    sending = _measure(kinds["exposed communication"])
    steps = []
    for mark, lengths in zip(
        marks, partition([mark.span for mark in marks], [kinds[name] for name in PARTS[:-1]]), strict=True
    ):
        parts = {name: length * _SECONDS for name, length in zip(PARTS, lengths, strict=True)}
        hidden = sending(mark.span) * _SECONDS - parts["exposed communication"]
        seconds = (mark.end - mark.start) * _SECONDS
        steps.append(StepTime(int(mark.name.removeprefix(STEP_MARK)), seconds, parts, max(0.0, hidden)))
    return steps


def partition(spans: Sequence[Interval], layers: Sequence[Iterable[Interval]]) -> Iterator[list[float]]:
    """Divide spans among layers of intervals: each moment goes to the first layer that covers it, or to the rest.

    Yields for each span a length for each layer, and that of the rest. Its time grows as n log n with all of them.
    """
    unions = accumulate(layers, lambda union, layer: _merge([*union, *layer]), initial=list[Interval]())
    measures = [_measure(union) for union in unions]
    for span in spans:
        lengths = [measure(span) for measure in measures]
        yield [after - before for before, after in pairwise([*lengths, span[1] - span[0]])]


def _measure(intervals: Iterable[Interval]) -> Callable[[Interval], float]:
    """Return a function of a span: how much of it the intervals cover together."""
    merged = _merge(intervals)
    starts = [start for start, _ in merged]
    before = [0.0, *accumulate(end - start for start, end in merged)]

    def measure_until(moment: float) -> float:
        index = bisect_right(starts, moment) - 1
        return 0.0 if index < 0 else before[index] + min(moment, merged[index][1]) - starts[index]

    return lambda span: measure_until(span[1]) - measure_until(span[0])


def _parse_name(name: str) -> re.Match[str] | None:
    return re.fullmatch(r"step-(\d{8,})-rank-(\d{5,})\.json\.gz", name)


def _read_events(content: object) -> Iterator[_Event]:
    """Yield the complete events of a trace, in microseconds, without damaged ones."""
    rows = content.get("traceEvents") if isinstance(content, dict) else None
    for row in rows if isinstance(rows, list) else []:
        start, length = read_number(row, "ts"), read_number(row, "dur")
        if start is None or length is None or not isinstance(row.get("name"), str):
            continue
        thread = str(row.get("pid")), str(row.get("tid"))
        yield _Event(row["name"], str(row.get("cat")), start, start + length, thread, read_mapping(row, "args"))


def _classify(events: Sequence[_Event]) -> dict[str, list[Interval]]:
    """Return the intervals of work on tensors, by part; those of operators contain those of the operators they call."""
    kinds: dict[str, list[Interval]] = {name: [] for name in PARTS}
    for event in events:
        if event.category in ("gpu_memcpy", "gpu_memset") or _COPY.search(event.name):
            kinds["copies"].append(event.span)
        elif _ATTENTION.search(event.name):
            kinds["attention"].append(event.span)
        elif _MATMUL.search(event.name):
            kinds["matrix products"].append(event.span)
        else:
            kinds["other kernels"].append(event.span)
    return kinds


def _merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals, in order, without overlaps."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def _in_steps(spans: Sequence[Interval]) -> Callable[[_Event], bool]:
    merged = _merge(spans)
    starts = [start for start, _ in merged]

    def is_inside(event: _Event) -> bool:
        index = bisect_right(starts, event.start)
        return index > 0 and event.start < merged[index - 1][1]

    return is_inside


def _count_collectives(
    events: Sequence[_Event], group_size: float | None, world_size: float | None
) -> list[Collectives]:
    """Sum the collectives by name and ranks, the slowest kind first."""
    everyone = (0, int(world_size) - 1) if world_size is not None and group_size == world_size else None
    by_kind = defaultdict(list)
    for event in events:
        by_kind[_name_collective(event), _find_ends(event) or everyone].append(event)
    collectives = [_sum_up(name, ends, group, group_size) for (name, ends), group in by_kind.items()]
    return sorted(collectives, key=lambda part: -part.seconds)


def _sum_up(name: str, ends: tuple[int, int] | None, events: Sequence[_Event], group_size: float | None) -> Collectives:
    sizes = [_count_bytes(event) for event in events]
    seconds = sum(event.end - event.start for event in events) * _SECONDS
    ring = [_ring_bytes(name, event, size, group_size) for event, size in zip(events, sizes, strict=True)]
    sent = _add_up(ring)
    total = _add_up(sizes)
    rate = None if sent is None or seconds <= 0 else sent / seconds
    return Collectives(name, len(events), seconds, None if total is None else int(total), rate, ends)


def _add_up(values: Sequence[float | None]) -> float | None:
    """Return the sum; None if one of the values is unknown."""
    numbers = [value for value in values if value is not None]
    return sum(numbers) if len(numbers) == len(values) else None


def _find_ends(event: _Event) -> tuple[int, int] | None:
    """Return the first and the last rank of NCCL's group; None if unknown.

    Of more than 30 ranks torch writes some and dots; older versions then leave out the last one.
    """
    text = str(event.details.get("Process Group Ranks", ""))
    ranks = [] if text.endswith("...]") else re.findall(r"\d+", text)
    return (int(ranks[0]), int(ranks[-1])) if ranks else None


def _find_group_size(content: object) -> float | None:
    """Return the size of the process groups if all have the same one: gloo's events do not name their group."""
    groups = read_value(content, "distributedInfo", "pg_config")
    sizes = {read_number(group, "pg_size") for group in groups} if isinstance(groups, list) else set()
    return sizes.pop() if len(sizes) == 1 else None


def _name_collective(event: _Event) -> str:
    """Return all_reduce and so on: NCCL's kernels have the name in their arguments, gloo's operators in their name."""
    label = event.details.get("Collective name")
    name = label if isinstance(label, str) and label else event.name.removeprefix("gloo:")
    return {"allreduce": "all_reduce", "_allgather_base": "all_gather", "_reduce_scatter_base": "reduce_scatter"}.get(
        name, name
    )


def _count_bytes(event: _Event) -> int | None:
    """Return the bytes of a rank's input to a collective; None if unknown."""
    if (elements := read_number(event.details, "In msg nelems")) is not None:
        width = _WIDTHS.get(str(event.details.get("dtype")))
        return None if width is None else int(elements) * width
    sizes, kinds = event.details.get("Input Dims"), event.details.get("Input type")
    if not (isinstance(sizes, list) and isinstance(kinds, list) and sizes):
        return None
    counts = [_count_tensor(size, kind) for size, kind in zip(sizes, kinds, strict=False)]
    known_counts = [count for count in counts if count is not None]
    return sum(known_counts) if len(known_counts) == len(sizes) else None


def _count_tensor(shape: object, kind: object) -> int | None:
    """Return the bytes of a tensor in the arguments of an operator; None if it is none, or a list of tensors."""
    width = _WIDTHS.get(str(kind))
    if width is None or not isinstance(shape, list) or not all(isinstance(size, int) for size in shape):
        return None
    return math.prod(shape) * width


def _ring_bytes(name: str, event: _Event, size: int | None, group_size: float | None) -> float | None:
    """Return the bytes that pass each link of a ring, by the factors of NCCL's tests (PERFORMANCE.md there)."""
    count = read_number(event.details, "Group size") or group_size
    if size is None or count is None or count < 1:
        return None
    factors = {
        "all_reduce": 2 * (count - 1) / count,
        "all_gather": count - 1,  # of the input, which is a part of the whole
        "reduce_scatter": (count - 1) / count,
        "all_to_all": (count - 1) / count,
        "broadcast": 1.0,
        "send": 1.0,
        "recv": 1.0,
    }
    return None if name not in factors else size * factors[name]


def _find_largest(events: Sequence[_Event], count: int = 10) -> list[tuple[str, int, float]]:
    """Return the names with the most time of their own, without that of the operators they call; count, seconds."""
    counts: Counter[str] = Counter()
    own_seconds: dict[str, float] = defaultdict(float)
    by_place = defaultdict(list)
    for event in events:
        by_place[event.place].append(event)
    for group in by_place.values():
        around: list[_Event] = []
        for event in sorted(group, key=lambda event: (event.start, -event.end)):
            while around and around[-1].end <= event.start:
                around.pop()
            if around:
                own_seconds[around[-1].name] -= event.end - event.start
            around.append(event)
            counts[event.name] += 1
            own_seconds[event.name] += event.end - event.start
    largest = sorted(own_seconds, key=lambda name: -own_seconds[name])[:count]
    return [(name, counts[name], own_seconds[name] * _SECONDS) for name in largest]
