"""Detect this machine's hardware; measure what no table has."""

import logging
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.ground.cores import read_system_file
from echelon.ground.errors import ConfigError
from echelon.ground.variables import Place, find_cache_dir, read_environment
from echelon.planner.hardware.accelerators import Accelerator, Cluster, find_accelerator
from echelon.planner.hardware.calibration_store import CPU, Calibration, find_calibration

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_TURNS = 4
_LONG_MATMUL_SECONDS = 0.5


def detect_cluster(num_processes: int) -> Cluster:
    """This machine's hardware as used by `num_processes` processes, with figures per process.

    Raises ConfigError when there are fewer GPUs than processes.
    """
    if (calibration := find_calibrated_cpu()) is not None:
        return calibrated_cluster(calibration, num_processes, num_processes)
    import torch

    visible = torch.cuda.device_count() if torch.cuda.is_available() else num_processes
    if num_processes > visible:
        raise ConfigError(
            f"--nproc {num_processes} is more than the {visible} GPUs of this machine; use --nproc {visible} or less."
        )
    return describe_cluster(num_processes, num_processes)


def detect_launched_cluster(place: Place) -> Cluster:
    """The hardware of a job whose ranks a launcher has placed: machines like this one, as many as there are."""
    return describe_cluster(place.world_size, min(place.local_world_size, place.world_size))


def find_calibrated_cpu() -> Calibration | None:
    """The calibration of this machine, if it is one without GPUs that was calibrated: torch need not be imported."""
    calibration = find_calibration(find_cache_dir())
    return calibration if calibration is not None and calibration.is_cpu and not calibration.machine["gpus"] else None


def calibrated_cluster(known: Calibration, num_devices: int, devices_per_node: int) -> Cluster:
    """Processes on CPUs like this one, at the rates that were measured."""
    cores = known.cores_of(devices_per_node)
    cpu = Accelerator(
        CPU,
        machine_memory_bytes() // devices_per_node,
        known.product_flops["bfloat16"] * cores,
        known.product_flops["float32"] * cores,
        known.stream_bandwidth * cores,
        known.describe(),
    )
    links = known.links(devices_per_node)
    return Cluster(
        cpu, num_devices, devices_per_node, "cpu", can_compile=has_compiler(), links=links, calibration=known
    )


def use_calibration(cluster: Cluster) -> Cluster:
    """The cluster with the rates and links measured on this machine, if its devices are like those that were measured.

    Links that were given are kept.
    """
    calibration = find_calibration(find_cache_dir())
    if calibration is None or calibration.is_cpu != (cluster.kind == "cpu"):
        return cluster
    if calibration.is_cpu:
        return calibrated_cluster(calibration, cluster.num_devices, cluster.devices_per_node)
    same = find_accelerator(calibration.device, cluster.accelerator.memory_bytes or 0)
    if cluster.accelerator.name not in (calibration.device, None if same is None else same.name):
        return cluster
    links = calibration.links(cluster.devices_per_node) if cluster.links is None else cluster.links
    return replace(cluster, links=links, calibration=calibration)


def describe_cluster(num_devices: int, devices_per_node: int) -> Cluster:
    """Machines like this one, as used by `devices_per_node` processes each."""
    import torch

    if torch.cuda.is_available():
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        has_float8 = torch.cuda.get_device_capability() >= (8, 9)
        return use_calibration(
            Cluster(_describe_gpu(), num_devices, devices_per_node, "cuda", has_bf16, float8_supported=has_float8)
        )
    if (calibration := find_calibrated_cpu()) is not None:
        return calibrated_cluster(calibration, num_devices, devices_per_node)
    cpu = _describe_cpu(devices_per_node)
    return Cluster(cpu, num_devices, devices_per_node, "cpu", can_compile=has_compiler())


def has_compiler() -> bool:
    """Whether this machine has a C++ compiler and Python's headers, which `torch.compile` needs on a CPU."""
    compilers = (read_environment().get("CXX"), "g++", "clang++", "c++")
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    return headers.is_file() and any(shutil.which(name) for name in compilers if name)


def _describe_gpu() -> Accelerator:
    import torch

    properties = torch.cuda.get_device_properties(0)
    accelerator = find_accelerator(properties.name, properties.total_memory)
    if accelerator is None:
        rates = _measure_in_child()
        return Accelerator(properties.name, properties.total_memory, *rates, None, "measured when the run started")
    source = f"{accelerator.source}; memory as the driver reports it"
    return replace(accelerator, memory_bytes=properties.total_memory, source=source)


def _measure_in_child() -> tuple[float | None, float | None]:
    """FLOP/s of this machine's GPU in bf16 and in fp32, or (None, None) if it cannot be measured.

    Measured in another process: in this one, which is the parent of the workers, the memory that CUDA allocates for a
    process would stay in use on their first GPU.
    """
    words = f"import sys; from {__name__} import measure_matmul_flops; print(*map(measure_matmul_flops, sys.argv[1:]))"
    command = [sys.executable, "-c", words, "bfloat16", "float32"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        logger.warning(f"hardware: the speed of the GPU could not be measured: {done.stderr.strip()[-200:]}")
        return None, None
    bf16_flops, fp32_flops = map(float, done.stdout.split()[-2:])
    return bf16_flops, fp32_flops


def _describe_cpu(num_processes: int) -> Accelerator:
    """One process's share of the machine's memory and cores, at the rates of matrix products measured on one core."""
    import torch

    cores = torch.get_num_threads() / num_processes
    bf16_flops, fp32_flops = (cores * rate for rate in measure_core_flops())
    memory = machine_memory_bytes() // num_processes
    return Accelerator("cpu", memory, bf16_flops, fp32_flops, None, "measured on one core when the run started")


@cache
def measure_core_flops() -> tuple[float, float]:
    """FLOP/s of one core of this CPU in bf16 and in fp32: the best of a few square matmuls of each, in alternation.

    Uses CPU time, so that other work on the machine does not affect the comparison. The matmuls are small enough to
    take less than a second if bf16 is emulated.
    """
    import torch

    size = 512
    factors = [torch.ones(size, size, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)]
    with torch.no_grad():
        bf16_seconds, fp32_seconds = time_on_a_core([partial(torch.mm, factor, factor) for factor in factors])
    return 2.0 * size**3 / bf16_seconds, 2.0 * size**3 / fp32_seconds


def time_on_a_core(works: Sequence[Callable[[], object]]) -> list[float]:
    """CPU seconds of each work on one core: the best of a few, in alternation."""
    import torch

    best = [float("inf")] * len(works)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(_TURNS):
            for index, work in enumerate(works):
                started = time.thread_time()
                work()
                best[index] = min(best[index], time.thread_time() - started)
    finally:
        torch.set_num_threads(threads)
    return best


def find_peak_flops(device: "torch.device", compute_dtype: str) -> float:
    """The peak FLOP/s of this process's device, the denominator of MFU: from the table, else measured now.

    On a CPU every process measures its own share at the same time, so call it on all ranks together.
    """
    import torch

    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        accelerator = find_accelerator(properties.name, properties.total_memory)
        peak = None if accelerator is None else accelerator.peak_flops(compute_dtype)
        if peak is not None:
            return peak
    return measure_matmul_flops(compute_dtype)


def describe_peak(device: "torch.device") -> str:
    """The source of the figure of `find_peak_flops`."""
    return "its vendor's figure" if device.type == "cuda" else "the rate of matrix products measured now"


def machine_memory_bytes() -> int:
    """The machine's memory in bytes, or the container's limit if that is smaller."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        limit = read_system_file(path).strip()
        if limit.isdigit():
            total = min(total, int(limit))
    return total


@cache
def measure_matmul_flops(dtype_name: str, budget_seconds: float = 0.15) -> float:
    """FLOP/s of the best of a few square matmuls on this machine's device, with torch's threads at the first call.

    A CPU that emulates the type, as many do fp16, would compute for seconds: its figure is that of small matmuls.
    """
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype: torch.dtype = getattr(torch, dtype_name)
    if device.type == "cuda":
        return _time_matmuls(8192, dtype, device, budget_seconds)
    small = _time_matmuls(256, dtype, device, budget_seconds / 10)
    emulated = 2.0 * 1024**3 / small > _LONG_MATMUL_SECONDS
    return small if emulated else _time_matmuls(1024, dtype, device, budget_seconds)


def _time_matmuls(size: int, dtype: "torch.dtype", device: "torch.device", budget_seconds: float) -> float:
    """FLOP/s of the best of the square matmuls of this size that begin within the budget, and of three at least.

    With less, another program that runs in between makes the device look slow.
    """
    import torch

    left = torch.ones(size, size, dtype=dtype, device=device)
    wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    seconds: list[float] = []
    deadline = time.perf_counter() + budget_seconds
    with torch.no_grad():
        while len(seconds) < 3 or time.perf_counter() < deadline:
            started = time.perf_counter()
            torch.mm(left, left)
            wait()
            seconds.append(time.perf_counter() - started)
    return 2.0 * size**3 / min(seconds)
