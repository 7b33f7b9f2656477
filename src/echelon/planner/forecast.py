"""What a run takes on machines of a known price: tokens per second, hours and dollars, from the time of a step."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from echelon.ground.errors import PlanError
from echelon.ground.sizes import render_duration
from echelon.planner.hardware.accelerators import Cluster
from echelon.planner.measured_runs import NO_HISTORY, UNCORRECTED, Correction, History
from echelon.planner.model_shape import ModelShape
from echelon.planner.plan import ParallelPlan
from echelon.planner.time import TimeEstimate, estimate_time, name_part

if TYPE_CHECKING:
    from echelon.recipe.document import Recipe

_SHOWN_SHARE = 0.005  # smaller parts of a step are not shown


def render_usd(usd: float) -> str:
    """Cents, or two digits of less than a dollar: `$63.43`, `$0.0012`."""
    return f"${usd:,.2f}" if usd >= 1 or usd == 0 else f"${usd:.2g}"


@dataclass(frozen=True)
class HourlyPrice:
    """Dollars per hour of one machine, and where that comes from: region and date, or the recipe key."""

    usd_per_hour: float
    terms: str


@dataclass(frozen=True)
class Forecast:
    """The predicted time of one step and of a run.

    Attributes:
        step: seconds of one optimizer step, by part.
        tokens_per_step: of all ranks together.
        tokens: of the whole run; None if they depend on data that is not prepared.
        num_steps: likewise.
        mfu: model FLOPs utilisation, a fraction; None if the table has no peak.
        num_devices, num_machines: of the cluster.
        price: of one machine; None if it is unknown.
        spot_usd_per_hour: of one spot machine; None if the recipe does not say.
        correction: of the step, by measured runs.
    """

    step: TimeEstimate
    tokens_per_step: int
    tokens: int | None
    num_steps: int | None
    mfu: float | None
    num_devices: int
    num_machines: int
    price: HourlyPrice | None = None
    spot_usd_per_hour: float | None = None
    correction: Correction = UNCORRECTED

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks together."""
        return self.tokens_per_step / self.step.total

    @property
    def hours(self) -> float | None:
        """Of all steps, without start-up, evaluation and checkpoints."""
        return None if self.tokens is None else self.tokens / self.tokens_per_second / 3600

    @property
    def usd_per_hour(self) -> float | None:
        """Of all machines together."""
        return None if self.price is None else self.price.usd_per_hour * self.num_machines

    @property
    def usd(self) -> float | None:
        """Of all steps."""
        hours, hourly = self.hours, self.usd_per_hour
        return None if hours is None or hourly is None else hours * hourly

    @property
    def usd_per_billion_tokens(self) -> float | None:
        """Dollars for 10^9 tokens of training."""
        hourly = self.usd_per_hour
        return None if hourly is None else hourly * 1e9 / self.tokens_per_second / 3600

    @property
    def spot_usd(self) -> float | None:
        """Of all steps on spot machines, without what interruptions cost."""
        hours, hourly = self.hours, self.spot_usd_per_hour
        return None if hours is None or hourly is None else hours * hourly * self.num_machines

    @property
    def spot_usd_per_billion_tokens(self) -> float | None:
        """Dollars for 10^9 tokens on spot machines, without what interruptions cost."""
        hourly = self.spot_usd_per_hour
        return None if hourly is None else hourly * self.num_machines * 1e9 / self.tokens_per_second / 3600

    def describe(self) -> Iterator[str]:
        """Lines for the user: the step by part, the whole run, its cost, and what is assumed."""
        step, rate = self.step, self.tokens_per_second
        per_device = f" ({rate / self.num_devices:,.0f} per device)" if self.num_devices > 1 else ""
        yield (
            f"time: {step.total:.3g} s per step of {self.tokens_per_step:,} tokens, {rate:,.0f} tokens/s{per_device}, "
            + ("" if self.mfu is None else f"MFU {self.mfu:.1%}; ")
            + f"limited by {step.limit}"
        )
        for name, seconds in sorted(step.to_dict().items(), key=lambda part: -part[1]):
            if seconds >= _SHOWN_SHARE * step.total:
                yield f"  {name_part(name):<20} {seconds:10.4f} s {seconds / step.total:6.1%}"
        for assumption in step.assumptions:
            yield f"  assumes: {assumption}"
        yield from self._describe_run()

    def _describe_run(self) -> Iterator[str]:
        if self.hours is not None:
            yield (
                f"run: {self.num_steps:,} steps of {self.tokens:,} tokens in all take "
                f"{render_duration(3600 * self.hours)}, without "
                "start-up, evaluation and checkpoints"
            )
        machines = f" x {self.num_machines} machines" if self.num_machines > 1 else ""
        if self.price is not None:
            run = "" if self.usd is None else f"{render_usd(self.usd)} for the run, "
            yield (
                f"cost: {run}{render_usd(self.usd_per_billion_tokens or 0)} for a billion tokens, at "
                f"${self.price.usd_per_hour:g}/h{machines} on demand ({self.price.terms})"
            )
        if self.spot_usd_per_hour is not None:
            run = "" if self.spot_usd is None else f"{render_usd(self.spot_usd)} for the run, "
            yield (
                f"cost: {run}{render_usd(self.spot_usd_per_billion_tokens or 0)} for a billion tokens, at "
                f"${self.spot_usd_per_hour:g}/h{machines} on spot machines that are not taken away "
                "(budget.spot_usd_per_hour)"
            )


def forecast_run(
    recipe: "Recipe",
    shape: ModelShape,
    plan: ParallelPlan,
    cluster: Cluster,
    price: HourlyPrice | None = None,
    num_samples: int | None = None,
    history: History = NO_HISTORY,
) -> Forecast:
    """The predicted time and cost of a recipe under a plan. num_samples: the sequences of one epoch, if known.
    history: measured runs of this model on these devices, which correct the prediction.

    `budget.usd_per_hour` of the recipe takes precedence over `price`. Raises PlanError if the speed of the devices is
    unknown.
    """
    correction = history.correct(plan)
    step = correction.apply(estimate_time(shape, plan, cluster))
    usd_per_hour = recipe.budget.usd_per_hour
    is_known = num_samples is not None or recipe.train.epochs is None
    num_steps = recipe.num_steps(num_samples or 0) if is_known else None
    per_step = plan.global_batch_size * plan.sequence_len
    trained = None if plan.adapter is None else plan.adapter.num_trained_matmul_parameters
    peak = cluster.accelerator.peak_flops(plan.precision.compute)
    rate = per_step / step.total
    return Forecast(
        step=step,
        tokens_per_step=per_step,
        tokens=None if num_steps is None else recipe.batches.first_token(num_steps),
        num_steps=num_steps,
        mfu=None if peak is None else shape.mfu(rate, cluster.num_devices, peak, plan.sequence_len, trained),
        num_devices=cluster.num_devices,
        num_machines=cluster.num_nodes,
        price=price if usd_per_hour is None else HourlyPrice(usd_per_hour, "budget.usd_per_hour"),
        spot_usd_per_hour=recipe.budget.spot_usd_per_hour,
        correction=correction,
    )


def describe_estimate(shape: ModelShape, plan: ParallelPlan, cluster: Cluster, history: History) -> dict[str, Any]:
    """The fields of estimate.json about time.

    `seconds`: of a step, and by part; None if the speed of the devices is unknown. `history`: the key of the measured
    runs of this model and device, and the factor by which they have corrected `seconds`.
    """
    correction = history.correct(plan)
    try:
        step = correction.apply(estimate_time(shape, plan, cluster))
    except PlanError:
        return {"seconds": None}
    seconds = {"step": step.total, **step.to_dict()}
    return {"seconds": seconds, "history": {"key": history.key, "factor": correction.factor}}
