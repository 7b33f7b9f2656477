"""The part of a run's time that trains, where machines fail and their steps vary: its goodput."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from echelon.ground.sizes import render_duration
from echelon.planner.memory import estimate_checkpoint
from echelon.planner.model_shape import ModelShape
from echelon.planner.plan import ParallelPlan
from echelon.planner.rates import GPU_RATES, expect_largest

RESTART_SECONDS = 300.0
"""From a failure to the next step, if it is not given: an assumption, not a measurement."""

_MOST_SPARES = 3


def best_interval_seconds(save_seconds: float, failure_seconds: float) -> float:
    """Return the training time between two saves that minimises the expected loss of time.

    Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer
    Systems 22 (2006), equation 37; its first term is Young's (1974).

    Args:
        save_seconds: how long a save blocks training.
        failure_seconds: the mean time between two failures of the job.
    """
    if save_seconds >= 2 * failure_seconds:
        return failure_seconds
    ratio = save_seconds / (2 * failure_seconds)
    return math.sqrt(2 * save_seconds * failure_seconds) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_seconds


def lost_fractions(interval_seconds: float, save_seconds: float, failure_seconds: float) -> tuple[float, float]:
    """Return the expected fractions of time for saves and for repeated work: half an interval at each failure."""
    period = interval_seconds + save_seconds
    return save_seconds / period, period / 2 / failure_seconds


@dataclass(frozen=True)
class Reliability:
    """What is known of the machines.

    Attributes:
        mtbf_hours: mean hours between two failures of one machine; None: machines do not fail.
        restart_seconds: from a failure of the job to its next step.
        step_spread: standard deviation of a machine's step time, as a part of its mean; every step waits for the
            slowest machine.
        replace_hours: mean hours until a machine that has failed is back, or another one in its place; 0: it only
            restarts.
    """

    mtbf_hours: float | None = None
    restart_seconds: float = RESTART_SECONDS
    step_spread: float = 0.0
    replace_hours: float = 0.0


@dataclass(frozen=True)
class Goodput:
    """Expected times of a job on some machines.

    Attributes:
        failure_hours: mean hours between two failures of the job; None without failures.
        save_seconds: how long a save blocks training.
        interval_seconds: training time between two saves.
        slowdown: the expected step over one whose machines all take the mean time.
        share: of the job's time, that of steps as fast as the plan says: the goodput.
        by_spares: the goodput with 0, 1, 2, ... machines that wait; empty if a machine that fails is back at once.
    """

    failure_hours: float | None
    save_seconds: float
    interval_seconds: float
    slowdown: float
    share: float
    by_spares: tuple[float, ...] = ()

    def describe(self, reliability: Reliability) -> Iterator[str]:
        """Lines for the user."""
        yield f"useful time (goodput): {self.share:.1%} of the time is training at the predicted speed"
        if self.failure_hours is not None:
            between = render_duration(3600 * self.failure_hours)
            yield (
                f"  failures: one in {between} of the job, {reliability.restart_seconds:g} s each to restart;"
                f" a save blocks training for {self.save_seconds:.2g} s and is best every "
                f"{render_duration(self.interval_seconds)}"
            )
        if self.by_spares:
            shares = ", ".join(f"{count}: {share:.1%}" for count, share in enumerate(self.by_spares))
            yield (
                f"  machines: replaced after {render_duration(3600 * reliability.replace_hours)}; useful time by the "
                f"number of spare machines (--nodes N+SPARES): {shares}"
            )
        if self.slowdown > 1:
            yield f"  stragglers: a step takes {self.slowdown:.3f} times the mean of one machine"


def estimate_goodput(shape: ModelShape, plan: ParallelPlan, num_machines: int, reliability: Reliability) -> Goodput:
    """The expected goodput of a plan on machines that fail independently of each other, at any time.

    With failures of the job every M seconds, saves of d seconds after each t seconds of training and restarts of R
    seconds, t seconds of training take M exp(R / M) (exp((t + d) / M) - 1): the complete model of Daly (2006). A save
    blocks training while each rank copies its part of the checkpoint to host memory.
    """
    slowdown = expect_slowest(num_machines, reliability.step_spread)
    save = estimate_checkpoint(shape, plan) / plan.world_size / GPU_RATES.host_bandwidth
    if reliability.mtbf_hours is None:
        return Goodput(None, save, math.inf, slowdown, 1 / slowdown)
    failure = reliability.mtbf_hours * 3600 / num_machines
    interval = best_interval_seconds(save, failure)
    share = training_share(interval, save, reliability.restart_seconds, failure) / slowdown
    if not reliability.replace_hours:
        return Goodput(failure / 3600, save, interval, slowdown, share)
    missing = reliability.replace_hours * 3600 / failure
    by_spares = tuple(share * complete_share(missing, count) for count in range(_MOST_SPARES + 1))
    return Goodput(failure / 3600, save, interval, slowdown, by_spares[0], by_spares)


def complete_share(missing: float, num_spares: int) -> float:
    """The part of the time in which no more machines are missing than there are spares.

    If machines fail independently, at any time, the number of those that are being replaced is Poisson-distributed
    whatever the distribution of the time that takes (Palm's theorem: a queue M/G/infinity).

    Args:
        missing: the mean number of machines that are being replaced: the time for one over that between two failures.
    """
    return math.exp(-missing) * sum(missing**count / math.factorial(count) for count in range(num_spares + 1))


def training_share(interval: float, save: float, restart: float, failure: float) -> float:
    """The part of the time that trains, by Daly's formula; all in seconds. 0 if failures leave no time for it."""
    if (interval + save + restart) / failure > 500:
        return 0.0
    return interval / (failure * math.exp(restart / failure) * math.expm1((interval + save) / failure))


def expect_slowest(num_machines: int, spread: float) -> float:
    """The expected longest of `num_machines` step times over their mean, if they are normally distributed."""
    return 1 + spread * expect_largest(num_machines)
