"""Measured runs that correct later predictions for the same model on the same kind of device.

The end of a run adds a line to a file in the user's cache folder, named by model and device, so that a plan finds it
without searching. A plan takes the run that is most like it, and multiplies its prediction by measured over predicted.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from echelon.hardware.accelerators import Cluster
from echelon.hardware.calibration import describe_machine
from echelon.planner.model_shape import ModelShape
from echelon.planner.plan import ParallelPlan
from echelon.planner.time import TimeEstimate
from echelon.stored import read_as, write_json

FEWEST_STEPS = 20
"""Measured steps of a run that corrects others."""

_MOST = 32  # runs that are kept of a model and device
_WIDTHS = ("model_type", "num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads")
_DEGREES = ("strategy", "dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")


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
class History:
    """The measured runs of a model on a kind of device, the newest last. key: of the model and the device."""

    key: str
    runs: tuple[MeasuredRun, ...] = ()

    def sharpen(self, step: TimeEstimate, plan: ParallelPlan) -> tuple[TimeEstimate, float]:
        """(the estimate corrected by the run that is most like this plan, the factor; 1 without such a run).

        The newest run of the same plan counts, else the newest one with the same degrees, else the newest one.
        """
        words = describe_plan(plan)
        best = max(
            enumerate(self.runs), key=lambda each: (_count_equal(each[1].plan, words), each[0]), default=(0, None)
        )[1]
        if best is None:
            return step, 1.0
        like = "of this plan" if best.plan == words else f"with {best.plan['degrees']}"
        took = f"{best.measured:.3g} s per step on {best.date}"
        line = f"corrected by a factor of {best.factor:.2f}: run {best.name} {like} took {took}"
        return step.scaled(best.factor, line), best.factor


NO_HISTORY = History("")


def describe_plan(plan: ParallelPlan) -> dict[str, str]:
    """What the speed of a plan depends on beside model and device: its degrees, micro batch and precision."""
    degrees = {name: getattr(plan, name) for name in _DEGREES}
    words = [f"{name} {value}" for name, value in degrees.items() if name != "strategy" and value > 1]
    return {
        "degrees": f"{plan.strategy} on {plan.world_size} processes" + (f" ({', '.join(words)})" if words else ""),
        "precision": f"{plan.precision.compute}{', float8' if plan.precision.float8 else ''}",
        "compile": str(plan.compile),
        "micro_batch": f"{plan.micro_batch_size} x {plan.num_microbatches}",
        "checkpointing": f"{plan.activation_checkpointing} {plan.checkpoint_every} {plan.activation_memory_budget}",
        "schedule": str(plan.schedule),
    }


def _count_equal(one: Mapping[str, str], other: Mapping[str, str]) -> tuple[bool, int]:
    return one["degrees"] == other["degrees"], sum(one.get(name) == value for name, value in other.items())


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
    others = [each for each in _read(path) if each.name != name]
    write_json(path, [asdict(each) for each in [*others, run][-_MOST:]])
    return run


def _path(cache_dir: Path, key: str) -> Path:
    return cache_dir / "measured-runs" / f"{key}.json"


def _read(path: Path) -> Sequence[MeasuredRun]:
    try:
        found = read_as(path, list[MeasuredRun])
    except (OSError, ValueError):
        return []
    return [each for each in found if each.predicted > 0 and each.measured > 0 and "degrees" in each.plan]
