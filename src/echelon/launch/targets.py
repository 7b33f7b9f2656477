"""The table of launchers: one row for each value of `launch.to`."""

from importlib import import_module
from typing import get_args

from echelon.launch.job import Launcher
from echelon.recipe.launch_sections import Target

# Imported by name, so that one target needs no package of the others.
_LAUNCHERS: dict[Target, tuple[str, str]] = {
    "local": ("echelon.launch.local", "LocalLauncher"),
    "torchrun": ("echelon.launch.ssh_launcher", "TorchrunLauncher"),
    "slurm": ("echelon.launch.slurm", "SlurmLauncher"),
    "ray": ("echelon.launch.ray.launcher", "RayLauncher"),
    "skypilot": ("echelon.launch.skypilot", "SkyPilotLauncher"),
    "kubernetes": ("echelon.launch.kubernetes.launcher", "KubernetesLauncher"),
    "sagemaker": ("echelon.launch.sagemaker.launcher", "SageMakerLauncher"),
}
TARGETS: tuple[Target, ...] = get_args(Target)


def find_launcher(target: Target) -> Launcher:
    """The launcher of this target."""
    module, name = _LAUNCHERS[target]
    launcher: Launcher = getattr(import_module(module), name)()
    return launcher
