"""The launcher of a target: a class that echelon or another package registers as an entry point."""

from echelon.ground.errors import ConfigError
from echelon.launch.job import Launcher
from echelon.recipe.names import LAUNCHERS


def find_launcher(target: str) -> Launcher:
    """The launcher of this target. Raises ConfigError if no package registers it, or it is of another kind."""
    plugin = LAUNCHERS[target]
    if Launcher not in getattr(plugin, "__mro__", ()):
        raise ConfigError(f"launch.to={target}: {plugin} is not a class derived from echelon.launch.job.Launcher.")
    launcher: Launcher = plugin()
    return launcher
