"""The run folder: where each file of a run stands, who may write there, and how a run is found again.

`recipe.yaml plan.json estimate.json environment.json data.json hub.json remote.json metrics.jsonl events.jsonl
outcome.json spending.json checkpoints/step-00000100/ model/ export/ logs/rank-00000.log trackers/mlflow.json`
"""

import errno
import fcntl
import json
import os
import platform
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.errors import ConfigError, DataError, EchelonError, explain_storage_error, is_disk_full
from echelon.stored import Row, Rows, parse_row, read_as, read_rows, whole_lines, write_json, write_text

FILES = (
    "recipe.yaml", "plan.json", "estimate.json", "environment.json", "data.json", "hub.json", "remote.json",
    "metrics.jsonl", "samples.jsonl", "events.jsonl", "outcome.json", "spending.json",
)  # fmt: skip
"""The files that stand in a run folder itself, `.lock` beside them."""

FOLDERS = (".outcomes", "checkpoints", "export", "logs", "model", "tensorboard", "trackers", "wandb")
"""The folders in a run folder."""

OWNER_ONLY = 0o700
"""The mode of a new folder that holds recipes, scripts or logs; one that exists keeps its own."""

TEMPORARY = re.compile(r"\..+\.tmp")
"""What `stored.write_text` writes before a file gets its name."""

_NUMBERS = ("loss", "grad_norm", "learning_rate", "tokens", "target_tokens", "tokens_per_second", "step_seconds")
_LARGEST = 1e300
# `is_held` takes the lock itself for a moment; a process that wants it then tries for as long.
_LOOK_SECONDS = 0.2


@dataclass(frozen=True)
class RunText:
    """The prepared text that a run reads, and what stands for its content, wherever it lies."""

    prepared: str
    digest: str | None


@dataclass(frozen=True)
class Ending:
    """How a run ended for good, as its outcome.json says."""

    outcome: str
    step: int | None = None


class RunFolder:
    """One run's folder. Making the object touches nothing; `create()` makes the directories.

    `outcomes_dir`: where ranks say how they ended, and hear of others, by default inside. The agent of one machine of
    several has it elsewhere, since its own ranks alone report to it.
    """

    def __init__(self, path: Path, outcomes_dir: Path | None = None) -> None:
        self.path = path
        self.outcomes_dir = outcomes_dir or path / ".outcomes"
        self._lock_fd: int | None = None

    @property
    def recipe_path(self) -> Path:
        """The recipe, resolved, as run."""
        return self.path / "recipe.yaml"

    @property
    def plan_path(self) -> Path:
        """The ParallelPlan that runs."""
        return self.path / "plan.json"

    @property
    def estimate_path(self) -> Path:
        """What the plan was predicted to need, and on what hardware."""
        return self.path / "estimate.json"

    @property
    def environment_path(self) -> Path:
        """Versions, platform and the variables of the launcher."""
        return self.path / "environment.json"

    @property
    def metrics_path(self) -> Path:
        """One JSON object a logged step."""
        return self.path / "metrics.jsonl"

    @property
    def samples_path(self) -> Path:
        """What the model made of `evaluate.prompts` at each evaluation."""
        return self.path / "samples.jsonl"

    @property
    def events_path(self) -> Path:
        """What happened when: see docs/checkpoints.md."""
        return self.path / "events.jsonl"

    @property
    def spending_path(self) -> Path:
        """What all starts of the run have used: see `echelon.runs.cost.Spending`."""
        return self.path / "spending.json"

    @property
    def outcome_path(self) -> Path:
        """Written when the run has finished; absent while it has not."""
        return self.path / "outcome.json"

    @property
    def checkpoints_dir(self) -> Path:
        """Holds step-00000100/ and its siblings."""
        return self.path / "checkpoints"

    @property
    def model_dir(self) -> Path:
        """The model's config.json and tokenizer, without weights."""
        return self.path / "model"

    @property
    def data_path(self) -> Path:
        """Names the prepared text that the run reads."""
        return self.path / "data.json"

    @property
    def hub_path(self) -> Path:
        """The commits of what the run takes from the Hugging Face hub; absent where it takes nothing."""
        return self.path / "hub.json"

    @property
    def remote_path(self) -> Path:
        """Which run this is, among those whose checkpoints are in an object store."""
        return self.path / "remote.json"

    @property
    def export_dir(self) -> Path:
        """Default place of an exported model."""
        return self.path / "export"

    @property
    def logs_dir(self) -> Path:
        """One file a rank, and `parent.log` for the command's own failures."""
        return self.path / "logs"

    @property
    def stop_path(self) -> Path:
        """Where the parent asks its workers to stop."""
        return self.outcomes_dir / "stop"

    @property
    def death_path(self) -> Path:
        """Where the parent tells its workers that one of them has died."""
        return self.outcomes_dir / "death"

    def write_pid(self, rank: int) -> None:
        """Note which process is this rank, for the parent to watch."""
        (self.outcomes_dir / f"pid-{rank}").write_text(str(os.getpid()), encoding="utf-8")

    def read_pids(self) -> dict[int, int]:
        """The process of each rank that has noted its own."""
        found = {path.name: path.read_text(encoding="utf-8") for path in self.outcomes_dir.glob("pid-*")}
        return {int(name.removeprefix("pid-")): int(text) for name, text in found.items() if text.isdecimal()}

    def tracker_path(self, name: str) -> Path:
        """What this tracker was given of the run."""
        return self.path / "trackers" / f"{name}.json"

    def log_path(self, rank: int) -> Path:
        """Where this rank's stdout and stderr go."""
        return self.logs_dir / f"rank-{rank:05d}.log"

    def create(self) -> None:
        """Make the folder, which only its owner can read, and its directories; existing ones stay as they are."""
        for directory in (self.path, self.checkpoints_dir, self.logs_dir, self.outcomes_dir):
            try:
                directory.mkdir(OWNER_ONLY if directory == self.path else 0o777, parents=True, exist_ok=True)
            except OSError as error:
                raise self._explain("made", error) from error

    def lock(self, patience_seconds: float = 0.0) -> None:
        """Hold the folder for this process until `unlock()` or its end. A live run raises ConfigError with its pid.

        `patience_seconds`: how long one that is about to end may take to let go of it.
        """
        self.create()
        try:
            if not os.access(self.path, os.W_OK | os.X_OK):  # a lock that is there already would open all the same
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            fd = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise self._explain("written to", error) from error
        deadline = time.monotonic() + max(patience_seconds, _LOOK_SECONDS)
        while not (held := _try_lock(fd)) and time.monotonic() < deadline:
            time.sleep(0.1)
        if not held:
            holder = os.read(fd, 100).decode("utf-8", "replace").strip() or "unknown"
            os.close(fd)
            raise ConfigError(
                f"run.dir={self.path} is in use by a live run (pid {holder}); "
                "wait for it, stop it, or give this run another run.name."
            )
        self._lock_fd = fd
        try:
            os.ftruncate(fd, 0)
            os.write(fd, f"{os.getpid()} on {platform.node()}\n".encode())
        except OSError as error:
            self.unlock()
            raise self._explain("written to", error) from error

    def is_held(self) -> bool:
        """Whether a live process holds the folder, this one included."""
        try:
            fd = os.open(self.path / ".lock", os.O_RDONLY)
        except OSError:
            return False
        try:
            return not _try_lock(fd, fcntl.LOCK_SH)
        finally:
            os.close(fd)

    def _explain(self, what: str, error: OSError) -> EchelonError:
        """A full disk is nobody's mistake (exit code 1); a folder that cannot be used is the request's (2)."""
        if is_disk_full(error):
            return EchelonError(f"run.dir={self.path}: {explain_storage_error(error, self.path)}.")
        reason = error.strerror or error
        return ConfigError(f"run.dir={self.path} cannot be {what}: {reason}; choose a folder you can write to.")

    def unlock(self) -> None:
        """Let go of the folder; harmless when it is not held."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def write_prepared_path(self, path: Path, digest: str | None = None) -> None:
        """Note which prepared text the run reads, so that every rank opens that and none prepares its own.

        `digest` stands for its content, wherever it lies.
        """
        write_json(self.data_path, {"prepared": str(path.resolve()), "digest": digest})

    def read_texts(self) -> list[RunText]:
        """Which text the run reads, as data.json says and as the newest start in events.jsonl does, of which one may be
        damaged; none where the run has not begun.

        Raises DataError where data.json is damaged and there is no such start.
        """
        found, damage = list[RunText](), None
        try:
            found.append(read_as(self.data_path, RunText))
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as error:
            damage = error
        for event in reversed(self.read_events()):
            if isinstance(prepared := event.get("prepared"), str) and isinstance(digest := event.get("digest"), str):
                found.append(RunText(prepared, digest))
                break
        if damage is not None and not found:
            raise DataError(
                f"{self.data_path} does not say which text the run reads ({damage}); restore it, or remove it and "
                "start `echelon train` with the run's recipe and the same text, which writes it again."
            )
        return found

    def read_prepared_path(self) -> Path:
        """The prepared text the run reads. Raises DataError when the run never got that far, or nothing tells."""
        paths = [Path(text.prepared) for text in self.read_texts()]
        if not paths:
            raise DataError(
                f"{self.data_path} does not name the prepared text of this run; run `echelon train` once to write it."
            )
        return next((path for path in paths if path.is_dir()), paths[0])

    def read_data_digest(self) -> str | None:
        """What `write_prepared_path` was told of the content; None when nothing was noted. Raises DataError."""
        return next((text.digest for text in self.read_texts()), None)

    def append_event(self, event: str, **fields: Any) -> None:
        """Add one line to events.jsonl: the time in UTC seconds, the event, the step (null when unknown), `fields`."""
        row = {"time": time.time(), "event": event, "step": fields.pop("step", None), **fields}
        with self.events_path.open("ab", buffering=0) as file:
            size = file.tell()
            line = (json.dumps(row) + "\n").encode()
            if file.write(line) < len(line):  # a disk that fills up takes the beginning of a line
                file.truncate(size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.events_path))

    def read_events(self) -> tuple[Row, ...]:
        """The rows of events.jsonl, in order, without lines that are none."""
        return read_rows(self.events_path, _is_event).rows

    def read_metrics(self) -> Rows:
        """The rows of metrics.jsonl, in order, and which lines are none."""
        return read_rows(self.metrics_path, is_metrics_row)

    def describe_bad_lines(self) -> list[str]:
        """A line about each of events.jsonl, metrics.jsonl and samples.jsonl that has lines which are passed over."""
        kinds = ((self.events_path, _is_event), (self.metrics_path, is_metrics_row), (self.samples_path, _has_step))
        found = (read_rows(path, is_row).describe_bad() for path, is_row in kinds)
        return [line for line in found if line is not None]

    def cut_metrics(self, step: int, owes_evaluation: bool = False) -> int:
        """Drop the rows of metrics.jsonl and samples.jsonl beyond `step`, and torn last lines; returns their number.

        Where the evaluation at `step` is owed, it is made again, and its rows go too.
        """
        evaluated = step - owes_evaluation
        paths = (self.metrics_path, self.samples_path)
        return sum(_cut_rows(path, step, evaluated) for path in paths if path.exists())

    def last_step(self) -> int:
        """The last step that has a row in metrics.jsonl; 0 where none has."""
        return next((int(row["step"]) for row in self.rows_backwards()), 0)

    def rows_backwards(self) -> Iterator[Row]:
        """The rows of metrics.jsonl, the last one first; none where there is no such file."""
        try:
            lines = list(whole_lines(self.metrics_path.read_bytes()))
        except OSError:
            return
        yield from (row for line in reversed(lines) if (row := parse_row(line, is_metrics_row)) is not None)

    def newest_step(self) -> int | None:
        """The step of the newest published checkpoint, by name alone; None when there is none."""
        return newest_step(self.checkpoints_dir)

    def is_finished(self) -> bool:
        """Whether the run reached its last step and said so."""
        return self.outcome_path.exists()

    def mark_finished(self, step: int | None = None, reason: str = "done") -> None:
        """Say that the run reached its last step, or stopped early for good (`reason`: early_stop).

        Only the process that holds the lock, or its rank 0, calls it.
        """
        write_json(self.outcome_path, {"time": time.time(), "outcome": reason, "step": step})

    def remedy(self) -> str:
        """What makes a finished run go on, to follow "has finished"."""
        try:
            ending = read_as(self.outcome_path, Ending)
        except (OSError, ValueError):
            ending = Ending("done")
        if ending.outcome == "early_stop":
            at = "" if ending.step is None else f", at step {ending.step}"
            return f" early{at}; raise evaluate.early_stopping, or set it to null, to go on"
        return "; raise train.steps to go on"

    def clear_outcomes(self, restart: bool = False) -> None:
        """Forget how earlier attempts ended, before a new one starts; a `restart` still hears of a stop."""
        self.outcome_path.unlink(missing_ok=True)
        for path in list_directory(self.outcomes_dir):
            if not (restart and path == self.stop_path):
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)

    def sweep(self) -> None:
        """Remove what a killed process left half written. For the holder of the lock, while no worker runs."""
        leftovers = [path for path in list_directory(self.path) if TEMPORARY.fullmatch(path.name)]
        for path in leftovers:
            path.unlink(missing_ok=True)
        sweep_checkpoints(self.checkpoints_dir)

    def move_aside(self) -> Path:
        """Rename the folder to NAME.old-1, or the first free number; returns where it went."""
        number = 1
        while (target := self.path.with_name(f"{self.path.name}.old-{number}")).exists():
            number += 1
        self.path.rename(target)
        return target


def _try_lock(fd: int, kind: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def describe_gone(path: Path) -> str:
    """How a run ends whose folder is gone."""
    return (
        f"run.dir={path} was removed or moved while the run went on, so nothing that it did since is kept; start the "
        "same command again to begin anew, or set run.dir to where the folder is now."
    )


def is_run(path: Path) -> bool:
    """Whether a folder is a run's."""
    return RunFolder(path).recipe_path.is_file()


def require_folder(path: Path) -> None:
    """Raise ConfigError unless there is a folder."""
    if not path.is_dir():
        raise ConfigError(f"{path} is not a folder; give a run folder (runs/NAME) or an HF model folder.")


def sweep_checkpoints(folder: Path) -> list[str]:
    """Take away what a killed process left half-written, half-removed or half-replaced; returns the names of it.

    A checkpoint that was to be replaced, and whose successor did not get its name, gets its own back.
    """
    swept = []
    for path in sorted(folder.glob(".*-*")):
        kind, _, step = path.name.partition("-")
        if kind == ".replaced" and not (final := folder / f"step-{step}").exists():
            path.rename(final)
        elif kind in (".writing", ".removing", ".replaced"):
            shutil.rmtree(path, ignore_errors=True)
            swept.append(path.name)
    return swept


def list_directory(path: Path) -> list[Path]:
    """What stands in a folder, by name; nothing where there is none."""
    return sorted(path.iterdir()) if path.is_dir() else []


def newest_step(folder: Path) -> int | None:
    """The step of the newest published checkpoint in a folder, by name alone; None when there is none."""
    names = (re.fullmatch(r"step-(\d+)", path.name) for path in list_directory(folder))
    return max((int(name[1]) for name in names if name), default=None)


def _cut_rows(path: Path, step: int, evaluated: int) -> int:
    content = path.read_bytes()
    kept = [line for line in whole_lines(content) if is_row_up_to(path.name, line, step, evaluated)]
    num_lines = content.count(b"\n") + (not content.endswith(b"\n") and bool(content))
    if len(kept) < num_lines:
        write_text(path, b"".join(kept).decode("utf-8"))
    return num_lines - len(kept)


def is_row_up_to(name: str, line: bytes, step: int, evaluated: int) -> bool:
    """Whether a line of metrics.jsonl or samples.jsonl (its `name`) is whole, and of `step` or before.

    Of an evaluation, of step `evaluated` or before.
    """
    is_row = is_metrics_row if name == "metrics.jsonl" else _has_step
    row = parse_row(line, is_row) if line.endswith(b"\n") else None
    return row is not None and bool(row["step"] <= (step if row.get("kind") == "train" else evaluated))


def is_metrics_row(row: Row) -> bool:
    """Whether a row is one of metrics.jsonl: of a kind and a step, numbers where there must be numbers."""
    numbers = (row.get(name) for name in _NUMBERS)
    sets = row.get("sets")
    return (
        isinstance(row.get("kind"), str)
        and _has_step(row)
        and all(value is None or isinstance(value, float) or _is_number(value) for value in numbers)
        and (sets is None or (isinstance(sets, dict) and all(isinstance(each, dict) for each in sets.values())))
    )


def _is_event(row: Row) -> bool:
    """Whether a row is one of events.jsonl; of a rollback, whether it says which step was ruled out."""
    is_event = isinstance(row.get("event"), str) and _is_number(row.get("time"))
    has_step = row.get("step") is None or _has_step(row)
    return is_event and has_step and (row["event"] != "rollback" or _is_count(row.get("suppressed")))


def _has_step(row: Row) -> bool:
    return _is_count(row.get("step"))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def _is_number(value: object) -> bool:
    # Compared, since a whole number may be too large to be made a float; nan is neither.
    return isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST < value < _LARGEST
