"""The step of a Slurm job: srun's options, and the container of each machine's task."""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from echelon.ground.errors import ConfigError
from echelon.launch.job import JobSpec, list_inputs
from echelon.recipe.launch_sections import Options, SlurmContainerConfig
from echelon.recipe.yaml_text import read_table

_LONG_OPTION = re.compile(r"[a-z][a-z0-9-]+")

_KEY = "launch.slurm"
_OPTIONS: Mapping[str, Any] = read_table(Path(__file__).with_name("slurm_options.yaml"))
_REASON = "echelon starts one step with one task per machine, whose output is the job's"
_MOUNT = re.compile(r"(?P<source>(?:/|~/)[^:,]*)(?::(?P<target>/[^:,]*)(?::(?P<flags>[a-z+]+))?)?")


def check_step(job: JobSpec) -> None:
    """Raise ConfigError for an option that srun or the container's runtime cannot take, and for a hidden folder."""
    slurm = job.recipe.launch.slurm
    for name, value in slurm.srun_options.items():
        check_option(f"{_KEY}.srun_options", name, value, "step", _REASON)
        if re.match(r"(no-)?container-", name):
            raise ConfigError(
                f"{_KEY}.srun_options.{name}={value} is an option of pyxis; set {_KEY}.container, with "
                f"{name} under {_KEY}.container.options."
            )
    if slurm.container is None:
        return
    for name, value in slurm.container.options.items():
        check_option(f"{_KEY}.container.options", name, value, "step", _REASON)
    if not slurm.container.image.isprintable():
        raise ConfigError(f"{_KEY}.container.image={slurm.container.image!r} must be one line of printable characters.")
    for mount in slurm.container.mounts:
        if not _MOUNT.fullmatch(mount) or not mount.isprintable():
            raise ConfigError(
                f"{_KEY}.container.mounts: {mount!r} is not SOURCE[:TARGET[:FLAGS]] with absolute paths that have no "
                "comma; write it like /scratch, or /scratch/data:/data:ro."
            )
    if re.search("[:,]", str(job.workdir)):
        raise ConfigError(
            f"{_KEY}.container: the working directory {job.workdir} cannot be mounted, because its name has a colon or "
            "a comma; launch from another folder."
        )
    for key, path in (("run.dir", job.recipe.run.dir), ("the job's folder", job.folder)):
        if not _is_visible(job, slurm.container, path):
            raise ConfigError(
                f"{key}={path} is {job.workdir / path}, which the container does not see; add its folder to "
                f"{_KEY}.container.mounts, under the same path."
            )


def list_hidden_inputs(job: JobSpec) -> list[str]:
    """A line for each input outside of the mounts; the cluster may mount it in every container."""
    if (container := job.recipe.launch.slurm.container) is None:
        return []
    return [
        f"{key}={path} is not below a folder of {_KEY}.container.mounts; add it, unless the cluster mounts it"
        for key, path in list_inputs(job.recipe)
        if not _is_visible(job, container, Path(path).expanduser())
    ]


def render_task(job: JobSpec, own: Options, command: str) -> str:
    """The rest of the srun line: echelon's options and the recipe's, then the command, in its container if it has one.

    `command` is quoted for the shell already.
    """
    slurm = job.recipe.launch.slurm
    words = render_options({**own, **slurm.srun_options})
    if slurm.container is None:
        return " ".join([*words, command])
    image = str(Path(slurm.container.image).expanduser()) if slurm.container.image[:1] == "~" else slurm.container.image
    mounts = _list_mounts(job, slurm.container)
    if slurm.container.runtime == "pyxis":
        flags = {"container-image": image, "container-mounts": ",".join(mounts), **slurm.container.options}
        return " ".join([*words, *render_options(flags), command])
    # --nv: the GPUs and their driver; without GPUs it only warns.
    options = render_options({"nv": "rocm" not in slurm.container.options, **slurm.container.options})
    options += [shlex.quote(f"--bind={mount}") for mount in mounts]
    return " ".join([*words, "apptainer", "exec", *options, shlex.quote(image), command])


def check_option(
    section: str,
    name: str,
    value: str | int | bool,
    command: Literal["batch", "step"],
    reason: str,
) -> None:
    """Raise ConfigError for an option in this section of the recipe that a command cannot take.

    `reason` is why options are impossible, in `slurm_options.yaml`.
    """
    taken, impossible = _OPTIONS["own"][command], _OPTIONS["impossible"][command].split()
    key = f"{section}.{name}"
    if not _LONG_OPTION.fullmatch(name):
        raise ConfigError(f"{key}: {name!r} is not a long option; write it like mail-type.")
    if name in taken:
        raise ConfigError(f"{key}={value}: echelon sets this option from {taken[name]}; set that key instead.")
    if name in impossible:
        raise ConfigError(f"{key}={value}: {reason}; remove the option.")
    if not str(value).isprintable():
        raise ConfigError(f"{key}={value!r} must be one line of printable characters.")


def render_options(options: Options) -> list[str]:
    """The words of a command for long options, quoted for the shell."""
    return [
        f"--{name}" if value is True else shlex.quote(f"--{name}={value}")
        for name, value in options.items()
        if value is not False
    ]


def _list_mounts(job: JobSpec, container: SlurmContainerConfig) -> list[str]:
    """SOURCE:TARGET[:FLAGS] of each mount, the working directory first."""
    mounts = [f"{job.workdir}:{job.workdir}"]
    for mount in container.mounts:
        source, target, flags = _read_mount(mount)
        mounts.append(":".join([source, target, *([flags] if flags else [])]))
    return mounts


def _read_mount(mount: str) -> tuple[str, str, str]:
    match = _MOUNT.fullmatch(mount)
    assert match is not None, mount
    source = str(Path(match["source"]).expanduser())
    return source, match["target"] or source, match["flags"] or ""


def _is_visible(job: JobSpec, container: SlurmContainerConfig, path: str | Path) -> bool:
    """Whether the container sees a path of this machine under the same name."""
    absolute = job.workdir / path
    return absolute.is_relative_to(job.workdir) or any(
        absolute.is_relative_to(target) for _, target, _ in map(_read_mount, container.mounts)
    )
