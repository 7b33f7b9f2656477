"""The run folder: where each file of a run stands, who may write there, and how a run is found again.

`recipe.yaml plan.json estimate.json environment.json data.json remote.json metrics.jsonl events.jsonl outcome.json
spending.json checkpoints/step-00000100/ model/ export/ logs/rank-00000.log trackers/mlflow.json`
"""

import errno
import fcntl
import json
import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from echelon.errors import ConfigError, DataError, EchelonError, explain_storage_error, is_disk_full
from echelon.recipe import Difference, Recipe, blocking_differences, diff_recipes, load_recipe

# What a run leaves in its folder before recipe.yaml exists; any other file means the folder is somebody else's.
_EARLY_FILES = {
    ".lock", ".outcomes", "logs", "checkpoints", "events.jsonl", "data.json", "environment.json", "estimate.json",
    "plan.json", "remote.json", "metrics.jsonl", "samples.jsonl", "trackers",
    "spending.json",
}  # fmt: skip
_TEMPORARY = re.compile(r"\..+\.tmp")
# A finished run goes on only when one of these asks for more.
_LENGTH_KEYS = ("train.steps", "train.tokens", "train.epochs", "evaluate.early_stopping")

RunState = Literal["new", "resumed", "finished"]


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
        """What all starts of the run have used: see `echelon.cost.Spending`."""
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
        """Make the folder and its directories; existing ones stay as they are."""
        for directory in (self.path, self.checkpoints_dir, self.logs_dir, self.outcomes_dir):
            try:
                directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise self._explain("made", error) from error

    def lock(self, patience_seconds: float = 0.0) -> None:
        """Hold the folder for this process until `unlock()` or its end. A live run raises ConfigError with its pid.

        `patience_seconds`: how long one that is about to end may take to let go of it.
        """
        self.create()
        try:
            fd = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise self._explain("written to", error) from error
        deadline = time.monotonic() + patience_seconds
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

    def read_prepared_path(self) -> Path:
        """The prepared text the run reads. Raises DataError when the run never got that far."""
        try:
            return Path(json.loads(self.data_path.read_text(encoding="utf-8"))["prepared"])
        except (OSError, ValueError, KeyError) as error:
            raise DataError(
                f"{self.data_path} does not name the prepared text of this run; run `echelon train` once to write it."
            ) from error

    def read_data_digest(self) -> str | None:
        """What `write_prepared_path` was told of the content; None when nothing was noted."""
        try:
            digest = json.loads(self.data_path.read_text(encoding="utf-8")).get("digest")
        except (OSError, ValueError, AttributeError):
            return None
        return str(digest) if digest is not None else None

    def append_event(self, event: str, **fields: Any) -> None:
        """Add one line to events.jsonl: the time in UTC seconds, the event, the step (null when unknown), `fields`."""
        row = {"time": time.time(), "event": event, "step": fields.pop("step", None), **fields}
        with self.events_path.open("ab", buffering=0) as file:
            size = file.tell()
            line = (json.dumps(row) + "\n").encode()
            if file.write(line) < len(line):  # a disk that fills up takes the beginning of a line
                file.truncate(size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.events_path))

    def read_events(self) -> list[dict[str, Any]]:
        """The lines of events.jsonl, in order, but for one that a power cut took half of."""
        lines = self.events_path.read_text(encoding="utf-8").splitlines() if self.events_path.exists() else []
        events = []
        for line in lines:
            with suppress(ValueError):
                events.append(json.loads(line))
        return events

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

    def rows_backwards(self) -> Iterator[dict[str, Any]]:
        """The rows of metrics.jsonl, the last one first; none where there is no such file."""
        with suppress(OSError):
            lines = self.metrics_path.read_bytes().splitlines()
            yield from (row for line in reversed(lines) if (row := _read_row(line)) is not None)

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
            outcome = json.loads(self.outcome_path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            outcome = {}
        if outcome.get("outcome") == "early_stop":
            return f" early, at step {outcome['step']}; raise evaluate.early_stopping, or set it to null, to go on"
        return "; raise train.steps to go on"

    def clear_outcomes(self, restart: bool = False) -> None:
        """Forget how earlier attempts ended, before a new one starts; a `restart` still hears of a stop."""
        self.outcome_path.unlink(missing_ok=True)
        for path in _list_directory(self.outcomes_dir):
            if not (restart and path == self.stop_path):
                path.unlink(missing_ok=True)

    def sweep(self) -> None:
        """Remove what a killed process left half written. For the holder of the lock, while no worker runs."""
        leftovers = [path for path in _list_directory(self.path) if _TEMPORARY.fullmatch(path.name)]
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


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_run(path: Path) -> bool:
    """Whether a folder is a run's."""
    return RunFolder(path).recipe_path.is_file()


@dataclass(frozen=True)
class OpenedRun:
    """A run folder ready to be used, locked unless finished, the recipe it was run by, and how this one differs."""

    folder: RunFolder
    state: RunState
    differences: tuple[Difference, ...] = ()
    before: Recipe | None = None


def open_run(
    recipe: Recipe,
    fresh: bool,
    say: Callable[[str], None],
    check: Callable[[], None] = lambda: None,
    bring_back: Callable[[RunFolder], None] = lambda folder: None,
    patience_seconds: float = 0.0,
) -> OpenedRun:
    """Find out what `recipe.run.dir` holds: nothing, a run to resume, or one that has finished; lock it.

    A run whose recipe differs in a key that would change the model or its data raises ConfigError with the
    difference; `fresh` moves the old run aside instead. `check` is called for a run that starts anew, before its
    folder is made and before an old run is moved aside: what it refuses leaves everything as it was. `bring_back` may
    fill the locked folder with what the run left elsewhere; it is not called where a run starts afresh.
    `patience_seconds` is how long a live run may take to end.
    """
    folder = RunFolder(Path(recipe.run.dir))
    _refuse_foreign_folder(folder)
    had_recipe = folder.recipe_path.exists()
    if fresh or not had_recipe:
        check()
    folder.lock(patience_seconds)
    folder.sweep()
    if fresh:
        if had_recipe:
            target = folder.move_aside()
            folder.unlock()
            say(f"run: the old run is now in {target}")
            folder.lock()
        return OpenedRun(folder, "new")
    try:
        bring_back(folder)
        if not folder.recipe_path.exists():
            return OpenedRun(folder, "new")
        return _reopen(folder, recipe, say)
    except BaseException:
        folder.unlock()
        raise


def _reopen(folder: RunFolder, recipe: Recipe, say: Callable[[str], None]) -> OpenedRun:
    """Compare with the recipe that ran here, and say what changed."""
    try:
        old, _ = load_recipe(folder.recipe_path)
    except ConfigError as error:
        raise ConfigError(
            f"run.dir={folder.path} holds a run whose recipe cannot be read ({error}); "
            "pass --fresh to move it aside, or choose another run.name."
        ) from error
    blocking = blocking_differences(old, recipe)
    if blocking:
        shown = "\n".join(f"  {line}" for line in _render_differences(blocking))
        raise ConfigError(
            f"run.dir={folder.path} holds a run of another recipe:\n{shown}\n"
            "restore these keys to resume it, pass --fresh to move it aside, or choose another run.name."
        )
    differences = tuple(diff_recipes(old, recipe))
    if folder.is_finished() and not any(difference.key in _LENGTH_KEYS for difference in differences):
        folder.unlock()
        say(f"run: {folder.path} has finished{folder.remedy()}, or pass --fresh to start again.")
        return OpenedRun(folder, "finished", differences, old)
    for line in _render_differences(differences):
        say(f"run: changed {line}")
    return OpenedRun(folder, "resumed", differences, old)


def _render_differences(differences: list[Difference] | tuple[Difference, ...]) -> list[str]:
    return [f"{each.key}: {each.old!r} -> {each.new!r}" for each in differences]


def _refuse_foreign_folder(folder: RunFolder) -> None:
    """A folder with files that no run wrote is never taken, and never moved aside."""
    if folder.path.is_file():
        raise ConfigError(f"run.dir={folder.path} is a file; give a folder.")
    if folder.recipe_path.exists():
        return
    names = {path.name for path in _list_directory(folder.path) if not _TEMPORARY.fullmatch(path.name)} - _EARLY_FILES
    if names:
        raise ConfigError(
            f"run.dir={folder.path} holds files but no run (for example {min(names)}); "
            "choose a new folder, or an empty one."
        )


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


def _list_directory(path: Path) -> list[Path]:
    return sorted(path.iterdir()) if path.is_dir() else []


def newest_step(folder: Path) -> int | None:
    """The step of the newest published checkpoint in a folder, by name alone; None when there is none."""
    names = (re.fullmatch(r"step-(\d+)", path.name) for path in _list_directory(folder))
    return max((int(name[1]) for name in names if name), default=None)


def _cut_rows(path: Path, step: int, evaluated: int) -> int:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    kept = [line for line in lines if is_row_up_to(line, step, evaluated)]
    if len(kept) < len(lines):
        write_text(path, "".join(kept))
    return len(lines) - len(kept)


def is_row_up_to(line: str, step: int, evaluated: int) -> bool:
    """Whether a line of metrics.jsonl or samples.jsonl is whole, and of `step` or before; of an evaluation, `evaluated`
    or before."""
    row = _read_row(line) if line.endswith("\n") else None
    return row is not None and bool(row["step"] <= (step if row.get("kind") == "train" else evaluated))


def _read_row(line: str | bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def write_text(path: Path, text: str) -> None:
    """Replace the file in one go: a reader sees the old text or the new one, also after a power cut."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def sync_path(path: Path) -> None:
    """Flush a file, or a folder's entries, to disk, so that a rename that follows survives a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """Replace the file with `value` as indented JSON, in one go."""
    write_text(path, json.dumps(value, indent=2, default=str) + "\n")
