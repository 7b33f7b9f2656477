"""`echelon launch`, `runs`, `status`, `logs` and `cancel`: submit jobs; list, query, read and stop runs and jobs."""

import json
import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from echelon.cli.commands.arguments import JsonOption, OverridesArgument, RecipeArgument, parse_hosts, read_recipe
from echelon.cli.commands.terminal import complain, report_failure, show
from echelon.ground.errors import ConfigError, EchelonError, LaunchError
from echelon.ground.redaction import redact_text
from echelon.ground.stop_request import handled

if TYPE_CHECKING:
    from echelon.launch.job import JobRecord, JobStatus, Launcher
    from echelon.launch.job_checks import CheckedJob

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
NameArgument = Annotated[
    str, typer.Argument(metavar="RUN_OR_JOB", help="A run folder, its name in runs/, or a job: its name, folder or id.")
]


def launch(
    recipe_path: RecipeArgument,
    overrides: OverridesArgument = None,
    *,
    to: Annotated[str | None, typer.Option(metavar="TARGET")] = None,
    dry_run: bool = False,
    hosts: Annotated[str | None, typer.Option(metavar="A,B")] = None,
    nodes: Annotated[str | None, typer.Option(metavar="N|MIN:MAX|N+S")] = None,
    instance: Annotated[str | None, typer.Option(metavar="ml.TYPE|auto")] = None,
    follow: bool = False,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Submit a recipe to a cluster or to the background. First makes all checks that are possible on this machine.

    Args:
        to: `local`, torchrun, slurm, ray, skypilot, kubernetes or sagemaker.
        dry_run: print what would be submitted, and submit nothing.
        hosts: machines for `--to torchrun`; sets launch.nodes too.
        nodes: machines.
        instance: machines for `--to sagemaker`.
        follow: show the job's output until it ends, and exit with its exit code.
        as_json: print the job, or the files of `--dry-run`, as one JSON object; errors too.
    """
    if to == "sagemaker-endpoint":
        raise ConfigError(
            "--to sagemaker-endpoint: echelon serves no models any more; export the run with `echelon export`, and "
            "deploy it by AWS's own tools, as in docs/sagemaker.md#serving-a-model."
        )
    from echelon.launch.job_checks import check_job, preview_job, settle_instance
    from echelon.launch.records import make_job, submit_job

    options = _read_options(to, hosts, nodes, instance)
    recipe = read_recipe(recipe_path, [*(overrides or []), *options])
    _check_options(recipe.launch.to, hosts, instance)
    recipe = settle_instance(recipe)
    job = make_job(recipe, Path.cwd())
    checked = preview_job(job) if dry_run else check_job(job)
    for line in checked.lines:
        logger.info(line)
    if dry_run:
        _show_files(checked, as_json)
        return
    with _handed_over_whole(job.name):
        record = submit_job(job, checked.launcher, checked.texts)
        if not as_json:
            show(f"launched {record.name} as {record.id}; echelon status {record.name}, echelon logs {record.name}")
        elif not follow:
            show(json.dumps(name_job(record)))
    if follow:
        _follow(checked.launcher, record, as_json)


def _follow(launcher: "Launcher", record: "JobRecord", as_json: bool) -> None:
    """Show the job's output until it ends, and exit with its exit code."""
    try:
        for line in launcher.logs(record, True):
            (logger.info if as_json else show)(redact_text(line))
        ended = _await_end(launcher, record)
    except KeyboardInterrupt:
        raise LaunchError(
            f"no longer followed; {record.name} continues, `echelon cancel {record.name}` stops it."
        ) from None
    show(json.dumps(summarize_job(record, ended)) if as_json else describe_job(record, ended))
    code = 1 if ended.exit_code is None else ended.exit_code
    if code and as_json:
        report_failure(f"{record.name} ended with exit code {code}; see its output", code)
    raise typer.Exit(code)


def _read_options(to: str | None, hosts: str | None, nodes: str | None, instance: str | None) -> list[str]:
    """The options as overrides: each is a shorthand for a recipe key."""
    options = [] if to is None else [f"launch.to={to}"]
    if hosts is not None:
        options.append(parse_hosts(hosts))
        if nodes is None:
            options.append(f"launch.nodes={options[-1].count(',') + 1}")
    if nodes is not None:
        options.append(f"launch.nodes={json.dumps(nodes)}")
    if instance is not None:
        options.append(f"launch.sagemaker.instance_type={json.dumps(instance)}")
    return options


def _check_options(target: str | None, hosts: str | None, instance: str | None) -> None:
    """Raise ConfigError for an option that has no meaning at this target."""
    for option, value, only in (("--hosts", hosts, "torchrun"), ("--instance", instance, "sagemaker")):
        if value is not None and target not in (only, None):
            raise ConfigError(f"{option} {value} requires --to {only}, not {target}; remove one of them.")


def _await_end(launcher: "Launcher", record: "JobRecord") -> "JobStatus":
    from echelon.launch.job import FINAL_STATES

    while (now := launcher.status(record)).state not in FINAL_STATES:
        time.sleep(_LOOK_SECONDS)
    return now


def _show_files(checked: "CheckedJob", as_json: bool) -> None:
    """Show what would be submitted. Raises ConfigError, after it, with the settings that are missing."""
    from echelon.launch.job_checks import refuse_missing

    if as_json:
        show(json.dumps({"files": checked.texts}))
    for name, text in () if as_json else checked.texts.items():
        show(f"--- {name}" + (", with placeholders for what is missing" if checked.missing else ""))
        show(text.rstrip("\n"))
    if checked.missing:
        raise refuse_missing(checked.missing)


@contextmanager
def _handed_over_whole(name: str) -> Iterator[None]:
    """Delay a signal until the job is submitted and its record is written; a second signal takes effect immediately."""
    asked: list[str] = []

    def note(number: int, _: object) -> None:
        asked.append(signal.Signals(number).name)
        if len(asked) > 1:
            raise LaunchError(f"ended immediately by {asked[-1]}; {name} may have reached its target; check there.")

    with handled((signal.SIGINT, signal.SIGTERM), note):
        yield
    if asked:
        raise LaunchError(f"stopped by {asked[0]}, but {name} was already launched; `echelon cancel {name}` ends it.")


def runs(
    folders: Annotated[list[Path] | None, typer.Argument(metavar="[FOLDER]...", help="Default: runs.")] = None,
    *,
    as_json: JsonOption = False,
) -> None:
    """List the runs below folders, each with status, step and loss."""
    from echelon.run.folder.overview import RUNS, find_runs, render_summaries, summarize_run

    if missing := [str(folder) for folder in folders or () if not folder.is_dir()]:
        raise ConfigError(f"{', '.join(missing)} is not a folder; give folders with runs, such as {RUNS}.")
    runs = [summarize_run(path) for path in find_runs(folders or [RUNS])]
    if as_json:
        show(json.dumps({"runs": [run.to_dict() for run in runs]}))
    elif runs:
        for line in render_summaries(runs):
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
    from echelon.launch.job import find_launcher

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
    from echelon.launch.job import find_launcher
    from echelon.launch.records import Log, find_job
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
    from echelon.launch.job import find_launcher
    from echelon.launch.records import find_job
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
