"""Engines, which run the training steps of a model under a plan: the protocol and its implementations."""

from echelon.ground.extensions import import_place
from echelon.learn.engines.engine import Engine, EngineSpec, Evaluation, Finding, Rehearsal
from echelon.recipe.engines import ENGINES

__all__ = ["Engine", "EngineSpec", "Evaluation", "Finding", "Rehearsal", "build_engine"]


def build_engine(spec: EngineSpec) -> Engine:
    """Build the engine that the recipe names, with initial weights. Collective."""
    made: Engine = import_place(ENGINES[spec.recipe.engine].place)(spec)
    return made
