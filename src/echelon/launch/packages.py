"""The packages that a recipe needs beyond echelon's own: will the machines of a job have them?"""

import re
import sys

from echelon.ground.errors import ConfigError
from echelon.ground.extras import EXTRAS, find_absent, pip_command
from echelon.launch.ray.submission import INSTALLERS, read_packages
from echelon.launch.source_bundle import list_extras
from echelon.launch.targets import find_launcher
from echelon.recipe.document import Recipe
from echelon.recipe.launch_sections import LaunchConfig
from echelon.recipe.names import NATIVE

# The bare name, also with extras or a version: no path, address, direct reference, or part of another name.
_NAMESAKE = r"echelon(?=[\s'\"\[=<>~!;&|]|$)(?!(\[[^\]]*\])?\s*@)"
_INSTALLS_NAMESAKE = re.compile(rf"\b(?:pip3?|uv)\b[^;&|#]*\binstall\b[^;&|#]*[\s'\"]{_NAMESAKE}")


def describe_packages(recipe: Recipe) -> list[str]:
    """At most one line about the packages that the job needs, and who provides them.

    Raises ConfigError for a package that is missing where the job's Python is the one that runs this process, and for
    an installation of the other project that has echelon's name at the package index.
    """
    launch, needed = recipe.launch, list_extras(recipe)
    _refuse_namesake(launch)
    assert launch.to is not None
    source, where = find_launcher(launch.to).find_packages(launch)
    words = ", ".join(f"{extra} ({key})" for extra, key in needed.items())
    if source == "wheel":
        return [f"packages: {where} installs the wheel of echelon that the job brings{words and ', with '}{words}"]
    if source == "self" or not needed:
        return []
    if source == "shared":
        _refuse_missing(recipe, needed)
        return []
    if source == "there":
        return [f"packages: {where} must have echelon with its extras {words}; this cannot be checked here"]
    if others := [extra for extra in needed if extra not in EXTRAS]:
        where = f"{where} must contain {', '.join(others)}, which cannot be checked here"
        return [f"packages: {where}; the container installs what else it lacks"]
    return [f"packages: the container installs what its image lacks of echelon's extras {words}"]


def _refuse_namesake(launch: LaunchConfig) -> None:
    """Refuse `pip install echelon`: at the package index this is another project."""
    lines = [(f"setup.{index}", line) for index, line in enumerate(launch.setup) if _INSTALLS_NAMESAKE.search(line)]
    for tool in INSTALLERS:
        packages = read_packages(launch.ray.runtime_env.get(tool)) or []
        lines += [(f"ray.runtime_env.{tool}", line) for line in map(str, packages) if re.match(_NAMESAKE, line)]
    for key, line in lines:
        raise ConfigError(
            f"launch.{key}: {line} installs another project, which has this name at the package index; remove it: jobs "
            "of skypilot, and of ray with launch.ray.runtime_env.pip, bring a wheel of echelon; for other targets use "
            "an image that has it, or pip install with the address of a checkout or a wheel."
        )


def _refuse_missing(recipe: Recipe, needed: dict[str, str]) -> None:
    for extra, key in needed.items():
        if (package := find_absent(extra)) is not None:
            fix = f"run {sys.executable} -m {pip_command(extra)}"
            if extra == recipe.engine:
                fix = f"see docs/engines.md for how to install it, or use engine={NATIVE}"
            raise ConfigError(
                f"{key} requires the package {package}, which {sys.executable}, the Python of the job, does not have; "
                f"{fix}."
            )
