"""Measured runs that correct later predictions for the same model on the same kind of device.

The end of a run adds a line to a file in the user's cache folder, named by model and device, so that a plan finds it
without searching. A prediction is multiplied by measured over predicted of the runs that are most like its plan.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from statistics import geometric_mean
from typing import Any, Literal

from echelon.ground.stored import read_as, write_json
from echelon.planner.hardware.accelerators import Cluster
from echelon.planner.hardware.calibration_store import describe_machine
from echelon.planner.model_shape import ModelShape
from echelon.planner.plan import ParallelPlan
from echelon.planner.time import TimeEstimate

FEWEST_STEPS = 20
"""Measured steps of a run that corrects others: the median of fewer moves with single slow steps."""

FEWEST_SECONDS = 20.0
"""Of these steps together: whatever keeps a machine busy for a moment must not count for all later plans."""

MOST_SPREAD = 0.15
"""The largest interquartile range of their times over the median. It was 0.27 on two cores that were shared with other
programs, where steps took seven times as long as they would alone."""

_MOST = 32  # runs that are kept of a model and device
_WIDTHS = ("model_type", "num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads")


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
            best = max(enumerate(like), key=lambda item: (_count_equal(item[1].plan, words), item[0]))[1]
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


def _count_equal(one: Mapping[str, str], other: Mapping[str, str]) -> int:
    return sum(one.get(name) == value for name, value in other.items())


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
    return History(key, tuple(_read(_path(cache_dir, key))))


def record_run(
    cache_dir: Path, key: str, name: str, plan: ParallelPlan, predicted: float, measured: float
) -> MeasuredRun:
    """Add a run to its history, in place of an earlier measurement of the same run. Raises OSError."""
    run = MeasuredRun(name, date.today().isoformat(), describe_plan(plan), predicted, measured)
    path = _path(cache_dir, key)
    path.parent.mkdir(parents=True, exist_ok=True)
    others = [run for run in _read(path) if run.name != name]
    write_json(path, [asdict(kept) for kept in [*others, run][-_MOST:]])
    return run


def _path(cache_dir: Path, key: str) -> Path:
    return cache_dir / "measured-runs" / f"{key}.json"


def _read(path: Path) -> Sequence[MeasuredRun]:
    try:
        runs = read_as(path, list[MeasuredRun])
    except (OSError, ValueError):
        return []
    return [run for run in runs if run.predicted > 0 and run.measured > 0 and "degrees" in run.plan]
