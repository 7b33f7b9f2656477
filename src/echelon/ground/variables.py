"""Environment variables that any part may use: the place that torchrun gives a rank, and settings of other libraries.

torch is not imported: the variables of a library must be set before that library is.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from echelon.ground.errors import ConfigError
from echelon.ground.redaction import find_secrets

# cuBLAS sums in a fixed order only with this setting; of the two in NVIDIA's documentation, the faster one.
CUBLAS_WORKSPACES = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}

NCCL_LIMITS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_USE_COMM_NONBLOCKING": "1",
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "60",
}
"""Where processes live on when one is lost: torch's threads end no process, and NCCL connects and aborts in 60 s."""

HUB_PLACES = frozenset({"HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"})
"""The variables that set where files of the Hugging Face hub are stored."""

GPUS_VARIABLE = "ECHELON_GPUS"
"""Set by `echelon launch` on each machine of a job: the number of GPUs that it asked for there, and what says so.

`any` instead of a number: those that the machine has.
"""

QUOTE_VARIABLE = "ECHELON_QUOTE"
"""Set by `echelon plan --accept` in its job: the hours and dollars of the quote, which the run settles at its end."""

SYSTEM_VARIABLE = "ECHELON_SYSTEM_ROOT"
"""The folder below which `/proc`, `/sys` and `/usr` of another machine are read, for tests; `/` by default."""


@dataclass(frozen=True)
class Place:
    """This process's ranks, as set by the launcher: `rank` of all, `local_rank` of those on the machine."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @property
    def is_one_machine(self) -> bool:
        """Whether all ranks are on this machine."""
        return self.world_size == self.local_world_size


def read_place(env: Mapping[str, str], keys: tuple[str, str, str, str]) -> Place:
    """The place in these variables: rank, number of ranks, and the same on this machine. Raises ConfigError.

    Without the last two, all ranks are taken to be on this machine.
    """
    rank, world_size = read_int(env, keys[0], 0), read_int(env, keys[1], 1)
    if not 0 <= rank < world_size:
        raise ConfigError(f"{keys[0]}={rank} is not below {keys[1]}={world_size}; check the launcher.")
    return Place(rank, world_size, read_int(env, keys[2], rank), read_int(env, keys[3], world_size))


def find_torchrun_place(env: Mapping[str, str] | None = None) -> Place | None:
    """The place that torchrun, or a launcher with its variables, gives this process; None without them."""
    env = os.environ if env is None else env
    if "RANK" in env and "WORLD_SIZE" in env:
        return read_place(env, ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    return None


def read_int(env: Mapping[str, str], key: str, default: int) -> int:
    """The number in a variable; `default` if it is absent or empty. Raises ConfigError if it is not a number."""
    value = env.get(key)
    if value is None or value == "":
        return default
    try:
        return int(value)
    except ValueError:
        raise ConfigError(f"{key}={value!r} is not a whole number; check the launcher that set it.") from None


def is_thread_count_set() -> bool:
    """Whether OMP_NUM_THREADS sets this process's number of threads."""
    return "OMP_NUM_THREADS" in os.environ


def set_variables(variables: Mapping[str, str]) -> None:
    """Set variables in this process's environment, overriding it, for a library that reads them later."""
    os.environ.update(variables)


def set_default_variables(variables: Mapping[str, str]) -> None:
    """Set each variable that is not yet in this process's environment, for a library that reads it."""
    for key, value in variables.items():
        os.environ.setdefault(key, value)


def remove_secrets() -> None:
    """Remove the variables that hold a secret, by their name or their value, from this process's environment."""
    for name, *_ in find_secrets(dict(os.environ)):
        del os.environ[str(name)]


def use_one_tokenizer_thread() -> None:
    """Limit `tokenizers` to one thread in this process: parallel processes use the other cores."""
    set_variables({"TOKENIZERS_PARALLELISM": "false"})


def read_environment() -> dict[str, str]:
    """A copy of the environment, for environment.json, which keeps only an allow-list of it."""
    return dict(os.environ)


def find_cache_dir() -> Path:
    """The user's folder for what echelon measured and may measure again: ECHELON_CACHE, else that of the system."""
    if folder := os.environ.get("ECHELON_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "echelon"


@dataclass(frozen=True)
class AskedGpus:
    """The GPUs that this process's job asked for on this machine; `count` None: those that it has.

    `by`: the recipe key or the launcher that asked, for messages.
    """

    count: int | None
    by: str


def asked_environment(count: int | None, by: str) -> dict[str, str]:
    """The variables that tell the processes of a job how many GPUs it asked for on their machine; empty for 0."""
    return {} if count == 0 else {GPUS_VARIABLE: f"{'any' if count is None else count} {by}"}


def find_asked_gpus(env: Mapping[str, str] | None = None) -> AskedGpus | None:
    """The GPUs that this process's job asked for, as set by `echelon launch`, else by Slurm; None if it asked for none.

    A command that a user starts outside of a job has asked for none, whatever the launch section of its recipe says.
    """
    env = os.environ if env is None else env
    if (told := env.get(GPUS_VARIABLE)) is not None:
        number, _, by = told.partition(" ")
        count = None if number == "any" else read_int({GPUS_VARIABLE: number}, GPUS_VARIABLE, 0)
        return None if count == 0 else AskedGpus(count, by or GPUS_VARIABLE)
    # Slurm sets it in jobs and steps, on the machine where they run.
    count = read_int(env, "SLURM_GPUS_ON_NODE", 0)
    return AskedGpus(count, f"Slurm's allocation (SLURM_GPUS_ON_NODE={count})") if count else None


def find_system_root() -> Path:
    """The root of the system files of this machine."""
    return Path(os.environ.get(SYSTEM_VARIABLE, "/"))
