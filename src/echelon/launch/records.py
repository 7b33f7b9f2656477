"""The jobs that were launched from a folder: `jobs/NAME` with what was submitted, and how each is found again."""

import re
import shutil
import time
from dataclasses import asdict
from pathlib import Path

from echelon.errors import ConfigError
from echelon.launch.job import JobRecord, JobSpec, Launcher, Submitted
from echelon.launch.targets import TARGETS
from echelon.recipe import Recipe, render_recipe
from echelon.runs.run_folder import OWNER_ONLY
from echelon.stored import read_json, write_json, write_text

JOBS = Path("jobs")

_NAME_LENGTH = 63
STAMP_LENGTH = len("-20260102-030405")
"""Of a job's name, what the time of its launch takes."""


def name_job(recipe: Recipe, now: float | None = None) -> str:
    """The run's name and the time in UTC, as every target takes it: letters, digits and dashes, at most 63."""
    stamp = time.strftime("-%Y%m%d-%H%M%S", time.gmtime(now))
    plain = re.sub(r"[^a-z0-9]+", "-", recipe.run.name.lower()).strip("-")
    if not plain or not plain[0].isalpha():
        plain = f"run-{plain}".rstrip("-")
    return plain[: _NAME_LENGTH - STAMP_LENGTH].rstrip("-") + stamp


def make_job(recipe: Recipe, workdir: Path, name: str | None = None) -> JobSpec:
    """The job of a recipe that is launched now, from this folder; nothing is written."""
    name = name or name_job(recipe)
    return JobSpec(name, recipe, JOBS / name, workdir)


def write_job(job: JobSpec, texts: dict[str, str]) -> None:
    """Make the job's folder, its owner's alone, with recipe and texts, whole or not at all.

    Raises ConfigError where there is one.
    """
    try:
        job.folder.mkdir(OWNER_ONLY, parents=True)
    except FileExistsError:
        raise ConfigError(f"{job.folder} exists: a job of that name was launched; wait a second.") from None
    except NotADirectoryError:
        raise ConfigError(
            f"{job.folder.parent} is a file, and echelon keeps what it launches in a folder of that name; rename it, "
            "or launch elsewhere."
        ) from None
    try:
        write_text(job.recipe_path, render_recipe(job.recipe))
        for name, text in texts.items():
            write_text(job.folder / name, text)
    except OSError:
        shutil.rmtree(job.folder, ignore_errors=True)
        raise


def submit_job(job: JobSpec, launcher: Launcher, texts: dict[str, str]) -> JobRecord:
    """Write the job's folder and hand the job over. Raises LaunchError; then the folder stays, to be looked at."""
    write_job(job, texts)
    return record_job(job, launcher.submit(job))


def record_job(job: JobSpec, submitted: Submitted) -> JobRecord:
    """Note where a submitted job is found."""
    target = job.recipe.launch.to
    assert target is not None
    run_dir = str(job.workdir / job.recipe.run.dir)
    record = JobRecord(job.name, target, submitted.id, run_dir, time.time(), job.folder, submitted.place)
    fields = asdict(record)
    del fields["folder"]
    write_json(job.folder / "job.json", fields)
    return record


def find_job(name: str) -> JobRecord:
    """A job by its name, its folder, or what its target calls it. Raises ConfigError naming the newest ones."""
    records = list_jobs()
    for record in records:
        if name.rstrip("/") in (record.name, record.id, str(record.folder)):
            return record
    elsewhere = read_job(Path(name))  # a sweep keeps the jobs of its trials in a folder of its own
    if elsewhere is not None:
        return elsewhere
    for folder in (JOBS / name, Path(name)):
        if folder.parent.name == JOBS.name and folder.is_dir():
            raise ConfigError(
                f"{folder}/job.json is damaged or not there, as when a launch failed; if the target knows nothing of "
                "the job, remove the folder."
            )
    known = ", ".join(record.name for record in records[:5]) or "none"
    raise ConfigError(f"{name} is not a job of this folder; the newest ones in {JOBS}/: {known}.")


def list_jobs() -> list[JobRecord]:
    """The jobs launched from this folder, newest first; a record that cannot be read counts as absent."""
    records = [record for path in JOBS.glob("*") if (record := read_job(path)) is not None]
    return sorted(records, key=lambda record: record.submitted_at, reverse=True)


def read_job(folder: Path) -> JobRecord | None:
    """The record in a job's folder; None where there is none, or none that can be read."""
    try:
        record = JobRecord(**read_json(folder / "job.json"), folder=folder)
    except (OSError, ValueError, TypeError):
        return None
    words = (record.name, record.id, record.run_dir)
    is_whole = all(isinstance(word, str) for word in words) and isinstance(record.place, dict)
    return record if is_whole and record.target in TARGETS and isinstance(record.submitted_at, float | int) else None
