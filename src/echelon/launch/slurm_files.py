"""The files that all machines of a Slurm job must see.

Before it is submitted, those on a disk of this machine alone are named, by the type of their file system. When it
starts, each machine looks for them.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from echelon.ground.stored import read_text
from echelon.launch.job import JobSpec, list_inputs

# File systems of one machine; others are shared by their nature, such as NFS, Lustre, GPFS, BeeGFS, Ceph and FUSE.
_LOCAL = (
    "bcachefs",
    "btrfs",
    "ext2",
    "ext3",
    "ext4",
    "f2fs",
    "jfs",
    "overlay",
    "ramfs",
    "squashfs",
    "tmpfs",
    "xfs",
    "zfs",
)


def list_local_files(job: JobSpec, mounts: Path = Path("/proc/self/mounts")) -> list[str]:
    """A line for each local file system with files that the machines of the job need; none where /proc is missing.

    A machine of the cluster may mount the same files in another way, so this is no error.
    """
    types = _read_mounts(mounts)
    by_mount: dict[Path, list[str]] = {}
    for key, path in _list_needed(job):
        real_path = Path(os.path.realpath(path))
        mount = next((mount for mount in (real_path, *real_path.parents) if mount in types), None)
        if mount is not None and types[mount] in _LOCAL:
            by_mount.setdefault(mount, []).append(f"{key}={path}")
    return [
        f"{', '.join(keys)}: on {mount}, a file system of this machine ({types[mount]}); if the job's machines do not "
        "see it, the job fails when it starts; move it to a file system that all of them share"
        for mount, keys in by_mount.items()
    ]


def render_needed(job: JobSpec) -> str:
    """The paths that each machine looks for, one per line; of what is not there yet, the folder that will have it.

    Only the working directory and the run folder, where `launch.setup` or a container may bring the rest.
    """
    launch = job.recipe.launch
    brings = bool(launch.setup) or launch.slurm.container is not None
    paths = [path for key, path in _list_needed(job) if not brings or key in ("the working directory", "run.dir")]
    there = (next(folder for folder in (path, *path.parents) if folder.exists()) for path in paths)
    return "".join(f"{path}\n" for path in dict.fromkeys(there) if path != Path("/"))


def _list_needed(job: JobSpec) -> Iterator[tuple[str, Path]]:
    """Key and path of what every machine must see under the same path."""
    recipe = job.recipe
    yield "the working directory", job.workdir
    yield "run.dir", job.workdir / recipe.run.dir
    for key, path in list_inputs(recipe):
        if "://" not in path:
            yield key, job.workdir / Path(path).expanduser()
    if recipe.launch.slurm.container is None and "/" in recipe.launch.python:
        yield "launch.python", job.workdir / Path(recipe.launch.python).expanduser()


def _read_mounts(mounts: Path) -> dict[Path, str]:
    """The type of the file system at each mount point; of several at one, the last is the one that is seen."""
    try:
        lines = read_text(mounts).splitlines()
    except OSError:
        return {}
    rows = (line.split() for line in lines)
    return {Path(_unescape(row[1])): row[2] for row in rows if len(row) > 2}


def _unescape(name: str) -> str:
    """A mount point as it is, without the escapes of spaces, such as `\\040`."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), name)
