"""Measuring a step: device tensors gathered without waiting, reduced over ranks in one sum, read one step late."""

import math
import resource
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

LIMB_BITS = 16  # a batch hash travels as four limbs, whose sums over any number of ranks are exact in fp64


@dataclass(frozen=True)
class StepRecord:
    """One step as this rank saw it, before anything was reduced. Tensors are scalars on the device."""

    step: int
    loss_sum: Tensor
    num_targets: Tensor
    grad_norm: Tensor
    commit: Tensor
    learning_rate: float
    num_tokens: int
    batch_hash: int
    data_wait_seconds: float


@dataclass(frozen=True)
class StepMetrics:
    """One step over all ranks, on the host."""

    step: int
    loss: float
    grad_norm: float
    committed: bool
    learning_rate: float
    tokens: int
    target_tokens: int
    batch_hash: str
    data_wait_seconds: float


class Stamp:
    """A moment in the device's own time: an event on a GPU, where the host runs ahead, else the host's clock."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record()
        self._host = time.perf_counter()

    def seconds_since(self, earlier: "Stamp") -> float:
        """Time between two stamps of one device; waits until this one is reached."""
        if self._event is None or earlier._event is None:
            return self._host - earlier._host
        self._event.synchronize()
        return float(earlier._event.elapsed_time(self._event)) / 1e3


class PendingMetrics:
    """A step's sums, on their way over the ranks; `read` waits for them. Building one is collective."""

    def __init__(self, record: StepRecord, group: dist.ProcessGroup) -> None:
        self._record = record
        self.finished = Stamp(record.loss_sum.device)
        limbs = [(record.batch_hash >> (LIMB_BITS * place)) & (2**LIMB_BITS - 1) for place in range(4)]
        host = torch.tensor([record.num_tokens, record.data_wait_seconds, *limbs], dtype=torch.float64)
        sums = torch.cat([record.loss_sum.double().reshape(1), host.to(record.loss_sum.device)])
        self._world_size = dist.get_world_size(group)
        dist.all_reduce(sums, group=group)
        self._sums = sums

    def read(self) -> StepMetrics:
        """Move the sums to the host. The only place where the host waits for the device."""
        loss_sum, tokens, wait, *limbs = self._sums.tolist()
        record = self._record
        num_targets = int(record.num_targets)
        total = sum(int(limb) << (LIMB_BITS * place) for place, limb in enumerate(limbs)) % 2**64
        return StepMetrics(
            step=record.step,
            loss=loss_sum / max(1, num_targets),
            grad_norm=float(record.grad_norm),
            committed=bool(record.commit),
            learning_rate=record.learning_rate,
            tokens=int(tokens),
            target_tokens=num_targets,
            batch_hash=f"{total:016x}",
            data_wait_seconds=wait / self._world_size,
        )


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory this process has held: on the GPU where there is one, else resident memory of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def largest_over_ranks(value: int, device: torch.device, group: dist.ProcessGroup) -> int:
    """The maximum over ranks. Collective."""
    tensor = torch.tensor(value, dtype=torch.int64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)
    return int(tensor)


def finite(value: float) -> float | None:
    """The value, or None where JSON has no number for it."""
    return value if math.isfinite(value) else None


def train_row(metrics: StepMetrics, **measured: Any) -> dict[str, Any]:
    """A row of metrics.jsonl: every key of its kind, null where unknown."""
    return {
        "kind": "train",
        "step": metrics.step + 1,
        "tokens": measured.get("tokens"),
        "target_tokens": measured.get("target_tokens"),
        "loss": finite(metrics.loss),
        "grad_norm": finite(metrics.grad_norm),
        "learning_rate": metrics.learning_rate,
        "tokens_per_second": measured.get("tokens_per_second"),
        "step_seconds": measured.get("step_seconds"),
        "data_wait_seconds": metrics.data_wait_seconds,
        "mfu": measured.get("mfu"),
        "memory_peak_bytes": measured.get("memory_peak_bytes"),
        "batch_hash": metrics.batch_hash,
        "skipped": not metrics.committed,
    }
