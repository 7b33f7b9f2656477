"""The run folder: the paths of its files, its state, and the lock of the process that may write to it.

`recipe.yaml plan.json estimate.json environment.json data.json hub.json models.json remote.json metrics.jsonl
events.jsonl outcome.json spending.json checkpoints/step-00000100/ model/ export/ logs/console.log logs/rank-00000.log
profile/step-00000020-rank-00000.json.gz trackers/mlflow.json`
"""

import errno
import json
import os
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.ground.checksums import MANIFEST, remove_tree
from echelon.ground.errors import ConfigError, DataError, EchelonError, explain_storage_error, is_disk_full
from echelon.ground.file_lock import FileLock, describe_mark
from echelon.ground.run_files import (
    RunFiles,
    has_step,
    is_count,
    is_metrics_row,
    is_number,
    list_directory,
    newest_step,
    sweep_checkpoints,
)
from echelon.ground.stored import (
    MAX_ROWS_BYTES,
    Row,
    open_to_append,
    parse_row,
    read_as,
    read_bytes,
    read_rows,
    read_text,
    whole_lines,
    write_json,
    write_text,
)

FILES = (
    "recipe.yaml", "plan.json", "estimate.json", "environment.json", "data.json", "hub.json", "models.json",
    "remote.json", "metrics.jsonl", "samples.jsonl", "events.jsonl", "outcome.json", "spending.json", "report.html",
)  # fmt: skip
"""The files at the top of a run folder, except `.lock`."""

FOLDERS = (".outcomes", "checkpoints", "export", "logs", "model", "profile", "tensorboard", "trackers", "wandb")
"""The folders in a run folder."""

STEP_MARK = "echelon step "
"""The beginning of the name of a step in a trace; its number follows."""

OWNER_ONLY = 0o700
"""Mode of new folders with recipes, scripts or logs; existing folders keep their mode."""

TEMPORARY = re.compile(r"\..+\.tmp")
"""Names of the temporary files of `stored.write_text`."""

# `read_holder` takes the lock for a moment, so `lock` retries for at least this long.
_POLL_SECONDS = 0.2


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


@dataclass(frozen=True)
class Ending:
    """How a finished run ended, from its outcome.json."""

    outcome: str
    step: int | None = None


class RunFolder(RunFiles):
    """The folder of a run. The constructor does no I/O; `create()` makes the directories.

    `outcomes_dir`: where ranks report how they ended, and learn about other ranks; `.outcomes` by default. On several
    machines each agent uses its own, since only its own ranks report to it.
    """

    def __init__(self, path: Path, outcomes_dir: Path | None = None) -> None:
        super().__init__(path)
        self.outcomes_dir = outcomes_dir or path / ".outcomes"
        self.rows = RunRows(path)
        self.text = TextRecord(path, self.rows)
        self._lock = FileLock(path / ".lock")
        self.estimate_path = path / "estimate.json"
        """The predicted memory of the plan, and the hardware it is for."""
        self.samples_path = self.rows.samples_path
        """The model's continuations of `evaluate.prompts` at each evaluation."""
        self.events_path = self.rows.events_path
        """The events of the run: see docs/run-folder.md."""
        self.spending_path = path / "spending.json"
        """Time and money used by all starts of the run: see `echelon.run.folder.cost.Spending`."""
        self.outcome_path = path / "outcome.json"
        """Written when the run has finished; absent before."""
        self.data_path = self.text.path
        """The path of the prepared text that the run reads."""
        self.remote_path = path / "remote.json"
        """The name of the run in its object store."""
        self.export_dir = path / "export"
        """Default folder of an exported model."""
        self.logs_dir = path / "logs"
        """The kept console, one log file per rank, and `parent.log` for failures of the command itself."""
        self.console_path = self.logs_dir / "console.log"
        """What all starts of the run have shown on the console, also if nobody saw it."""
        self.stop_path = self.outcomes_dir / "stop"
        """The file by which the parent asks its workers to stop."""
        self.death_path = self.outcomes_dir / "death"
        """The file by which the parent tells its workers that one of them has died."""
        self.awaited_path = self.outcomes_dir / "awaited"
        """The file by which the parent tells replicas that it starts a lost one again, without which none may train."""
        self.slow_path = self.outcomes_dir / "slow"
        """The file by which a worker tells its agent that it is slow, and that a spare may take the machine's place."""

    def write_pid(self, rank: int) -> None:
        """Write the pid of this rank, for the parent to watch."""
        (self.outcomes_dir / f"pid-{rank}").write_text(str(os.getpid()), encoding="utf-8")

    def read_pids(self) -> dict[int, int]:
        """Return the pid of each rank that has written it."""
        texts = dict[str, str]()
        for path in self.outcomes_dir.glob("pid-*"):
            with suppress(FileNotFoundError):  # a new start removes those of the last one
                texts[path.name] = read_text(path)
        return {int(name.removeprefix("pid-")): int(text) for name, text in texts.items() if text.isdecimal()}

    def tracker_path(self, name: str) -> Path:
        """The record of what was sent to this tracker."""
        return self.path / "trackers" / f"{name}.json"

    def log_path(self, rank: int) -> Path:
        """The file of this rank's stdout and stderr."""
        return self.logs_dir / f"rank-{rank:05d}.log"

    def trace_path(self, step: int, rank: int) -> Path:
        """The trace of a rank that begins with this step; Perfetto opens it."""
        return self.path / "profile" / f"step-{step:08d}-rank-{rank:05d}.json.gz"

    def create(self) -> None:
        """Create the folder, readable only by its owner, and its directories; existing ones are not changed."""
        for directory in (self.path, self.checkpoints_dir, self.logs_dir, self.outcomes_dir):
            try:
                directory.mkdir(OWNER_ONLY if directory == self.path else 0o777, parents=True, exist_ok=True)
            except OSError as error:
                raise explain_unusable(self.path, "created", error) from error

    def check_creatable(self) -> None:
        """Raise ConfigError if the folder does not exist and cannot be created: tries it with another name."""
        try:
            parent = next(path for path in self.path.absolute().parents if path.exists())
            os.rmdir(tempfile.mkdtemp(prefix=".echelon-", dir=parent))
        except OSError as error:
            raise explain_unusable(self.path, "created", error) from error

    def lock(self, patience_seconds: float = 0.0) -> None:
        """Lock the folder for this process until `unlock()` or its end. Raises ConfigError if a live run holds it.

        `patience_seconds`: how long to wait for a run that is about to end.
        """
        self.create()
        deadline = time.monotonic() + max(patience_seconds, _POLL_SECONDS)
        try:
            if not os.access(self.path, os.W_OK | os.X_OK):  # an existing lock file opens in a read-only folder too
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            while not self._lock.take():
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"run.dir={self.path} is in use by a live run (pid {self.read_holder() or 'unknown'}); "
                        f"wait for it, stop it, or give this run another run.name.{describe_mark(self._lock)}"
                    )
                time.sleep(0.1)
        except OSError as error:
            raise explain_unusable(self.path, "written to", error) from error

    def unlock(self) -> None:
        """Release the lock, if held."""
        self._lock.release()

    def is_held(self) -> bool:
        """Whether a live process, possibly this one, holds the lock."""
        return self.read_holder() is not None

    def read_holder(self) -> str | None:
        """Return the live process, possibly this one, that holds the lock, as PID on HOST; None if there is none."""
        return self._lock.read_holder()

    def newest_step(self) -> int | None:
        """Return the step of the newest published checkpoint, by name only; None if there is none."""
        return newest_step(self.checkpoints_dir)

    def is_finished(self) -> bool:
        """Whether the run has finished, by outcome.json."""
        return self.outcome_path.exists()

    def mark_finished(self, step: int | None = None, reason: str = "done") -> None:
        """Record that the run reached its last step, or stopped early (`reason`: early_stop).

        Must only be called by the process that holds the lock, or its rank 0.
        """
        write_json(self.outcome_path, {"time": time.time(), "outcome": reason, "step": step})

    def remedy(self) -> str:
        """Return how to continue a finished run, as the end of a message after "has finished"."""
        try:
            ending = read_as(self.outcome_path, Ending)
        except (OSError, ValueError):
            ending = Ending("done")
        if ending.outcome == "early_stop":
            at = "" if ending.step is None else f", at step {ending.step}"
            return f" early{at}; raise evaluate.early_stopping, or set it to null, to continue"
        return "; raise train.steps to continue"

    def clear_outcomes(self, restart: bool = False) -> None:
        """Remove the outcomes of earlier attempts before a new one; a `restart` keeps a stop request."""
        self.outcome_path.unlink(missing_ok=True)
        for path in list_directory(self.outcomes_dir):
            if not (restart and path == self.stop_path):
                if path.is_dir():
                    remove_tree(path)
                else:
                    path.unlink(missing_ok=True)

    def sweep(self) -> None:
        """Remove incomplete files of a killed process. The caller must hold the lock, and no worker may run."""
        leftovers = [path for path in list_directory(self.path) if TEMPORARY.fullmatch(path.name)]
        for path in leftovers:
            path.unlink(missing_ok=True)
        sweep_checkpoints(self.checkpoints_dir)

    def move_aside(self) -> Path:
        """Rename the folder to NAME.old-1, or the first free number; return the new path."""
        number = 1
        while (target := self.path.with_name(f"{self.path.name}.old-{number}")).exists():
            number += 1
        self.path.rename(target)
        return target


def describe_gone(path: Path) -> str:
    """Return the message for a run whose folder was removed while it was training."""
    return (
        f"run.dir={path} was removed or moved during the run, so all progress since then is lost; run the same command "
        "again to start over, or set run.dir to the folder's new path."
    )


def explain_unusable(folder: Path, what: str, error: OSError) -> EchelonError:
    """Return the error for an unusable folder: exit code 1 if the disk is full, else 2, a wrong request."""
    if is_disk_full(error):
        return EchelonError(f"run.dir={folder}: {explain_storage_error(error, folder)}.")
    reason = error.strerror or error
    return ConfigError(f"run.dir={folder} cannot be {what}: {reason}; choose a folder you can write to.")


_LONGEST_PATH = 4096  # characters that Linux accepts


@dataclass(frozen=True)
class RunText:
    """The path of the prepared text that a run reads, and a digest of its content, independent of the path.

    packing: whether samples share sequences; None for plain text.
    """

    prepared: str
    digest: str | None
    packing: bool | None = None


class TextRecord:
    """data.json of a run folder; if it is damaged, the newest start in events.jsonl has the same information."""

    def __init__(self, folder: Path, rows: RunRows) -> None:
        self.path = folder / "data.json"
        self._rows = rows

    def write_prepared_path(self, path: Path, digest: str | None = None, packing: bool | None = None) -> None:
        """Record the prepared text that the run reads. `digest` and `packing`: see RunText."""
        write_json(self.path, {"prepared": str(path.resolve()), "digest": digest, "packing": packing})

    def read_texts(self) -> list[RunText]:
        """Return the run's text according to data.json and to the newest start in events.jsonl.

        One of the two may be damaged. Empty if the run has not started. Raises DataError if data.json is damaged and
        there is no such start.
        """
        texts, damage = list[RunText](), None
        try:
            texts.append(read_as(self.path, RunText))
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            damage = error
        if texts and len(texts[0].prepared) > _LONGEST_PATH:
            damage = ValueError(f"its path has {len(texts.pop().prepared)} characters")
        for event in reversed(self._rows.read_events()):
            if isinstance(prepared := event.get("prepared"), str) and isinstance(digest := event.get("digest"), str):
                packing = event.get("packing")
                texts.append(RunText(prepared, digest, packing if isinstance(packing, bool) else None))
                break
        if damage is not None and not texts:
            raise DataError(
                f"{self.path}: cannot read which text the run uses ({damage}); restore it, or remove it and run "
                "`echelon train` with the run's recipe and the same text, which writes it again."
            )
        return texts

    def read_prepared_path(self) -> Path:
        """Return the path of the run's prepared text. Raises DataError if it is not recorded."""
        paths = [Path(text.prepared) for text in self.read_texts()]
        if not paths:
            raise DataError(
                f"{self.path}: the prepared text of this run is not recorded; run `echelon train` once to write it."
            )
        return next((path for path in paths if os.path.isfile(path / MANIFEST)), paths[0])

    def read_data_digest(self) -> str | None:
        """Return the digest that `write_prepared_path` recorded; None if there is none. Raises DataError."""
        return next((text.digest for text in self.read_texts()), None)

    def read_packing(self) -> bool | None:
        """Return whether the run's samples share sequences; None unless one answer is recorded. Raises DataError."""
        answers = {text.packing for text in self.read_texts()}
        return answers.pop() if len(answers) == 1 else None
