"""Measures the memory of a forward and a backward pass, by part, from the bytes that the device's allocator holds.

Nothing is measured in the steps of a run: an engine measures its rehearsal.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from echelon.ground.variables import set_default_variables
from echelon.learn.model.sharding import local_part
from echelon.planner.memory_parts import MemoryParts

# Moments of a microbatch: before the layers run, when the last hidden states are there, and when their gradient is.
_BEGIN, _HIDDEN, _LOSS = "begin", "hidden", "loss"
_END = "end"
_MARK = "echelon memory: "


@dataclass(frozen=True)
class _Moment:
    """`held`: bytes allocated now, above some constant. `peak`: the most since the moment before."""

    name: str
    held: int
    peak: int


class _Allocations(Protocol):
    """Observes the allocator of one device within its block; `moments` is complete after it."""

    moments: list[_Moment]

    def __enter__(self) -> object: ...

    def __exit__(self, *error: Any) -> None: ...

    def mark(self, name: str) -> None:
        """Note this moment."""


class _DeviceAllocations(_Allocations):
    """Reads the counters of the caching allocator of a GPU, which are kept on the host: nothing waits for the GPU."""

    def __init__(self, device: torch.device) -> None:
        self.moments: list[_Moment] = []
        self._device = device

    @override
    def __enter__(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    @override
    def __exit__(self, *error: Any) -> None:
        self.mark(_END)

    @override
    def mark(self, name: str) -> None:
        held, peak = torch.cuda.memory_allocated(self._device), torch.cuda.max_memory_allocated(self._device)
        self.moments.append(_Moment(name, held, peak))
        torch.cuda.reset_peak_memory_stats(self._device)


class HostAllocations(_Allocations):
    """Adds up the allocations that torch's profiler records: the allocator of a CPU has no counters."""

    def __init__(self) -> None:
        self.moments: list[_Moment] = []
        set_default_variables({"KINETO_LOG_LEVEL": "6"})  # the profiler would log each start and end
        profile: Any = torch.autograd.profiler.profile  # without annotations
        self._profiler = profile(use_kineto=True, profile_memory=True)

    @override
    def __enter__(self) -> None:
        self._profiler.__enter__()

    @override
    def __exit__(self, *error: Any) -> None:
        self._profiler.__exit__(*error)
        if error[0] is not None:
            return
        held = peak = 0
        for event in sorted(self._profiler.kineto_results.events(), key=lambda event: event.start_ns()):
            name = event.name()
            if name == "[memory]":
                held += event.nbytes()
                peak = max(peak, held)
            elif name.startswith(_MARK):
                self.moments.append(_Moment(name.removeprefix(_MARK), held, peak))
                peak = held
        self.moments.append(_Moment(_END, held, peak))

    @override
    def mark(self, name: str) -> None:
        with torch.profiler.record_function(_MARK + name):
            pass


class Footprint:
    """Measures the microbatches that run within its block."""

    def __init__(self, decoder: nn.Module, backbone: nn.Module, device: torch.device) -> None:
        """`backbone`: the module of `decoder` whose first output is the last hidden states."""
        self._decoder = decoder
        self._backbone = backbone
        self._device = device
        self._is_sharded = any(isinstance(parameter, DTensor) for parameter in decoder.parameters())
        self._gathered: list[int] = []
        self._allocations: _Allocations = _DeviceAllocations(device) if device.type == "cuda" else HostAllocations()

    def __enter__(self) -> None:
        self._hooks = (
            self._backbone.register_forward_pre_hook(self._before),
            self._backbone.register_forward_hook(self._after),
        )
        self._allocations.__enter__()

    def __exit__(self, *error: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        self._allocations.__exit__(*error)

    def parts(self, optimizer: Iterable[Tensor], has_buckets: bool, reference: nn.Module | None) -> MemoryParts | None:
        """Return the parts, each at its largest, on this rank. Called after the block, before gradients are cleared.

        None for a model that does not run its backbone once in each forward pass. The activations of a pipeline stage
        are those of all microbatches that it keeps at once.

        Args:
            optimizer: the state of the optimizer.
            has_buckets: whether memory for gradients was there before the block.
            reference: the frozen model with which the objective compares.
        """
        moments = self._allocations.moments
        names = [moment.name for moment in moments]
        end = len(names) - 1
        # Microbatches whose activations were there at once: the marks between the last hidden states and the end.
        count = end - 1 - max((index for index, name in enumerate(names) if name == _HIDDEN), default=end)
        begin, hidden, loss = end - 3 * count, end - count - 1, end - count
        at_once = [*(_BEGIN, _HIDDEN) * count, *(_LOSS,) * count, _END]
        if count < 1 or names[begin:] != at_once or names.count(_BEGIN) != names.count(_LOSS):
            return None
        weights = self._count((*self._decoder.parameters(), *self._decoder.buffers()))
        gradients = self._count(
            parameter.grad for parameter in self._decoder.parameters() if parameter.grad is not None
        )
        state = self._count(optimizer)
        # The last microbatches, which find the gradients of those before.
        kept = moments[hidden].held - moments[begin].held - (self._gathered[hidden] - self._gathered[begin])
        added = moments[loss].peak - moments[hidden].held
        before = weights + state + self._gathered[0] + (gradients if has_buckets else 0)
        peak = before + max(moment.peak for moment in moments[loss:]) - moments[0].held
        other = max(0, peak - (weights + gradients + state + kept + added))
        frozen = 0 if reference is None else self._count((*reference.parameters(), *reference.buffers()))
        return MemoryParts(weights, gradients, state, kept, added, other, frozen)

    def _before(self, module: nn.Module, inputs: Any) -> None:
        if torch.is_grad_enabled():
            self._mark(_BEGIN)

    def _after(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        hidden: Tensor = outputs[0]
        if hidden.requires_grad:
            self._mark(_HIDDEN)
            hook: Any = hidden.register_hook(lambda gradient: reached())  # type: ignore[no-untyped-call]

            def reached() -> None:
                hook.remove()  # a pipeline may pass here again, for the gradients of weights
                self._mark(_LOSS)

    def _mark(self, name: str) -> None:
        whole = (parameter for parameter in self._decoder.parameters() if not isinstance(parameter, DTensor))
        self._gathered.append(self._count(whole) if self._is_sharded else 0)
        self._allocations.mark(name)

    def _count(self, tensors: Iterable[Tensor]) -> int:
        """Return the bytes of distinct storages on the device."""
        parts = (local_part(tensor.detach()) for tensor in tensors)
        storages = [part.untyped_storage() for part in parts if part.device.type == self._device.type]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
