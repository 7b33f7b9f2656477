"""`echelon runs`, `status`, `logs` and `cancel`: list, query, read and stop runs and launched jobs."""

import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from echelon.cli.commands.arguments import JsonOption
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
    name: Annotated[
        str | None,
        typer.Argument(metavar="[RUN_OR_JOB]", help="Default: all jobs launched from here, and all runs in runs/."),
    ] = None,
) -> None:
    """Show the status of jobs and runs, and their step."""
    from echelon.launch.records import find_job, list_jobs
    from echelon.launch.targets import find_launcher
    from echelon.run.folder.overview import RUNS, describe_run, find_run, find_runs, summarize_run

    if name is not None and (run := find_run(name)) is not None:
        show(describe_run(summarize_run(run)))
        return
    records = list_jobs() if name is None else [find_job(name)]
    unknown = False
    for record in records:
        try:
            show(describe_job(record, find_launcher(record.target).status(record)))
        except EchelonError as error:
            if name is not None:
                raise
            unknown = True  # the other targets may answer
            complain(f"{record.name}: {error}")
    of_jobs = {Path(record.run_dir).resolve() for record in records}
    others = [path for path in find_runs([RUNS] if name is None else []) if path.resolve() not in of_jobs]
    for path in others:
        show(describe_run(summarize_run(path)))
    if not records and not others:
        show(f"no job was launched from this folder, and {RUNS}/ has no run")
    if unknown:
        raise typer.Exit(1)


def logs(
    name: NameArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the output until the job ends.")] = False,
) -> None:
    """Print the output of a run or a job."""
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


def describe_job(record: "JobRecord", now: "JobStatus") -> str:
    """A line about a job: its state at the target, the run's step, the cost counted by the run and by the target."""
    from echelon.ground.sizes import render_duration
    from echelon.launch.job_checks import find_run_folder
    from echelon.run.folder.cost import read_spending

    parts: list[Any] = [record.name, record.target, now.state]
    if now.detail:
        parts.append(now.detail)
    folder = find_run_folder(record.target, Path(record.run_dir))
    if step := folder.rows.last_step():
        parts.append(f"step {step}")
    with suppress(ConfigError):  # a damaged file; the run's next start reports it
        if usd := read_spending(folder).usd:
            parts.append(f"cost ${usd:.2f}")
    if now.billed_hours is not None:
        parts.append(f"billed {render_duration(3600 * now.billed_hours)}")
    if now.billed_usd is not None:
        parts.append(f"billed ${now.billed_usd:.2f}")
    return "  ".join(map(str, parts))
