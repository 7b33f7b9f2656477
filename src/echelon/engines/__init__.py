"""Engines, which run the training steps of a model under a plan: the protocol and its implementations."""

from collections.abc import Sequence

import torch
from transformers import PretrainedConfig

from echelon.distributed.mesh import Meshes
from echelon.engines.engine import Engine, Evaluation, Finding, Rehearsal
from echelon.extensions import find_named
from echelon.objectives.objective import Objective
from echelon.planner.plan import ParallelPlan
from echelon.recipe import Recipe
from echelon.recipe.engines import ENGINES

__all__ = ["Engine", "Evaluation", "Finding", "Rehearsal", "build_engine"]


def build_engine(
    recipe: Recipe,
    config: PretrainedConfig,
    plan: ParallelPlan,
    meshes: Meshes,
    objective: Objective,
    device: torch.device,
    compile_backend: str = "inductor",
    new_token_ids: Sequence[int] = (),
) -> Engine:
    """Build the engine that the recipe names, with initial weights. Collective.

    Args:
        config: the model's HF config, with its vocabulary size.
        new_token_ids: ids of `model.new_tokens`, whose rows are trained in addition to an adapter.
    """
    build = find_named("engine", recipe.engine, {name: row.place for name, row in ENGINES.items()})
    made: Engine = build(recipe, config, plan, meshes, objective, device, compile_backend, new_token_ids)
    return made
