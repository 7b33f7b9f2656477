"""`echelon runs`, `status`, `logs` and `cancel`: list, query, read and stop runs and launched jobs."""

import json
import os
import signal
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from echelon.cli.commands.arguments import JsonOption
from echelon.cli.commands.failure import report_failure
from echelon.cli.commands.terminal import complain, show
from echelon.ground.errors import ConfigError, EchelonError
from echelon.ground.redaction import redact_text

if TYPE_CHECKING:
    from echelon.launch.job import JobRecord, JobStatus

NameArgument = Annotated[
    str, typer.Argument(metavar="RUN_OR_JOB", help="A run folder, its name in runs/, or a job: its name, folder or id.")
]


def runs(
    folders: Annotated[list[Path] | None, typer.Argument(metavar="[FOLDER]...", help="Default: runs.")] = None,
    *,
    as_json: JsonOption = False,
) -> None:
    """List the runs below folders, each with status, step and loss."""
    from echelon.run.folder.overview import RUNS, find_runs, render_summaries, summarize_run

    if missing := [str(folder) for folder in folders or () if not folder.is_dir()]:
        raise ConfigError(f"{', '.join(missing)} is not a folder; give folders with runs, such as {RUNS}.")
    found = [summarize_run(path) for path in find_runs(folders or [RUNS])]
    if as_json:
        show(json.dumps({"runs": [run.to_dict() for run in found]}))
    elif found:
        for line in render_summaries(found):
            show(line)
    else:
        show(f"no run below {', '.join(map(str, folders or [RUNS]))}")


def status(
    name: Annotated[str | None, typer.Argument(metavar="[RUN_OR_JOB]")] = None, *, as_json: JsonOption = False
) -> None:
    """Show the status of jobs and runs, and their step.

    Args:
        name: default: all jobs launched from here, and all runs in runs/.
    """
    from echelon.run.folder.overview import RUNS, describe_run, summarize_run

    records, paths = _find_subjects(name)
    jobs = [(record, _ask(record, raises=name is not None)) for record in records]
    answers = [(record, now) for record, now in jobs if now is not None]
    runs = [summarize_run(path) for path in paths]
    if as_json:
        rows = [summarize_job(*answer) for answer in answers]
        show(json.dumps({"jobs": rows, "runs": [run.to_dict() for run in runs]}))
    else:
        for line in (*(describe_job(*answer) for answer in answers), *map(describe_run, runs)):
            show(line)
        if not records and not runs:
            show(f"no job was launched from this folder, and {RUNS}/ has no run")
    if len(answers) < len(records):
        silent = ", ".join(record.name for record, now in jobs if now is None)
        report_failure(f"the status of {silent} is unknown; see above", 1)
        raise typer.Exit(1)


def _find_subjects(name: str | None) -> "tuple[list[JobRecord], list[Path]]":
    """The job or the run of this name; None: all jobs launched from here, and the runs of no job.

    Prints a line for each record that cannot be used.
    """
    from echelon.launch.records import find_job, list_jobs
    from echelon.run.folder.overview import RUNS, find_run, find_runs

    if name is not None:
        run = find_run(name)
        return ([find_job(name)], []) if run is None else ([], [run])
    records, faults = list_jobs()
    for fault in faults:
        complain(fault)
    of_jobs = {Path(record.run_dir).resolve() for record in records}
    return records, [path for path in find_runs([RUNS]) if path.resolve() not in of_jobs]


def _ask(record: "JobRecord", raises: bool) -> "JobStatus | None":
    """The status of a job; None, with a message, if its target does not answer: the others may."""
    from echelon.launch.targets import find_launcher

    try:
        return find_launcher(record.target).status(record)
    except EchelonError as error:
        if raises:
            raise
        complain(f"{record.name}: {error}")
        return None


def logs(name: NameArgument, *, follow: Annotated[bool, typer.Option("--follow", "-f")] = False) -> None:
    """Print the output of a run or a job.

    Args:
        follow: follow the output until the job ends.
    """
    from echelon.launch.job_logs import Log
    from echelon.launch.records import find_job
    from echelon.launch.targets import find_launcher
    from echelon.run.folder.overview import find_run
    from echelon.run.folder.run_folder import RunFolder

    if (run := find_run(name)) is not None:
        folder = RunFolder(run)
        lines = Log(folder.console_path).follow(lambda: not (follow and folder.is_held()))
    else:
        record = find_job(name)
        lines = find_launcher(record.target).logs(record, follow)
    for line in lines:
        show(redact_text(line))


def cancel(name: NameArgument) -> None:
    """Ask a run of this machine or a job to save and stop. The same recipe resumes it."""
    from echelon.launch.records import find_job
    from echelon.launch.targets import find_launcher
    from echelon.run.folder.overview import find_run, require_live_process

    if (run := find_run(name)) is not None:
        os.kill(require_live_process(run), signal.SIGTERM)
    else:
        record = find_job(name)
        find_launcher(record.target).cancel(record)
    show(f"asked {run or record.name} to stop; it saves, then ends")


def name_job(record: "JobRecord") -> dict[str, Any]:
    """What identifies a job, for programs."""
    return {"name": record.name, "target": record.target, "id": record.id, "run_dir": record.run_dir}


def summarize_job(record: "JobRecord", now: "JobStatus") -> dict[str, Any]:
    """A job for programs: its state at the target, the run's step, the cost counted by the run and by the target."""
    from echelon.launch.job_checks import find_run_folder
    from echelon.run.folder.cost import read_spending

    folder, usd = find_run_folder(record.target, Path(record.run_dir)), None
    with suppress(ConfigError):  # a damaged file; the run's next start reports it
        usd = read_spending(folder).usd or None
    return name_job(record) | asdict(now) | {"step": folder.rows.last_step(), "usd": usd}


def describe_job(record: "JobRecord", now: "JobStatus") -> str:
    """A line about a job, with what of `summarize_job` is known."""
    from echelon.ground.sizes import render_duration

    job = summarize_job(record, now)
    parts = [job["name"], job["target"], job["state"], job["detail"]]
    parts += [f"step {job['step']}"] if job["step"] else []
    parts += [f"cost ${job['usd']:.2f}"] if job["usd"] else []
    parts += [f"billed {render_duration(3600 * now.billed_hours)}"] if now.billed_hours is not None else []
    parts += [f"billed ${now.billed_usd:.2f}"] if now.billed_usd is not None else []
    return "  ".join(filter(None, parts))
