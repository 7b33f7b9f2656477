"""`echelon status`, `echelon logs` and `echelon cancel`: query, read and cancel launched jobs."""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from echelon.commands.terminal import complain, show
from echelon.errors import ConfigError, EchelonError
from echelon.redaction import redact_text

if TYPE_CHECKING:
    from echelon.launch.job import JobRecord, JobStatus

JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="A job's name, its folder, or its id at the target.")]


def status(
    name: Annotated[str | None, typer.Argument(metavar="[JOB]", help="Default: all jobs launched from here.")] = None,
) -> None:
    """Show the state of jobs. Also the step, if this machine sees the run folder."""
    from echelon.launch.records import find_job, list_jobs
    from echelon.launch.targets import find_launcher

    records = list_jobs() if name is None else [find_job(name)]
    if not records:
        show("no job was launched from this folder")
    unknown = False
    for record in records:
        try:
            show(describe_job(record, find_launcher(record.target).status(record)))
        except EchelonError as error:
            if name is not None:
                raise
            unknown = True  # the other targets may answer
            complain(f"{record.name}: {error}")
    if unknown:
        raise typer.Exit(1)


def logs(
    name: JobArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the output until the job ends.")] = False,
) -> None:
    """Print the output of a job."""
    from echelon.launch.records import find_job
    from echelon.launch.targets import find_launcher

    record = find_job(name)
    for line in find_launcher(record.target).logs(record, follow):
        show(redact_text(line))


def cancel(name: JobArgument) -> None:
    """Ask a job to save and stop. Launching the same recipe again resumes it."""
    from echelon.launch.records import find_job
    from echelon.launch.targets import find_launcher

    record = find_job(name)
    find_launcher(record.target).cancel(record)
    show(f"asked {record.name} to stop; it saves, then ends")


def describe_job(record: "JobRecord", now: "JobStatus") -> str:
    """A line about a job: its state at the target, the run's step, the cost counted by the run and by the target."""
    from echelon.lifecycle.job_checks import find_run_folder
    from echelon.runs.cost import read_spending

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
        parts.append(f"billed {now.billed_hours:.2f} h")
    if now.billed_usd is not None:
        parts.append(f"billed ${now.billed_usd:.2f}")
    return "  ".join(map(str, parts))
