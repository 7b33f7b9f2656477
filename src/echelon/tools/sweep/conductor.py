"""The main loop of a sweep: starts trials in free slots and watches them until enough have ended."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from echelon.ground.errors import BusyError, EchelonError, LaunchError
from echelon.launch.job import JobSpec
from echelon.tools.sweep.slots import TrialSlot
from echelon.tools.sweep.space import Values, show_values
from echelon.tools.sweep.study import SLOT, SweepStudy
from echelon.tools.sweep.trials import Ended, Running, Trials

logger = logging.getLogger(__name__)

# Added to a trial's time to save, before the sweep stops waiting for it.
_GRACE_SECONDS = 60.0
_NAP_SECONDS = 0.1


@dataclass(frozen=True)
class SweepEnding:
    """How a sweep ended: `done`, `stopped` by a signal, or `failed` by too many failures in a row."""

    state: Literal["done", "stopped", "failed"]
    message: str = ""


class StopWord:
    """A stop request: the signal handler stores the signal's name here."""

    def __init__(self) -> None:
        self.name: str | None = None

    def wait(self, seconds: float) -> None:
        """Wait for a stop request, for at most `seconds`."""
        deadline = time.monotonic() + seconds
        while self.name is None and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, _NAP_SECONDS))


class Conductor:
    """Runs trials until `num_trials` have ended, one per slot at a time. A failed trial does not affect others."""

    def __init__(
        self,
        study: SweepStudy,
        trials: Trials,
        slots: Sequence[TrialSlot],
        num_trials: int,
        max_failures: int,
        look_seconds: float,
        ended: Callable[[], None] = lambda: None,
        at_once: int = 1,
    ) -> None:
        """`ended` is called whenever a trial ends, and may write intermediate results.

        `at_once` is the maximum number of trials submitted together as an array, which the target starts itself.
        """
        self._study, self._trials, self._slots = study, trials, tuple(slots)
        self._num_trials, self._max_failures = num_trials, max_failures
        self._look_seconds, self._ended = look_seconds, ended
        self._at_once = at_once
        self._running: dict[int, Running] = {}
        self._left: list[int] = []
        self._failures: list[str] = []
        self._is_full = False

    def run(self, stop: StopWord) -> SweepEnding:
        """Run all trials to their end. On a stop request, running trials save, and the next start resumes them.

        Raises LaunchError if the target refuses a job while no trial is running; this is not counted as a failed trial.
        """
        self._adopt()
        self._look()  # frees the slots of trials that have ended meanwhile
        while stop.name is None and not self._has_failed():
            if not self._fill() and not self._running:
                return SweepEnding("done")
            self._look()
            if self._running:
                stop.wait(self._look_seconds)
        if stop.name is None:
            ending = SweepEnding("failed", f"{len(self._failures)} failures in a row, the last: {self._failures[-1]}")
            self._stop_all()
            return ending
        self._stop_all()
        late = [str(trial.number) for trial in self._running.values()]
        trials = f"trials {', '.join(late)} have not ended yet" if late else "its trials have saved"
        return SweepEnding("stopped", f"stopped by {stop.name}; {trials}; the same command resumes the sweep")

    def _has_failed(self) -> bool:
        """Whether too many trials failed in a row while there are trials left."""
        return len(self._failures) >= self._max_failures and (bool(self._running) or self._has_more())

    def _num_new(self) -> int:
        return self._num_trials - len(self._study.trials())

    def _has_more(self) -> bool:
        return bool(self._left) or self._num_new() > 0

    def _adopt(self) -> None:
        """Take over the jobs of an earlier start of this sweep, each in its former slot."""
        for number in self._study.unfinished():
            _, values = self._study.begin(number)
            before = self._study.recall(number, SLOT)
            slot = next((slot for slot in self._slots if slot.index == before), None)
            try:
                running = self._trials.adopt(number, values, slot)
            except LaunchError:  # an unrecorded job may run there
                raise
            except EchelonError as error:
                self._fail(number, str(error))
                continue
            if running is None:
                self._left.append(number)
            else:
                self._enter(running, "continues", values)

    def _fill(self) -> bool:
        """Start trials in the free slots, unfinished ones first; returns whether any was started."""
        begun = False
        while self._has_room() and not self._has_failed():
            begun = True
            count = min(self._at_once, len(self._left) + self._num_new())
            if count > 1 and not self._running:
                self._start_array(count)
            else:
                self._start(*self._begin())
        return begun

    def _has_room(self) -> bool:
        """Whether a trial can start now. While an array runs, only unfinished trials are started again."""
        if self._is_full:
            return False
        waits = self._at_once > 1 and bool(self._running)
        return len(self._running) < len(self._slots) and (bool(self._left) if waits else self._has_more())

    def _begin(self) -> tuple[int, Values]:
        return self._study.begin(self._left.pop(0) if self._left else None)

    def _start(self, number: int, values: Values) -> None:
        held = {running.slot for running in self._running.values()}
        free = [slot for slot in self._slots if slot not in held]
        before = self._study.recall(number, SLOT)  # an unrecorded job of a killed sweep may still run there
        slot = next((slot for slot in free if slot.index == before), free[0])
        try:
            running = self._trials.start(number, values, slot)
        except EchelonError as error:
            if isinstance(error, LaunchError) and not self._running:
                raise
            if isinstance(error, BusyError):
                logger.warning(f"trial {number} waits for another one to end: {error}")
                self._left.insert(0, number)
                self._is_full = True
                return
            self._fail(number, str(error))
            return
        self._enter(running, "starts", values)

    def _start_array(self, count: int) -> None:
        """Submit an array. Trials that the recipe refuses fail; if the target refuses the array, submit one by one."""
        values: dict[int, Values] = {}
        jobs: dict[int, JobSpec] = {}
        for _ in range(count):
            number, values[number] = self._begin()
            try:
                jobs[number] = self._trials.job(number, values[number])
            except EchelonError as error:
                self._fail(number, str(error))
        if not jobs:
            return
        try:
            array = self._trials.start_array(jobs, min(len(self._slots), len(jobs)))
        except LaunchError as error:
            logger.warning(f"jobs: one by one, because the array was refused: {error}")
            self._at_once, self._left = 1, [*jobs, *self._left]
            return
        for running in array:
            self._enter(running, f"is submitted as {running.record.id}", values[running.number])

    def _enter(self, running: Running, word: str, values: Values) -> None:
        self._running[running.number] = running
        where = "" if running.slot is None else f" in slot {running.slot.index}"
        logger.info(f"trial {running.number} {word}{where}: {show_values(values)}")

    def _look(self) -> None:
        for number, running in list(self._running.items()):
            if (ended := self._trials.look(running)) is not None:
                del self._running[number]
                self._is_full = False
                self._finish(running, ended)

    def _finish(self, running: Running, ended: Ended) -> None:
        number = running.number
        if ended.again:
            self._left.insert(0, number)
        elif ended.pruned:
            self._failures = []
            self._study.prune(number)
            logger.info(f"trial {number} pruned")
            self._ended()
        elif ended.value is not None:
            self._failures = []
            self._study.complete(number, ended.value)
            best = self._study.best()
            assert best is not None
            beside = "the best so far" if best.number == number else f"best: trial {best.number}, {best.value:.6g}"
            logger.info(f"trial {number} done: {ended.value:.6g}, {beside}")
            self._ended()
        else:
            self._fail(number, ended.message)

    def _fail(self, number: int, message: str) -> None:
        message = message.splitlines()[0]
        self._failures.append(f"trial {number}: {message}")
        self._study.fail(number, message)
        logger.warning(f"trial {number} failed: {message}")
        self._ended()

    def _stop_all(self) -> None:
        """Ask every trial to save and end, and wait for it; a trial that completes meanwhile is done."""
        for running in reversed(self._running.values()):  # pending trials of an array first, or they would start now
            self._trials.stop(running)
        notice = max((trial.recipe.fault.notice_seconds for trial in self._running.values()), default=0.0)
        deadline = time.monotonic() + notice + _GRACE_SECONDS
        while self._running and time.monotonic() < deadline:
            for number, running in list(self._running.items()):
                if (ended := self._trials.look(running)) is not None:
                    del self._running[number]
                    if ended.value is not None or ended.pruned:
                        self._finish(running, ended)
            time.sleep(min(self._look_seconds, 0.5))
