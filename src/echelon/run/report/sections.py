"""The sections of the report of one run."""

import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any

from echelon.ground.errors import PlanError
from echelon.ground.redaction import redact_text
from echelon.ground.sizes import render_bytes, render_rate, render_seconds
from echelon.ground.wall_time import CAUSES
from echelon.planner.plan import ParallelPlan
from echelon.planner.plan_lines import describe_plan
from echelon.run.report.blocks import (
    UNKNOWN,
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
    draw_lines,
    read_mapping,
    read_number,
    read_numbers,
    read_points,
    read_value,
    render_number,
    render_percent,
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

# Shares of the time above which a cause is worth a change.
_DATA, _SAVING, _EVALUATING, _LOST, _MESSAGES = 0.05, 0.05, 0.10, 0.05, 0.25
_FEW_STEPS = 20
_UNEVEN = 2.0
_SPARE = 0.5


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


def find_advice(record: RunRecord) -> list[str]:
    """Return sentences, each with a change of the recipe and what it gains; empty if nothing stands out."""
    topics = (_about_stragglers, _about_messages, _about_steps, _about_time, _about_skipped_steps, _about_memory)
    return [line for about in topics for line in about(record)]


def _gain(share: float) -> str:
    """How much faster a run is without this share of its time."""
    return f"{1 / (1 - min(share, 0.99)):.2f} times as fast"


def _about_stragglers(record: RunRecord) -> Iterator[str]:
    """The slow ranks of the last start: the machines of an earlier one may have been replaced."""
    since = max((row["time"] for row in record.starts), default=0.0)
    rows = [row for row in record.find_events("straggler") if row["time"] >= since and isinstance(row.get("rank"), int)]
    for rank, row in sorted({row["rank"]: row for row in rows}.items()):
        spent, usual = read_number(row, "own_seconds"), read_number(row, "peer_seconds")
        if spent is None or usual is None:
            continue
        factor = f", {spent / usual:.2f} times as long as the others" if usual else ""
        yield (
            f"Rank {rank} on {redact_text(str(row.get('host')))} is slow: it needs {render_seconds(spent)} for its own "
            f"part of a step{factor}, and they wait for it. Look for other programs and for heat on that machine, or "
            "replace it; fault.on_straggler=stop ends a run with a checkpoint for that. The gain is not predicted."
        )


def _about_messages(record: RunRecord) -> Iterator[str]:
    """A link that is slow for what the ranks send. The bubble of a pipeline is such a wait too, and is left out."""
    seconds, waits = record.values("step_seconds"), record.values("message_wait_seconds")
    sent, plan = record.values("sent_bytes"), record.plan
    if min(len(seconds), len(waits), len(sent)) < _FEW_STEPS or (read_number(plan, "pp") or 1) > 1:
        return
    share = min(1.0, sum(waits) / max(sum(seconds), 1e-9))
    if share < _MESSAGES:
        return
    amount = f"{render_bytes(statistics.median(sent))}, {render_rate(sum(sent) / sum(seconds))} on average"
    finding = (
        f"Even the busiest process waits for messages for {render_percent(share)} of a step, and sends {amount}"
        f"{_name_interface(record)}."
    )
    names = ("global_batch_size", "global_batch_tokens")
    batch = [(name, size) for name in names if (size := read_number(record.recipe, "train", name))]
    sends_once = plan.get("reduce_gradients") == "last" and not plan.get("reshard_after_forward")
    if sends_once and batch and all((read_number(plan, axis) or 1) == 1 for axis in ("tp", "cp", "ep")):
        yield (
            f"{finding} With train.{batch[0][0]}={2 * batch[0][1]:.0f} and the same train.micro_batch_size, it would "
            f"send as much for twice the tokens: tokens would be {_gain(share / 2)}. sync.compress sends fewer bytes."
        )
    else:
        yield f"{finding} Fewer bytes, a faster link or a larger batch would help; the gain is not predicted."


def _name_interface(record: RunRecord) -> str:
    """Name the network interface that carried most of what rank 0's machine sent; empty if none carried half of it."""
    [event] = record.find_events("network")[-1:] or [{}]
    rates = {name: read_number(event, "interfaces", name, "sent") or 0.0 for name in read_mapping(event, "interfaces")}
    rates.pop("lo", None)  # between the processes of one machine
    name = max(rates, key=lambda axis: rates[axis], default=None)
    if name is None or rates[name] < (read_number(event, "sent_bytes") or 0.0) / 2:
        return ""
    return redact_text(f", through {name} of {event.get('host')}")


def _about_steps(record: RunRecord) -> Iterator[str]:
    seconds = record.values("step_seconds")
    if len(seconds) < _FEW_STEPS:
        return
    wait = sum(record.values("data_wait_seconds")) / max(sum(seconds), 1e-9)
    if wait > _DATA:
        yield (
            f"Steps wait for data for {render_percent(wait)} of their time. Keep the prepared text on a local disk and "
            f"not on a network folder (data.prepared_dir): steps would be up to {_gain(wait)}."
        )
    middle, slow = statistics.median(seconds), percentile(seconds, 0.95)
    if slow > _UNEVEN * middle:
        excess = sum(second - middle for second in seconds if second > middle) / sum(seconds)
        yield (
            f"One step in twenty takes {render_seconds(slow)} or more; the median is {render_seconds(middle)}. At an "
            f"even pace, steps would be {_gain(excess)}. Look for other programs on the machine, and for a slow disk "
            "or link."
        )


def _about_time(record: RunRecord) -> Iterator[str]:
    events = record.find_events("goodput")
    seconds = read_mapping(events[-1], "seconds") if events else {}
    times = {cause: read_number(seconds, cause) or 0.0 for cause in seconds if cause != "stopped"}
    wall = sum(times.values())
    if wall <= 0:
        return
    shares = {cause: spent / wall for cause, spent in times.items()}
    saving, evaluating = shares.get("saving", 0.0), shares.get("evaluating", 0.0)
    if saving > _SAVING:
        is_async = read_value(record.recipe, "checkpoint", "async") is not False
        change = "Set checkpoint.every twice as high" if is_async else "Set checkpoint.async: true"
        part = saving / 2 if is_async else saving
        bound = "" if is_async else "up to "
        yield f"{render_percent(saving)} of the time waits for saves. {change}: the run would be {bound}{_gain(part)}."
    if evaluating > _EVALUATING:
        yield (
            f"{render_percent(evaluating)} of the time is spent on evaluations. With train.eval_every twice as high, "
            f"the run would be {_gain(evaluating / 2)}."
        )
    lost = shares.get("redone", 0.0) + shares.get("down", 0.0)
    if lost > _LOST:
        yield (
            f"Failures cost {render_percent(lost)} of the time: {render_seconds(times.get('redone', 0.0))} of repeated "
            f"work and {render_seconds(times.get('down', 0.0))} without processes. checkpoint.every: auto saves "
            "as often as failures and the time of a save make worthwhile."
        )


def _about_skipped_steps(record: RunRecord) -> Iterator[str]:
    skipped = sum(row.get("skipped") is True for row in record.train_rows)
    if skipped and skipped > 0.01 * len(record.train_rows):
        yield (
            f"{skipped} of {len(record.train_rows)} steps were not applied. A lower optim.learning_rate or a longer "
            "warmup usually avoids that; its gain is not predicted."
        )


def _about_memory(record: RunRecord) -> Iterator[str]:
    """A GPU with half of its memory free and several microbatches per step."""
    cluster = read_value(record.environment, "cluster")
    capacity = read_number(cluster, "accelerator", "memory_bytes")
    peaks = read_numbers(record.train_rows, "memory_peak_bytes")
    count, size = read_number(record.plan, "num_microbatches"), read_number(record.plan, "micro_batch_size")
    if read_value(cluster, "kind") != "cuda" or not (capacity and peaks and count and size):
        return
    share = max(peaks) / capacity
    if count > 1 and share < _SPARE:
        yield (
            f"A GPU uses at most {render_percent(share)} of its memory, and a step has {count:.0f} microbatches. Try "
            f"train.micro_batch_size={2 * size:.0f}; its gain is not predicted."
        )
