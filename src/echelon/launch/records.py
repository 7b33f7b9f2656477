"""The jobs launched from a folder: `jobs/NAME` has the submitted files and the record that finds the job again."""

import re
import shutil
import time
from dataclasses import asdict
from pathlib import Path

from echelon.ground.errors import ConfigError
from echelon.ground.stored import read_json, write_json, write_text
from echelon.launch.job import JobRecord, JobSpec, JobTarget, Launcher, Submitted
from echelon.launch.targets import JOB_TARGETS
from echelon.recipe import Recipe
from echelon.recipe.render import render_recipe
from echelon.run.folder.overview import RUNS, find_newest_runs
from echelon.run.folder.run_folder import OWNER_ONLY

JOBS = Path("jobs")

# Runs and jobs that a message names.
_NAMED = 5
_NAME_LENGTH = 63
STAMP_LENGTH = len("-20260102-030405")
"""Length of the launch time at the end of a job's name, in characters."""


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


def submit_job(job: JobSpec, launcher: Launcher, texts: dict[str, str], serves: JobTarget | None = None) -> JobRecord:
    """Write the job's folder and submit the job. After a LaunchError the folder stays, for inspection."""
    write_job(job, texts)
    return record_job(job, launcher.submit(job), serves)


def record_job(job: JobSpec, submitted: Submitted, serves: JobTarget | None = None) -> JobRecord:
    """Write the record of a submitted job to its folder. `serves`: the target of a job that serves a run.

    Such a job has no run folder of its own.
    """
    target = serves or job.recipe.launch.to
    assert target is not None
    run_dir = str(job.workdir / (job.recipe.run.dir if serves is None else job.folder))
    record = JobRecord(job.name, target, submitted.id, run_dir, time.time(), job.folder, submitted.place)
    fields = asdict(record)
    del fields["folder"]
    write_json(job.folder / "job.json", fields)
    return record


def find_job(name: str) -> JobRecord:
    """Find a job by its name, its folder or its id at the target.

    Raises ConfigError if there is none, listing the newest runs and jobs: commands that take a job take a run too.
    """
    records = list_jobs()
    for record in records:
        if name.rstrip("/") in (record.name, record.id, str(record.folder)):
            return record
    elsewhere = read_job(Path(name))  # a sweep keeps the jobs of its trials in its own folder
    if elsewhere is not None:
        return elsewhere
    for folder in (JOBS / name, Path(name)):
        if folder.parent.name == JOBS.name and folder.is_dir():
            raise ConfigError(
                f"{folder}/job.json is missing or damaged, as after a failed launch; if the target does not know the "
                "job, remove the folder."
            )
    jobs = ", ".join(record.name for record in records[:_NAMED]) or "none"
    runs = ", ".join(str(path.relative_to(RUNS)) for path in find_newest_runs([RUNS])[:_NAMED]) or "none"
    raise ConfigError(
        f"{name} is neither a run nor a job of this folder; the newest runs in {RUNS}/: {runs}; the newest jobs in "
        f"{JOBS}/: {jobs}."
    )


def list_jobs() -> list[JobRecord]:
    """The jobs launched from this folder, newest first; unreadable records are left out."""
    records = [record for path in JOBS.glob("*") if (record := read_job(path)) is not None]
    return sorted(records, key=lambda record: record.submitted_at, reverse=True)


def read_job(folder: Path) -> JobRecord | None:
    """The record in a job's folder; None if it is missing or unreadable."""
    try:
        record = JobRecord(**read_json(folder / "job.json"), folder=folder)
    except (OSError, ValueError, TypeError):
        return None
    words = (record.name, record.id, record.run_dir)
    is_whole = all(isinstance(word, str) for word in words) and isinstance(record.place, dict)
    is_whole = is_whole and record.target in JOB_TARGETS and isinstance(record.submitted_at, float | int)
    return record if is_whole else None
