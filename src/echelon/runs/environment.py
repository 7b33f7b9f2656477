"""What environment.json holds: the machine, the software and the settings that a run was started with."""

import os
import platform
import re
import subprocess
import time
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from echelon.redaction import redact

# Only these variables are written down: everything else may hold a secret.
_RECORDED_VARIABLES = re.compile(
    r"(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|MASTER_ADDR|MASTER_PORT|OMP_NUM_THREADS|MKL_NUM_THREADS"
    r"|CUDA_VISIBLE_DEVICES|CUBLAS_WORKSPACE_CONFIG|PYTORCH_ALLOC_CONF|PYTORCH_CUDA_ALLOC_CONF|NCCL_[A-Z_0-9]+"
    r"|GLOO_SOCKET_IFNAME|TORCH_NCCL_[A-Z_]+|TORCHELASTIC_(RUN_ID|RESTART_COUNT|MAX_RESTARTS)"
    r"|SLURM_(JOB_ID|STEP_ID|PROCID|LOCALID|NODEID|NTASKS|NTASKS_PER_NODE|NNODES|JOB_NODELIST|JOB_PARTITION"
    r"|RESTART_COUNT|CPUS_PER_TASK|GPUS_ON_NODE))"
)
_RECORDED_PACKAGES = (
    "echelon",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "pydantic",
    "peft",
    "bitsandbytes",
)


def describe_environment(variables: Mapping[str, str]) -> dict[str, Any]:
    """What environment.json holds: versions, platform, git revision, and the launcher's variables by an allow-list."""
    return {
        "time": time.time(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "hostname": platform.node(),
        "num_cores": os.cpu_count(),
        "packages": {name: version for name in _RECORDED_PACKAGES if (version := find_version(name))},
        "git_revision": _find_git_revision(variables),
        "variables": redact(
            {key: value for key, value in sorted(variables.items()) if _RECORDED_VARIABLES.fullmatch(key)}
        ),
    }


def find_version(package: str) -> str | None:
    """The version of an installed package; None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _find_git_revision(variables: Mapping[str, str]) -> str | None:
    """The commit of the working directory, with `-dirty` when tracked files differ from it; None outside git.

    Nothing that the repository's own configuration names is run, for the folder may be a stranger's: no hook and no
    monitor. To compare files git would run the filters it names; where there are such, the commit alone is told.
    """
    commit = _ask_git(variables, "rev-parse", "--verify", "HEAD")
    if commit is None or _names_filters(variables):
        return commit
    changed = _ask_git(variables, "status", "--porcelain", "--untracked-files=no", "--ignore-submodules=all")
    return f"{commit}-dirty" if changed else commit


def _names_filters(variables: Mapping[str, str]) -> bool:
    """Whether the repository itself names a program that files go through, and not only its user or the machine."""
    found = _ask_git(variables, "config", "--show-scope", "--name-only", "--get-regexp", r"^filter\.") or ""
    return any(not line.startswith(("system\t", "global\t")) for line in found.splitlines())


def _ask_git(variables: Mapping[str, str], *words: str) -> str | None:
    """What git answers about the working directory; None where it refuses, or is not there."""
    command = ["git", "-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}", *words]
    # It may write no index, which calls a hook, and fetch nothing, which calls what the repository names as its remote.
    harmless = {**variables, "GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": "none"}
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False, env=harmless)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None
