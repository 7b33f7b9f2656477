"""The learning rate as a pure function of the step, or of the number of tokens trained on before it."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from echelon.recipe.batches import BatchSchedule
from echelon.recipe.training import OptimConfig

Schedule = Callable[[int], float]
"""Returns the learning rate of a step; steps are counted from 0."""


@dataclass(frozen=True)
class _Course:
    """The positions at which the schedule changes, in its unit: steps or tokens."""

    warmup: int
    last: int
    """The start of the last step."""
    total: int
    """The end of the last step."""


def build_schedule(config: OptimConfig, num_steps: int, batches: BatchSchedule) -> Schedule:
    """Return the function from a step to its learning rate: linear warm-up to the peak, then `config.schedule`.

    The position of a step is its index, or, with a warm-up in tokens, the number of tokens before it. A step of the
    warm-up has the fraction of the peak that the warm-up reaches at the end of the step, so the rate of the first step
    is above 0; the first step after the warm-up has the peak. The last step and steps beyond it have exactly
    `min_learning_rate_fraction` of the peak, except under `constant`, which does not decay, and `inverse_sqrt`, which
    does not depend on the length of the run.
    """
    place = _place(config, batches)
    course = _find_course(config, num_steps, batches)
    peak, warmup = config.learning_rate, course.warmup
    fall = _FALLS[config.schedule](config, course)

    def learning_rate(step: int) -> float:
        begins = place(step)
        if begins < warmup:
            return peak * min(place(step + 1), warmup) / warmup
        return peak * fall(begins)

    return learning_rate


def find_fault(config: OptimConfig, num_steps: int, batches: BatchSchedule) -> str | None:
    """Return an error message if the schedule does not fit a run of this length, otherwise None."""
    course = _find_course(config, num_steps, batches)
    unit, total = config.schedule_unit, course.total
    shown = f"optim.warmup={config.warmup!r}" + (f" ({course.warmup} {unit})" if config.warms_up_by_share else "")
    if course.warmup > total:
        return f"{shown} is more than the {total} {unit} of the whole run; use at most {total}."
    decay = Fraction(str(config.decay_fraction)) * total
    if config.schedule == "wsd" and course.warmup + decay > total:
        most = math.floor(1000 * (total - course.warmup) / total) / 1000
        remedy = f"use at most {most}, or a shorter warm-up" if most else "use a shorter warm-up"
        return (
            f"optim.decay_fraction={config.decay_fraction} of the run's {total} {unit} is {float(decay):g}, and "
            f"{shown} leaves {total - course.warmup}; {remedy}."
        )
    return None


def find_warmup(config: OptimConfig, num_steps: int, batches: BatchSchedule) -> int:
    """Return the length of the warm-up for a run of this length, in `config.schedule_unit`.

    A share is rounded up in decimal arithmetic: 0.07 of 100 are 7, and not the 8 of binary floating point.
    """
    return config.warmup_of(_place(config, batches)(num_steps))


def render_schedule(config: OptimConfig, num_steps: int, batches: BatchSchedule) -> str:
    """Return a line for the user with the learning rate at 0, 25, 50, 75 and 100 % of the steps."""
    rate, course = build_schedule(config, num_steps, batches), _find_course(config, num_steps, batches)
    steps = sorted({round(share * (num_steps - 1)) for share in (0, 0.25, 0.5, 0.75, 1)})
    unit = f" ({course.total:,} tokens)" if config.schedule_unit == "tokens" else ""
    share = f" ({str(config.warmup).partition('%')[0]} % of the run)" if config.warms_up_by_share else ""
    warmup = f", warm-up over {course.warmup:,} {config.schedule_unit}{share}" if course.warmup else ""
    rates = ", ".join(f"{rate(step):.2e} at step {step + 1:,}" for step in steps)
    return f"schedule: {config.schedule} over {num_steps:,} steps{unit}{warmup}: {rates}"


def _place(config: OptimConfig, batches: BatchSchedule) -> Callable[[int], int]:
    return batches.first_token if config.schedule_unit == "tokens" else lambda step: step


def _find_course(config: OptimConfig, num_steps: int, batches: BatchSchedule) -> _Course:
    place = _place(config, batches)
    return _Course(find_warmup(config, num_steps, batches), place(num_steps - 1), place(num_steps))


# Each decay: the fraction of the peak at a position after the warm-up.
_Fall = Callable[[int], float]


def _progress(course: _Course) -> _Fall:
    """The fraction of the decay that is done: 0 at the end of the warm-up, 1 from the start of the last step on."""
    span = max(1, course.last - course.warmup)
    return lambda place: min(1.0, (place - course.warmup) / span)


def _cosine(config: OptimConfig, course: _Course) -> _Fall:
    """Half a period of the cosine (Loshchilov & Hutter 2017, SGDR, equation 5, without restarts)."""
    floor, progress = config.min_learning_rate_fraction, _progress(course)
    return lambda place: floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress(place)))


def _polynomial(config: OptimConfig, course: _Course) -> _Fall:
    """(1 - progress) to `polynomial_power`; 1 is a straight line (`get_polynomial_decay_schedule_with_warmup`)."""
    floor, progress = config.min_learning_rate_fraction, _progress(course)
    power = 1.0 if config.schedule == "linear" else config.polynomial_power
    return lambda place: floor + (1.0 - floor) * (1.0 - progress(place)) ** power


def _inverse_sqrt(config: OptimConfig, course: _Course) -> _Fall:
    """sqrt(warm-up / position), at least the minimum (Vaswani et al. 2017, section 5.3)."""
    floor = config.min_learning_rate_fraction
    return lambda place: max(floor, math.sqrt(course.warmup / place))


def _wsd(config: OptimConfig, course: _Course) -> _Fall:
    """The peak, then 1 - sqrt(progress) over the last `decay_fraction` of the run (Hägele et al. 2024)."""
    floor = config.min_learning_rate_fraction
    decay = float(Fraction(str(config.decay_fraction)) * course.total)
    start = course.last - decay

    def fall(place: int) -> float:
        if place <= start:
            return 1.0
        return floor + (1.0 - floor) * (1.0 - math.sqrt(min(1.0, (place - start) / decay)))

    return fall


_FALLS: dict[str, Callable[[OptimConfig, _Course], _Fall]] = {
    "cosine": _cosine,
    "linear": _polynomial,
    "constant": lambda config, course: lambda place: 1.0,
    "inverse_sqrt": _inverse_sqrt,
    "polynomial": _polynomial,
    "wsd": _wsd,
}
