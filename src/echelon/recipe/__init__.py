"""The recipe of a run, as a frozen value: loading, checking, rendering and comparing it."""

from echelon.recipe.difference import RESUMABLE, Difference, blocking_differences, diff_recipes
from echelon.recipe.document import Recipe
from echelon.recipe.inputs import (
    AdapterConfig,
    DataConfig,
    ModelConfig,
    ObjectiveConfig,
    RunConfig,
    SourceConfig,
    TrainedTokenizerConfig,
    TrainTokenizerConfig,
)
from echelon.recipe.launching import LaunchConfig
from echelon.recipe.load import Overrides, build_recipe, load_recipe
from echelon.recipe.operation import (
    BudgetConfig,
    CheckpointConfig,
    EvaluateConfig,
    FaultConfig,
    MlflowConfig,
    WandbConfig,
)
from echelon.recipe.reference import render_recipe_reference
from echelon.recipe.render import find_secret_keys, render_recipe
from echelon.recipe.schema import recipe_json_schema
from echelon.recipe.starter import render_starter
from echelon.recipe.synchronization import SyncConfig
from echelon.recipe.training import BatchRampConfig, OptimConfig, ParallelConfig, TrainConfig

__all__ = [
    "RESUMABLE",
    "AdapterConfig",
    "BatchRampConfig",
    "BudgetConfig",
    "CheckpointConfig",
    "DataConfig",
    "Difference",
    "EvaluateConfig",
    "FaultConfig",
    "LaunchConfig",
    "MlflowConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "OptimConfig",
    "Overrides",
    "ParallelConfig",
    "Recipe",
    "RunConfig",
    "SourceConfig",
    "SyncConfig",
    "TrainConfig",
    "TrainTokenizerConfig",
    "TrainedTokenizerConfig",
    "WandbConfig",
    "blocking_differences",
    "build_recipe",
    "diff_recipes",
    "find_secret_keys",
    "load_recipe",
    "recipe_json_schema",
    "render_recipe",
    "render_recipe_reference",
    "render_starter",
]
