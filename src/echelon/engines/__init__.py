"""What runs the steps of one model under one plan: the protocol, and the engines that implement it."""

from collections.abc import Sequence

import torch
from transformers import PretrainedConfig

from echelon.distributed.mesh import Meshes
from echelon.engines.engine import Engine, Evaluation, Finding
from echelon.extensions import find_named
from echelon.objectives.objective import Objective
from echelon.planner.plan import ParallelPlan
from echelon.recipe import Recipe

__all__ = ["ENGINES", "Engine", "Evaluation", "Finding", "build_engine"]

ENGINES: dict[str, str] = {"native": "echelon.engines.native:build_native_engine"}
"""What the recipe's `engine` can be. Each is called with the arguments of `build_engine`."""


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
    """The engine that the recipe names, its weights in place. Collective.

    Args:
        config: of the model, with the vocabulary's size.
        new_token_ids: of `model.new_tokens`; beside an adapter their rows are trained.
    """
    build = find_named("engine", recipe.engine, ENGINES)
    made: Engine = build(recipe, config, plan, meshes, objective, device, compile_backend, new_token_ids)
    return made
