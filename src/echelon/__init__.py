"""echelon trains language models across processes, GPUs and machines: Recipe -> Plan -> Run.

The commands as functions, a run folder as an object (docs/python.md), and one rank as a library (docs/library.md). They
are imported on first access, so `import echelon` is fast and does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from echelon.cli.api.models import chat, evaluate, export, generate
    from echelon.cli.api.planning import plan
    from echelon.cli.api.recipes import load_recipe
    from echelon.cli.api.run import Run
    from echelon.cli.api.training_process import train
    from echelon.learn.answers.sampling import Sampling
    from echelon.learn.data.loader import Microbatch, StepBatch
    from echelon.learn.data.own_batches import build_step_batch
    from echelon.learn.learner import Learner
    from echelon.learn.objectives.objective import Objective
    from echelon.learn.opened import open_model
    from echelon.run.training.loop_run import LoopRun

__version__ = "0.1.0"

__all__ = [
    "Learner", "LoopRun", "Microbatch", "Objective", "Run", "Sampling", "StepBatch", "build_step_batch",
    "chat", "evaluate", "export", "generate", "load_recipe", "open_model", "plan", "train",
]  # fmt: skip

_PLACES = {
    "Learner": "learn.learner",
    "LoopRun": "run.training.loop_run",
    "Microbatch": "learn.data.loader",
    "Objective": "learn.objectives.objective",
    "Run": "cli.api.run",
    "Sampling": "learn.answers.sampling",
    "StepBatch": "learn.data.loader",
    "build_step_batch": "learn.data.own_batches",
    "chat": "cli.api.models",
    "evaluate": "cli.api.models",
    "export": "cli.api.models",
    "generate": "cli.api.models",
    "load_recipe": "cli.api.recipes",
    "open_model": "learn.opened",
    "plan": "cli.api.planning",
    "train": "cli.api.training_process",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"echelon.{_PLACES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
