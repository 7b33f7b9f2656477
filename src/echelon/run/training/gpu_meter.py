"""The utilisation and the power of this process's GPU, as NVML reports them."""

import threading
from typing import NamedTuple

import torch

_PERIOD_SECONDS = 1.0  # NVML itself averages over 1/6 s to 1 s


class GpuLoad(NamedTuple):
    """The share of the time in which a kernel ran, from 0 to 1, and the power in watts."""

    utilization: float
    watts: float


class GpuMeter:
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

    def start(self) -> None:
        """Start reading, if there is a GPU."""
        if self._device.type == "cuda":
            self._ended = threading.Event()
            threading.Thread(target=self._watch, args=(self._ended,), name="gpu meter", daemon=True).start()

    def stop(self) -> None:
        """Stop reading; does not wait for a call that is under way."""
        self._ended.set()

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
        return GpuLoad(torch.cuda.utilization(device) / 100, torch.cuda.power_draw(device) / 1000)
    except (RuntimeError, ImportError, pynvml.NVMLError):  # not supported by the GPU or its driver
        return None
