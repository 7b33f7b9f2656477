"""The table of launchers: one row for each value of `launch.to`, and one for endpoints."""

from importlib import import_module
from typing import get_args

from echelon.launch.job import JobTarget, Launcher
from echelon.recipe.launch_sections import Target

# Imported by name, so that one target needs no package of the others.
_LAUNCHERS: dict[JobTarget, tuple[str, str]] = {
    "local": ("echelon.launch.local", "LocalLauncher"),
    "torchrun": ("echelon.launch.ssh_launcher", "TorchrunLauncher"),
    "slurm": ("echelon.launch.slurm", "SlurmLauncher"),
    "ray": ("echelon.launch.ray.launcher", "RayLauncher"),
    "skypilot": ("echelon.launch.skypilot", "SkyPilotLauncher"),
    "kubernetes": ("echelon.launch.kubernetes.launcher", "KubernetesLauncher"),
    "sagemaker": ("echelon.launch.sagemaker.launcher", "SageMakerLauncher"),
    "sagemaker-endpoint": ("echelon.launch.sagemaker.endpoint", "EndpointLauncher"),
}
TARGETS: tuple[Target, ...] = get_args(Target)
JOB_TARGETS: tuple[JobTarget, ...] = tuple(_LAUNCHERS)


def find_launcher(target: JobTarget) -> Launcher:
    """The launcher of this target."""
    module, name = _LAUNCHERS[target]
    launcher: Launcher = getattr(import_module(module), name)()
    return launcher
