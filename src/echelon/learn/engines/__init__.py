"""Engines, which run the training steps of a model under a plan: the protocol and its implementations."""

from echelon.ground.extensions import find_named
from echelon.learn.engines.engine import Engine, EngineSpec, Evaluation, Finding, Rehearsal
from echelon.recipe.engines import ENGINES

__all__ = ["Engine", "EngineSpec", "Evaluation", "Finding", "Rehearsal", "build_engine"]


def build_engine(spec: EngineSpec) -> Engine:
    """Build the engine that the recipe names, with initial weights. Collective."""
    build = find_named("engine", spec.recipe.engine, {name: row.place for name, row in ENGINES.items()})
    made: Engine = build(spec)
    return made
