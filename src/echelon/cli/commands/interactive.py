"""`echelon generate --chat` without a prompt: a conversation on a terminal, or messages from a pipe."""

import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.cli.commands.terminal import complain, show, show_made, show_piece
from echelon.ground.errors import ConfigError

if TYPE_CHECKING:
    from echelon.learn.answers.sampling import Sampling
    from echelon.tools.inference.dialogue import Dialogue

HELP = (
    "/reset forgets the conversation, /system TEXT also sets the system message, /quit or Ctrl-D ends; "
    "Ctrl-C stops an answer."
)


def converse(target: Path, sampling: "Sampling", system: str | None, checkpoint: str | None, as_json: bool) -> None:
    """Answer messages from a terminal, or from a pipe or file as stdin, until they end.

    Raises ConfigError if the model has no chat template, and on a pipe for a message that cannot be answered.
    """
    from echelon.tools.inference.dialogue import Dialogue

    dialogue = Dialogue(target, sampling, system, checkpoint)
    if not as_json and sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty():
        _talk(dialogue)
    else:
        _answer_lines(dialogue, as_json)


def _talk(dialogue: "Dialogue") -> None:
    """Answer the messages typed on a terminal, token by token, until /quit, Ctrl-D, or Ctrl-C between two answers."""
    show(HELP)
    for message in _messages(_typed_lines()):
        try:
            if not _obey(dialogue, message):
                dialogue.ask(message, show_piece)
                show("")
        except KeyboardInterrupt:
            show("")
        except ConfigError as error:
            complain(str(error))


def _answer_lines(dialogue: "Dialogue", as_json: bool) -> None:
    """Answer each line of stdin by one line: JSON, or the text with line breaks as `\\n`.

    Raises ConfigError for a message that cannot be answered, an unknown command, or no message at all.
    """
    from echelon.tools.inference.generate import render_sample

    is_empty = True
    for message in _messages(_piped_lines()):
        is_empty = False
        if not _obey(dialogue, message):
            answer = dialogue.ask(message)
            show_made(render_sample({"prompt": message}, answer) if as_json else answer.text.replace("\n", "\\n"))
    if is_empty:
        raise ConfigError("--chat: stdin contains no message; write one per line, or give --prompt or --prompts.")


def _typed_lines() -> Iterator[str]:
    """Yield the lines typed on the terminal until Ctrl-D or Ctrl-C."""
    with suppress(ImportError):
        import readline  # noqa: F401  input() then edits lines and recalls earlier ones
    while True:
        try:
            line = input("> ")
        except (EOFError, KeyboardInterrupt):
            show("")
            return
        except UnicodeDecodeError as error:
            complain(f"{error}; write UTF-8.")
            continue
        yield line


def _piped_lines() -> Iterator[str]:
    try:
        yield from sys.stdin or ()
    except UnicodeDecodeError as error:
        raise ConfigError(f"--chat: stdin cannot be read: {error}; write UTF-8.") from error


def _messages(lines: Iterator[str]) -> Iterator[str]:
    """Yield the lines that are not empty, until /quit."""
    for line in lines:
        if line.strip() == "/quit":
            return
        if line.strip():
            yield line.rstrip("\n")


def _obey(dialogue: "Dialogue", line: str) -> bool:
    """Execute a line that is a command, such as `/reset`; return whether it was one. Raises ConfigError."""
    if (words := re.fullmatch(r"\s*(/[a-z]+)(?:\s+(.*?))?\s*", line)) is None:
        return False
    match words[1], words[2]:
        case "/reset", None:
            dialogue.reset()
        case "/system", str(text):
            dialogue.reset(text)
        case _:
            raise ConfigError(f"{line.strip()!r} is not a command. {HELP}")
    return True
