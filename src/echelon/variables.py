"""Environment variables that any part may use: the place that torchrun gives a rank, and settings of other libraries.

torch is not imported: the variables of a library must be set before that library is.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from echelon.errors import ConfigError

# cuBLAS sums in a fixed order only with this setting; of the two in NVIDIA's documentation, the faster one.
CUBLAS_WORKSPACES = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}

HUB_PLACES = frozenset({"HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"})
"""The variables that set where files of the Hugging Face hub are stored."""


@dataclass(frozen=True)
class Place:
    """This process's ranks, as set by the launcher, before any process group exists."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


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


def use_one_tokenizer_thread() -> None:
    """Limit `tokenizers` to one thread in this process: parallel processes use the other cores."""
    set_variables({"TOKENIZERS_PARALLELISM": "false"})
