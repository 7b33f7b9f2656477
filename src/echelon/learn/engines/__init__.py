"""Engines, which run the training steps of a model under a plan: the protocol and its implementations."""

from pkgutil import resolve_name

from echelon.learn.engines.engine import Engine, EngineSpec, Evaluation, NonFinite, Rehearsal
from echelon.recipe.names import ENGINES

__all__ = ["Engine", "EngineSpec", "Evaluation", "NonFinite", "Rehearsal", "build_engine"]


def build_engine(spec: EngineSpec) -> Engine:
    """Build the engine that the recipe names, with initial weights. Collective."""
    made: Engine = resolve_name(ENGINES[spec.recipe.engine].place)(spec)
    return made
