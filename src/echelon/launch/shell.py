"""What the scripts of all targets have in common: the lines before training, and those around it."""

import math
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from echelon.recipe.launching import LaunchConfig


def guard_setup(setup: Sequence[str], note: str = "") -> list[str]:
    """The lines of `launch.setup` for bash, where the first command that fails ends the script with 1 and a message.

    As under `set -e`, a command whose failure is handled (`a || b`, `if a`) does not count. `note`: a file that gets
    the message too.
    """
    if not setup:
        return []
    told = f" | tee {shlex.quote(note)}" if note else ""
    message = 'echo "echelon: launch.setup failed with exit code $?: $BASH_COMMAND"'
    return [f"trap '{message}{told} >&2; exit 1' ERR", *setup, "trap - ERR"]


def join_words(argv: Iterable[str]) -> str:
    """A command line for the shell: each word quoted, but for a `~/` or `~NAME/` that begins it, which is expanded."""
    quoted = []
    for word in argv:
        match = re.match(r"~[\w.-]*/", word)
        home = match[0] if match else ""
        quoted.append(home + shlex.quote(word[len(home) :]))
    return " ".join(quoted)


def needs_shell(launch: LaunchConfig) -> bool:
    """Whether a container, which else starts echelon directly, has something for a shell to do first."""
    return bool(launch.setup) or launch.python.startswith("~")


def prepare_lines(launch: LaunchConfig, workdir: Path) -> list[str]:
    """What runs before training: into the folder, then `launch.env` and `launch.setup`."""
    exports = [f"export {name}={shlex.quote(value)}" for name, value in launch.env.items()]
    return [f"cd {shlex.quote(str(workdir))} || exit 2", *exports, *guard_setup(launch.setup)]


def watched_lines(launch: LaunchConfig, workdir: Path, command: tuple[str, ...], code: str) -> list[str]:
    """A script in a session of its own, which leaves the command's exit code in a file, however it ends.

    A signal goes to the whole session. `code` is the file's path, quoted for the shell.
    """
    return [
        f"trap {shlex.quote(f'echo $? > {code}')} EXIT",
        "trap 'echo stopped before training began; exit 1' TERM INT USR1",
        *prepare_lines(launch, workdir),
        "# This shell stays, to note how training ended.",
        "trap : TERM INT USR1",
        join_words(command),
    ]


def limit_command(launch: LaunchConfig, command: tuple[str, ...]) -> tuple[str, ...]:
    """The command, asked to save and end at `launch.max_hours`: where the target itself has no such limit."""
    if launch.max_hours is None:
        return command
    seconds = math.ceil(launch.max_hours * 3600)
    return ("timeout", "--foreground", "--preserve-status", "--signal=TERM", str(seconds), *command)
