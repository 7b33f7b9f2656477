"""The health of this machine before it takes part in a job: its GPUs, memory, disk, and how fast it computes.

What NVIDIA's driver says of the GPUs is that of NVML (https://docs.nvidia.com/deploy/nvml-api/), through `pynvml`, and
the kernel's log, with Xid errors (https://docs.nvidia.com/deploy/xid-errors/).
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from echelon.ground.cores import read_system_file
from echelon.ground.sizes import render_bytes
from echelon.ground.variables import find_system_root, read_environment
from echelon.planner.hardware.detection import machine_memory_bytes, measure_core_flops, time_on_a_core
from echelon.planner.hardware.gpu_check import count_visible

# Less than a process needs to import PyTorch, and than a run writes in its first minute.
_LEAST_MEMORY, _LEAST_DISK = 256 * 2**20, 256 * 2**20
_COPIED = {"cpu": 2**24, "cuda": 2**28}  # numbers of a copy, more than caches hold
_TURNS = 4
_MEASURE_SECONDS = 120.0
_SIZE = 8192

# The Xid errors after which a GPU needs a reset or a replacement; others are often errors of a program.
_SERIOUS_XIDS = {
    48: "a double-bit memory error",
    64: "a failed row remapping",
    74: "an NVLink error",
    79: "it has fallen off the bus",
    95: "an uncontained memory error",
    119: "a timeout of its GSP processor",
    120: "an error of its GSP processor",
    140: "an unrecovered memory error",
}
_XID = re.compile(r"^\d+,\d+,(\d+),[^;]*;NVRM: Xid \(PCI:([0-9a-fA-F:]+)[^)]*\): (\d+)", re.M)
# An older error may have been repaired by a reset since, of which the log says nothing.
_RECENT_SECONDS = 3600.0
_RESET = "drain the machine, reset the GPU with `nvidia-smi --gpu-reset` or reboot, and replace it if that comes back"


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


@dataclass(frozen=True)
class GpuHealth:
    """What is wrong with the GPUs of this machine, a sentence each, with the fix.

    `faults`: a training is likely to fail, or to compute wrong numbers. `slowdowns`: GPUs that run below their speed.
    """

    faults: tuple[str, ...] = ()
    slowdowns: tuple[str, ...] = ()


def read_gpu_health() -> GpuHealth:
    """Ask the driver about the GPUs that this process may use. Nothing is found without a driver or without pynvml."""
    try:
        import pynvml
    except ImportError:
        return GpuHealth()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return GpuHealth()
    try:
        return _examine(pynvml)
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _examine(nvml: Any) -> GpuHealth:
    faults: list[str] = []
    slowdowns: list[str] = []
    names: dict[str, str] = {}
    links: dict[str, int] = {}
    for ordinal, index in _find_visible(nvml):
        name = f"GPU {ordinal}"
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            names[_find_bus(nvml.nvmlDeviceGetPciInfo(handle).busId)] = name
        except nvml.NVMLError as error:
            faults.append(f"{name} does not answer its driver ({error}); {_RESET}")
            continue
        faults += [f"{name} {words}; {_RESET}" for words in _find_memory_faults(nvml, handle)]
        if (cause := _find_slowdown(nvml, handle)) is not None:
            slowdowns.append(f"{name} runs below its speed ({cause}); check the cooling and the power of the machine")
        links[name] = _count_links(nvml, handle)
    most = max(links.values(), default=0)
    slowdowns += [  # no fault: cards may be bridged in pairs, and others not
        f"{name} has {count} active NVLinks, and another GPU of the machine {most}; unless it is built so, {_RESET}"
        for name, count in links.items()
        if count < most
    ]
    faults += [f"{name} had Xid {number}, {_SERIOUS_XIDS[number]}; {_RESET}" for name, number in _find_xids(names)]
    return GpuHealth(tuple(faults), tuple(slowdowns))


def _find_visible(nvml: Any) -> list[tuple[str, int]]:
    """The GPUs that this process may use: how each is called in messages, and its index in NVML."""
    count = nvml.nvmlDeviceGetCount()
    chosen = read_environment().get("CUDA_VISIBLE_DEVICES")
    numbers = [int(word) for word in (chosen or "").split(",") if word.strip().isdigit()]
    if not numbers and chosen not in ("", "-1"):  # all, or named by an id
        numbers = list(range(count))
    return [(str(number), number) for number in numbers if number < count]


def _find_memory_faults(nvml: Any, handle: Any) -> Iterator[str]:
    """What NVML says of a GPU's memory; a GPU that has no such counter has no such fault."""
    with suppress(nvml.NVMLError):
        kinds = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
        if count := nvml.nvmlDeviceGetTotalEccErrors(handle, *kinds):
            yield f"has {count} uncorrectable memory (ECC) errors since its last reset"
    with suppress(nvml.NVMLError):
        _, _, is_pending, has_failed = nvml.nvmlDeviceGetRemappedRows(handle)
        if has_failed:
            yield "could not remap a row of its memory, and has to be replaced"
        elif is_pending:
            yield "has to be reset to remap a row of its memory"
    with suppress(nvml.NVMLError):
        if nvml.nvmlDeviceGetRetiredPagesPendingStatus(handle):
            yield "has to be reset to retire pages of its memory"


def _find_slowdown(nvml: Any, handle: Any) -> str | None:
    """Why the hardware has lowered the clock of a GPU now; None if it has not."""
    causes = {
        nvml.nvmlClocksThrottleReasonHwThermalSlowdown: "it is too hot",
        nvml.nvmlClocksThrottleReasonSwThermalSlowdown: "it is too hot",
        nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown: "it lacks power",
    }
    with suppress(nvml.NVMLError):
        reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        return next((words for bit, words in causes.items() if reasons & bit), None)
    return None


def _count_links(nvml: Any, handle: Any) -> int:
    """The number of NVLinks of a GPU that are active."""
    count = 0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        with suppress(nvml.NVMLError):  # it has no such link
            count += nvml.nvmlDeviceGetNvLinkState(handle, link) == nvml.NVML_FEATURE_ENABLED
    return count


def _find_xids(names: Mapping[str, str]) -> list[tuple[str, int]]:
    """The serious Xid errors of the last hour in the kernel's log: the GPU, and the number; each once.

    `names`: by place on the bus. Empty where the log may not be read, as in most containers.
    """
    errors: dict[tuple[str, int], None] = {}
    for microseconds, bus, number in _XID.findall(_read_kernel_log()):
        is_recent = time.monotonic() - int(microseconds) / 1e6 < _RECENT_SECONDS
        if is_recent and int(number) in _SERIOUS_XIDS and (name := names.get(_find_bus(bus))) is not None:
            errors[name, int(number)] = None
    return list(errors)


def _find_bus(text: str | bytes) -> str:
    """A place on the PCI bus as NVML or the kernel writes it, in one form: the last digits of the domain, bus, device.

    NVML: `00000000:3B:00.0`; the kernel: `0000:3b:00`.
    """
    domain, _, rest = (text.decode() if isinstance(text, bytes) else text).lower().partition(":")
    return f"{domain[-4:]}:{rest.partition('.')[0]}"


def _read_kernel_log() -> str:
    """The records of the kernel's log; empty if this user may not read it."""
    parts: list[bytes] = []
    try:
        log = os.open(find_system_root() / "dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return ""
    try:
        while True:
            with suppress(BrokenPipeError):  # older records were overwritten meanwhile
                if not (part := os.read(log, 2**16)):
                    break
                parts.append(part)
    except OSError:  # the end: BlockingIOError
        pass
    finally:
        os.close(log)
    return b"".join(parts).decode(errors="replace")
