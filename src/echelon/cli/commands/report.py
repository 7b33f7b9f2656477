"""`echelon report`: what a run did, as a page or as text."""

import shutil
from typing import Annotated

import typer

from echelon.cli.commands.terminal import show
from echelon.ground.errors import ConfigError

_MAX_WIDTH = 100


def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUN", help="A run folder, or its name in runs/.")],
    compare: Annotated[
        list[str] | None,
        typer.Option("--compare", metavar="RUN ...", help="Compare with these runs, on a page of its own."),
    ] = None,
    as_text: Annotated[bool, typer.Option("--text", help="Print the report instead of writing a page.")] = False,
) -> None:
    """Write a page about a run into its folder, or print it."""
    from echelon.ground.stored import write_text
    from echelon.run.folder.overview import require_run
    from echelon.run.report.comparison import build_comparison, name_comparison
    from echelon.run.report.page import render_page
    from echelon.run.report.plain import render_text
    from echelon.run.report.run_record import read_record
    from echelon.run.report.sections import build_report

    if len(runs) > 1 and not compare:
        raise ConfigError(
            f"echelon report {' '.join(runs)} has several runs; write {runs[0]} --compare {' '.join(runs[1:])}."
        )
    # `--compare A B`: the parser takes B for an argument.
    names = [runs[0], *(compare or []), *runs[1:]]
    records = [read_record(require_run(name)) for name in names]
    whole = build_report(records[0]) if len(records) == 1 else build_comparison(records)
    if as_text:
        show(render_text(whole, min(_MAX_WIDTH, shutil.get_terminal_size().columns)))
        return
    target = records[0].summary.path / ("report.html" if len(records) == 1 else name_comparison(records))
    try:
        write_text(target, render_page(whole))
    except OSError as error:
        raise ConfigError(f"{target} cannot be written ({error.strerror}); use --text to print the report.") from error
    show(f"report: {target}")
