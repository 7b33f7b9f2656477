"""Records some steps of a run with torch's profiler, as traces that Perfetto and chrome://tracing open."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from typing_extensions import override

from echelon.ground.sizes import render_bytes
from echelon.ground.variables import set_default_variables
from echelon.learn.distributed.runtime import Runtime
from echelon.recipe.operation import ProfileConfig
from echelon.run.folder.run_folder import STEP_MARK, RunFolder
from echelon.run.training.callbacks import Monitor

logger = logging.getLogger(__name__)


class Recorder(Monitor):
    """Records `count` steps from step `first` on, counted from 1, on this rank; without steps it records nothing.

    The step before `first` warms the profiler up. While steps are recorded, the host waits for the device at the
    boundaries of a step, so that each step has its own kernels.
    """

    def __init__(
        self,
        device: torch.device,
        find_path: Callable[[int], Path],
        steps: tuple[int, int] | None = None,
        memory: bool = False,
        unlimited: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`find_path`: returns the file of a trace by its first step. `memory`: also record allocations.

        `unlimited`: returns a scope without a time limit, to write a trace in.
        """
        self._device = device
        self._find_path = find_path
        self._first, self._end = (0, 0) if steps is None else (steps[0], sum(steps))
        self._memory = memory
        self._unlimited = unlimited
        self._profiler: profile | None = None

    @override
    def around_step(self, step: int) -> AbstractContextManager[None]:
        number = step + 1
        return self._record(number) if max(1, self._first - 1) <= number < self._end else nullcontext()

    @contextmanager
    def _record(self, number: int) -> Iterator[None]:
        if self._profiler is None:
            self._profiler = self._start(number)
        self._wait()
        with record_function(f"{STEP_MARK}{number}"):
            yield
            self._wait()
        with self._unlimited():  # after the last step it writes the trace
            self._profiler.step()
        if number == self._end - 1:
            self._profiler.stop()
            self._profiler = None

    def _start(self, number: int) -> profile:
        """Start a profiler that records from this step on, or from the first one, and then writes the trace."""
        set_default_variables({"KINETO_LOG_LEVEL": "6"})  # it would log each start and end
        first = max(number, self._first)
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        profiler = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=first - number, active=self._end - first, repeat=1),
            on_trace_ready=lambda ended: self._write(ended, first),
            record_shapes=True,  # the sizes of what gloo sends
            profile_memory=self._memory,
        )
        profiler.start()
        return profiler

    def _write(self, profiler: profile, first: int) -> None:
        """Write the trace of the recorded steps, and log where it is."""
        began, path = time.monotonic(), self._find_path(first)
        path.parent.mkdir(exist_ok=True)
        temporary = path.with_name(f".{path.name}")  # the suffix .gz selects the compression
        try:
            profiler.export_chrome_trace(str(temporary))
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        size, seconds = render_bytes(path.stat().st_size), time.monotonic() - began
        logger.info(
            f"profile: steps {first} to {self._end - 1} are in {path} ({size}, written in {seconds:.1f} s); "
            "https://ui.perfetto.dev opens it"
        )

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def build_recorder(
    config: ProfileConfig, folder: RunFolder, runtime: Runtime, unlimited: Callable[[], AbstractContextManager[None]]
) -> Recorder:
    """Build the recorder of this rank, which records nothing if the recipe does not name the rank.

    `unlimited`: returns a scope without a time limit for steps.
    """
    steps = config.steps if runtime.rank in config.ranks else None
    return Recorder(runtime.device, partial(folder.trace_path, rank=runtime.rank), steps, config.memory, unlimited)
