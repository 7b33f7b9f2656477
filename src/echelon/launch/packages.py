"""The packages that a recipe needs beyond echelon's own: will the machines of a job have them?"""

import re
import shutil
import sys
from pathlib import Path

from echelon.ground.errors import ConfigError
from echelon.ground.extras import EXTRAS, find_absent, pip_command
from echelon.launch.ray.submission import INSTALLERS, installs_packages, read_packages
from echelon.launch.source_bundle import list_extras
from echelon.recipe import LaunchConfig, Recipe
from echelon.recipe.engines import NATIVE

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
    words = ", ".join(f"{extra} ({key})" for extra, key in needed.items())
    if launch.to == "skypilot" or (launch.to == "ray" and installs_packages(launch.ray.runtime_env)):
        which = "a machine without echelon" if launch.to == "skypilot" else "each machine"
        return [f"packages: {which} installs the wheel of echelon that the job brings{words and ', with '}{words}"]
    if launch.to == "local" or not needed:
        return []
    if _uses_this_python(launch):
        _refuse_missing(recipe, needed)
        return []
    if launch.to == "sagemaker":
        if launch.sagemaker.network_isolation:
            place = f"the image {launch.sagemaker.image}"
            return [f"packages: {place} must have echelon's extras {words}; this cannot be checked here"]
        own = [extra for extra in needed if extra not in EXTRAS]
        if own:
            place = f"{launch.sagemaker.image} must contain {', '.join(own)}, which cannot be checked here"
            return [f"packages: {place}; the container installs what else it lacks"]
        return [f"packages: the container installs what its image lacks of echelon's extras {words}"]
    place = _find_place(launch)
    return [f"packages: {place} must have echelon with its extras {words}; this cannot be checked here"]


def _refuse_namesake(launch: LaunchConfig) -> None:
    """Refuse `pip install echelon`: at the package index this is another project."""
    found = [(f"setup.{index}", line) for index, line in enumerate(launch.setup) if _INSTALLS_NAMESAKE.search(line)]
    for tool in INSTALLERS:
        packages = read_packages(launch.ray.runtime_env.get(tool)) or []
        found += [(f"ray.runtime_env.{tool}", line) for line in map(str, packages) if re.match(_NAMESAKE, line)]
    for key, line in found:
        raise ConfigError(
            f"launch.{key}: {line} installs another project, which has this name at the package index; remove it: jobs "
            "of skypilot, and of ray with launch.ray.runtime_env.pip, bring a wheel of echelon; for other targets use "
            "an image that has it, or pip install with the address of a checkout or a wheel."
        )


def _find_place(launch: LaunchConfig) -> str:
    """What provides the packages where SageMaker's container installs none."""
    images = {
        "kubernetes": launch.kubernetes.image,
        "slurm": None if launch.slurm.container is None else launch.slurm.container.image,
        "skypilot": launch.skypilot.resources.get("image_id"),
    }
    if image := images.get(launch.to or ""):
        return f"the image {image}"
    if launch.to == "ray" and launch.ray.runtime_env:
        return "launch.ray.runtime_env"
    return f"launch.python={launch.python} on the machines"


def _uses_this_python(launch: LaunchConfig) -> bool:
    """Whether the machines of a job start the interpreter of this process, which they share by their file system.

    `launch.setup`, a container or another PATH may choose another.
    """
    if launch.setup or "PATH" in launch.env or launch.slurm.container is not None:
        return False
    here = Path(sys.executable)
    if launch.to == "slurm" and launch.slurm.options.get("export", "ALL") == "ALL":  # sbatch passes PATH on
        found = shutil.which(launch.python)
        return found is not None and Path(found).parent == here.parent
    return launch.to in ("slurm", "torchrun") and Path(launch.python).parent == here.parent


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
