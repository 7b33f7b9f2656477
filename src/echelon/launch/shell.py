"""Shell lines that the scripts of all targets share: the setup before training, and the wrapper around it."""

import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from echelon.recipe.launch_sections import LaunchConfig

_NONE: Mapping[str, str] = MappingProxyType({})


def guard_setup(setup: Sequence[str], note: str = "") -> list[str]:
    """The lines of `launch.setup` for bash; the first failing command ends the script with 1 and a message.

    As under `set -e`, a command whose failure is handled (`a || b`, `if a`) does not count. `note` is a file that also
    gets the message.
    """
    if not setup:
        return []
    copy = f" | tee {shlex.quote(note)}" if note else ""
    message = 'echo "echelon: launch.setup failed with exit code $?: $BASH_COMMAND"'
    return [f"trap '{message}{copy} >&2; exit 1' ERR", *setup, "trap - ERR"]


def join_words(argv: Iterable[str]) -> str:
    """A command line for the shell: quotes each word except a leading `~/` or `~NAME/`, which the shell expands."""
    quoted = []
    for word in argv:
        match = re.match(r"~[\w.-]*/", word)
        home = match[0] if match else ""
        quoted.append(home + shlex.quote(word[len(home) :]))
    return " ".join(quoted)


def needs_shell(launch: LaunchConfig) -> bool:
    """Whether a container needs a shell before echelon, for `launch.setup` or a `~` in `launch.python`."""
    return bool(launch.setup) or launch.python.startswith("~")


def prepare_lines(launch: LaunchConfig, workdir: Path, variables: Mapping[str, str] = _NONE) -> list[str]:
    """The lines before training: `cd` to the working directory, echelon's `variables`, `launch.env`, `launch.setup`."""
    exports = [f"export {name}={shlex.quote(value)}" for name, value in {**variables, **launch.env}.items()]
    return [f"cd {shlex.quote(str(workdir))} || exit 2", *exports, *guard_setup(launch.setup)]


def watched_lines(
    launch: LaunchConfig,
    workdir: Path,
    command: tuple[str, ...],
    code: str,
    begin: Sequence[str] = (),
    variables: Mapping[str, str] = _NONE,
) -> list[str]:
    """The lines of a script that runs in its own session and always writes the command's exit code to a file.

    A signal goes to the whole session. `code` is the file's path, quoted for the shell. The lines of `begin` run first,
    when signals are already handled.
    """
    return [
        f"trap {shlex.quote(f'echo $? > {code}')} EXIT",
        "trap 'echo stopped before training began; exit 1' TERM INT USR1",
        *begin,
        *prepare_lines(launch, workdir, variables),
        "# This shell ignores signals, so that it can write the exit code of training.",
        "trap : TERM INT USR1",
        join_words(command),
    ]


def limit_command(launch: LaunchConfig, command: tuple[str, ...], own_code: bool = False) -> tuple[str, ...]:
    """Wrap the command to save and end at `launch.max_hours`, for targets that have no time limit themselves.

    The exit code is that of the command; with `own_code` it is 124 at the limit.
    """
    if launch.max_hours is None:
        return command
    seconds = math.ceil(launch.max_hours * 3600)
    preserve = () if own_code else ("--preserve-status",)
    return ("timeout", "--foreground", *preserve, "--signal=TERM", str(seconds), *command)
