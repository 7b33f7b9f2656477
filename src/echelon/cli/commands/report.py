"""`echelon report`: what a run did, as a page or as text; and what it does, as it goes on."""

import shutil
import sys
from contextlib import suppress
from typing import Annotated

import typer

from echelon.cli.commands.terminal import clear_terminal, show
from echelon.ground.errors import ConfigError

_MAX_WIDTH = 100


def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUN")],
    *,
    compare: Annotated[list[str] | None, typer.Option(metavar="RUN ...")] = None,
    as_text: Annotated[bool, typer.Option("--text")] = False,
    live: bool = False,
    web: bool = False,
    port: Annotated[int, typer.Option(min=0, max=65535)] = 0,
) -> None:
    """Write a page about a run into its folder, or print it.

    Args:
        runs: a run folder, or its name in runs/.
        compare: compare with these runs, on a page of its own.
        as_text: print the report instead of writing a page.
        live: show losses, speed and events as the run goes on.
        web: with `live`: serve a page that updates itself, to browsers on this machine.
        port: the port of `web`; a free one by default.
    """
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
    if live or web:
        if len(names) > 1 or as_text:
            raise ConfigError("--live follows one run; remove --compare and --text.")
        return _follow(names[0], web, port)
    records = [read_record(require_run(name)) for name in names]
    whole = build_report(records[0]) if len(records) == 1 else build_comparison(records)
    if as_text:
        show(render_text(whole, min(_MAX_WIDTH, shutil.get_terminal_size().columns)))
        return None
    target = records[0].summary.path / ("report.html" if len(records) == 1 else name_comparison(records))
    try:
        write_text(target, render_page(whole))
    except OSError as error:
        raise ConfigError(f"{target} cannot be written ({error.strerror}); use --text to print the report.") from error
    show(f"report: {target}")
    return None


def _follow(run: str, web: bool, port: int) -> None:
    """Show the state of a run until it ends, in the terminal or to browsers."""
    from echelon.run.folder.overview import require_run
    from echelon.run.report.plain import render_text
    from echelon.run.report.server import LiveServer, follow, shorten

    path = require_run(run)
    with suppress(KeyboardInterrupt):
        if web:
            with LiveServer(path, port) as server:
                show(f"{run} is shown at {server.address} to browsers on this machine; Ctrl-C ends that.")
                server.serve_forever()
        is_terminal = sys.stdout.isatty()
        for report in follow(path):
            size = shutil.get_terminal_size()
            lines = render_text(shorten(report), min(_MAX_WIDTH, size.columns)).splitlines()
            if is_terminal:
                clear_terminal()
                show("\n".join(line[: size.columns] for line in lines[: size.lines - 1]))
            else:
                show("\n".join([*lines, ""]))
