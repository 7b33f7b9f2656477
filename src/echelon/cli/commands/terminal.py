"""Output of commands: results, errors, and logging to stderr. No other file of the commands writes to a stream.

The last words of a command that fails are a message, or with `--json` one line of JSON, on stderr.
"""

import json
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from typing import Any

import typer

from echelon.ground.errors import Fault
from echelon.ground.launch_environment import find_log_level, find_look
from echelon.ground.logs import keep_line, log_to_console
from echelon.ground.redaction import make_encodable, make_printable, redact_text

_CLEAR = "\x1b[H\x1b[J"
UsageError: Any = typer.BadParameter.__mro__[1]
"""The error of words that are no command line. Of its kinds, typer exports only this one."""

_HINT = re.compile(r"(?P<rule>.+?)\.?(?: (?:Did you mean|\(Possible options:) '?(?P<near>[^'?)]+)'?[?)])?", re.DOTALL)
_SUBJECT = re.compile(r"--[a-z][a-z-]*|(?<=')[^']+(?=')")


def show(line: str) -> None:
    """Print a line of the result and flush, also if stdout is a pipe. Progress messages are logged instead.

    Control characters are replaced: the line may quote a file or a model of a stranger.
    """
    typer.echo(make_printable(line))
    sys.stdout.flush()


def show_made(text: str, end: str = "\n") -> None:
    """Print text that a program may go on with, a model's for example, and flush.

    A pipe or a file gets it as it is; on a terminal control characters are replaced.
    """
    sys.stdout.write((make_printable if sys.stdout.isatty() else make_encodable)(text + end))
    sys.stdout.flush()


def show_piece(text: str) -> None:
    """Print a part of such a text."""
    show_made(text, end="")


def show_styled(parts: Iterable[tuple[str, str]], coloured: bool) -> None:
    """Print a line of parts, each a text and its style, such as `green`."""
    from rich.console import Console
    from rich.text import Text

    text = Text.assemble(*((make_printable(part), style) for part, style in parts))
    Console(highlight=False, soft_wrap=True, no_color=not coloured).print(text)


def clear_terminal() -> None:
    """Clear the terminal's window, and go on at its top."""
    sys.stdout.write(_CLEAR)


def complain(message: str, machine_line: str | None = None) -> None:
    """Print an error to stderr, with the prefix `echelon: `, with secrets and control characters replaced; also to a
    kept console.

    `machine_line`: what stderr gets instead, for programs.
    """
    line = f"echelon: {make_printable(redact_text(message))}"
    keep_line(line)
    with suppress(OSError):  # a closed terminal must not change the exit code
        if machine_line is not None:
            typer.echo(machine_line, err=True)
            return
        colours = find_look(sys.stderr, logging.ERROR).has_colours
        typer.secho(line, err=True, fg="red" if colours else None, color=colours)


@contextmanager
def stdout_kept_for_result(wanted: bool) -> Iterator[None]:
    """If wanted, send to stderr what this process, native code and child processes write to stdout in the block."""
    if not wanted:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def log_to_stderr() -> None:
    """Send log messages to stderr from now on, since a program may read the result from stdout."""
    level = find_log_level()
    log_to_console(level, sys.stderr, find_look(sys.stderr, level))


def wants_json() -> bool:
    """Whether `--json` is among the words of the command, which may be wrong and so not be parsed."""
    return "--json" in sys.argv[1:]


def report_failure(message: str, code: int, faults: Sequence[Fault] = ()) -> None:
    """Say why the command ends with this exit code. With `--json`, stderr gets `render_failure`."""
    complain(message, render_failure(message, code, faults) if wants_json() else None)


def report_usage(error: Any) -> None:
    """As `report_failure`, of a UsageError with `--json`."""
    hint = _HINT.fullmatch(error.format_message())
    command = error.ctx.command_path if error.ctx else "echelon"
    rule, near = (hint["rule"], hint["near"]) if hint else (error.format_message(), None)
    subject = _SUBJECT.search(rule)
    key = subject[0] if subject else None
    fix = f"did you mean {near}?" if near else f"see `{command} --help`"
    if value := next(_given(key), None) if isinstance(error, typer.BadParameter) else None:
        rule = rule.removeprefix(f"Invalid value for '{key}': ").removeprefix("Value error, ")
        message = f"{key}={value}: {rule}; {fix}"
    else:
        message = f"{rule}; {fix}"
    report_failure(message, error.exit_code, [Fault(None, key, value, rule, fix)])


def render_failure(message: str, code: int, faults: Sequence[Fault] = ()) -> str:
    """One line: `{"error": {"code", "message", "place", "key", "value", "rule", "fix", "more"}}`.

    The parts are those of the first fault, null where unknown; `more` has the others, each with the five parts. A part
    is always a part of the message, in which secrets are replaced.

    Args:
        faults: the parts, if they are known; else they are read from the message.
    """
    from echelon.recipe.messages import read_fault

    shown = make_printable(redact_text(message))
    first, *more = [asdict(fault.within(shown)) for fault in faults or [_with_value(read_fault(shown))]]
    return json.dumps({"error": {"code": code, "message": shown, **first, "more": more}})


def _with_value(fault: Fault) -> Fault:
    """The fault about an option with its value, which in a message only a space divides from the rule."""
    for value in _given(fault.key) if fault.value is None else ():
        for shown in (value, repr(value)):
            if fault.rule is not None and fault.rule.startswith(shown):
                return replace(fault, value=value, rule=fault.rule[len(shown) :].lstrip(" :,") or None)
    return fault


def _given(option: str | None) -> Iterator[str]:
    """The values of an option on the command line."""
    if option is not None and option.startswith("--"):
        for index, word in enumerate(sys.argv):
            if word == option and sys.argv[index + 1 :]:
                yield sys.argv[index + 1]
            elif word.startswith(f"{option}="):
                yield word.removeprefix(f"{option}=")
