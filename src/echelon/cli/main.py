"""The `echelon` command: registers its commands, and turns errors into a message and an exit code."""

import functools
import os
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typing_extensions import override

from echelon.cli.commands.checkpoint import HELP as CHECKPOINT_HELP
from echelon.cli.commands.checkpoint import app as checkpoint_app
from echelon.cli.commands.options import (
    JsonErrorsOption,
    QuietOption,
    VerboseOption,
    make_command,
    read_docstring,
    set_verbosity,
)
from echelon.cli.commands.terminal import UsageError, report_failure, report_usage, show, wants_json
from echelon.ground.errors import (
    EchelonError,
    explain_storage_error,
    first_line,
    is_out_of_memory,
    is_panic,
    render_traceback,
)
from echelon.ground.launch_environment import find_place, restart_in_utf8, restart_with_libraries
from echelon.ground.stop_request import stops_told
from echelon.ground.variables import read_environment
from echelon.planner.hardware.gpu_check import find_compat

FORMER = {
    "prepare": ("data", "--prepare"),
    "quote": ("plan", "--quote"),
    "schema": ("init", "--schema"),
    "watch": ("report", "--live"),
}
"""The commands of earlier versions, which others have taken in."""


COMMANDS = {
    "train": "train", "data": "data", "plan": "plan", "eval": "trained_models:evaluate",
    "generate": "trained_models:generate", "export": "trained_models:export", "launch": "jobs:launch",
    "runs": "jobs:runs", "status": "jobs:status", "logs": "jobs:logs", "cancel": "jobs:cancel", "report": "report",
    "sweep": "sweep", "drill": "drill", "doctor": "doctor", "import": "init:import_recipe", "init": "init",
    "demo": "demo",
}  # fmt: skip
"""The module in echelon.cli.commands of each command, imported to run it; and its function, if not of the same name."""

_STOPPED: dict[str, tuple[signal.Signals, ...]] = {
    **dict.fromkeys(("data", "plan", "eval", "export", "report", "doctor", "import"), (signal.SIGTERM, signal.SIGINT)),
    "generate": (signal.SIGTERM,),  # in a conversation Ctrl-C ends an answer
}
"""The commands that these signals end with a message, after cleanup. The others handle signals themselves, or write
nothing."""

_INTERRUPTED = 130
"""The exit code that typer gives to a command which Ctrl-C ends, without a message."""


def _find_function(name: str) -> Callable[..., None]:
    module, _, function = COMMANDS[name].partition(":")
    found: Callable[..., None] = getattr(import_module(f"echelon.cli.commands.{module}"), function or module)
    return found


def _stoppable(name: str, command: Callable[..., None]) -> Callable[..., None]:
    """The command, ended by the signals of _STOPPED. A rank is not: its parent reports the stop."""

    @functools.wraps(command)
    def run(**options: object) -> None:
        from echelon.ground.launch_environment import launch_role

        follows = options.get("live") or options.get("web")  # Ctrl-C is how `report --live` ends
        if follows or launch_role() == "worker":
            return command(**options)
        with stops_told(signals=_STOPPED[name]):
            command(**options)
        return None

    return run if name in _STOPPED else command


class _Commands(TyperGroup):
    """The commands, also by their earlier names. Each is made when it is asked for; until then it is None."""

    def __init__(self, *, commands: dict[str, Any], **settings: Any) -> None:
        super().__init__(commands=dict.fromkeys(COMMANDS) | commands, **settings)  # type: ignore[arg-type]

    @override
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        first = next((number for number, word in enumerate(args) if not word.startswith("-")), None)
        if first is not None and (new := FORMER.get(args[first])):
            typer.echo(f"echelon {args[first]} is now echelon {' '.join(new)}", err=True)
            args = [*args[:first], *new, *args[first + 1 :]]
        return super().parse_args(ctx, args)

    @override
    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        own = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
        own.command(cmd_name)(make_command(_stoppable(cmd_name, _find_function(cmd_name))))
        return typer.main.get_command(own)

    @override
    def format_commands(self, ctx: Any, formatter: Any) -> None:
        texts = {name: read_docstring(_find_function(name))[0] for name in COMMANDS} | {"checkpoint": CHECKPOINT_HELP}
        with formatter.section("Commands"):
            formatter.write_dl([(name, f"{text.partition('.')[0]}.") for name, text in texts.items()])


app = typer.Typer(
    name="echelon",
    cls=_Commands,
    help="Train language models across processes, GPUs and machines from one recipe.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(checkpoint_app, name="checkpoint", help=CHECKPOINT_HELP)


def _show_version(wanted: bool) -> None:
    if wanted:
        from echelon.run.folder.environment import describe_source

        show(f"echelon {describe_source()}")
        raise typer.Exit


@app.callback()
def begin(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    verbose: VerboseOption = False,
    quiet: QuietOption = False,
    as_json: JsonErrorsOption = False,
    local_rank: Annotated[int | None, typer.Option("--local-rank", "--local_rank", hidden=True)] = None,
) -> None:
    """Set up logging. `python -m torch.distributed.launch` passes `--local-rank` to each rank, in addition to
    LOCAL_RANK; it is ignored."""
    set_verbosity(verbose, quiet)


def _use_compatible_libraries() -> None:
    """Restart this program with the image's CUDA compatibility libraries if torch needs them with this driver.

    A process finds libraries by the environment that it was started with. Each rank under torchrun does this itself.
    """
    if (compat := find_compat(read_environment())) is None:
        return
    if find_place().local_rank == 0:
        typer.echo(f"hardware: {compat.line}", err=True)
    restart_with_libraries(compat.folder)


def main() -> None:
    """The console script: every error becomes one message and an exit code."""
    if sys.getfilesystemencoding() != "utf-8":  # libraries fail on paths with characters outside of the locale
        restart_in_utf8()
    _use_compatible_libraries()
    try:
        code = app(standalone_mode=not wants_json())
    except EchelonError as error:
        report_failure(str(error), error.exit_code, error.faults)
        sys.exit(error.exit_code)
    except UsageError as error:
        report_usage(error)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # What reads the result has ended, and so does this command, as typer ends it without --json.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        report_failure("stopped by SIGINT", 1)
        sys.exit(1)
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        _report_unexpected(error)
        sys.exit(1)
    if code == _INTERRUPTED:
        report_failure("stopped by SIGINT", _INTERRUPTED)
    sys.exit(code)


def _report_unexpected(error: BaseException) -> None:
    if storage := explain_storage_error(error, Path.cwd()):
        report_failure(f"{storage}.", 1)
    elif is_out_of_memory(error):
        report_failure(f"not enough memory for this command on this machine ({first_line(error)}).", 1)
    elif wants_json():  # what programs read comes last
        sys.stderr.write(render_traceback(error))
        report_failure(f"{type(error).__name__}: {error}; this is a bug in echelon", 1)
    else:
        report_failure(f"{type(error).__name__}: {error}; this is a bug in echelon; its traceback follows", 1)
        sys.stderr.write(render_traceback(error))
