"""What a rank measures of its own steps: time, memory, bytes sent, and the load of its GPU."""

import resource
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from typing_extensions import override

from echelon.learn.distributed.stamp import Stamp
from echelon.learn.distributed.traffic import count_traffic
from echelon.run.training.callbacks import FinishedStep, Monitor
from echelon.run.training.metrics import GpuLoad, Measured, find_message_wait
from echelon.run.training.straggler import read_own_time

_PERIOD_SECONDS = 1.0  # NVML itself averages over 1/6 s to 1 s


class GpuMeter(Monitor):
    """Reads the load of a GPU once a second, in a thread: a call of NVML takes milliseconds, or hangs with the GPU.

    NVML asks the driver and not the stream of kernels, so nothing waits for the device. Without a GPU, without NVML's
    Python package `pynvml`, or where the GPU does not tell, there is no load.
    """

    def __init__(self, device: torch.device, period_seconds: float = _PERIOD_SECONDS) -> None:
        self._device = device
        self._period_seconds = period_seconds
        self._lock = threading.Lock()
        self._new: list[GpuLoad] = []
        self._latest: GpuLoad | None = None
        self._ended = threading.Event()

    @override
    def on_start(self, step: int) -> None:
        if self._device.type == "cuda":
            self._ended = threading.Event()
            threading.Thread(target=self._watch, args=(self._ended,), name="gpu meter", daemon=True).start()

    @override
    def on_end(self) -> None:
        self._ended.set()  # without waiting for a call that is under way

    def take(self) -> GpuLoad | None:
        """Return the mean load since the last call, or the latest one if there is no newer; None if unknown."""
        with self._lock:
            new, self._new = self._new, []
        if new:
            self._latest = GpuLoad(*(sum(values) / len(new) for values in zip(*new, strict=True)))
        return self._latest

    def _watch(self, ended: threading.Event) -> None:
        while (load := _read_load(self._device)) is not None:
            with self._lock:
                self._new.append(load)
            if ended.wait(self._period_seconds):
                return


def _read_load(device: torch.device) -> GpuLoad | None:
    """Return the present load of a GPU; None if it cannot be read."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        load, watts = torch.cuda.utilization(device) / 100, torch.cuda.power_draw(device) / 1000
        return GpuLoad(load, watts, torch.cuda.clock_rate(device))
    except (RuntimeError, ImportError, pynvml.NVMLError):  # not supported by the GPU or its driver
        return None


class StepMeter(Monitor):
    """Measures the steps of this rank."""

    def __init__(self, device: torch.device, log_every: int, find_mfu: Callable[[float], float | None]) -> None:
        """`find_mfu`: returns the MFU at a number of tokens per second over all ranks; None if unknown."""
        self.traffic = count_traffic()
        self._device = device
        self._log_every = log_every
        self._find_mfu = find_mfu
        self.gpu = GpuMeter(device)
        self._peak_bytes: int | None = None
        self._mark = Stamp(device)
        self._measured_at, self._entered = time.perf_counter(), 0.0

    def restart(self) -> None:
        """Start the clock of the next step: time since the last step does not count, nor do bytes sent since then."""
        self.traffic.take()
        self._measured_at = time.perf_counter()
        self._mark = Stamp(self._device)

    @override
    def around_step(self, step: int) -> AbstractContextManager[None]:
        self._entered = read_own_time()
        return super().around_step(step)

    def measure(self, step: int) -> Measured:
        """Return what this rank measured since its last step: peak memory at the first step and at logged ones."""
        is_due = self._peak_bytes is None or (step + 1) % self._log_every == 0
        peak = peak_memory_bytes(self._device) if is_due else None
        busy = 0.0 if self._device.type == "cuda" else read_own_time() - self._entered
        wall, self._measured_at = time.perf_counter() - self._measured_at, time.perf_counter()
        return Measured(peak, self.traffic.take(), wall, busy, self.gpu.take())

    def finish(self, finished: Stamp) -> float:
        """Return the seconds of the next finished step, which ended at this moment."""
        seconds, self._mark = finished.seconds_since(self._mark), finished
        return seconds

    @override
    def on_metrics(self, step: FinishedStep) -> None:
        metrics, rate = step.metrics, step.metrics.tokens / step.seconds
        if metrics.memory_peak_bytes is not None:
            self._peak_bytes = metrics.memory_peak_bytes
        step.measured |= {
            "tokens_per_second": rate,
            "step_seconds": step.seconds,
            "mfu": self._find_mfu(rate),
            "memory_peak_bytes": self._peak_bytes,
            "message_wait_seconds": None if self._device.type == "cuda" else find_message_wait(metrics),
        }


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this process: reserved GPU memory, or resident memory without a GPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
