"""The launcher of a target: a class that echelon or another package registers as an entry point."""

from typing import Any

from echelon.ground.errors import ConfigError
from echelon.ground.plugins import Plugins
from echelon.launch.job import Launcher
from echelon.recipe.names import LAUNCHERS

ENDPOINTS = Plugins[Any]("endpoints", "--to")
"""The launchers of jobs that serve a run."""


def find_launcher(target: str) -> Launcher:
    """The launcher of this target. Raises ConfigError if no package registers it, or it is of another kind."""
    found = (ENDPOINTS if target in ENDPOINTS.own else LAUNCHERS)[target]
    if Launcher not in getattr(found, "__mro__", ()):
        raise ConfigError(f"launch.to={target}: {found} is not a class derived from echelon.launch.job.Launcher.")
    launcher: Launcher = found()
    return launcher
