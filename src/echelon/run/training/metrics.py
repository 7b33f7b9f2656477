"""Metrics of a step: collected on the device without synchronization, reduced in one sum, and read one step late."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.ground.errors import TrainingError
from echelon.ground.stop_request import agreed_stop
from echelon.learn.distributed.mesh import AXES, Meshes, start_all_reduce
from echelon.learn.distributed.stamp import Stamp
from echelon.learn.engines.engine import Targets
from echelon.run.training.bad_steps import Verdict

LIMB_BITS = 16  # a batch hash is reduced as four limbs, whose sums over any number of ranks are exact in fp64
_NUM_LIMBS = 4


@dataclass(frozen=True)
class StepRecord:
    """The values of one step on this rank, before any reduction. Tensors are scalars on the device.

    expert_tokens: the tokens of each router's experts, [routers, experts].
    """

    step: int
    loss_sum: Tensor
    router_sum: Tensor | None
    expert_tokens: Tensor | None
    targets: Targets
    grad_norm: Tensor
    verdict: Verdict
    loss_scale: Tensor | None
    learning_rate: float
    num_tokens: int
    num_labels: int
    batch_hash: int
    data_wait_seconds: float
    stop_flags: list[float]
    further: Mapping[str, Tensor] = field(default_factory=dict)
    """Metrics of a loop's own, by name, of which the row has the mean over all ranks."""

    def joined_with(self, other: "StepRecord") -> "StepRecord":
        """Return the values of two shares of one step, of which `other` is the later one."""
        return replace(
            other,
            loss_sum=self.loss_sum + other.loss_sum,
            router_sum=_add(self.router_sum, other.router_sum),
            expert_tokens=_add(self.expert_tokens, other.expert_tokens),
            targets=Targets(*(mine + theirs for mine, theirs in zip(self.targets, other.targets, strict=True))),
            grad_norm=torch.maximum(self.grad_norm, other.grad_norm),
            verdict=self.verdict.joined_with(other.verdict),
            num_tokens=self.num_tokens + other.num_tokens,
            num_labels=self.num_labels + other.num_labels,
            batch_hash=self.batch_hash + other.batch_hash,
            data_wait_seconds=self.data_wait_seconds + other.data_wait_seconds,
        )

    def emptied(self, step: int, learning_rate: float, stop_flags: list[float]) -> "StepRecord":
        """Return the values of a rank that reads nothing in a step, shaped like these."""
        return replace(
            self,
            step=step,
            loss_sum=torch.zeros_like(self.loss_sum),
            router_sum=None if self.router_sum is None else torch.zeros_like(self.router_sum),
            expert_tokens=None if self.expert_tokens is None else torch.zeros_like(self.expert_tokens),
            targets=Targets(*map(torch.zeros_like, self.targets)),
            grad_norm=torch.zeros_like(self.grad_norm),
            verdict=self.verdict.emptied(),
            learning_rate=learning_rate,
            num_tokens=0,
            num_labels=0,
            batch_hash=0,
            data_wait_seconds=0.0,
            stop_flags=stop_flags,
        )


def _add(mine: Tensor | None, theirs: Tensor | None) -> Tensor | None:
    return None if mine is None or theirs is None else mine + theirs


class GpuLoad(NamedTuple):
    """Of a GPU the share of the time in which a kernel ran, from 0 to 1, the power in watts, and the clock in MHz."""

    utilization: float
    watts: float
    clock: float


@dataclass(frozen=True)
class Measured:
    """What this rank measured since its last step, and reports with the metrics of this one.

    peak_bytes: its peak memory, on all ranks or on none. sent_bytes: what it sent in collectives. wall_seconds: since
    its last step; busy_seconds: those in which it worked for the step, without waiting for other ranks or for data.
    gpu: the load of its GPU.
    """

    peak_bytes: int | None = None
    sent_bytes: float = 0.0
    wall_seconds: float = 0.0
    busy_seconds: float = 0.0
    gpu: GpuLoad | None = None


_NOTHING = Measured()


@dataclass(frozen=True)
class StepMetrics:
    """The metrics of one step over all ranks, on the host."""

    step: int
    loss: float
    router_loss: float | None
    expert_load: float | None
    grad_norm: float
    committed: bool
    loss_scale: float | None
    learning_rate: float
    tokens: int
    target_tokens: int
    batch_hash: str
    data_wait_seconds: float
    sent_bytes: float
    """That a rank sent in collectives, on average."""
    wall_seconds: float
    """Since the last step, on average."""
    own_seconds: Sequence[float]
    """Of each rank: working for the step and waiting for data, but not for other ranks. On GPUs by their clocks."""
    gpu: GpuLoad | None
    """The mean over ranks with a GPU that tells it; None without any."""
    memory_peak_bytes: int | None
    is_bad: bool
    bad_in_a_row: int
    """Number of consecutive bad steps up to this one, the largest of all replicas."""
    stopped_by: str | None
    """The signal or budget limit that stops the run, on any rank."""
    further: Mapping[str, float] = field(default_factory=dict)
    """Metrics of a loop's own, by name: the mean over all ranks."""


class PendingMetrics:
    """The metrics of a step while they are reduced and copied to the host. The constructor is collective.

    One of the ranks that read the same sequences counts them, and one of those that compute the same loss reports it.
    The loss is divided by the targets of all ranks, even if each replica divides its gradients by its own. Of the
    gradient norms of replicas the largest is reported, and a step counts as applied if every replica applied it.
    The constructor waits for neither the device nor another replica. `read` waits only for this step, not for later
    ones.
    """

    def __init__(self, record: StepRecord, meshes: Meshes, measured: Measured = _NOTHING) -> None:
        """Of the peak memory of the ranks, `read` returns the largest."""
        device, peak_bytes = record.loss_sum.device, measured.peak_bytes
        limbs = [(record.batch_hash >> (LIMB_BITS * limb)) & (2**LIMB_BITS - 1) for limb in range(_NUM_LIMBS)]
        data = [record.num_tokens, record.num_labels, *limbs]
        router_sum = torch.zeros_like(record.loss_sum) if record.router_sum is None else record.router_sum
        losses = torch.stack([value.double() for value in (record.loss_sum, router_sum, record.targets.own)])
        experts = losses.new_zeros(1, 1) if record.expert_tokens is None else record.expert_tokens.double()
        *load, clock = [0.0] * 4 if measured.gpu is None else [1.0, *measured.gpu]
        own_times = [0.0] * (2 * meshes.num_devices)
        busy_seconds = measured.busy_seconds + record.data_wait_seconds
        own_times[dist.get_rank(meshes.everyone) :: meshes.num_devices] = [busy_seconds, clock]
        membership = meshes.membership if meshes.is_one_model else None
        sees_next = membership is not None and membership.sees_next()
        sums = torch.cat(
            [
                _to_device([float(sees_next)], device),
                losses if meshes.counts_loss else torch.zeros_like(losses),
                _to_device(data if meshes.counts_data else [0] * len(data), device),
                _to_device(
                    [record.data_wait_seconds, measured.sent_bytes, measured.wall_seconds, *load, *record.stop_flags],
                    device,
                ),
                record.verdict.is_bad.double().reshape(1),  # bad on one rank is bad on all, or the ranks would diverge
                (experts if meshes.counts_routers else torch.zeros_like(experts)).flatten(),
                _to_device(own_times, device),
                *(value.double().reshape(1) / meshes.num_devices for value in record.further.values()),
                _place_own(record, meshes).flatten(),
            ]
        )
        sums = _await_device(sums, is_vote=membership is not None)
        peak = _to_device([-1 if peak_bytes is None else peak_bytes], sums.device)
        works = [start_all_reduce(sums, meshes.everyone)]
        if peak_bytes is not None:
            works.append(start_all_reduce(peak, meshes.everyone, dist.ReduceOp.MAX))
        self.record = record
        self._grid = meshes.grid
        self._reduced = (works, sums, peak, experts.shape)
        self._values: Tensor | None = None
        if meshes.outer is None:
            self.collect()
        self.finish()

    def finish(self) -> None:
        """Record that the step is done here."""
        self.finished = Stamp(self.record.loss_sum.device)

    def agree(self, agree: Callable[[Tensor], Tensor]) -> None:
        """Wait for the reduced values, and take what the replicas agree on instead. See `StepVote.agree`."""
        self._values = agree(self.collect())

    def collect(self) -> Tensor:
        """Return the reduced values, which may still be on their way to the host. Waits for other replicas."""
        if self._values is not None:
            return self._values
        works, sums, peak, shape = self._reduced
        for work in filter(None, works):
            work.wait()
        num_replicas, num_experts = self._grid.sizes["replica"], math.prod(shape)
        last = len(sums) - 4 * num_replicas
        norm, commit, in_a_row, scale = sums[last:].view(num_replicas, 4).T
        sees_next, sums = sums[:1], sums[1:last]
        num_ranks, num_further = self._grid.size(AXES), len(self.record.further)
        sizes = [len(sums) - num_experts - 2 * num_ranks - num_further, num_experts, 2 * num_ranks, num_further]
        sums, tokens, times, further = torch.split(sums, sizes)
        agreed = (norm.amax(), commit.amin(), in_a_row.amax(), scale.amin(), expert_load(tokens.view(shape)))
        self._values = _to_host(torch.cat([sees_next, torch.stack(agreed), peak, times, further, sums]))
        return self._values

    def read(self) -> StepMetrics:
        """Return the step's metrics. The only place where the host waits for the device."""
        self.finished.wait()
        _, grad_norm, committed, in_a_row, scale, load, peak, *values = self.collect().tolist()
        num_ranks = self._grid.size(AXES)
        own_times, clocks, values = values[:num_ranks], values[num_ranks : 2 * num_ranks], values[2 * num_ranks :]
        further, sums = values[: len(self.record.further)], values[len(self.record.further) :]
        loss_sum, router_sum, num_targets, tokens, labels, *rest, num_bad = sums
        limbs, (wait, sent, wall, num_loads, utilization, watts, *stops) = rest[:_NUM_LIMBS], rest[_NUM_LIMBS:]
        total = sum(int(limb) << (LIMB_BITS * index) for index, limb in enumerate(limbs)) % 2**64
        return StepMetrics(
            step=self.record.step,
            loss=loss_sum / max(1.0, num_targets),
            router_loss=None if self.record.router_sum is None else router_sum / max(1.0, num_targets),
            expert_load=None if self.record.expert_tokens is None else load,
            grad_norm=grad_norm,
            committed=bool(committed),
            loss_scale=None if self.record.loss_scale is None else scale,
            learning_rate=self.record.learning_rate,
            tokens=int(tokens),
            target_tokens=int(labels),
            batch_hash=f"{total:016x}",
            data_wait_seconds=wait / num_ranks,
            sent_bytes=sent / num_ranks,
            wall_seconds=wall / num_ranks,
            own_seconds=own_times if 0.0 in clocks else add_gpu_seconds(own_times, clocks, wall / num_ranks),
            gpu=GpuLoad(utilization / num_loads, watts / num_loads, sum(clocks) / num_loads) if num_loads else None,
            memory_peak_bytes=None if peak < 0 else int(peak),
            is_bad=num_bad > 0,
            bad_in_a_row=int(in_a_row),
            stopped_by=agreed_stop(stops),
            further=dict(zip(self.record.further, further, strict=True)),
        )


def _place_own(record: StepRecord, meshes: Meshes) -> Tensor:
    """Return the values that differ between replicas, [replicas, 4]; other than 0 on the first rank of a replica."""
    verdict = record.verdict
    scale = torch.zeros_like(record.loss_sum) if record.loss_scale is None else record.loss_scale
    values = torch.stack([value.double() for value in (record.grad_norm, verdict.commit, verdict.in_a_row, scale)])
    places = values.new_zeros(meshes.grid.sizes["replica"], len(values))
    if not any(coordinate for axis, coordinate in meshes.place.items() if axis != "replica"):
        places[meshes.place["replica"]] = values
    return places


def add_gpu_seconds(own_seconds: Sequence[float], clocks: Sequence[float], wall_seconds: float) -> list[float]:
    """Return the own seconds of each rank with those of its GPU, if computation alone limits the step.

    The GPU with the lowest clock then computes during the whole step, and each other one for a part of it, by the ratio
    of the two clocks.
    """
    lowest = min(clocks)
    return [seconds + wall_seconds * lowest / clock for seconds, clock in zip(own_seconds, clocks, strict=True)]


def expert_load(tokens: Tensor) -> Tensor:
    """Return the tokens of the most used expert over the mean of its router's, of the most uneven router: a scalar.

    Args:
        tokens: of each router's experts, [routers, experts].
    """
    return (tokens.amax(-1) / tokens.mean(-1).clamp(min=1e-9)).amax()


def _to_device(values: list[float], device: torch.device) -> Tensor:
    """Copy numbers to the device as fp64, without waiting for it."""
    host = torch.tensor(values, dtype=torch.float64, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def _await_device(values: Tensor, is_vote: bool) -> Tensor:
    """Copy what is about to be a vote to the host, once the device has done all sums of the step's gradients."""
    return values.cpu() if is_vote else values


def _to_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to the host without waiting; valid once the device has reached this point."""
    if tensor.device.type != "cuda":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def find_message_wait(metrics: StepMetrics) -> float | None:
    """Return the seconds of a step in which even the busiest rank waited for messages; None if that is not measured."""
    busiest = max(metrics.own_seconds, default=0.0)
    is_measured = len(metrics.own_seconds) > 1 and busiest > metrics.data_wait_seconds
    return max(0.0, metrics.wall_seconds - busiest) if is_measured else None


def finite(value: float) -> float | None:
    """Return the value, or None if it is not finite, which JSON cannot represent."""
    return value if math.isfinite(value) else None


def train_row(metrics: StepMetrics, **measured: Any) -> dict[str, Any]:
    """Return a train row of metrics.jsonl: every key, null if not measured, and the further metrics of an own loop.

    Raises TrainingError if one of these has the name of a key.
    """
    row = {
        "kind": "train",
        "step": metrics.step + 1,
        "tokens": None,
        "target_tokens": None,
        "loss": finite(metrics.loss),
        "grad_norm": finite(metrics.grad_norm),
        "learning_rate": metrics.learning_rate,
        "tokens_per_second": None,
        "step_seconds": None,
        "data_wait_seconds": metrics.data_wait_seconds,
        "mfu": None,
        "memory_peak_bytes": None,
        "batch_hash": metrics.batch_hash,
        "skipped": not metrics.committed,
        "loss_scale": metrics.loss_scale,
        "cost_usd": None,
        "sent_bytes": metrics.sent_bytes,
        "message_wait_seconds": None,
        "rank_seconds": None,
        "gpu_utilization": None if metrics.gpu is None else metrics.gpu.utilization,
        "gpu_watts": None if metrics.gpu is None else metrics.gpu.watts,
        "router_loss": None if metrics.router_loss is None else finite(metrics.router_loss),
        "expert_load": metrics.expert_load,
    } | measured
    if taken := sorted(row.keys() & metrics.further.keys()):
        raise TrainingError(f"run.record(..., {taken[0]}=...): every row has this key already; choose another name.")
    return row | {name: finite(value) for name, value in metrics.further.items()}
