"""The interval between saves: a fixed number of steps, or chosen from the cost of a save and the failure rate."""

import math
import statistics
from collections import deque

import torch
import torch.distributed as dist

from echelon.ground.sizes import render_duration
from echelon.planner.reliability import best_interval_seconds, lost_fractions
from echelon.recipe.document import Recipe

# Grattafiori et al., "The Llama 3 Herd of Models" (arXiv 2407.21783), section 3.3.4: 419 unexpected interruptions in 54
# days on 16,384 GPUs, which is one per 50,676 GPU hours.
DEVICE_HOURS_BETWEEN_FAILURES = 50_000.0

# The first save with `auto`, after enough steps to measure their time.
_FIRST_STEPS = 10
_RECENT_STEPS = 50
# Relative change of the interval from which on it is logged.
_ANNOUNCED_CHANGE = 0.2


class SaveInterval:
    """Decides after which steps the run is saved, the same on every rank."""

    def __init__(self, recipe: Recipe, num_samples: int, num_devices: int, step: int) -> None:
        """`num_samples`: sequences per epoch. `step`: steps already done.

        With `auto` the first save of a start comes early, to measure its cost.
        """
        self._rhythm = None if recipe.checkpoint.every == "auto" else recipe.save_rhythm(num_samples)
        hours = recipe.fault.mean_hours_between_failures
        self._failure_seconds = 3600 * (hours or DEVICE_HOURS_BETWEEN_FAILURES / num_devices)
        self._next = step + _FIRST_STEPS
        self._announced = 0
        self._step_seconds: deque[float] = deque(maxlen=_RECENT_STEPS)

    def is_due(self, done: int) -> bool:
        """Whether a save is due after this number of steps."""
        return self._rhythm.is_due(done) if self._rhythm is not None else done >= self._next

    def saw_step(self, seconds: float) -> None:
        """Record the duration of a step."""
        self._step_seconds.append(seconds)

    def learn(self, done: int, stall_seconds: float, write_seconds: float, group: dist.ProcessGroup) -> str | None:
        """After a save, choose the next one; return a line for the user if the interval has changed. Collective.

        Args:
            done: the step that was saved.
            stall_seconds: how long the save blocked training on this rank.
            write_seconds: how long the previous save took until it was published; 0 if there was none.
            group: all ranks. The slowest rank determines the interval.
        """
        if self._rhythm is not None:
            return None
        device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
        step_seconds = statistics.median(self._step_seconds)
        slowest = torch.tensor([stall_seconds, write_seconds, step_seconds], dtype=torch.float64, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
        stall, write, step = slowest.tolist()
        # With a shorter interval than the writing time, saves would wait for each other.
        seconds = max(best_interval_seconds(stall, self._failure_seconds), write)
        every = max(1, math.ceil(seconds / step))
        self._next = done + every
        if abs(every - self._announced) <= _ANNOUNCED_CHANGE * self._announced:
            return None
        self._announced = every
        return self._describe(every, every * step, stall)

    def _describe(self, every: int, seconds: float, stall: float) -> str:
        saving, redone = lost_fractions(seconds, stall, self._failure_seconds)
        return (
            f"checkpoint.every auto: every {every} steps ({render_duration(seconds)}): a save blocks training "
            f"for {stall:.2f} s, and a failure is expected every "
            f"{render_duration(self._failure_seconds)}; expected loss "
            f"of time {100 * (saving + redone):.2g} %: {100 * saving:.2g} % saving, {100 * redone:.2g} % repeated work"
        )
