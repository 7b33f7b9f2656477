"""Tracks the time and cost of this start on rank 0, and stops the run when a budget is used up."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from echelon.ground.launch_environment import find_last_end, find_start, read_clock
from echelon.ground.sizes import render_duration
from echelon.ground.stop_request import StopRequest
from echelon.recipe.document import Recipe
from echelon.recipe.operation import BudgetConfig
from echelon.run.folder.cost import Rate, Spending, read_spending, write_spending
from echelon.run.folder.run_folder import RunFolder

_POLL_SECONDS = 0.2
# If a start is killed, at most this much of its usage is not recorded.
_WRITE_SECONDS = 10.0
# A save may take longer than the previous one; at a stop request, two steps are still to be finished first.
_SAVE_MARGIN = 1.5
_STEPS_UNDER_WAY = 2
# Until a save is measured, `fault.notice_seconds` is reserved for it, but at most this fraction of the budget.
_UNKNOWN_SAVE_SHARE = 0.1


class CostMeter:
    """Adds this start's time and money to those of earlier starts, and stops the run before its budget is used up.

    A thread checks the clock, so that steps have no overhead. Time counts from the command that began this start; after
    an automatic restart by an agent, from the moment the previous processes were last known to work.
    """

    def __init__(self, recipe: Recipe, folder: RunFolder, rate: Rate | None, num_machines: int) -> None:
        """Raises ConfigError if the run's spending.json is damaged."""
        self._budget = recipe.budget
        self._notice_seconds = recipe.fault.notice_seconds
        self._folder = folder
        self._rate = rate
        self._num_machines = num_machines
        before = read_spending(folder)
        end = find_last_end(folder.metrics_path)
        held = end is not None and end.detection_seconds is not None and before.until > 0
        # A replica of a quorum may go on with the journal of a lost one, long after its own start.
        began = before.until if held else max(find_start(before.until), before.until)
        if began > (now := read_clock()):  # the clock was ahead during an earlier start
            began = find_start(before.until)
        used = max(0.0, now - began)
        self._base = before.grown(used, num_machines, rate)
        self._mark = time.monotonic()
        self._step_seconds = 0.0
        self._reserve_seconds = 0.0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def usd_per_second(self) -> float | None:
        """Dollars per second of all machines; None if the price is unknown."""
        return None if self._rate is None else self._rate.usd_per_hour * self._num_machines / 3600

    @property
    def usd(self) -> float | None:
        """Dollars that all starts have used so far; None if the price is unknown."""
        return None if self._rate is None else self.spending().usd

    @property
    def at_most(self) -> bool:
        """Whether the dollars are an upper bound, as those of spot machines at the price on demand."""
        return self._rate is not None and self._rate.at_most

    def describe_usd(self) -> str | None:
        """The dollars that all starts have used, `$1.23` or `at most $1.23`; None if the price is unknown."""
        return None if self.usd is None else f"{'at most ' if self.at_most else ''}${self.usd:.2f}"

    def expect_usd(self, remaining_seconds: float | None) -> float | None:
        """Estimate the dollars used at the end of the run; None if the remaining time or the price is unknown."""
        if self.usd is None or self.usd_per_second is None or remaining_seconds is None:
            return None
        return self.usd + remaining_seconds * self.usd_per_second

    def spending(self) -> Spending:
        """Return the spending of all starts so far."""
        grown = self._base.grown(time.monotonic() - self._mark, self._num_machines, self._rate)
        return replace(grown, until=read_clock(), reserve_seconds=self._reserve_seconds)

    def saw_step(self, seconds: float) -> None:
        """Record the duration of a step: a stop may have to wait for the longest of the last ones."""
        self._step_seconds = max(seconds, 0.9 * self._step_seconds)

    def watch(self, stop: StopRequest, save_seconds: Callable[[], float | None]) -> None:
        """Start counting, and request a stop of the run in time; `save_seconds` returns the duration of a save."""

        def look() -> None:
            written = 0.0
            while not self._ended.wait(_POLL_SECONDS):
                self.check(stop, save_seconds())
                if time.monotonic() - written >= _WRITE_SECONDS:
                    written = time.monotonic()
                    self._write()

        self._thread = threading.Thread(target=look, name="budget", daemon=True)
        self._thread.start()

    def check(self, stop: StopRequest, save_seconds: float | None) -> None:
        """Request a stop of the run if a save that begins now would just finish within the budget."""
        if stop.limit is None:  # otherwise keep the reserve of that moment for the next start
            self._reserve_seconds = self._find_reserve(save_seconds)
            ahead = self.spending().grown(self._reserve_seconds, self._num_machines, self._rate)
            stop.limit = ahead.exceeds(self._budget)

    def describe(self) -> str | None:
        """Describe what all starts have used; None without a price and a budget."""
        if self._rate is None and self._budget == BudgetConfig():
            return None
        now = self.spending()
        rate, dollars = self._rate, ""
        if rate is not None:
            bound = "at most " if self.at_most else ""
            dollars = f", {bound}${now.usd:.2f} at ${rate.usd_per_hour:g}/h ({rate.source})"
        machines = f" on {self._num_machines} machines" if self._num_machines > 1 else ""
        return f"cost: {render_duration(now.seconds)}{machines}{dollars}, all starts together"

    def close(self) -> None:
        """Stop counting, and write spending.json."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        self._write()

    def _find_reserve(self, save_seconds: float | None) -> float:
        under_way = _STEPS_UNDER_WAY * self._step_seconds + _POLL_SECONDS
        if save_seconds is not None:
            return _SAVE_MARGIN * save_seconds + under_way
        limits = [] if self._budget.max_hours is None else [3600 * self._budget.max_hours]
        if self._budget.max_usd is not None and self.usd_per_second is not None:
            limits.append(self._budget.max_usd / self.usd_per_second)
        return min([self._notice_seconds, *(_UNKNOWN_SAVE_SHARE * limit for limit in limits)]) + under_way

    def _write(self) -> None:
        with suppress(OSError):  # a full disk must not end training
            write_spending(self._folder, self.spending())
