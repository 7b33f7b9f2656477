"""`echelon watch`: the state of a run, in the terminal or in a browser, as it goes on."""

import shutil
import sys
from contextlib import suppress
from typing import Annotated

import typer

from echelon.cli.commands.terminal import clear_terminal, show

_MAX_WIDTH = 100


def watch(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run folder, or its name in runs/.")],
    web: Annotated[
        bool, typer.Option("--web", help="Serve a page that updates itself, to browsers on this machine.")
    ] = False,
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="The port of --web; a free one by default.")
    ] = 0,
) -> None:
    """Show a run's losses, speed and events as it goes on."""
    from echelon.run.folder.overview import require_run
    from echelon.run.report.live import follow, shorten
    from echelon.run.report.plain import render_text
    from echelon.run.report.server import LiveServer

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
