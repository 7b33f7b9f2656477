"""What `echelon launch` shows of a job, and the moment at which a target takes it over."""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from echelon.cli.commands.terminal import show
from echelon.ground.errors import LaunchError
from echelon.ground.stop_request import handled

if TYPE_CHECKING:
    from echelon.launch.job_checks import CheckedJob


def show_files(checked: "CheckedJob", as_json: bool) -> None:
    """Show what would be submitted. Raises ConfigError, after it, with the settings that are missing."""
    from echelon.launch.job_checks import refuse_missing

    if as_json:
        show(json.dumps({"files": checked.texts}))
    for name, text in () if as_json else checked.texts.items():
        show(f"--- {name}" + (", with placeholders for what is missing" if checked.missing else ""))
        show(text.rstrip("\n"))
    if checked.missing:
        raise refuse_missing(checked.missing)


@contextmanager
def handed_over_whole(name: str) -> Iterator[None]:
    """Delay a signal until the job is submitted and its record is written; a second signal takes effect immediately."""
    asked: list[str] = []

    def note(number: int, _: object) -> None:
        asked.append(signal.Signals(number).name)
        if len(asked) > 1:
            raise LaunchError(f"ended immediately by {asked[-1]}; {name} may have reached its target; check there.")

    with handled((signal.SIGINT, signal.SIGTERM), note):
        yield
    if asked:
        raise LaunchError(f"stopped by {asked[0]}, but {name} was already launched; `echelon cancel {name}` ends it.")
