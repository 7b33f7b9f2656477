"""The sections of the report of one run."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

from echelon.ground.errors import PlanError
from echelon.ground.redaction import redact_text
from echelon.ground.sizes import render_bytes, render_seconds
from echelon.ground.wall_time import CAUSES
from echelon.planner.plan import ParallelPlan
from echelon.planner.plan_lines import describe_plan
from echelon.run.report.advice import find_advice
from echelon.run.report.blocks import (
    Bars,
    Block,
    Curves,
    Lines,
    Listing,
    Mark,
    Pairs,
    Report,
    ReportSection,
    Series,
    Table,
    Timeline,
)
from echelon.run.report.judgement import judge_run
from echelon.run.report.measured_sections import (
    build_benchmarks,
    build_memory,
    build_network,
    build_prediction,
    build_profile,
    build_rewards,
    build_throughput,
)
from echelon.run.report.run_record import RunRecord, percentile
from echelon.run.report.values import (
    UNKNOWN,
    draw_lines,
    read_mapping,
    read_number,
    read_numbers,
    read_points,
    read_value,
    render_number,
    render_percent,
)

_BAD_EVENTS = (
    "failure",
    "restart",
    "bad_step",
    "rollback",
    "replicas_differ",
    "passes_differ",
    "upload_failed",
    "straggler",
)
# Events with a mark on the timeline, and their name there; checkpoints are shown without names.
_MARKED = {
    "start": "start",
    "resume": "resume",
    "checkpoint": "",
    "done": "done",
    "early_stop": "early stop",
    "signal": "signal",
    "budget": "budget",
    **{name: name.replace("_", " ") for name in _BAD_EVENTS},
}
_MAX_EVENTS = 30
_MAX_SAMPLES = 3
_MAX_METRICS = 20
ROW_KEYS = {
    "kind", "step", "tokens", "target_tokens", "loss", "grad_norm", "learning_rate", "tokens_per_second",
    "step_seconds", "data_wait_seconds", "mfu", "memory_peak_bytes", "batch_hash", "skipped", "loss_scale", "cost_usd",
    "sent_bytes", "message_wait_seconds", "rank_seconds", "gpu_utilization", "gpu_watts", "router_loss", "expert_load",
}  # fmt: skip
"""The keys of a train row that are echelon's; others are metrics of a loop."""


def build_report(record: RunRecord) -> Report:
    """Build the report of one run."""
    status = record.summary.status
    return Report(
        title=record.name,
        status=status,
        is_bad=status in ("failed", "interrupted"),
        summary=describe_run(record),
        figures=[(name, value) for name, value in list_figures(record).items() if value != UNKNOWN],
        sections=build_sections(record),
    )


def build_sections(record: RunRecord) -> list[ReportSection]:
    """Build the sections, without those about which the files say nothing."""
    advice, verdict = find_advice(record), judge_run(record)
    sections = [
        ReportSection("Messages", list(_messages(record))),
        ReportSection("Verdict", [Lines(verdict)] if verdict else []),
        ReportSection("Advice", [Lines(advice, "advice")] if advice else []),
        ReportSection("Rewards", list(build_rewards(record))),
        ReportSection("Loss", list(_losses(record))),
        ReportSection("Metrics of the loop", list(_own_metrics(record))),
        ReportSection("Benchmarks", list(build_benchmarks(record))),
        ReportSection("Throughput", list(build_throughput(record))),
        ReportSection("Predicted and measured", list(build_prediction(record))),
        ReportSection("Where the time went", list(_time(record))),
        ReportSection("Network", list(build_network(record))),
        ReportSection("Profiled steps", list(build_profile(record))),
        ReportSection("Memory", list(build_memory(record))),
        ReportSection("Events", list(_events(record))),
        ReportSection("Samples", list(_samples(record))),
        ReportSection("Plan", list(_plan(record))),
        ReportSection("Environment", list(_environment(record))),
    ]
    return [section for section in sections if section.blocks]


def describe_run(record: RunRecord) -> str:
    """Return one line about what was trained: the model, the method, the processes."""
    config = read_value(record.recipe, "model", "config", "model_type")
    checkpoint = read_value(record.recipe, "model", "checkpoint")
    model = f"weights of {checkpoint}" if checkpoint else f"a new {config} model" if config else "a model"
    method = read_value(record.recipe, "adapter", "method")
    adapter = f" with {method}" if method not in (None, "full") else ""
    count = _count_devices(record)
    devices = "" if count is None else f" on {count} process" + ("es" if count > 1 else "")
    began = "" if not record.events else f", started {_date(record.events[0]['time'])}"
    return redact_text(f"{model}{adapter}, {read_value(record.plan, 'strategy') or 'unknown plan'}{devices}{began}")


def list_figures(record: RunRecord) -> dict[str, str]:
    """Return the numbers of a run to see first, by name; a run without them has "unknown".

    The MFU is that of GPUs: on a CPU it is relative to a rate that was measured, and is further below.
    """
    is_cpu = read_value(record.environment, "cluster", "kind") == "cpu"
    speeds, mfus = record.values("tokens_per_second"), [] if is_cpu else record.values("mfu")
    peaks = read_numbers(record.train_rows, "memory_peak_bytes")
    evaluated = read_numbers(record.eval_rows, "loss")
    tokens = read_number(record.train_rows[-1], "tokens") if record.train_rows else None
    bits = read_numbers(record.eval_rows, "bits_per_byte")
    loss, solved = record.summary.loss, read_numbers(record.eval_rows, "solved")
    return {
        "steps": record.summary.describe_progress(),
        "tokens": render_number(tokens, 3),
        "training loss": UNKNOWN if loss is None else f"{loss:.4f}",
        "evaluation loss": f"{evaluated[-1]:.4f}" if evaluated else UNKNOWN,
        "solved": render_percent(solved[-1]) if solved else UNKNOWN,
        "bits per byte": f"{bits[-1]:.4f}" if bits else UNKNOWN,
        "tokens per second": render_number(percentile(speeds, 0.5), 3) if speeds else UNKNOWN,
        "MFU": render_percent(percentile(mfus, 0.5)) if mfus else UNKNOWN,
        "peak memory": render_bytes(max(peaks)) if peaks else UNKNOWN,
        "useful time": render_percent(_goodput(record)),
        "time": render_seconds(record.spending.seconds if record.spending else record.wall_seconds),
        "cost": UNKNOWN if not record.summary.usd else f"${record.summary.usd:.2f}",
    }


def _messages(record: RunRecord) -> Iterator[Block]:
    failures = [row for row in record.find_events("failure") if isinstance(row.get("message"), str)]
    if record.summary.status == "failed" and failures:
        yield Lines([redact_text(failures[-1]["message"])], "warning")
    if record.summary.status == "interrupted":
        yield Lines(["The processes ended without a message. The same command resumes the run."], "warning")
    if record.summary.status == "running":
        yield Lines([f"The run goes on; this is its state at {_date(record.read_at)}."])
    if record.faults:
        yield Lines(record.faults, "warning")


def _losses(record: RunRecord) -> Iterator[Block]:
    yield from _draw_losses(record)
    yield from _list_sets(record)
    yield from _list_labels(record)
    if norms := read_points(record.train_rows, "grad_norm"):
        yield Curves("gradient norm, before clipping", "step", draw_lines("", norms))


def _draw_losses(record: RunRecord) -> Iterator[Block]:
    """Yield the losses in one picture, or in two if a loop of one's own may train with another quantity."""
    training = draw_lines("training", read_points(record.train_rows, "loss"))
    evaluation = [Series("evaluation", read_points(record.eval_rows, "loss"), is_marked=True)]
    groups = {"loss": [*training, *evaluation]}
    if loop := read_value(record.recipe, "train", "loop"):
        told = f"The training loss is that of {loop}; it may be another quantity than the evaluation loss."
        yield Lines([redact_text(told)])
        groups = {"training loss": training, "evaluation loss": evaluation}
    for name, group in groups.items():
        if shown := [line for line in group if line.points]:
            yield Curves(name, "step", shown)


def _list_sets(record: RunRecord) -> Iterator[Block]:
    names = sorted({name for row in record.eval_rows for name in (row.get("sets") or {})})
    rows = [row for row in record.eval_rows if isinstance(row.get("sets"), dict)]
    if rows and names:
        last, first = rows[-1]["sets"], rows[0]["sets"]
        yield Table(
            ("held-out text", "first loss", "last loss", "perplexity"),
            [
                (
                    name,
                    *(render_number(read_number(row, name, "loss")) for row in (first, last)),
                    render_number(read_number(last, name, "perplexity")),
                )
                for name in names
            ],
        )


def _own_metrics(record: RunRecord) -> Iterator[Block]:
    """Yield the curves of what a loop has recorded of its own, each with its own scale."""
    if not read_value(record.recipe, "train", "loop"):
        return
    names = {name: None for row in record.train_rows for name in row if name not in ROW_KEYS}
    for name in list(names)[:_MAX_METRICS]:
        if points := read_points(record.train_rows, name):
            yield Curves(redact_text(name), "step", draw_lines("", points))
    if len(names) > _MAX_METRICS:
        yield Lines([f"The first {_MAX_METRICS} of {len(names)} metrics; metrics.jsonl has all."])


def _list_labels(record: RunRecord) -> Iterator[Block]:
    """Yield how often a classifier was right: over time, and for each label at the last evaluation."""
    named = (("accuracy", "accuracy"), ("macro F1", "macro_f1"))
    series = [Series(word, read_points(record.eval_rows, name), is_marked=True) for word, name in named]
    if not series[0].points:
        return
    yield Curves("held-out texts with the right label", "step", [line for line in series if line.points])
    counts = read_mapping(record.eval_rows[-1], "labels")
    columns = ("texts", "predicted", "right")
    rows = [(name, *(render_number(read_number(counts, name, column)) for column in columns)) for name in counts]
    yield Table(("label", "texts with it", "texts given it", "of both"), rows)


def _time(record: RunRecord) -> Iterator[Block]:
    rows = []
    seconds = _read_goodput(record)
    wall = sum(seconds.values())
    if seconds:
        ordered = sorted(seconds.items(), key=lambda item: -item[1])
        shown = [(CAUSES.get(cause, cause), spent) for cause, spent in ordered if spent >= 0.0005 * wall]
        yield Bars([("wall time", shown)], "seconds")
    elif record.train_rows:
        yield Bars([("wall time so far", _time_by_rows(record))], "seconds")
    else:
        rows.append(("wall time", render_seconds(record.wall_seconds)))
    if record.spending is not None and record.spending.seconds:
        rows.append(("time of all starts", render_seconds(record.spending.seconds)))
    tokens = read_number(record.train_rows[-1], "tokens") if record.train_rows else None
    if record.summary.usd:
        rows.append(("cost", f"${record.summary.usd:.2f}"))
        if tokens:
            rows.append(("cost of a million tokens", f"${1e6 * record.summary.usd / tokens:.4f}"))
        if wall:
            lost, trained = seconds.get("redone", 0.0) + seconds.get("down", 0.0), seconds.get("training", 0.0)
            rate = record.summary.usd / wall
            rows.append(("cost of failures", f"${lost * rate:.2f}"))
            rows.append(
                ("cost of saves, starts and other time without steps", f"${(wall - trained - lost) * rate:.2f}")
            )
    elif record.spending is not None:
        rows.append(("cost", "unknown: set budget.usd_per_hour, the price of one machine"))
    yield Pairs(rows)


def _time_by_rows(record: RunRecord) -> list[tuple[str, float]]:
    """Return the time in steps and outside of them: the event goodput is written at the end of a start."""
    steps, waits = (sum(read_numbers(record.train_rows, name)) for name in ("step_seconds", "data_wait_seconds"))
    wall = max(record.wall_seconds or 0.0, steps)
    return [
        (CAUSES["training"], max(0.0, steps - waits)),
        (CAUSES["data"], waits),
        ("in all else: starts, saves, evaluations, lost work", wall - steps),
    ]


def _events(record: RunRecord) -> Iterator[Block]:
    if not record.events:
        return
    began, wall = record.events[0]["time"], record.wall_seconds or 0.0
    marks = [
        Mark(row["time"] - began, _MARKED[row["event"]], row["event"] in _BAD_EVENTS)
        for row in record.events
        if row["event"] in _MARKED
    ]
    yield Timeline(wall, _spans(record, began, wall), marks)
    told = [row for row in record.events if row["event"] in _MARKED and row["event"] != "checkpoint"]
    left = told[-_MAX_EVENTS:]
    if len(told) > len(left):
        yield Lines([f"The last {len(left)} of {len(told)} events; events.jsonl has all."])
    rows = [(render_seconds(row["time"] - began), row["event"], _show_step(row), _describe_event(row)) for row in left]
    yield Table(("after", "event", "step", ""), rows, is_text=True)
    if saves := read_numbers(record.find_events("checkpoint"), "seconds"):
        count = "1 checkpoint" if len(saves) == 1 else f"{len(saves)} checkpoints"
        yield Lines([f"{count}; the slowest was complete after {render_seconds(max(saves))}."])


def _samples(record: RunRecord) -> Iterator[Block]:
    last = record.samples[-1]["step"] if record.samples else None
    for row in [row for row in record.samples if row["step"] == last][:_MAX_SAMPLES]:
        yield Listing(f"step {last}: {row['prompt']}", row["prompt"] + row["text"])


def _plan(record: RunRecord) -> Iterator[Block]:
    try:
        lines = describe_plan(ParallelPlan.from_dict(record.plan))
    except PlanError:  # of another version of echelon
        lines = [f"{name}: {value}" for name, value in record.plan.items() if isinstance(value, str | int | float)]
    pairs = [line.partition(": ") for line in lines]
    if pairs:
        yield Pairs([(name, redact_text(text)) for name, _, text in pairs])
    if record.recipe_text:
        yield Listing("recipe.yaml", redact_text(record.recipe_text))


def _environment(record: RunRecord) -> Iterator[Block]:
    if not (environment := record.environment):
        return
    cluster = read_mapping(environment, "cluster")
    device = read_value(cluster, "accelerator", "name")
    count, per_node = cluster.get("num_devices"), cluster.get("devices_per_node")
    rows = [
        ("machine", f"{environment.get('hostname')}, {environment.get('num_cores')} cores"),
        ("devices", UNKNOWN if device is None else f"{count} x {device}, {per_node} per machine"),
        ("platform", str(environment.get("platform"))),
        ("Python", str(environment.get("python"))),
        ("packages", ", ".join(f"{name} {version}" for name, version in read_mapping(environment, "packages").items())),
        ("git revision", str(environment.get("git_revision") or UNKNOWN)),
    ]
    if variables := read_mapping(environment, "variables"):
        rows.append(("variables", ", ".join(f"{name}={value}" for name, value in variables.items())))
    yield Pairs([(name, redact_text(value)) for name, value in rows])


def _spans(record: RunRecord, began: float, wall: float) -> list[tuple[float, float]]:
    """Return the spans, in seconds of the run, from each first event of a start to its last one."""
    beginnings = [row["time"] for row in record.find_events("prepare", "start", "resume")]
    spans: list[tuple[float, float]] = []
    for row in record.events:
        seconds = row["time"] - began
        opens = row["time"] in beginnings and (not spans or _has_ended(record, began + spans[-1][1]))
        if opens or not spans:
            spans.append((seconds, seconds))
        spans[-1] = (spans[-1][0], seconds)
    if record.summary.status == "running" and spans:
        spans[-1] = (spans[-1][0], wall)
    return spans


def _has_ended(record: RunRecord, at: float) -> bool:
    """Whether the last event up to this time ended the processes."""
    last = [row["event"] for row in record.events if row["time"] <= at][-1]
    return last in ("failure", "restart", "signal", "budget", "goodput", "done", "early_stop")


def _read_goodput(record: RunRecord) -> dict[str, float]:
    """Return the seconds of each cause, if they were written after the last start; else nothing."""
    events = record.find_events("goodput", "start", "resume")
    seconds = read_mapping(events[-1], "seconds") if events else {}
    return {name: value for name in seconds if name != "stopped" and (value := read_number(seconds, name)) is not None}


def _goodput(record: RunRecord) -> float | None:
    seconds = _read_goodput(record)
    return seconds.get("training", 0.0) / sum(seconds.values()) if sum(seconds.values()) else None


def _count_devices(record: RunRecord) -> int | None:
    count = read_number(record.environment, "cluster", "num_devices")
    return None if count is None else int(count)


def _describe_event(row: Mapping[str, Any]) -> str:
    text = row.get("message") or row.get("host") or row.get("action") or ""
    if row["event"] == "recovered":
        text = f"first step after {render_seconds(read_number(row, 'first_step_seconds'))}"
    return redact_text(" ".join(str(text).split()))


def _show_step(row: Mapping[str, Any]) -> str:
    return "" if row.get("step") is None else str(row["step"])


def _date(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
    except (OverflowError, OSError, ValueError):  # of a damaged file
        return UNKNOWN
