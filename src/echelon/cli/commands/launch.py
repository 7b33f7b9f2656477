"""`echelon launch`: submit a recipe to a target."""

import json
import logging
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from echelon.cli.commands.arguments import OverridesArgument, RecipeArgument, parse_hosts, read_recipe
from echelon.cli.commands.failure import report_failure
from echelon.cli.commands.jobs import describe_job, name_job, summarize_job
from echelon.cli.commands.terminal import show
from echelon.ground.errors import ConfigError, LaunchError
from echelon.ground.redaction import redact_text
from echelon.ground.stop_request import handled

if TYPE_CHECKING:
    from echelon.launch.job import JobRecord, JobStatus, Launcher
    from echelon.launch.job_checks import CheckedJob

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0


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
    for option, given, only in (("--hosts", hosts, "torchrun"), ("--instance", instance, "sagemaker")):
        if given is not None and target not in (only, None):
            raise ConfigError(f"{option} {given} requires --to {only}, not {target}; remove one of them.")


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
