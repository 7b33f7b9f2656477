"""The sections of a report with what was measured: speed, ranks' own times, prediction, memory, network, benchmarks,
rewards, and where the time of profiled steps went."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from echelon.ground.redaction import redact_text
from echelon.ground.sizes import render_bytes, render_rate, render_seconds
from echelon.planner.hardware.links import usual_links
from echelon.planner.memory import describe_peak_memory
from echelon.run.folder.reckoning import describe_difference, list_compared
from echelon.run.report.blocks import (
    Bars,
    Block,
    Curves,
    HeatMap,
    Lines,
    Pairs,
    Series,
    Table,
    draw_lines,
    read_mapping,
    read_number,
    read_numbers,
    read_points,
    read_value,
    render_number,
    render_percent,
)
from echelon.run.report.run_record import RunRecord, percentile
from echelon.run.report.trace import PARTS, Collectives, Trace

_PERCENTILES = (("slowest 5 %", 0.05), ("median", 0.5), ("fastest 5 %", 0.95))
# Of more ranks, the slowest are drawn; of more moments, medians of neighbours.
_MAX_RANKS, _MAX_COLUMNS = 32, 100
_ERROR = "_stderr"
_MEASURES = {
    "reward": "mean reward",
    "solved": "share with the full reward",
    "reward_spread": "spread within a group",
    "uniform_groups": "share of groups with equal rewards",
    "unjudged": "share without a reward",
    "answer_tokens": "tokens of an answer",
    "truncated": "share cut off",
    "turns": "turns of an answer",
    "entropy": "entropy, nats per token",
    "kl": "divergence from the reference",
    "clipped": "share of tokens clipped",
    "mismatch_max": "largest difference between sampler and training",
}
_PARTS = {"sample_seconds": "sampling", "reward_seconds": "rewards", "update_seconds": "updates"}
_NEAR, _MAX_STEPS, _MAX_ANSWERS, _MAX_LETTERS = 10, 8, 3, 100
_NAME_WIDTH = 70
# The speed of a machine drifts, so recorded steps are compared with so many steps before and after them.
_NEAR_STEPS = 20


def build_throughput(record: RunRecord) -> Iterator[Block]:
    """Yield the blocks of the section; none without a step."""
    if not (points := read_points(record.steady_rows, "tokens_per_second")):
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
    groups = [rows[start : start + size] for start in range(0, len(rows), size)]
    values = _group_by_rank([[times for _, times in group] for group in groups])
    if not (slowest := _find_slowest(values)):
        return
    is_gpu = read_value(record.environment, "cluster", "kind") == "cuda"
    what = "waiting for data" if is_gpu else "a rank's own part of a step"
    are_many = len(slowest) == _MAX_RANKS
    yield HeatMap(
        f"seconds of {what}{', the slowest ranks' if are_many else ''}",
        [f"rank {rank}" for rank in slowest],
        [f"step {group[-1][0]}" for group in groups],
        [values[rank] for rank in slowest],
        "seconds",
    )


def _group_by_rank(groups: Sequence[Sequence[Mapping[int, float | None]]]) -> dict[int, list[float | None]]:
    """The median of each group of rows by rank. A row of many ranks has only the slowest; their number can change."""
    ranks = sorted({rank for group in groups for times in group for rank in times})
    return {rank: [_find_median(group, rank) for group in groups] for rank in ranks}


def _find_slowest(values: Mapping[int, Sequence[float | None]]) -> list[int]:
    """Return the ranks with the largest values, in order; without those of which nothing is known."""
    largest = {rank: max((v for v in row if v is not None), default=None) for rank, row in values.items()}
    measured = {rank: value for rank, value in largest.items() if value is not None}
    return sorted(sorted(measured, key=lambda rank: -measured[rank])[:_MAX_RANKS])


def _read_times(value: object) -> dict[int, float | None]:
    """The seconds by rank, of a row; an older version wrote a list of all ranks."""
    items = dict(enumerate(value)) if isinstance(value, list) else value if isinstance(value, dict) else {}
    return {int(rank): read_number({"": item}, "") for rank, item in items.items() if str(rank).isdigit()}


def _find_median(rows: Sequence[Mapping[int, float | None]], rank: int) -> float | None:
    values = [value for row in rows if (value := row.get(rank)) is not None]
    return statistics.median(values) if values else None


_SMALL = 0.0005  # collectives with a smaller share of what is sent, such as those of a start, have no row


def build_network(record: RunRecord) -> Iterator[Block]:
    """Yield the blocks of the section; none if nothing was sent, or if an older version recorded nothing."""
    pairs = [
        (sent, seconds)
        for row in record.steady_rows
        if (sent := read_number(row, "sent_bytes")) and (seconds := read_number(row, "step_seconds"))
    ]
    if not pairs:
        return
    rate = sum(sent for sent, _ in pairs) / sum(seconds for _, seconds in pairs)
    median = render_bytes(statistics.median(sent for sent, _ in pairs))
    yield Lines([f"In a step each rank sends {median} in collectives, {render_rate(rate)} on average."])
    if waits := record.values("message_wait_seconds"):
        share = sum(waits) / (sum(record.values("step_seconds")) or 1.0)
        yield Lines([f"Even the busiest process waited for messages for {render_percent(share)} of the time of steps."])
    if events := record.find_events("network"):
        yield from _list_last(events[-1])


def _list_last(event: Mapping[str, Any]) -> Iterator[Block]:
    """Tables of the last start that ended: its collectives by group, and the interfaces of rank 0's machine."""
    sent, seconds = read_mapping(event, "collectives"), read_number(event, "seconds")
    counts = {name: count for name in sent if (count := read_number(sent, name))}
    if counts:
        whole = sum(counts.values())
        rows = sorted((item for item in counts.items() if item[1] >= _SMALL * whole), key=lambda item: -item[1])
        yield Table(
            ("sent by rank 0, with evaluations and saves", "bytes", "share"),
            [(redact_text(name), render_bytes(count), render_percent(count / whole)) for name, count in rows],
        )
    interfaces = read_mapping(event, "interfaces")
    if interfaces and seconds:
        rates = []
        for name in interfaces:
            ways = [read_number(interfaces, name, way) or 0.0 for way in ("sent", "received")]
            rates.append((redact_text(name), *(render_rate(amount / seconds) for amount in ways)))
        yield Table((f"interface of {redact_text(str(event.get('host')))}, all programs", "sent", "received"), rates)


_SMALL = 0.001  # parts of all memory below this share, planned and measured, have no row


def build_prediction(record: RunRecord) -> Iterator[Block]:
    """Yield time and money as predicted before the first step, beside those measured."""
    events = record.find_events("reckoning")
    event = events[-1] if events else record.estimate.get("reckoning")
    sides = [
        {name: value for name in read_mapping(event, side) if (value := read_number(event, side, name)) is not None}
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
            [name.replace("_", " ") for name in names],
            *([read_number(side, name) or 0.0 for name in names] for side in (planned, measured)),
        )
    elif (total := _estimated_bytes(record)) is not None:
        yield Pairs([("planned for the tensors of one process", render_bytes(total))])
    if peaks := read_numbers(record.train_rows, "memory_peak_bytes"):
        yield Lines([_describe_peak(record, max(peaks))])


def _compare_parts(names: Sequence[str], planned: Sequence[float], measured: Sequence[float]) -> Iterator[Block]:
    sides = (("planned", planned), ("measured", measured))
    yield Bars([(label, list(zip(names, side, strict=True))) for label, side in sides], "bytes")
    totals = sum(planned), sum(measured)
    parts = [row for row in zip(names, planned, measured, strict=True) if max(row[1:]) >= _SMALL * max(totals)]
    rows = [_compare_bytes(*row) for row in (*parts, ("total", *totals))]
    yield Table(("tensors of one process", "planned", "measured", "difference"), rows)


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
    sizes = [part for part in parts if part is not None]
    return sum(sizes) if len(sizes) == len(parts) else None


def build_benchmarks(record: RunRecord) -> Iterator[Block]:
    """Yield the metrics of benchmarks over time, first and last; none for a run without benchmarks."""
    series, rows = [], []
    for task, metric in _list_benchmarks(record):
        values = [(row["step"], read_number(row, "tasks", task, metric)) for row in record.task_rows]
        points = [(step, value) for step, value in values if value is not None]
        if not points:
            continue
        series.append(Series(f"{task} {metric}", points, is_marked=True))
        chosen, comma, rest = metric.partition(",")
        error = read_number(record.task_rows[-1], "tasks", task, f"{chosen}{_ERROR}{comma}{rest}")
        rows.append((task, metric, *(render_number(points[index][1]) for index in (0, -1)), render_number(error)))
    if series:
        yield Curves("benchmarks", "step", series)
        yield Table(("task", "metric", "first", "last", "standard error of the last"), rows, is_text=True)


def _list_benchmarks(record: RunRecord) -> Iterator[tuple[str, str]]:
    """Yield each task with each of its metrics, without their standard errors."""
    metrics = {
        (task, name): None
        for row in record.task_rows
        for task, values in (row.get("tasks") or {}).items()
        for name in values
    }
    yield from ((task, name) for task, name in metrics if not name.partition(",")[0].endswith(_ERROR))


def build_rewards(record: RunRecord) -> Iterator[Block]:
    """Yield the blocks of the section; none for a run without rewards."""
    if not (points := read_points(record.train_rows, "reward")):
        return
    held = read_points(record.eval_rows, "reward")
    lines = [*draw_lines("training", points), Series("held-out prompts, greedily", held, is_marked=True)]
    yield Curves("reward", "step", [line for line in lines if line.points])
    parts = sorted({name for row in record.train_rows for name in row if _is_part(name)})
    if parts:
        series = [Series(name.removeprefix("reward_"), read_points(record.train_rows, name)) for name in parts]
        yield Curves("reward of each function", "step", series)
    yield from _list_measures(record)
    means = [(word, read_numbers(record.steady_rows, name)) for name, word in _PARTS.items()]
    if all(seconds for _, seconds in means):
        yield Bars([("a step", [(word, statistics.fmean(seconds)) for word, seconds in means])], "seconds")
    yield from _list_answers(record)


def _is_part(name: str) -> bool:
    return name.startswith("reward_") and not name.endswith("_std") and name not in ("reward_spread", "reward_seconds")


def _list_measures(record: RunRecord) -> Iterator[Block]:
    rows = []
    for name, word in _MEASURES.items():
        if values := read_numbers(record.train_rows, name):
            near = min(_NEAR, len(values))
            ends = (statistics.fmean(values[:near]), statistics.fmean(values[-near:]))
            rows.append((word, *map(render_number, ends)))
    yield Table(("", "first steps", "last steps"), rows)


def _list_answers(record: RunRecord) -> Iterator[Block]:
    """Yield the answers to one prompt in some steps, spread over the run: the commonest ones, with their rewards."""
    answers = [row for row in record.samples if "reward" in row]
    steps = list(dict.fromkeys(row["step"] for row in answers))
    rows: list[Sequence[str]] = []
    for step in _spread(steps):
        at_step = [row for row in answers if row["step"] == step]
        by_text: dict[str, list[float | None]] = {}
        for row in at_step:
            by_text.setdefault(row["text"], []).append(row["reward"])
        common = sorted(by_text.items(), key=lambda item: -len(item[1]))[:_MAX_ANSWERS]
        for text, rewards in common:
            share, reward = len(rewards) / len(at_step), rewards[0]
            rows.append((
                str(step), _show(at_step[0]["prompt"]), _show(text), render_percent(share),
                "none" if reward is None else render_number(reward),
            ))  # fmt: skip
    if rows:
        yield Table(("step", "prompt", "answer", "share", "reward"), rows, is_text=True)


def _spread(steps: Sequence[int]) -> list[int]:
    """Return at most `_MAX_STEPS` of the steps, with the first and the last."""
    count = min(_MAX_STEPS, len(steps))
    if count < 2:
        return list(steps)
    return [steps[round(index * (len(steps) - 1) / (count - 1))] for index in range(count)]


def _show(text: str) -> str:
    """Return a text on one line, without secrets, cut where it is long."""
    line = " ".join(redact_text(text).split())
    return line if len(line) <= _MAX_LETTERS else f"{line[:_MAX_LETTERS]}..."


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
