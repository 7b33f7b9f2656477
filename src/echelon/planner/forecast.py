"""What a run takes on machines of a known price: tokens per second, hours and dollars, from the time of a step.

Measured runs correct later predictions for the same model on the same kind of device. The end of a run adds a line to a
file in the user's cache folder, named by model and device, so that a plan finds it without searching. A prediction is
multiplied by measured over predicted of the runs that are most like its plan.

It also tells at what speed of the links between replicas a way to agree makes steps shorter than `sync.name:
every_step` does.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any, Literal

from echelon.ground.errors import PlanError
from echelon.ground.sizes import render_duration
from echelon.ground.stored import read_as, write_json
from echelon.planner.hardware.accelerators import Cluster
from echelon.planner.hardware.calibration_store import describe_machine
from echelon.planner.hardware.links import Link, Links
from echelon.planner.model_shape import ModelShape
from echelon.planner.plan import ParallelPlan, SyncPlan
from echelon.planner.replica_limits import without_sync
from echelon.planner.time import TimeEstimate, estimate_time, name_part
from echelon.recipe.synchronization import EVERY_STEP, QUORUM

if TYPE_CHECKING:
    from echelon.recipe.document import Recipe

FEWEST_STEPS = 20
"""Measured steps of a run that corrects others: the median of fewer moves with single slow steps."""

FEWEST_SECONDS = 20.0
"""Of these steps together: whatever keeps a machine busy for a moment must not count for all later plans."""

MOST_SPREAD = 0.15
"""The largest interquartile range of their times over the median. It was 0.27 on two cores that were shared with other
programs, where steps took seven times as long as they would alone."""

_MOST = 32  # runs that are kept of a model and device
_WIDTHS = ("model_type", "num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads")
_SHOWN_SHARE = 0.005  # smaller parts of a step are not shown

WORTH = 0.9
"""A way to agree pays if a step takes at most this share of the time that it takes with `every_step`."""

# Bits per second of the slowest and the fastest link that are tried, and the steps between them.
_SLOWEST, _FASTEST, _PER_DECADE, _HALVINGS = 1e6, 1e12, 8, 12
_UNITS = ((1e9, "Gbit/s"), (1e6, "Mbit/s"))


@dataclass(frozen=True)
class MeasuredRun:
    """A run that was measured. Seconds are those of a step.

    Attributes:
        name: the run folder.
        date: when it ended, as YYYY-MM-DD.
        plan: the words of `describe_plan`.
        predicted: without a correction by earlier runs.
        measured: the median.
    """

    name: str
    date: str
    plan: dict[str, str]
    predicted: float
    measured: float

    @property
    def factor(self) -> float:
        """Measured over predicted."""
        return self.measured / self.predicted


@dataclass(frozen=True)
class Correction:
    """By how much measured runs correct the prediction for one plan.

    Attributes:
        factor: measured over predicted; 1 without a measured run.
        by: "plan": the newest run of this plan; "degrees": the newest one with its strategy and degrees; "model": runs
            with other degrees, which show what is common to all plans of the model on such devices; "none": no run.
        reason: for the user; empty without a run.
    """

    factor: float = 1.0
    by: Literal["plan", "degrees", "model", "none"] = "none"
    reason: str = ""

    def apply(self, step: TimeEstimate) -> TimeEstimate:
        """The corrected estimate, with the reason among its assumptions."""
        return step.scaled(self.factor, self.reason or None)


UNCORRECTED = Correction()


@dataclass(frozen=True)
class History:
    """The measured runs of a model on a kind of device, the newest last. key: of the model and the device."""

    key: str
    runs: tuple[MeasuredRun, ...] = ()

    def correct(self, plan: ParallelPlan) -> Correction:
        """The correction of a plan.

        The newest run of the same plan counts, else the newest one with the same degrees. A plan with degrees that were
        not measured gets the geometric mean over the measured ones, the newest run of each: so runs of one strategy
        alone never change its order among those that were not measured.
        """
        words = describe_plan(plan)
        like = [run for run in self.runs if run.plan["degrees"] == words["degrees"]]
        if like:
            best = max(enumerate(like), key=lambda item: (len(item[1].plan.items() & words.items()), item[0]))[1]
            is_same = best.plan == words
            run = f"run {best.name} {'of this plan' if is_same else 'with ' + best.plan['degrees']}"
            took = f"took {best.measured:.3g} s per step on {best.date}"
            line = f"corrected by a factor of {best.factor:.2f}: {run} {took}"
            return Correction(best.factor, "plan" if is_same else "degrees", line)
        newest = {run.plan["degrees"]: run for run in self.runs}
        if not newest:
            return UNCORRECTED
        factor = geometric_mean(run.factor for run in newest.values())
        runs = ", ".join(f"{run.name} with {degrees}" for degrees, run in newest.items())
        mean = "the mean of runs" if len(newest) > 1 else "run"
        line = f"corrected by a factor of {factor:.2f}, {mean} of other plans of this model: {runs}"
        return Correction(factor, "model", line)


NO_HISTORY = History("")


def describe_plan(plan: ParallelPlan) -> dict[str, str]:
    """What the speed of a plan depends on beside model and device: its degrees, micro batch, precision and more."""
    degrees = plan.name_degrees()
    return {
        "degrees": f"{plan.strategy} on {plan.world_size} processes" + (f" ({degrees})" if degrees else ""),
        "precision": f"{plan.precision.compute}{', float8' if plan.precision.float8 else ''}",
        "compile": str(plan.compile),
        "micro_batch": f"{plan.micro_batch_size} x {plan.num_microbatches}",
        "checkpointing": f"{plan.activation_checkpointing} {plan.checkpoint_every} {plan.activation_memory_budget}"
        + f" {plan.mlp_tiles}" * (plan.mlp_tiles > 1),
        "schedule": str(plan.schedule),
        "sharding": f"{plan.reshard_after_forward} {plan.reduce_gradients} {plan.cp_method}",
        "offload": f"{plan.cpu_offload} {plan.activation_offloading}",
        "sync": f"{plan.sync.name} {plan.num_replicas}",
    }


def history_key(shape: ModelShape, cluster: Cluster) -> str:
    """The name of the file of a model on a kind of device: its widths; the GPU, or this machine's processor."""
    machine = describe_machine()
    device: Any = cluster.accelerator.name
    if cluster.kind == "cpu":
        device = [machine["host"], machine["processor"], machine["cores"]]
    content = {"model": [getattr(shape, name) for name in _WIDTHS], "device": device}
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def read_history(cache_dir: Path, shape: ModelShape, cluster: Cluster) -> History:
    """The measured runs of this model on these devices; none if there is no file, or it cannot be read."""
    key = history_key(shape, cluster)
    return History(key, tuple(_read_runs(_runs_path(cache_dir, key))))


def record_run(
    cache_dir: Path, key: str, name: str, plan: ParallelPlan, predicted: float, measured: float
) -> MeasuredRun:
    """Add a run to its history, in place of an earlier measurement of the same run. Raises OSError."""
    run = MeasuredRun(name, date.today().isoformat(), describe_plan(plan), predicted, measured)
    path = _runs_path(cache_dir, key)
    path.parent.mkdir(parents=True, exist_ok=True)
    others = [run for run in _read_runs(path) if run.name != name]
    write_json(path, [asdict(kept) for kept in [*others, run][-_MOST:]])
    return run


def _runs_path(cache_dir: Path, key: str) -> Path:
    return cache_dir / "measured-runs" / f"{key}.json"


def _read_runs(path: Path) -> Sequence[MeasuredRun]:
    try:
        runs = read_as(path, list[MeasuredRun])
    except (OSError, ValueError):
        return []
    return [run for run in runs if run.predicted > 0 and run.measured > 0 and "degrees" in run.plan]


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
                f"{render_duration(3600 * self.hours)}, without start-up, evaluation and checkpoints"
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


def describe_payoff(shape: ModelShape, plan: ParallelPlan, cluster: Cluster) -> str | None:
    """The line about when `sync` pays; None where the plan has one copy of the model, or nothing but `every_step`.

    Raises PlanError if the speed of the devices is unknown.
    """
    if plan.num_whole_copies == 1 or plan.sync.name == QUORUM or plan.sync == SyncPlan():
        return None
    synced, other = (estimate_time(shape, candidate, cluster).total for candidate in (plan, without_sync(plan)))
    speed = find_payoff(shape, plan, cluster)
    if speed is None:
        limit = "at no speed of the links between replicas"
    elif speed >= _FASTEST:
        limit = "at any speed of the links between replicas"
    else:
        size, unit = next(row for row in _UNITS if speed >= row[0] or row is _UNITS[-1])
        limit = f"where the links between replicas have less than {speed / size:.3g} {unit} per process"
    sync = plan.sync
    name = f"sync.compress {sync.method}" if sync.name == EVERY_STEP else f"sync {sync.name}"
    return (
        f"{name}: {synced:.3g} s per step here, {other:.3g} s with every_step and no compression; it shortens steps by "
        f"at least {1 - WORTH:.0%} {limit}"
    )


def find_payoff(shape: ModelShape, plan: ParallelPlan, cluster: Cluster) -> float | None:
    """The fastest link between replicas, in bit/s for each process, at which `sync` pays; None: at no speed.

    Between 1 Mbit/s and 1 Tbit/s; computation, and links inside a replica, are those of the cluster. Raises as
    `describe_payoff` does.
    """
    other, latency = without_sync(plan), cluster.known_links.between.latency

    def pays(speed: float) -> bool:
        link = Link("", speed / 8, latency, "")
        ours, theirs = (
            estimate_time(shape, candidate, cluster, between=Links(link, link)).total for candidate in (plan, other)
        )
        return ours <= WORTH * theirs

    count = round(_PER_DECADE * 6)
    speeds: list[float] = [_SLOWEST * (_FASTEST / _SLOWEST) ** (number / count) for number in range(count + 1)]
    paying = [speed for speed in speeds if pays(speed)]
    if not paying or paying[-1] == speeds[-1]:
        return _FASTEST if paying else None
    low: float = paying[-1]
    high: float = speeds[speeds.index(low) + 1]
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if pays(middle) else (low, middle)
    return low
