"""The rows of a run: metrics.jsonl, samples.jsonl and events.jsonl, of which any line may be torn or invalid."""

import errno
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from echelon.ground.run_files import has_step, is_count, is_metrics_row, is_number
from echelon.ground.stored import (
    MAX_ROWS_BYTES,
    Row,
    open_to_append,
    parse_row,
    read_bytes,
    read_rows,
    whole_lines,
    write_text,
)


class RunRows:
    """Metrics, samples and events in a run folder. One process appends to each file; any process may read."""

    def __init__(self, folder: Path) -> None:
        self.metrics_path = folder / "metrics.jsonl"
        self.samples_path = folder / "samples.jsonl"
        self.events_path = folder / "events.jsonl"

    def append_event(self, event: str, **fields: Any) -> None:
        """Append a line to events.jsonl: the time in UTC seconds, the event, the step (null if unknown), `fields`."""
        row = {"time": time.time(), "event": event, "step": fields.pop("step", None), **fields}
        with open_to_append(self.events_path) as file:
            size = file.tell()
            line = (json.dumps(row) + "\n").encode()
            if file.write(line) < len(line):  # a partial write, as the disk fills up
                file.truncate(size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.events_path))

    def read_events(self) -> tuple[Row, ...]:
        """Return the rows of events.jsonl, in order, without invalid lines."""
        return read_rows(self.events_path, _is_event).rows

    def describe_bad_lines(self) -> list[str]:
        """Describe the invalid lines of events.jsonl, metrics.jsonl and samples.jsonl, one line per affected file."""
        kinds = ((self.events_path, _is_event), (self.metrics_path, is_metrics_row), (self.samples_path, has_step))
        reports = (read_rows(path, is_row).describe_bad() for path, is_row in kinds)
        return [line for line in reports if line is not None]

    def cut_metrics(self, step: int, owes_evaluation: bool = False) -> int:
        """Remove the rows of metrics.jsonl and samples.jsonl beyond `step`, and torn last lines; return their number.

        With `owes_evaluation`, the evaluation at `step` will be repeated, so its rows are removed too.
        """
        evaluated = step - owes_evaluation
        paths = (self.metrics_path, self.samples_path)
        return sum(_cut_rows(path, step, evaluated) for path in paths if path.exists())

    def last_step(self) -> int:
        """Return the last step in metrics.jsonl; 0 if there is none."""
        return next((int(row["step"]) for row in self.rows_backwards()), 0)

    def last_loss(self) -> float | None:
        """Return the loss of the last training step in metrics.jsonl; None if there is none or it is not finite."""
        return next((row.get("loss") for row in self.rows_backwards() if row["kind"] == "train"), None)

    def rows_backwards(self) -> Iterator[Row]:
        """Yield the rows of metrics.jsonl, last one first; nothing if the file does not exist."""
        try:
            lines = list(whole_lines(read_bytes(self.metrics_path, MAX_ROWS_BYTES)))
        except OSError:
            return
        yield from (row for line in reversed(lines) if (row := parse_row(line, is_metrics_row)) is not None)


def _cut_rows(path: Path, step: int, evaluated: int) -> int:
    content = read_bytes(path, MAX_ROWS_BYTES)
    kept = [line for line in whole_lines(content) if is_row_up_to(path.name, line, step, evaluated)]
    num_lines = content.count(b"\n") + (not content.endswith(b"\n") and bool(content))
    if len(kept) < num_lines:
        write_text(path, b"".join(kept).decode("utf-8"))
    return num_lines - len(kept)


def is_row_up_to(name: str, line: bytes, step: int, evaluated: int) -> bool:
    """Whether a line of metrics.jsonl or samples.jsonl (the file `name`) is complete and not beyond `step`.

    For rows of an evaluation, not beyond step `evaluated`.
    """
    is_row = is_metrics_row if name == "metrics.jsonl" else has_step
    row = parse_row(line, is_row) if line.endswith(b"\n") else None
    return row is not None and bool(row["step"] <= (step if row.get("kind") == "train" else evaluated))


def _is_event(row: Row) -> bool:
    """Whether a row is valid in events.jsonl; a rollback must have the suppressed step."""
    is_event = isinstance(row.get("event"), str) and is_number(row.get("time"))
    is_placed = row.get("step") is None or has_step(row)
    return is_event and is_placed and (row["event"] != "rollback" or is_count(row.get("suppressed")))
