"""Timestamps on a device's own clock, which no host waits for."""

import time

import torch


class Stamp:
    """A timestamp: a CUDA event on a GPU, because the host runs ahead, else the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record()
        self._host = time.perf_counter()

    def wait(self) -> None:
        """Wait until the device has reached this point."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: "Stamp") -> float:
        """Return the time since an earlier stamp of the same device; waits until this one is reached."""
        if self._event is None or earlier._event is None:
            return self._host - earlier._host
        self.wait()
        return float(earlier._event.elapsed_time(self._event)) / 1e3
