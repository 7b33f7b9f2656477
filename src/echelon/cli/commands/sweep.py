"""`echelon sweep`: run a recipe with many values, N at a time, and rank the results."""

import json
import logging
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from echelon.cli.commands.terminal import report_failure, show

if TYPE_CHECKING:
    from echelon.tools.sweep.conduct import StopWord

logger = logging.getLogger(__name__)


def sweep(
    sweep_path: Annotated[Path, typer.Argument(metavar="SWEEP")],
    *,
    to: Annotated[str | None, typer.Option(metavar="TARGET")] = None,
    dry_run: bool = False,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Search over values of recipe keys. The same command resumes a stopped or killed sweep.

    Args:
        sweep_path: the sweep file, a YAML file.
        to: where trials run; sets launch.to of all trials.
        dry_run: show the trials and the first job, and run nothing.
        as_json: print the content of results.json instead of a table.
    """
    from echelon.launch.job_checks import check_job
    from echelon.run.supervise.outcome import STOPPED
    from echelon.tools.sweep.conduct import (
        StopWord,
        check_sweep,
        describe_sweep,
        first_job,
        render_first_array,
        run_sweep,
        share_slots,
    )

    checked = check_sweep(sweep_path, to)
    slots = share_slots(checked)
    for line in describe_sweep(checked, slots):
        logger.info(line)
    job, lines = first_job(checked)
    checked_job = check_job(job)
    if dry_run:
        for line in (*checked_job.lines, *lines):
            show(line)
        for name, text in (render_first_array(checked) or checked_job.texts).items():
            show(f"--- {name}")
            show(text.rstrip("\n"))
        return
    stop = StopWord()
    with stops_noted(stop):
        ending, results = run_sweep(checked, slots, stop)
    if as_json:
        show(json.dumps(results))
    if ending.state == "stopped":
        report_failure(ending.message, STOPPED)
        raise typer.Exit(STOPPED)
    if ending.state == "failed":
        limit = f"sweep.max_failures={checked.sweep.sweep.max_failures}"
        report_failure(f"{ending.message}; {limit} is reached; the same command continues with the next trial", 1)
        raise typer.Exit(1)
    if results["best"] is None:
        report_failure("no trial ended with a result; see the table above", 1)
        raise typer.Exit(1)


@contextmanager
def stops_noted(stop: "StopWord") -> Iterator[None]:
    """Store the first signal for the sweep; a second one ends it immediately and leaves its trials running."""
    from echelon.ground.stop_request import ECHO_SECONDS, STOP_SIGNALS, handled

    asked_at: list[float] = []

    def ask(number: int, _: object) -> None:
        now, name = time.monotonic(), signal.Signals(number).name
        if not asked_at:
            asked_at.append(now)
            stop.name = name
        elif now - asked_at[0] > ECHO_SECONDS:
            report_failure(f"ended immediately by {name}; trials may still run; the same command takes them over", 1)
            raise typer.Exit(1)  # not a LaunchError, which the sweep would treat as a target that does not answer

    with handled(STOP_SIGNALS, ask):
        yield
