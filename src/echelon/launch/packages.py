"""The packages that a recipe needs beyond echelon's own: will the machines of a job have them?"""

import shutil
import sys
from pathlib import Path

from echelon.ground.errors import ConfigError
from echelon.ground.quiet_imports import is_installed
from echelon.launch.sagemaker.source_bundle import EXTRAS, list_extras
from echelon.recipe import LaunchConfig, Recipe
from echelon.recipe.engines import ENGINES, NATIVE

# What each extra imports; that of an engine is in its row.
_IMPORTS: dict[str, tuple[str, ...]] = {
    "peft": ("peft",),
    "qlora": ("peft", "bitsandbytes"),
    "tensorboard": ("tensorboard",),
    "mlflow": ("mlflow", "psutil"),
    "wandb": ("wandb",),
    "prometheus": ("prometheus_client",),
    "opentelemetry": ("opentelemetry.exporter.otlp.proto.http",),
    "s3": ("s3fs",),
    "gcs": ("gcsfs",),
    "float8": ("torchao",),
    "math": ("math_verify",),
    "lm-eval": ("lm_eval", "accelerate"),
}


def describe_packages(recipe: Recipe) -> list[str]:
    """At most one line about the packages that the job needs, and who provides them.

    Raises ConfigError for a package that is missing where the job's Python is the one that runs this process.
    """
    launch, needed = recipe.launch, list_extras(recipe)
    if launch.to == "local" or not needed:
        return []
    if _uses_this_python(launch):
        _refuse_missing(recipe, needed)
        return []
    words = ", ".join(f"{extra} ({key})" for extra, key in needed.items())
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
        engine = ENGINES[recipe.engine].package if extra == recipe.engine else None
        for package in (engine,) if engine is not None else _IMPORTS[extra]:
            if is_installed(package):
                continue
            fix = f"run {sys.executable} -m pip install 'echelon[{extra}]'"
            if extra == recipe.engine:
                fix = f"see docs/engines.md for how to install it, or use engine={NATIVE}"
            raise ConfigError(
                f"{key} requires the package {package}, which {sys.executable}, the Python of the job, does not have; "
                f"{fix}."
            )
