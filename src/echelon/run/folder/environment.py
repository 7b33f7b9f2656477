"""The content of environment.json: the machine, software and settings that a run was started with."""

import os
import platform
import re
import subprocess
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from echelon.ground.redaction import redact

# Only these variables are recorded: any other may contain a secret.
_RECORDED_VARIABLES = re.compile(
    r"(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|MASTER_ADDR|MASTER_PORT|OMP_NUM_THREADS|MKL_NUM_THREADS"
    r"|CUDA_VISIBLE_DEVICES|CUBLAS_WORKSPACE_CONFIG|PYTORCH_ALLOC_CONF|PYTORCH_CUDA_ALLOC_CONF|NCCL_[A-Z_0-9]+"
    r"|GLOO_SOCKET_IFNAME|TORCH_NCCL_[A-Z_]+|TORCHELASTIC_(RUN_ID|RESTART_COUNT|MAX_RESTARTS)"
    r"|SLURM_(JOB_ID|STEP_ID|PROCID|LOCALID|NODEID|NTASKS|NTASKS_PER_NODE|NNODES|JOB_NODELIST|JOB_PARTITION"
    r"|RESTART_COUNT|CPUS_PER_TASK|GPUS_ON_NODE))"
)
_RECORDED_PACKAGES = (
    "echelon", "torch", "transformers", "tokenizers", "safetensors", "numpy", "pydantic", "peft", "bitsandbytes",
)  # fmt: skip


def describe_environment(variables: Mapping[str, str]) -> dict[str, Any]:
    """Return the content of environment.json: versions, platform, git revision, and an allow-list of variables."""
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
    """Return the version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def describe_source() -> str:
    """Return echelon's version, or the checkout that it runs from if it is not installed."""
    return find_version("echelon") or f"a checkout at {Path(__file__).parents[3]}"


def _find_git_revision(variables: Mapping[str, str]) -> str | None:
    """Return the commit of the working directory, with `-dirty` if tracked files differ from it; None outside git.

    The repository may be untrusted, so no program from its configuration is run: no hooks and no file system monitor.
    If it configures filters, which git would run to compare files, only the commit is returned.
    """
    commit = _ask_git(variables, "rev-parse", "--verify", "HEAD")
    if commit is None or _names_filters(variables):
        return commit
    changed = _ask_git(variables, "status", "--porcelain", "--untracked-files=no", "--ignore-submodules=all")
    return f"{commit}-dirty" if changed else commit


def _names_filters(variables: Mapping[str, str]) -> bool:
    """Whether the repository's own configuration sets filters, in contrast to the user's or the system's."""
    output = _ask_git(variables, "config", "--show-scope", "--name-only", "--get-regexp", r"^filter\.") or ""
    return any(not line.startswith(("system\t", "global\t")) for line in output.splitlines())


def _ask_git(variables: Mapping[str, str], *words: str) -> str | None:
    """Run a git command in the working directory and return its output; None if it fails or git is missing."""
    command = ["git", "-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}", *words]
    # No index writes, which call a hook, and no lazy fetches, which call the repository's remote helper.
    harmless = {**variables, "GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": "none"}
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False, env=harmless)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None
