"""Read this process's role and place from its environment, and build the environment of the processes it starts.

Here and in `variables` alone environment variables are read and set. torch is not imported: `echelon --help` needs the
role of a command.
"""

import json
import logging
import os
import re
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NoReturn, TextIO

from typing_extensions import override

from echelon.ground.cores import num_cores
from echelon.ground.errors import ConfigError, LaunchError
from echelon.ground.foreign_launchers import (
    expand_nodelist,
    in_number_order,
    read_horovodrun_rendezvous,
    read_mpirun_rendezvous,
)
from echelon.ground.hosts import HostGroup, find_interface, find_own_address, parse_group
from echelon.ground.logs import LEVELS, PLAIN, Look
from echelon.ground.variables import (
    CUBLAS_WORKSPACES,
    HUB_PLACES,
    Place,
    find_torchrun_place,
    read_int,
    read_place,
    set_default_variables,
)

Role = Literal["worker", "agent", "local"]

AGENT_PID_VARIABLE = "ECHELON_AGENT_PID"
"""Set for the workers of `echelon train` on one machine: the id of the process that they must not outlive."""

HOST_VARIABLE = "ECHELON_HOST_DIR"
"""Set for the workers of an agent in a job of several machines: the folder for the outcomes of its ranks."""

SHARED_VARIABLE = "ECHELON_SHARES_FILES"
"""0 if the machines of a job do not see the same run folder."""

ADDRESS_VARIABLE = "ECHELON_ADDRESS"
"""This machine's address for the others; if rank 0 is here, its store listens at this address."""

RESTART_VARIABLE = "ECHELON_RESTART"
"""Set for restarted workers: JSON with the time when the previous processes ended, and the seconds to detect it."""

_MEMBER_VARIABLE, _STORE_VARIABLE = "ECHELON_REPLICA", "TORCHELASTIC_USE_AGENT_STORE"

TERMINAL_VARIABLE = "ECHELON_TERMINAL_RANK"
"""The rank of this job that runs in a terminal (`echelon train --here`), where a debugger may stop it at any time."""

LOG_LEVEL_VARIABLE = "ECHELON_LOG_LEVEL"
"""The log level of a command and the processes that it starts: one of `logs.LEVELS`."""

# When this process's command began, and when this process did: in UTC seconds, and by a clock that nobody sets.
_STARTED_VARIABLE = "ECHELON_STARTED_AT"
_PROCESS_STARTED = time.time(), time.monotonic()

_ALLOCATOR_VARIABLE, _OLD_ALLOCATOR_VARIABLE = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
_MAX_COMPILE_THREADS = 32  # as in torch
_RECORDED_COLLECTIVES = 2000

_SAGEMAKER_PORT = 7777
_RENTED_PORT = 29_400
# Of SkyPilot and dstack: the addresses of the machines, one per line, and the number of this one.
_RENTED = (("SKYPILOT_NODE_IPS", "SKYPILOT_NODE_RANK"), ("DSTACK_NODES_IPS", "DSTACK_NODE_RANK"))


def launch_role(env: Mapping[str, str] | None = None) -> Role:
    """The role of a command, from its environment: a worker, the agent of its machine, or a new local job."""
    env = os.environ if env is None else env
    if ("RANK" in env and "WORLD_SIZE" in env) or "OMPI_COMM_WORLD_RANK" in env or "HOROVOD_RANK" in env:
        return "worker"
    if env.get("SLURM_STEP_ID", "").isdigit() and read_int(env, "SLURM_NTASKS", 1) > 1:
        nodes = read_int(env, "SLURM_STEP_NUM_NODES", read_int(env, "SLURM_NNODES", 1))
        return "agent" if read_int(env, "SLURM_NTASKS", 1) == nodes else "worker"
    if "SM_HOSTS" in env or "SM_CURRENT_HOST" in env or len(_list_rented(env)[0]) > 1:
        return "agent"
    return "local"


def find_host_group(env: Mapping[str, str] | None = None) -> HostGroup:
    """The machines of an agent's job, from the variables of Slurm, SageMaker, SkyPilot or dstack.

    Raises ConfigError if they are missing.
    """
    env = os.environ if env is None else env
    hosts, rank = _list_rented(env)
    if hosts:
        own_host, first = hosts[rank], hosts[0]
        shares = env.get(SHARED_VARIABLE) == "1"
        return HostGroup(len(hosts), len(hosts), first, _RENTED_PORT, own_host == first, None, shares, own_host)
    if "SM_HOSTS" in env or "SM_CURRENT_HOST" in env:
        hosts = json.loads(env.get("SM_HOSTS", "null")) or [env["SM_CURRENT_HOST"]]
        hosts.sort(key=in_number_order)
        shares = env.get(SHARED_VARIABLE, str(int(len(hosts) == 1))) == "1"
        name = env.get("SM_CURRENT_HOST", hosts[0])
        interface = env.get("SM_NETWORK_INTERFACE_NAME") or None
        return HostGroup(len(hosts), len(hosts), hosts[0], _SAGEMAKER_PORT, name == hosts[0], interface, shares, name)
    names = expand_nodelist(env.get("SLURM_STEP_NODELIST", env.get("SLURM_JOB_NODELIST", "")))
    endpoint = env.get("ECHELON_RENDEZVOUS")
    if not names and endpoint is None:
        raise ConfigError("SLURM_STEP_NODELIST is not set, so machines cannot find each other; start them with srun.")
    port = 20_000 + read_int(env, "SLURM_JOB_ID", 0) % 10_000
    group = parse_group(str(read_int(env, "SLURM_NTASKS", 1)), endpoint or f"{names[0]}:{port}")
    return replace(group, coordinates=read_int(env, "SLURM_PROCID", 0) == 0)


def _list_rented(env: Mapping[str, str]) -> tuple[list[str], int]:
    """The addresses of the machines that SkyPilot or dstack has rented for this job, and the number of this one."""
    for addresses, number in _RENTED:
        if hosts := env.get(addresses, "").split():
            return hosts, read_int(env, number, 0)
    return [], 0


def find_place(env: Mapping[str, str] | None = None) -> Place:
    """This process's ranks, from the variables of torchrun, Open MPI, horovodrun or Slurm; else a single process."""
    env = os.environ if env is None else env
    if (place := find_torchrun_place(env)) is not None:
        return place
    if "OMPI_COMM_WORLD_RANK" in env:
        prefix = "OMPI_COMM_WORLD"
    elif "HOROVOD_RANK" in env:
        prefix = "HOROVOD"
    elif launch_role(env) == "worker":
        tasks_per_node = re.match(r"\d+", env.get("SLURM_STEP_TASKS_PER_NODE", env.get("SLURM_TASKS_PER_NODE", "")))
        local_size = int(tasks_per_node[0]) if tasks_per_node else 1
        return Place(
            read_int(env, "SLURM_PROCID", 0),
            read_int(env, "SLURM_NTASKS", 1),
            read_int(env, "SLURM_LOCALID", 0),
            local_size,
        )
    else:
        return Place(0, 1, 0, 1)
    return read_place(env, (f"{prefix}_RANK", f"{prefix}_SIZE", f"{prefix}_LOCAL_RANK", f"{prefix}_LOCAL_SIZE"))


@dataclass(frozen=True)
class Rendezvous:
    """The rendezvous of a job's ranks: MASTER_ADDR and MASTER_PORT, as set by the launcher.

    `own_address`: the address of this machine, if echelon's agent has set it. `is_local`: whether all ranks are known
    to be on this machine.
    """

    address: str
    port: str
    own_address: str | None
    is_local: bool

    @override
    def __str__(self) -> str:
        """HOST:PORT."""
        return f"{self.address}:{self.port}"


def find_rendezvous() -> Rendezvous | None:
    """The rendezvous of this process with the other ranks; None for a single process.

    For ranks of `mpirun` and `horovodrun`, which set no address, derives and sets it. Raises LaunchError if it is
    unknown.
    """
    place = find_place()
    if place.world_size == 1 and not is_managed() and "MASTER_PORT" not in os.environ:
        return None
    if "RANK" not in os.environ and "OMPI_COMM_WORLD_RANK" in os.environ:
        set_default_variables(read_mpirun_rendezvous(os.environ))
    elif "RANK" not in os.environ and "HOROVOD_RANK" in os.environ:
        set_default_variables(read_horovodrun_rendezvous(os.environ))
    for key in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(key):
            raise LaunchError(
                f"{key} is not set, so {place.world_size} processes cannot meet; "
                f"export {key} with the address and a free port of rank 0's machine."
            )
    knows_machines = "RANK" not in os.environ or "LOCAL_WORLD_SIZE" in os.environ
    return Rendezvous(
        os.environ["MASTER_ADDR"],
        os.environ["MASTER_PORT"],
        os.environ.get(ADDRESS_VARIABLE),
        knows_machines and place.is_one_machine,
    )


def find_socket_interface(rendezvous: Rendezvous) -> str | None:
    """The network interface on which this process meets the other ranks: that of gloo, if one is set."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface or rendezvous.is_local:
        return interface or find_interface("127.0.0.1")
    return find_interface(find_own_address(HostGroup(1, 2, rendezvous.address, int(rendezvous.port))))


def has_horovod_store() -> bool:
    """Whether `horovodrun` has given this process the store where Horovod's ranks meet."""
    return "HOROVOD_GLOO_RENDEZVOUS_ADDR" in os.environ


def has_mpi() -> bool:
    """Whether `mpirun` started this process."""
    return "OMPI_COMM_WORLD_RANK" in os.environ


def shares_agent_store() -> bool:
    """Whether the ranks meet in a store of their agent, torchrun's or echelon's, which outlives them."""
    return os.environ.get(_STORE_VARIABLE) == str(True)


def is_managed() -> bool:
    """Whether `echelon train` itself started this process, and waits for its outcome."""
    return AGENT_PID_VARIABLE in os.environ


def find_host_dir() -> Path | None:
    """The folder for this worker's outcome, if echelon's agent of its machine started it."""
    folder = os.environ.get(HOST_VARIABLE)
    return Path(folder) if folder else None


def shares_files() -> bool:
    """Whether every machine sees the same run folder, as far as the starter of this process knows."""
    return os.environ.get(SHARED_VARIABLE, "1") == "1"


def is_elastic() -> bool:
    """Whether the previous processes may still be alive: an agent in a job of several machines restarts processes when
    one fails or machines join or leave, without waiting for those of lost machines."""
    return _is_torchrun_elastic() or find_host_dir() is not None


def keeps_old_addresses() -> bool:
    """Whether torchrun restarts processes that meet in one store, which has the addresses of earlier ones too."""
    return _is_torchrun_elastic() and shares_agent_store()


def _is_torchrun_elastic() -> bool:
    return not is_managed() and read_int(os.environ, "TORCHELASTIC_MAX_RESTARTS", 0) > 0


def is_gpu_private() -> bool:
    """Whether the launcher may show each process only its own GPU, as Slurm does with --gpus-per-task."""
    return launch_role() == "worker" and not is_managed() and "SLURM_PROCID" in os.environ


def find_agent_pid() -> int:
    """The id of the process that this worker must not outlive: the one set by its agent, or else its parent."""
    return read_int(os.environ, AGENT_PID_VARIABLE, os.getppid())


def find_thread_count() -> int | None:
    """The number of threads that OMP_NUM_THREADS sets, the first of its list; None if it sets none."""
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isdigit() and int(first) > 0 else None


def begin_process(env: Mapping[str, str]) -> None:
    """Make a process that was just forked like one started now with this environment."""
    global _PROCESS_STARTED
    os.environ.clear()
    os.environ.update(env)
    _PROCESS_STARTED = time.time(), time.monotonic()


def _command_start() -> tuple[float, float]:
    utc, _, steady = os.environ.get(_STARTED_VARIABLE, "").partition(" ")
    return (float(utc), float(steady)) if steady else _PROCESS_STARTED


def read_clock() -> float:
    """UTC seconds, counted from the start of the command: differences are right also if the machine's clock is set."""
    utc, steady = _command_start()
    return utc + time.monotonic() - steady


def find_start(earlier: float) -> float:
    """When this start of the run began, as in `read_clock`: the start of its command, or, if that is before `earlier`,
    the start of this process, which the agent has restarted."""
    utc, steady = _command_start()
    return utc if utc >= earlier else utc + _PROCESS_STARTED[1] - steady


@dataclass(frozen=True)
class LastEnd:
    """When the previous processes ended (UTC seconds), and the seconds to detect it; None if unknown."""

    time: float
    detection_seconds: float | None


def find_last_end(sign_of_life: Path) -> LastEnd | None:
    """The end of the previous processes, if this process was restarted automatically; None if a user started it.

    Under torchrun, which does not report it, this is the last change of the file `sign_of_life`.
    """
    ended_at = sign_of_life.stat().st_mtime if sign_of_life.exists() else 0.0
    if RESTART_VARIABLE in os.environ:
        fields = json.loads(os.environ[RESTART_VARIABLE])
        return LastEnd(fields["ended_at"], fields["detection_seconds"])
    return LastEnd(ended_at, None) if "TORCHELASTIC_RUN_ID" in os.environ and ended_at else None


def worker_environment(num_processes: int, deterministic: bool = False) -> dict[str, str]:
    """The variables of `num_processes` workers on this machine: their number of threads, torch's settings, and when the
    command began.

    `deterministic` adds the cuBLAS setting that `use_deterministic_algorithms` requires before CUDA starts.
    """
    return {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, num_cores() // num_processes))),
        _STARTED_VARIABLE: " ".join(map(str, _PROCESS_STARTED)),
        **torch_environment(num_processes),
        **(CUBLAS_WORKSPACES if deterministic else {}),
    }


def torch_environment(num_processes: int) -> dict[str, str]:
    """Variables for torch in `num_processes` workers on this machine; they must be set before it is imported.

    GPU memory is allocated in segments that can grow, which prevents fragmentation. Each worker compiles kernels on its
    share of the cores: torch would use all of them in every worker. torch records the last collectives of each worker,
    to explain a hang. The user's own settings are kept.
    """
    variables = {"TORCHINDUCTOR_COMPILE_THREADS": str(min(_MAX_COMPILE_THREADS, max(1, num_cores() // num_processes)))}
    variables["TORCH_FR_BUFFER_SIZE"] = str(_RECORDED_COLLECTIVES)
    if _OLD_ALLOCATOR_VARIABLE not in os.environ:
        variables[_ALLOCATOR_VARIABLE] = "expandable_segments:True"
    return {key: os.environ.get(key, value) for key, value in variables.items()}


def managed_environment() -> dict[str, str]:
    """The variables of workers whose run this process prepared."""
    return {AGENT_PID_VARIABLE: str(os.getpid())}


def hosted_environment(outcomes_dir: Path, shares_files: bool) -> dict[str, str]:
    """The variables of workers that prepare the run themselves, with the folder where the agent reads outcomes."""
    return {HOST_VARIABLE: str(outcomes_dir), SHARED_VARIABLE: str(int(shares_files))}


def kernel_cache_environment() -> dict[str, str]:
    """Triton's cache on a disk of this machine: by default it is in the home directory, which machines may share.

    Its files are executed, so the folder must be this user's alone, on a disk from which files may be executed.
    """
    folder = Path(tempfile.gettempdir()) / f"triton-of-echelon-{os.getuid()}"
    if {"TRITON_CACHE_DIR", "TRITON_HOME"} & os.environ.keys():
        return {}
    with suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        status, disk = folder.lstat(), os.statvfs(folder)
        is_mine = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077
        if is_mine and not disk.f_flag & getattr(os, "ST_NOEXEC", 0):
            return {"TRITON_CACHE_DIR": str(folder)}
    return {}


def replica_environment(
    rank: int, world_size: int, num_local: int, address: str, port: int, member: str
) -> dict[str, str]:
    """The variables of a process of a replica that may be lost alone, one of `num_local` processes of this machine.

    `member`: the name of the process; `address` and `port`: those of its keeper's store.
    """
    variables = rank_environment(rank, world_size, rank % num_local, num_local)
    return {**variables, **store_environment(address, port), _MEMBER_VARIABLE: member}


def store_environment(address: str, port: int) -> dict[str, str]:
    """The variables of ranks that meet in a store of the process that starts them; torch reads them too."""
    return {"MASTER_ADDR": address, "MASTER_PORT": str(port), _STORE_VARIABLE: str(True)}


def rank_environment(rank: int, world_size: int, local_rank: int, num_local: int) -> dict[str, str]:
    """The variables that place a rank in a job, and among the `num_local` ranks of this machine."""
    ranks = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": num_local}
    return {key: str(value) for key, value in ranks.items()}


def find_terminal_rank() -> int | None:
    """The rank of this job that a debugger may stop, and the others wait for; None if there is none."""
    return read_int(os.environ, TERMINAL_VARIABLE, 0) if TERMINAL_VARIABLE in os.environ else None


def find_member() -> str | None:
    """The name of this start of a replica, if this process is a replica that a keeper has started."""
    return os.environ.get(_MEMBER_VARIABLE)


@contextmanager
def exported(variables: Mapping[str, str]) -> Iterator[None]:
    """Set these variables in the environment during the block, for processes started in it."""
    before = {key: os.environ.get(key) for key in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


def find_log_level() -> int:
    """The log level from the environment; INFO by default. Raises ConfigError for an unknown one."""
    name = os.environ.get(LOG_LEVEL_VARIABLE) or "info"
    if name not in LEVELS:
        raise ConfigError(f"{LOG_LEVEL_VARIABLE}={name} is not a log level; use one of {', '.join(LEVELS)}.")
    return LEVELS[name]


def find_look(console: TextIO, level: int) -> Look:
    """How a console shows lines: as a terminal with colours and a progress bar, or plain.

    NO_COLOR and FORCE_COLOR have their usual meaning (no-color.org, force-color.org). There is a bar only on a
    terminal, at the level INFO, and not in a CI job.
    """
    is_terminal = console.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")
    colours = (is_terminal or bool(os.environ.get("FORCE_COLOR"))) and not os.environ.get("NO_COLOR")
    bar = is_terminal and level == logging.INFO and os.environ.get("CI", "") in ("", "0", "false")
    bar = bar and TERMINAL_VARIABLE not in os.environ  # it would erase what a debugger shows
    return Look(colours, bar) if colours or bar else PLAIN


def keep_hub_cache_beside(run_dir: Path) -> None:
    """In a pod, store hub files in `huggingface` next to the run folder, on a volume: a container's disk is small.

    An existing setting wins. Call it before any access to the hub.
    """
    if "KUBERNETES_SERVICE_HOST" in os.environ and not HUB_PLACES & os.environ.keys():
        os.environ["HF_HOME"] = str((run_dir.parent / "huggingface").absolute())


def restart_in_utf8() -> NoReturn:
    """Restart this program with Python's UTF-8 mode, also for its children, whatever the locale is."""
    environment = {**os.environ, "PYTHONUTF8": "1"}
    os.execve(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]], environment)


def restart_with_libraries(folder: str) -> NoReturn:
    """Restart this program with a folder first on LD_LIBRARY_PATH, also for its children: libraries load from it."""
    path = ":".join(filter(None, (folder, os.environ.get("LD_LIBRARY_PATH"))))
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, "LD_LIBRARY_PATH": path})
