"""Divide this machine's devices and cores among the trials that run at the same time."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from echelon.ground.cores import num_cores
from echelon.ground.errors import ConfigError
from echelon.ground.launch_environment import exported
from echelon.ground.variables import read_environment

Item = TypeVar("Item")

_VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class TrialSlot:
    """A slot for one trial at a time: its GPUs as in CUDA_VISIBLE_DEVICES, and its core numbers.

    Both are empty if nothing is assigned, as at other targets.
    """

    index: int
    devices: tuple[str, ...] = ()
    cores: tuple[int, ...] = ()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Restrict processes started in the block to this slot's devices and cores."""
        before = os.sched_getaffinity(0) if self.cores else None
        try:
            if self.cores:
                os.sched_setaffinity(0, self.cores)
            with exported({_VISIBLE: ",".join(self.devices)} if self.devices else {}):
                yield
        finally:
            if before is not None:
                os.sched_setaffinity(0, before)

    def describe(self) -> str:
        """`slot 0: GPUs 0,1; cores 0-7`."""
        parts = [f"{len(self.devices)} GPU(s) {','.join(self.devices)}"] if self.devices else []
        parts += [f"{len(self.cores)} core(s) {_ranges(self.cores)}"] if self.cores else []
        return f"slot {self.index}: {'; '.join(parts) or 'not pinned'}"


def share_machine(count: int) -> tuple[TrialSlot, ...]:
    """Divide this machine into `count` slots, as equal as possible. Raises ConfigError if there are too few GPUs.

    On systems without core pinning (macOS) the slots have no cores.
    """
    devices = _find_devices()
    if devices and len(devices) < count:
        raise ConfigError(
            f"sweep.parallel={count}: each trial needs its own GPU, but this machine has {len(devices)}; use "
            f"parallel: {len(devices)} or less."
        )
    pins = hasattr(os, "sched_getaffinity")
    cores = tuple(sorted(os.sched_getaffinity(0))[: num_cores()]) if pins else ()
    return tuple(
        TrialSlot(index, find_share(devices, index, count), find_share(cores, index, count)) for index in range(count)
    )


def _find_devices() -> tuple[str, ...]:
    import torch

    visible = read_environment().get(_VISIBLE)
    if not torch.cuda.is_available():
        return ()
    count = torch.cuda.device_count()
    names = [name.strip() for name in visible.split(",")] if visible else [str(index) for index in range(count)]
    return tuple(names[:count])


def find_share(items: tuple[Item, ...], index: int, count: int) -> tuple[Item, ...]:
    """Return the items of a slot of `count`: a stretch of them, or one that slots share."""
    if len(items) < count:  # only cores: some trials share one
        return (items[index % len(items)],) if items else ()
    return items[index * len(items) // count : (index + 1) * len(items) // count]


def _ranges(numbers: tuple[int, ...]) -> str:
    """`0-3,8`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
