"""echelon trains language models across processes, GPUs and machines: Recipe -> Plan -> Run.

The commands as functions, and a run folder as an object: see docs/python.md. They are imported on first access, so
`import echelon` is fast and does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from echelon.api.models import chat, evaluate, export, generate
    from echelon.api.planning import plan
    from echelon.api.recipes import load_recipe
    from echelon.api.run import Run
    from echelon.api.training_process import train

__version__ = "0.1.0"

__all__ = ["Run", "chat", "evaluate", "export", "generate", "load_recipe", "plan", "train"]

_PLACES = {
    "Run": "run",
    "chat": "models",
    "evaluate": "models",
    "export": "models",
    "generate": "models",
    "load_recipe": "recipes",
    "plan": "planning",
    "train": "training_process",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"echelon.api.{_PLACES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
