"""Advice that follows from what a run recorded. Gains are arithmetic on measured shares of the time, not guesses."""

import statistics
from collections.abc import Iterator

from echelon.ground.redaction import redact_text
from echelon.ground.sizes import render_bytes, render_rate, render_seconds
from echelon.run.report.run_record import RunRecord, percentile
from echelon.run.report.values import read_mapping, read_number, read_numbers, read_value, render_percent

# Shares of the time above which a cause is worth a change.
_DATA, _SAVING, _EVALUATING, _LOST, _MESSAGES = 0.05, 0.05, 0.10, 0.05, 0.25
_FEW_STEPS = 20
_UNEVEN = 2.0
_SPARE = 0.5


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
