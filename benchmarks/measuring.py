"""What several benchmarks share: the machine in words, its measured ceilings, peak memory, Dynamo's counters."""

import datetime
import os
import platform
import statistics
import sys
import time
import traceback
from importlib import metadata
from pathlib import Path

import torch

# Operands large enough for the full rate, small enough for a second of measuring.
MATMUL_SIZE = {"cuda": 8192, "cpu": 512}
COPY_BYTES = {"cuda": 4 * 2**30, "cpu": 2**26}


def describe_machine(*packages):
    """One line: date, device, load, and the versions of Python and of packages."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores"
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in packages)
    return (
        f"{datetime.date.today()}, {device}, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}, "
        f"{versions}"
    )


def synchronize():
    """Wait until the GPU, if there is one, has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def median_seconds(run, repeats=10, warmups=3):
    """The median time of a call, including its work on the GPU."""
    seconds = []
    for _ in range(warmups + repeats):
        synchronize()
        started = time.perf_counter()
        run()
        synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[warmups:])


def free_cache():
    """Return the unused memory of torch's allocator to the GPU, for other processes."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measure_matmul(precision="bf16"):
    """FLOP/s of a square product of random numbers in bf16 or fp32; constant numbers would be faster on a GPU."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    size = MATMUL_SIZE[kind]
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
    left, right = (torch.randn(size, size, device=kind, dtype=dtype) for _ in range(2))
    return 2 * size**3 / median_seconds(lambda: torch.mm(left, right))


def measure_copy():
    """Bytes per second of a copy within the device's memory, counting those read and those written."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    source = torch.empty(COPY_BYTES[kind], device=kind, dtype=torch.uint8).random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / median_seconds(lambda: target.copy_(source))


def resident_bytes(field):
    """A field of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def peak_bytes():
    """The peak memory since the last reset: allocated bytes on a GPU, resident memory on a CPU."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else resident_bytes("VmHWM")


def reset_peak():
    """Reset the peak to the current memory."""
    if torch.cuda.is_available():
        torch.cuda.init()
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")  # proc(5)


def count_graphs():
    """(compiled graphs, graph breaks, recompilations) of Dynamo in this process; it is not imported for that."""
    if "torch._dynamo.utils" not in sys.modules:
        return 0, 0, 0
    from torch._dynamo.utils import counters, get_compilation_metrics

    recompiled = sum(each.recompile_reason is not None for each in get_compilation_metrics())
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()), recompiled


def spread(values, form):
    """The median and the range."""
    low, middle, high = (format(value, form) for value in (min(values), statistics.median(values), max(values)))
    return f"{middle} ({low} to {high})"


class NotHere(Exception):
    """What a row of a table needs is not on this machine, or not in this version."""


def measure_rows(names, seconds, measure):
    """Call `measure(name)` for each row of a table, whatever happens to the others, and print what was not measured.

    A row is skipped if fewer of the `seconds` are left than the longest row so far took. Returns whether no row failed.
    """
    started, longest, remarks, failed = time.monotonic(), 0.0, [], False
    for name in names:
        begun = time.monotonic()
        left = seconds - (begun - started)
        if left < longest:
            remarks.append(f"{name}: skipped, {left:.0f} s were left and another row took {longest:.0f} s")
            continue
        try:
            measure(name)
        except NotHere as reason:
            remarks.append(f"{name}: not measured, {reason}")
        except KeyboardInterrupt:
            remarks.append(f"{name}: stopped after {time.monotonic() - begun:.0f} s, and no row after it was started")
            failed = True
            break
        except Exception as error:
            traceback.print_exc()
            remarks.append(f"{name}: failed, {str(error).splitlines()[0] if str(error) else type(error).__name__}")
            failed = True
        longest = max(longest, time.monotonic() - begun)
    print("".join(f"\n- {remark}" for remark in remarks), flush=True)
    return not failed
