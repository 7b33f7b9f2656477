"""Sends metrics.jsonl to a tracker in a separate thread, so that no tracker slows or stops training.

The file is the queue: the forwarder reads it behind the run, and sends the rows that the tracker does not have yet.
Nothing is kept in memory during an outage, and an outage, a crash, a resume and a tracker added to a finished run are
handled in the same way.
"""

import logging
import threading
import time
import uuid
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from echelon.ground.redaction import redact_text
from echelon.ground.run_files import is_metrics_row
from echelon.ground.stored import open_regular, parse_row, read_as, write_json
from echelon.run.journal.trackers.tracker import Held, Tracker

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
RETRY_SECONDS = 10.0
# At the end of a run: how long a failing tracker is retried, and how long a tracker is awaited after a failed run.
PATIENCE_SECONDS = 5.0
HURRY_SECONDS = 3.0
_RETRY_AT_END_SECONDS = 1.0
_ROWS_AT_ONCE = 50
_LONGEST_ROW = 2**24  # bytes


@dataclass(frozen=True)
class _Entries:
    """The content of a ledger's file."""

    run_key: str
    steps: dict[str, int]
    complete: bool


@dataclass
class ForwarderState:
    """The state of one tracker in the run folder: `trackers/NAME.json`.

    `run_key` identifies the tracking run. It is written before that run is created, so that a crash does not lead to a
    second one.
    """

    path: Path
    run_key: str = field(default_factory=lambda: uuid.uuid4().hex)
    steps: dict[str, int] = field(default_factory=dict)
    complete: bool = False

    @classmethod
    def read(cls, path: Path) -> "ForwarderState":
        """Read the ledger; return a new one if the file is missing or damaged."""
        try:
            entries = read_as(path, _Entries)
        except FileNotFoundError:
            return cls(path)
        except (OSError, ValueError) as error:
            logger.warning(f"track: cannot read {path} ({error}); all rows are sent to a new run of this tracker")
            return cls(path)
        return cls(path, entries.run_key, entries.steps, entries.complete)

    def write(self) -> None:
        """Write the ledger to its file."""
        self.path.parent.mkdir(exist_ok=True)
        values = asdict(self)
        del values["path"]
        write_json(self.path, values)


class MetricsForwarder:
    """Sends the rows of one run to one tracker. Exceptions of the tracker are only logged."""

    def __init__(
        self, tracker: Tracker, ledger_path: Path, metrics_path: Path, resumed_step: int | None = None
    ) -> None:
        """`resumed_step`: step of the checkpoint that the run resumes from; None if the run does not train."""
        self._resumed_step = resumed_step
        self._tracker = tracker
        self._ledger = ForwarderState.read(ledger_path)
        self._metrics_path = metrics_path
        self._held: Held = defaultdict(int, self._ledger.steps)
        self._reader: RowReader | None = None  # None: the tracker must be opened first
        self._where = ""
        self._ending = threading.Event()
        self._given_up = threading.Event()
        self._was_cut = threading.Event()
        self._done = False
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._work, name=f"forwarder-{tracker.name}", daemon=True)

    def start(self) -> None:
        """Start sending rows."""
        self._thread.start()

    def reread(self) -> None:
        """Read again from the start, after the file was replaced by one without the last rows.

        Trackers cannot delete rows: their values for repeated steps stay unchanged.
        """
        self._was_cut.set()

    def close(self, done: bool) -> None:
        """Send the remaining rows and wait: as long as that succeeds, but only briefly for a failing tracker.

        `done`: the run reached its last step. After a failed run the wait is always brief.
        """
        self._done = done
        self._ending.set()
        deadline = time.monotonic() + (PATIENCE_SECONDS if done else HURRY_SECONDS)
        while self._thread.is_alive() and not (time.monotonic() > deadline and (self._failure or not done)):
            self._thread.join(0.1)
        self._given_up.set()  # a later start may send the remaining rows
        if not self._ledger.complete and done:
            advice = "; run the same command again to send them" if self._tracker.is_store else ""
            logger.warning(f"track: {self._tracker.name} {self._describe_missing()}{advice}")

    def _work(self) -> None:
        while not self._given_up.is_set():
            ending = self._ending.is_set()  # checked before reading: no rows are written after it is set
            # Client libraries and servers may fail in any way, and must not end training.
            try:
                count = self._deliver()
                if ending:
                    self._finish()
                self._note_success(count)
                if ending:
                    return
            except Exception as error:
                self._note_failure(error)
            if ending:
                self._given_up.wait(_RETRY_AT_END_SECONDS)
            else:
                self._ending.wait(RETRY_SECONDS if self._failure else POLL_SECONDS)

    def _deliver(self) -> int:
        """Send every row that the tracker does not have yet; return their number."""
        if self._reader is None:
            self._open()
        assert self._reader is not None
        if self._was_cut.is_set():
            self._was_cut.clear()
            self._reader.close()
        count = 0
        while batch := self._reader.read(_ROWS_AT_ONCE):
            missing = [row for row in batch if row["step"] > self._held[row["kind"]]]
            if missing:
                self._tracker.send(missing)
                self._held.update({row["kind"]: row["step"] for row in missing})
                self._ledger.steps = dict(self._held)
                self._ledger.write()
            count += len(missing)
        return count

    def _open(self) -> None:
        self._ledger.complete = False
        self._ledger.write()
        opened = self._tracker.open(self._ledger.run_key, self._ledger.steps)
        if opened.where != self._where:
            self._where = opened.where
            logger.info(f"track: {opened.where}")
            self._warn_ahead(max(opened.held.values(), default=0))
        self._held = opened.held
        # Start at the first row: a store that was changed or restored may lack more than the newest rows.
        self._reader = RowReader(self._metrics_path)

    def _warn_ahead(self, held_step: int) -> None:
        """Warn that repeated steps keep their first values in this tracker, because trackers cannot delete rows."""
        if self._resumed_step is not None and held_step > self._resumed_step:
            logger.warning(
                f"track: {self._tracker.name} keeps the values of steps {self._resumed_step + 1} to {held_step} from "
                "before the interruption"
            )

    def _finish(self) -> None:
        assert self._reader is not None
        self._reader.close()
        self._tracker.finish(self._done)
        self._ledger.complete = self._done
        self._ledger.write()

    def _note_success(self, count: int) -> None:
        if self._failure is not None:
            self._failure = None
            logger.info(f"track: {self._tracker.name} works again and has received the {count} pending rows")

    def _note_failure(self, error: Exception) -> None:
        """Report a failure, unless the tracker was already failing."""
        reason = (str(error).strip().splitlines() or [""])[0]
        reason = redact_text(f"{type(error).__name__}: {reason}")[:300]
        if self._failure is None:
            logger.warning(
                f"track: {self._tracker.name} fails ({reason}); training continues, metrics.jsonl has every row, and "
                f"{self._tracker.name} will receive the rows when it works again"
            )
        self._failure = reason
        if self._reader is not None:
            self._reader.close()
        self._reader = None  # reopen the tracker

    def _describe_missing(self) -> str:
        reader = RowReader(self._metrics_path)
        try:
            rows = reader.read()
        except OSError as error:
            return f"may lack rows, because they cannot be read again ({error})"
        finally:
            reader.close()
        missing = sum(row["step"] > self._held[row["kind"]] for row in rows)
        return f"is missing {missing} of {len(rows)} rows" if missing else "has every row, but not the final files"


class RowReader:
    """Reads the rows of metrics.jsonl from its start, while the run continues to write it.

    The file stays open, so that a file that replaces it is not read from the middle.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[bytes] | None = None
        self._offset = 0

    def read(self, limit: int | None = None) -> list[dict[str, Any]]:
        """Return the next rows, at most `limit`; none at the current end of the file."""
        if self._file is None and self._path.exists():
            self._file = open_regular(self._path)
        rows: list[dict[str, Any]] = []
        if self._file is not None:
            self._file.seek(self._offset)
            while line := self._file.readline(_LONGEST_ROW):
                if not line.endswith(b"\n"):  # still being written
                    break
                self._offset += len(line)
                if (row := parse_row(line, is_metrics_row)) is not None:
                    rows.append(row)
                if len(rows) == limit:
                    break
        return rows

    def close(self) -> None:
        """Close the file. The next `read` opens it again and starts with its first row."""
        if self._file is not None:
            self._file.close()
        self._file, self._offset = None, 0
