"""The jobs launched from a folder: `jobs/NAME` has the submitted files and the record that finds the job again,
and on targets whose job folder is visible on this machine also the log and the exit code.

A record is data, which may have come with a stranger's folder: its values are checked by the form of its target, and
addresses in it are used only if a launch of this account has written them.
"""

import hashlib
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

from echelon.ground.errors import ConfigError
from echelon.ground.stored import open_regular, read_as, read_json, read_text, write_json, write_text
from echelon.ground.variables import find_cache_dir
from echelon.launch.job import NAME, JobRecord, JobSpec, JobState, Launcher, Submitted, find_launcher
from echelon.recipe.document import Recipe
from echelon.recipe.render import render_recipe
from echelon.run.folder.overview import RUNS, find_newest_runs
from echelon.run.folder.run_folder import OWNER_ONLY
from echelon.run.supervise.outcome import DONE, STOPPED

JOBS = Path("jobs")

_RECORD = "job.json"
# Runs and jobs that a message names.
_NAMED = 5
_NAME_LENGTH = 63
STAMP_LENGTH = len("-20260102-030405")
"""Length of the launch time at the end of a job's name, in characters."""

_LOOK_SECONDS = 0.5
# A long log is read in parts, of which each is a list of lines; a longer line is divided.
_PART_BYTES = 2**20


def name_job(run_name: str, now: float | None = None) -> str:
    """A run's name and the UTC time, in a form that every target accepts: at most 63 letters, digits and dashes."""
    stamp = time.strftime("-%Y%m%d-%H%M%S", time.gmtime(now))
    plain = re.sub(r"[^a-z0-9]+", "-", run_name.lower()).strip("-")
    if not plain or not plain[0].isalpha():
        plain = f"run-{plain}".rstrip("-")
    return plain[: _NAME_LENGTH - STAMP_LENGTH].rstrip("-") + stamp


def make_job(recipe: Recipe, workdir: Path, name: str | None = None) -> JobSpec:
    """Build the job of a recipe launched now from `workdir`; writes nothing."""
    name = name or name_job(recipe.run.name)
    return JobSpec(name, recipe, JOBS / name, workdir)


def write_job(job: JobSpec, texts: dict[str, str]) -> None:
    """Create the job's folder with recipe and texts, readable by its owner only; on an error nothing is left.

    Raises ConfigError if the folder exists.
    """
    try:
        job.folder.mkdir(OWNER_ONLY, parents=True)
    except FileExistsError:
        raise ConfigError(f"{job.folder} exists: a job of this name was just launched; try again.") from None
    except NotADirectoryError:
        raise ConfigError(
            f"{job.folder.parent} is a file, but echelon stores launched jobs in a folder of that name; rename the "
            "file, or launch from another folder."
        ) from None
    try:
        write_text(job.recipe_path, render_recipe(job.recipe))
        for name, text in texts.items():
            write_text(job.folder / name, text)
    except OSError:
        shutil.rmtree(job.folder, ignore_errors=True)
        raise


def submit_job(job: JobSpec, launcher: Launcher, texts: dict[str, str]) -> JobRecord:
    """Write the job's folder and submit the job. After a LaunchError the folder stays, for inspection."""
    write_job(job, texts)
    return record_job(job, launcher.submit(job))


def record_job(job: JobSpec, submitted: Submitted) -> JobRecord:
    """Write the record of a submitted job to its folder."""
    target = job.recipe.launch.to
    assert target is not None
    run_dir = str(job.workdir / job.recipe.run.dir)
    record = JobRecord(job.name, target, submitted.id, run_dir, time.time(), job.folder, submitted.place)
    write_json(job.folder / _RECORD, _fields(record))
    if find_launcher(target).record_form.needs_own:
        path = _find_own(job.folder)
        with suppress(OSError):  # a home that cannot be written
            path.parent.mkdir(OWNER_ONLY, parents=True, exist_ok=True)
            write_json(path, _fields(record))
    return record


def _fields(record: JobRecord) -> dict[str, Any]:
    return {name: value for name, value in asdict(record).items() if name != "folder"}


def _find_own(folder: Path) -> Path:
    """This account's copy of the record in a job's folder."""
    return find_cache_dir() / "jobs" / f"{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:32]}.json"


def find_job(name: str) -> JobRecord:
    """Find a job by its name, its folder or its id at the target.

    Raises ConfigError if there is none, listing the newest runs and jobs: commands that take a job take a run too.
    """
    records, _ = list_jobs()
    for record in records:
        if name.rstrip("/") in (record.name, record.id, str(record.folder)):
            return record
    for folder in (JOBS / name, Path(name)):  # a sweep keeps the jobs of its trials in its own folder
        if (folder / _RECORD).exists():
            return read_job(folder)
        if folder.parent.name == JOBS.name and folder.is_dir():
            raise ConfigError(
                f"{folder}/{_RECORD} is missing, as after a failed launch; if the target does not know the job, remove "
                "the folder."
            )
    jobs = ", ".join(record.name for record in records[:_NAMED]) or "none"
    runs = ", ".join(str(path.relative_to(RUNS)) for path in find_newest_runs([RUNS])[:_NAMED]) or "none"
    raise ConfigError(
        f"{name} is neither a run nor a job of this folder; the newest runs in {RUNS}/: {runs}; the newest jobs in "
        f"{JOBS}/: {jobs}."
    )


def list_jobs() -> tuple[list[JobRecord], list[str]]:
    """The jobs launched from this folder, newest first, and why the records of others cannot be used."""
    records, faults = [], []
    for path in sorted(JOBS.glob(f"*/{_RECORD}")):
        try:
            records.append(read_job(path.parent))
        except ConfigError as error:
            faults.append(str(error))
    return sorted(records, key=lambda record: record.submitted_at, reverse=True), faults


def read_job(folder: Path) -> JobRecord:
    """The record in a job's folder. Raises ConfigError if it is missing or damaged, or has values of another form."""
    path = folder / _RECORD
    try:
        record = replace(read_as(path, JobRecord), folder=folder)
        form = find_launcher(record.target).record_form
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, ConfigError) as error:
        raise _damaged(path, str(error).rstrip(".")) from None
    if not re.fullmatch(NAME, record.name) or "\0" in record.run_dir:
        raise _damaged(path, f"name is {record.name!r:.60}, run_dir is {record.run_dir!r:.60}")
    if (fault := form.find_fault(record)) is not None:
        raise _damaged(path, fault)
    if form.needs_own and not _is_own(record):
        raise ConfigError(
            f"{path} was not written by a launch of this account on this machine, so the addresses in it are not "
            f"asked; see the run itself with: echelon status {record.run_dir}"
        )
    return record


def _damaged(place: Path, why: str) -> ConfigError:
    return ConfigError(f"{place} is not the record of a launch: {why}; restore the file, or remove its folder.")


def _is_own(record: JobRecord) -> bool:
    """Whether a launch of this account has written this record to this folder."""
    try:
        return bool(read_json(_find_own(record.folder)) == _fields(record))
    except (OSError, ValueError):
        return False


def read_exit_code(path: Path) -> int | None:
    """The exit code in a file; None while the file does not exist or has no number."""
    with suppress(OSError, ValueError):
        return int(read_text(path))
    return None


def name_ending(code: int) -> JobState:
    """The final state of a job with this exit code."""
    return "done" if code == DONE else "stopped" if code == STOPPED else "failed"


class Log:
    """A growing file, read from the start in whole lines. It need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0

    def read(self, is_last: bool) -> Iterator[str]:
        """Yield the lines added since the last read; with `is_last`, also an unfinished last line.

        Raises ConfigError if the file cannot be read.
        """
        try:
            with open_regular(self._path) as file:
                file.seek(self._position)
                while part := self._next_part(file, is_last):
                    yield from part.decode("utf-8", "replace").splitlines()
        except FileNotFoundError:
            return
        except OSError as error:
            raise ConfigError(f"{self._path} cannot be read: {error.strerror}.") from error

    def _next_part(self, file: IO[bytes], is_last: bool) -> bytes:
        """Return whole lines, or a part of a line that has no end yet; empty if there is nothing to read."""
        text = file.read(_PART_BYTES)
        end = text.rfind(b"\n") + 1
        if not end and (is_last or len(text) == _PART_BYTES):
            end = len(text)
        text = text[:end]
        self._position += len(text)
        file.seek(self._position)
        return text

    def follow(self, has_ended: Callable[[], bool]) -> Iterator[str]:
        """Yield existing and new lines until `has_ended`, which is called before each read."""
        while True:
            ended = has_ended()
            yield from self.read(ended)
            if ended:
                return
            time.sleep(_LOOK_SECONDS)


def rarely(ask: Callable[[], bool], seconds: float) -> Callable[[], bool]:
    """Limit the expensive check `ask` to one call every `seconds`; in between the answer is False."""
    asked_at = time.monotonic()

    def answer() -> bool:
        nonlocal asked_at
        if time.monotonic() < asked_at + seconds:
            return False
        asked_at = time.monotonic()
        return ask()

    return answer
