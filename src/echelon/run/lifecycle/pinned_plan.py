"""The plan and the memory that the rehearsal of a run's first step has found, for the run folder."""

from dataclasses import asdict
from typing import Any

from echelon.ground.stored import read_as, write_json
from echelon.learn.learner import Learner
from echelon.planner.hardware.accelerators import DeviceKind
from echelon.planner.memory import estimate_memory, estimate_parts
from echelon.planner.plan import ParallelPlan
from echelon.run.folder.run_folder import RunFolder
from echelon.run.journal.journal import Journal


def pin_plan(folder: RunFolder, planned: ParallelPlan, learner: Learner) -> None:
    """Write the plan and its estimate into the run folder if the rehearsal changed it. On rank 0."""
    if learner.plan == planned:
        return
    estimate = estimate_memory(learner.shape, learner.plan, _kind_of(learner))
    stored = read_as(folder.estimate_path, dict[str, Any])
    write_json(folder.estimate_path, stored | {"memory": asdict(estimate), "seconds": None})
    write_json(folder.plan_path, learner.plan.to_dict())


def note_memory(journal: Journal, step: int, learner: Learner) -> None:
    """Write the measured memory to the journal, if it is known, with what was planned. On rank 0."""
    if learner.memory is not None:
        planned = estimate_parts(learner.shape, learner.plan, _kind_of(learner))
        journal.memory(step, planned, learner.memory)


def _kind_of(learner: Learner) -> DeviceKind:
    return "cuda" if learner.device.type == "cuda" else "cpu"
