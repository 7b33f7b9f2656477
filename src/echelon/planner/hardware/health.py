"""The health of this machine before it takes part in a job: its GPUs, memory, disk, and how fast it computes."""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from echelon.ground.cores import read_system_file
from echelon.ground.sizes import render_bytes
from echelon.ground.variables import find_system_root, read_environment
from echelon.planner.hardware.detection import machine_memory_bytes, measure_core_flops, time_on_a_core
from echelon.planner.hardware.gpu_check import count_visible
from echelon.planner.hardware.gpu_health import read_gpu_health

# Less than a process needs to import PyTorch, and than a run writes in its first minute.
_LEAST_MEMORY, _LEAST_DISK = 256 * 2**20, 256 * 2**20
_COPIED = {"cpu": 2**24, "cuda": 2**28}  # numbers of a copy, more than caches hold
_TURNS = 4
_MEASURE_SECONDS = 120.0
_SIZE = 8192


@dataclass(frozen=True)
class Health:
    """This machine's health.

    Attributes:
        faults: why a training here is likely to fail, a sentence each, with the fix.
        slowdowns: why it is likely to be slow.
        rates: FLOP/s of products and bytes/s of copies on its slowest device, by the name of the device and the kind.
    """

    faults: tuple[str, ...]
    slowdowns: tuple[str, ...]
    rates: Mapping[str, float]


def examine_health(num_processes: int, folder: Path) -> Health:
    """Examine this machine. Takes a tenth of a second; with GPUs, whose rates a process of its own measures, seconds.

    `num_processes`: those that will train here, and `folder`: where their files go.
    """
    gpus = read_gpu_health()
    faults = list(gpus.faults)
    free = free_memory_bytes()
    if free < (needed := num_processes * _LEAST_MEMORY):
        faults.append(
            f"{render_bytes(free)} of memory are free, and {num_processes} processes need {render_bytes(needed)} to "
            "start; end other programs"
        )
    for path in (folder, Path(tempfile.gettempdir())):
        while not path.exists():
            path = path.parent
        if (left := shutil.disk_usage(path).free) < _LEAST_DISK:
            faults.append(f"{render_bytes(left)} are free at {path}; free some space")
    return Health(tuple(dict.fromkeys(faults)), gpus.slowdowns, measure_rates())


def free_memory_bytes() -> int:
    """The memory that programs can still get: of this machine, or of the container if that is smaller."""
    total = machine_memory_bytes()
    for line in read_system_file(str(find_system_root() / "proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            return min(total, int(line.split()[1]) * 1024)
    return total


@cache
def measure_rates() -> dict[str, float]:
    """FLOP/s of products and bytes/s of copies on the slowest device, by device and kind; empty if that fails.

    On a CPU by the time of the processor, so that other programs hardly matter.
    """
    if not count_visible():
        return {"a CPU core, product": measure_core_flops()[1], "a CPU core, copy": _measure_core_copy()}
    # In another process: in this one, the parent of the workers, CUDA's memory would stay in use.
    words = f"import json; from {__name__} import measure_gpu_rates; print(json.dumps(measure_gpu_rates()))"
    command = [sys.executable, "-c", words]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, env=read_environment(), timeout=_MEASURE_SECONDS
        )
        rates: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    except (subprocess.SubprocessError, ValueError, LookupError):
        return {}
    return rates


def measure_gpu_rates() -> dict[str, float]:
    """The rates of this machine's slowest GPU, by its name and the kind of work."""
    import torch

    rates: dict[str, float] = {}
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        factor = torch.ones(_SIZE, _SIZE, dtype=torch.bfloat16, device=device)
        source = torch.ones(_COPIED["cuda"], device=device)
        target = torch.empty_like(source)
        result = torch.empty_like(factor)
        pieces = (
            ("product", 2.0 * _SIZE**3, lambda a=factor, to=result: torch.mm(a, a, out=to)),
            ("copy", 2.0 * source.nbytes, lambda a=source, to=target: to.copy_(a)),
        )
        for kind, work, call in pieces:
            best = float("inf")
            for _ in range(2 * _TURNS):
                torch.cuda.synchronize(device)
                began = time.perf_counter()
                call()
                torch.cuda.synchronize(device)
                best = min(best, time.perf_counter() - began)
            name = f"{torch.cuda.get_device_name(index)}, {kind}"
            rates[name] = min(rates.get(name, float("inf")), work / best)
    return rates


def _measure_core_copy() -> float:
    """Bytes/s that one core reads and writes in a copy: the best of a few."""
    import torch

    source = torch.ones(_COPIED["cpu"])
    target = torch.empty_like(source)
    [seconds] = time_on_a_core([partial(target.copy_, source)])
    return 2.0 * source.nbytes / max(seconds, 1e-9)
