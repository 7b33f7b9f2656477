"""The recipe of a run, as a frozen value. `load`, `render` and `difference` read, write and compare recipes.

May import: ground; no torch at the top of a module.
"""

from echelon.recipe.document import Recipe
from echelon.recipe.inputs import (
    AdapterConfig,
    DataConfig,
    ModelConfig,
    RunConfig,
    SourceConfig,
    TrainedTokenizerConfig,
    TrainTokenizerConfig,
)
from echelon.recipe.launch_sections import LaunchConfig
from echelon.recipe.objective import ObjectiveConfig
from echelon.recipe.operation import (
    BudgetConfig,
    CheckpointConfig,
    EvaluateConfig,
    FaultConfig,
    MlflowConfig,
    PrometheusConfig,
)
from echelon.recipe.rollout import EnvironmentConfig, RewardConfig, RolloutConfig
from echelon.recipe.synchronization import SyncConfig
from echelon.recipe.training import BatchRampConfig, OptimConfig, ParallelConfig, TrainConfig

__all__ = [
    "AdapterConfig",
    "BatchRampConfig",
    "BudgetConfig",
    "CheckpointConfig",
    "DataConfig",
    "EnvironmentConfig",
    "EvaluateConfig",
    "FaultConfig",
    "LaunchConfig",
    "MlflowConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "OptimConfig",
    "ParallelConfig",
    "PrometheusConfig",
    "Recipe",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "SourceConfig",
    "SyncConfig",
    "TrainConfig",
    "TrainTokenizerConfig",
    "TrainedTokenizerConfig",
]
