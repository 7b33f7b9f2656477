"""This process among its peers: rank, device, process group. The only module that reads the environment.

torch is imported inside the functions: the role of a command and the watchdog are needed before it is loaded.
"""

import json
import os
import re
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn, cast

from echelon.distributed.openmpi import find_meeting
from echelon.errors import ConfigError, LaunchError
from echelon.supervise.host_agent import ADDRESS_VARIABLE, HOST_VARIABLE, SHARED_VARIABLE
from echelon.supervise.hosts import HostGroup, parse_group
from echelon.supervise.listening import listen_at, within
from echelon.supervise.nodelist import expand_nodelist, in_number_order
from echelon.supervise.restart import RESTART_VARIABLE
from echelon.supervise.workers import HUB_PLACES

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store  # type: ignore[attr-defined]

Role = Literal["worker", "agent", "local"]

# Set for the workers that `echelon train` starts itself: the process they must not outlive.
AGENT_PID_VARIABLE = "ECHELON_AGENT_PID"
# The folder in memory that a worker's parent holds for snapshots.
SNAPSHOT_VARIABLE = "ECHELON_SNAPSHOT_DIR"
# When the command began that started this process, and when this process did.
_STARTED_VARIABLE = "ECHELON_STARTED_AT"
_PROCESS_STARTED = time.time()

# cuBLAS adds up in a fixed order only in workspaces of its own; of what NVIDIA's documentation offers, the faster one.
CUBLAS_WORKSPACES = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}

RENDEZVOUS_SECONDS = 120.0
_SAGEMAKER_PORT = 7777
# How long a rank waits for its peers in a collective before it counts them as lost. A peer's death is noticed at once,
# and a hang in training by the heartbeat; this is for one before or between steps, and longer than either may differ.
COLLECTIVE_SECONDS = 900.0
_GRACE_SECONDS = 5.0
_WATCHDOG_SECONDS = 0.5


@dataclass(frozen=True)
class Runtime:
    """This process's place: `rank` of `world_size` everywhere, `local_rank` of `local_world_size` on this machine."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: "torch.device"
    backend: str


@dataclass(frozen=True)
class Place:
    """What the launcher says about this process, before any process group exists."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


@dataclass(frozen=True)
class LastEnd:
    """When the processes before this one had ended (UTC seconds), and how long that took; None if nobody saw it."""

    time: float
    detection_seconds: float | None


def find_last_end(sign_of_life: Path) -> LastEnd | None:
    """What this process goes on from, where it was started again by itself; None for a start by somebody's command.

    Under torchrun, which does not say so, it is the last change of the file `sign_of_life`.
    """
    ended_at = sign_of_life.stat().st_mtime if sign_of_life.exists() else 0.0
    if RESTART_VARIABLE in os.environ:
        words = json.loads(os.environ[RESTART_VARIABLE])
        told = LastEnd(words["ended_at"], words["detection_seconds"])
        # Of echelon's agent; since then torchrun's, for a machine that came, may have started all anew.
        return told if find_host_dir() is None or ended_at < told.time else LastEnd(ended_at, None)
    if "TORCHELASTIC_RUN_ID" in os.environ and not is_managed() and ended_at:
        # Whether it is echelon's own agent that starts anew, its own start tells.
        is_first = find_host_dir() is not None and ended_at < float(os.environ[_STARTED_VARIABLE])
        return None if is_first else LastEnd(ended_at, None)
    return None


def launch_role(env: Mapping[str, str] | None = None) -> Role:
    """What a command is by its environment: a worker, the agent of its machine, or the start of a new local job."""
    env = os.environ if env is None else env
    if ("RANK" in env and "WORLD_SIZE" in env) or "OMPI_COMM_WORLD_RANK" in env:
        return "worker"
    if env.get("SLURM_STEP_ID", "").isdigit() and _read_int(env, "SLURM_NTASKS", 1) > 1:
        nodes = _read_int(env, "SLURM_STEP_NUM_NODES", _read_int(env, "SLURM_NNODES", 1))
        return "agent" if _read_int(env, "SLURM_NTASKS", 1) == nodes else "worker"
    if "SM_HOSTS" in env or "SM_CURRENT_HOST" in env:
        return "agent"
    return "local"


def find_host_group(env: Mapping[str, str] | None = None) -> HostGroup:
    """The machines of an agent's job, as Slurm or SageMaker tell. Raises ConfigError where they tell too little."""
    env = os.environ if env is None else env
    if "SM_HOSTS" in env or "SM_CURRENT_HOST" in env:
        hosts = json.loads(env.get("SM_HOSTS", "null")) or [env["SM_CURRENT_HOST"]]
        hosts.sort(key=in_number_order)
        shares = env.get(SHARED_VARIABLE, str(int(len(hosts) == 1))) == "1"
        name = env.get("SM_CURRENT_HOST", hosts[0])
        interface = env.get("SM_NETWORK_INTERFACE_NAME") or None
        return HostGroup(len(hosts), len(hosts), hosts[0], _SAGEMAKER_PORT, name == hosts[0], interface, shares, name)
    names = expand_nodelist(env.get("SLURM_STEP_NODELIST", env.get("SLURM_JOB_NODELIST", "")))
    told = env.get("ECHELON_RENDEZVOUS")
    if not names and told is None:
        raise ConfigError("SLURM_STEP_NODELIST is not set, so machines cannot find each other; start them with srun.")
    port = 20_000 + _read_int(env, "SLURM_JOB_ID", 0) % 10_000
    group = parse_group(str(_read_int(env, "SLURM_NTASKS", 1)), told or f"{names[0]}:{port}")
    return replace(group, coordinates=_read_int(env, "SLURM_PROCID", 0) == 0)


def find_host_dir() -> Path | None:
    """Where this worker says how it ended, if echelon's agent of its machine started it."""
    place = os.environ.get(HOST_VARIABLE)
    return Path(place) if place else None


def shares_files() -> bool:
    """Whether every machine sees the same run folder, as far as whoever started this process knows."""
    return os.environ.get(SHARED_VARIABLE, "1") == "1"


def find_place(env: Mapping[str, str] | None = None) -> Place:
    """This process's ranks, as torchrun, Open MPI or Slurm tell them; a single process when none does."""
    env = os.environ if env is None else env
    if "RANK" in env and "WORLD_SIZE" in env:
        keys: tuple[str, ...] = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    elif "OMPI_COMM_WORLD_RANK" in env:
        keys = tuple(f"OMPI_COMM_WORLD_{key}" for key in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    elif launch_role(env) == "worker":
        tasks_per_node = re.match(r"\d+", env.get("SLURM_STEP_TASKS_PER_NODE", env.get("SLURM_TASKS_PER_NODE", "")))
        local_size = int(tasks_per_node[0]) if tasks_per_node else 1
        return Place(
            _read_int(env, "SLURM_PROCID", 0),
            _read_int(env, "SLURM_NTASKS", 1),
            _read_int(env, "SLURM_LOCALID", 0),
            local_size,
        )
    else:
        return Place(0, 1, 0, 1)
    rank, world_size = _read_int(env, keys[0], 0), _read_int(env, keys[1], 1)
    if not 0 <= rank < world_size:
        raise ConfigError(f"{keys[0]}={rank} is not below {keys[1]}={world_size}; check the launcher.")
    # A launcher that says nothing of machines is taken to run them all on this one.
    return Place(rank, world_size, _read_int(env, keys[2], rank), _read_int(env, keys[3], world_size))


def is_managed() -> bool:
    """Whether `echelon train` itself started this process, and waits for its outcome."""
    return AGENT_PID_VARIABLE in os.environ


def find_snapshot_dir() -> Path | None:
    """The folder in memory that the parent of this worker holds for it, if it does."""
    place = os.environ.get(SNAPSHOT_VARIABLE)
    return Path(place) if place else None


def find_start(earlier: float) -> float:
    """When this start of the run began, as `time.time()` counts: with its command, or, where that had begun before
    `earlier` already, with this process, which the agent has started anew."""
    command = float(os.environ.get(_STARTED_VARIABLE, _PROCESS_STARTED))
    return command if command >= earlier else _PROCESS_STARTED


def is_elastic() -> bool:
    """Whether the processes before this one may still be there: an agent of one machine of several starts processes
    anew, when one fails or machines come and go, without waiting for those of machines that are lost."""
    is_foreign = not is_managed() and _read_int(os.environ, "TORCHELASTIC_MAX_RESTARTS", 0) > 0
    return is_foreign or find_host_dir() is not None


def shares_agent_store() -> bool:
    """Whether torchrun has its workers meet in a store that outlives them."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def read_environment() -> dict[str, str]:
    """A copy of the environment, for environment.json, which keeps only an allow-list of it."""
    return dict(os.environ)


def worker_environment(num_processes: int, deterministic: bool = False, memory: Path | None = None) -> dict[str, str]:
    """The variables of `num_processes` local workers: their share of the cores, and the process they belong to.

    `deterministic`: with what cuBLAS must find before CUDA starts, for `use_deterministic_algorithms`. `memory`: the
    folder in memory for their snapshots.
    """
    # One machine talks to itself: no host name to resolve, no firewall to ask, and nobody else gets in.
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    return {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, num_cores() // num_processes))),
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": loopback,
        AGENT_PID_VARIABLE: str(os.getpid()),
        _STARTED_VARIABLE: str(_PROCESS_STARTED),
        **({} if memory is None else {SNAPSHOT_VARIABLE: str(memory)}),
        **(CUBLAS_WORKSPACES if deterministic else {}),
    }


def hosted_environment(num_processes: int, deterministic: bool = False) -> dict[str, str]:
    """The variables of `num_processes` workers of one machine of several, but for those of the network."""
    return {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, num_cores() // num_processes))),
        _STARTED_VARIABLE: str(_PROCESS_STARTED),
        **(CUBLAS_WORKSPACES if deterministic else {}),
    }


@contextmanager
def exported(variables: Mapping[str, str]) -> Iterator[None]:
    """Have these variables in the environment for the time of the block, for the processes started in it."""
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


def set_default_variables(variables: Mapping[str, str]) -> None:
    """Set each variable that this process's environment does not have: the settings of a library that reads it."""
    for key, value in variables.items():
        os.environ.setdefault(key, value)


def keep_hub_cache_beside(run_dir: Path) -> None:
    """In a pod, have the hub's files in `huggingface` beside the run, on a volume: a container's own disk is small.

    Whatever says already where they go wins. For a command, before anything asks the hub.
    """
    if "KUBERNETES_SERVICE_HOST" in os.environ and not HUB_PLACES & os.environ.keys():
        os.environ["HF_HOME"] = str((run_dir.parent / "huggingface").absolute())


def restart_in_utf8() -> NoReturn:
    """Start this program anew, and so what it starts, with paths in UTF-8 whatever the locale says."""
    environment = {**os.environ, "PYTHONUTF8": "1"}
    os.execve(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]], environment)


def use_one_tokenizer_thread() -> None:
    """Keep `tokenizers` to one thread in this process: the processes beside it have the other cores."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"


def use_deterministic_algorithms() -> None:
    """Let this process compute with operations alone whose results repeat bit for bit; any other one raises.

    Call it before anything ran on a GPU: cuBLAS reads its setting once.
    """
    import torch

    os.environ.update(CUBLAS_WORKSPACES)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def num_cores() -> int:
    """The CPU cores this process may use: its affinity, cut to the container's quota."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota, _, period = read_system_file("/sys/fs/cgroup/cpu.max").partition(" ")
    if quota.isdigit() and period.strip().isdigit():
        cores = min(cores, max(1, int(quota) // int(period)))
    return cores


def default_num_processes() -> int:
    """One process per GPU, or one per two CPU cores and at least one."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.device_count()
    return max(1, num_cores() // 2)


def start_watchdog(parent: int | None = None) -> None:
    """Make this worker leave as soon as the process that started it is gone, even by SIGKILL.

    `parent` is that process; by default what the agent said, or else the parent of now.
    """
    expected = _read_int(os.environ, AGENT_PID_VARIABLE, os.getppid()) if parent is None else parent

    def watch() -> None:
        while os.getppid() == expected:
            time.sleep(_WATCHDOG_SECONDS)
        if (place := find_snapshot_dir()) is not None:  # nobody else can give the memory back any more
            shutil.rmtree(place, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, name="watchdog", daemon=True).start()


def open_store(timeout_seconds: float = RENDEZVOUS_SECONDS) -> "Store":
    """Meet the other ranks at MASTER_ADDR:MASTER_PORT, where rank 0 (or torchrun's agent) keeps a key-value store.

    Collective: every rank calls it. Raises LaunchError when the port is taken or nobody answers in time.
    A single process gets a store of its own.
    """
    import torch.distributed as dist
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    place = find_place()
    if place.world_size == 1 and not is_managed() and "MASTER_PORT" not in os.environ:
        return HashStore()
    if "RANK" not in os.environ and "OMPI_COMM_WORLD_RANK" in os.environ:
        set_default_variables(find_meeting(os.environ))
    for key in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(key):
            raise LaunchError(
                f"{key} is not set, so {place.world_size} processes cannot meet; "
                f"export {key} with the address and a free port of rank 0's machine."
            )
    try:
        hosts_store = place.rank == 0 and not shares_agent_store()
        listener = _open_listener(place) if hosts_store else None
        return within(timeout_seconds + _GRACE_SECONDS, lambda: _join_store(place, timeout_seconds, listener))
    except (dist.DistError, RuntimeError, ValueError, OSError) as error:
        raise _explain_rendezvous(error, place, timeout_seconds) from error


def _join_store(place: Place, timeout_seconds: float, listener: socket.socket | None) -> "Store":
    from torch.distributed import TCPStore, rendezvous  # type: ignore[attr-defined]

    timeout = timedelta(seconds=timeout_seconds)
    if listener is None:
        url = f"env://?rank={place.rank}&world_size={place.world_size}"
        return cast("Store", next(iter(rendezvous(url, timeout=timeout)))[0])
    host, port = listener.getsockname()[:2]
    return TCPStore(host, port, place.world_size, True, timeout, master_listen_fd=listener.detach())


def _open_listener(place: Place) -> socket.socket | None:
    """Where rank 0's store listens: where the others look for it, instead of on every interface.

    None: torch decides. So it is under a launcher whose MASTER_ADDR is not this machine's own address, or loopback and
    not known to be of one machine, as operators of Kubernetes set it for rank 0. Raises OSError when the port is taken.
    """
    knows_machines = "RANK" not in os.environ or "LOCAL_WORLD_SIZE" in os.environ
    is_alone = knows_machines and place.world_size == place.local_world_size
    own = os.environ.get(ADDRESS_VARIABLE)
    host = os.environ["MASTER_ADDR"] if own is None else own
    with suppress(socket.gaierror, OverflowError):  # torch tries the name again, and has a word for a wrong port
        return listen_at(host, int(os.environ["MASTER_PORT"]), admits_loopback=is_alone or own is not None)
    return None


def _explain_rendezvous(error: Exception, place: Place, timeout_seconds: float) -> LaunchError:
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    text = str(error)
    if "EADDRINUSE" in text or "address already in use" in text.lower():
        return LaunchError(
            f"rank {place.rank} cannot listen on {address}: the port is in use by another program; "
            "set MASTER_PORT to a free port, the same for every rank."
        )
    if isinstance(error, ValueError):
        return LaunchError(f"MASTER_ADDR:MASTER_PORT is {address}, which is no address: {text}.")
    return LaunchError(
        f"rank {place.rank} did not meet all {place.world_size} processes at {address} within "
        f"{timeout_seconds:.0f} seconds; check that every rank was started, that MASTER_ADDR names rank 0's machine, "
        "and that MASTER_PORT is the same everywhere and not blocked."
    )


def start_runtime(timeout_seconds: float = COLLECTIVE_SECONDS, store: "Store | None" = None) -> Runtime:
    """Join the process group: NCCL with one GPU per process, else gloo on the CPU; one process is a group of one.

    Collective: every rank calls it. `timeout_seconds` is how long a collective may wait for its peers; `store` is
    what `open_store()` gave, opened here when absent.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    place = find_place()
    device, backend = _choose_device(place)
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, num_cores() // place.local_world_size))
    store = open_store() if store is None else store
    try:
        dist.init_process_group(
            backend,
            store=PrefixStore("group", store),
            rank=place.rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=timeout_seconds),
            device_id=device if device.type == "cuda" else None,
        )
    except dist.DistError as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise LaunchError(
            f"rank {place.rank} met its peers at {address} but could not connect to them: {error}; "
            "choose the network interface with GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME."
        ) from error
    return Runtime(place.rank, place.world_size, place.local_rank, place.local_world_size, device, backend)


def _choose_device(place: Place) -> "tuple[torch.device, str]":
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu"), "gloo"
    visible = torch.cuda.device_count()
    # Some launchers show each process its own GPU alone.
    index = 0 if visible == 1 and place.local_world_size > 1 and _is_gpu_private() else place.local_rank
    if index >= visible:
        raise LaunchError(
            f"local rank {place.local_rank} has no GPU of its own: {visible} visible for "
            f"{place.local_world_size} processes; start at most one process per GPU."
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device, "nccl"


def _is_gpu_private() -> bool:
    """Slurm with --gpus-per-task and the like leave one device visible to each process."""
    return launch_role() == "worker" and not is_managed() and "SLURM_PROCID" in os.environ


def stop_runtime(failed: bool = False) -> None:
    """Leave the process group. After a failure nothing is awaited: the process's end closes its connections."""
    import torch.distributed as dist

    if dist.is_initialized() and not failed:
        dist.destroy_process_group()


def _read_int(env: Mapping[str, str], key: str, default: int) -> int:
    value = env.get(key)
    if value is None or value == "":
        return default
    try:
        return int(value)
    except ValueError:
        raise ConfigError(f"{key}={value!r} is not a whole number; check the launcher that set it.") from None


def read_system_file(path: str) -> str:
    """A file by which the system tells about itself; empty where there is none."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
