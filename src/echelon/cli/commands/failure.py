"""The last words of a command that fails: a message, or with `--json` one line of JSON, on stderr."""

import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import typer

from echelon.cli.commands.terminal import complain
from echelon.ground.errors import Fault
from echelon.ground.redaction import make_printable, redact_text

UsageError: Any = typer.BadParameter.__mro__[1]
"""The error of words that are no command line. Of its kinds, typer exports only this one."""

_HINT = re.compile(r"(?P<rule>.+?)\.?(?: (?:Did you mean|\(Possible options:) '?(?P<near>[^'?)]+)'?[?)])?", re.DOTALL)
_SUBJECT = re.compile(r"--[a-z][a-z-]*|(?<=')[^']+(?=')")


def wants_json() -> bool:
    """Whether `--json` is among the words of the command, which may be wrong and so not be parsed."""
    return "--json" in sys.argv[1:]


def report_failure(message: str, code: int, faults: Sequence[Fault] = ()) -> None:
    """Say why the command ends with this exit code. With `--json`, stderr gets `render_failure`."""
    complain(message, render_failure(message, code, faults) if wants_json() else None)


def report_usage(error: Any) -> None:
    """As `report_failure`, of a UsageError with `--json`."""
    found = _HINT.fullmatch(error.format_message())
    command = error.ctx.command_path if error.ctx else "echelon"
    rule, near = (found["rule"], found["near"]) if found else (error.format_message(), None)
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
    for given in _given(fault.key) if fault.value is None else ():
        for shown in (given, repr(given)):
            if fault.rule is not None and fault.rule.startswith(shown):
                return replace(fault, value=given, rule=fault.rule[len(shown) :].lstrip(" :,") or None)
    return fault


def _given(option: str | None) -> Iterator[str]:
    """The values of an option on the command line."""
    if option is not None and option.startswith("--"):
        for place, word in enumerate(sys.argv):
            if word == option and sys.argv[place + 1 :]:
                yield sys.argv[place + 1]
            elif word.startswith(f"{option}="):
                yield word.removeprefix(f"{option}=")
