"""What a layer keeps for its backward pass: the keys of the recipe, read and checked together."""

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, get_args

from echelon.ground.errors import ConfigError, PlanError
from echelon.planner.hardware.accelerators import Cluster
from echelon.planner.model_shape import ModelShape
from echelon.planner.plan import ActivationCheckpointing, ParallelPlan
from echelon.recipe.names import ENGINES

if TYPE_CHECKING:
    from echelon.recipe.document import Recipe
    from echelon.recipe.training import TrainConfig

_KEY = "train.activation_checkpointing"
_BUDGET = f"{_KEY}.memory_budget"


@dataclass(frozen=True)
class KeptActivations:
    """`train.activation_checkpointing` as fields of a plan. See ParallelPlan."""

    policy: ActivationCheckpointing
    every: int = 1
    memory_budget: float | None = None
    mlp_tiles: int = 1

    @property
    def is_input_alone(self) -> bool:
        """Whether every layer keeps its input alone."""
        return self.policy == "full" and self.every == 1

    def apply(self, plan: ParallelPlan) -> ParallelPlan:
        """Return the plan with this policy."""
        return replace(
            plan,
            activation_checkpointing=self.policy,
            checkpoint_every=self.every,
            activation_memory_budget=self.memory_budget,
            mlp_tiles=self.mlp_tiles,
        )


NONE, SELECTIVE, FULL = (KeptActivations(name) for name in get_args(ActivationCheckpointing))


def list_activations(recipe: "Recipe") -> tuple[KeptActivations, ...]:
    """Return the policies that a plan may have, the one that keeps the most first.

    It is the one that the recipe names or maps; for `auto` those that its other keys and its engine allow.
    """
    setting = recipe.train.activation_checkpointing
    if not isinstance(setting, str):
        policy: ActivationCheckpointing = "full" if setting.memory_budget is None else "none"
        return (KeptActivations(policy, setting.every or 1, setting.memory_budget, setting.mlp_tiles or 1),)
    if setting != "auto":
        return (KeptActivations(setting),)
    limits = [limit.values for limit in ENGINES[recipe.engine].limits if limit.key == _KEY]
    allowed = [kept for kept in (NONE, SELECTIVE, FULL) if all(kept.policy in values for values in limits)]
    if getattr(recipe.parallel, "schedule", None) == "zero_bubble":
        allowed = [NONE]
    if recipe.train.activation_offloading:
        allowed = [kept for kept in allowed if _explain_offloading(recipe.train, kept) is None]
    return tuple(allowed)


def check_activations(recipe: "Recipe", kept: KeptActivations, shape: ModelShape, cluster: Cluster) -> None:
    """Refuse what this model, these devices or PyTorch cannot do. Raises ConfigError or PlanError."""
    if kept.every > shape.num_layers:
        raise ConfigError(
            f"train.activation_checkpointing.every={kept.every} is more than the {shape.num_layers} layers of the "
            f"model, and none would be recomputed; use {shape.num_layers} or less, or "
            "train.activation_checkpointing=none."
        )
    if getattr(recipe.parallel, "schedule", None) == "zero_bubble":
        _check_zero_bubble(recipe.train)
    if kept.mlp_tiles > 1:
        _check_tiles(recipe, kept.mlp_tiles)
    if kept.memory_budget is not None:
        _check_budget(recipe, kept.memory_budget, cluster)
    if recipe.train.activation_offloading:
        if cluster.kind == "cpu":
            raise PlanError("train.activation_offloading=true: on CPUs everything is in host memory already; omit it.")
        if (obstacle := _explain_offloading(recipe.train, kept)) is not None:
            raise ConfigError(f"train.activation_offloading=true does not work with {obstacle}")


def _check_zero_bubble(train: "TrainConfig") -> None:
    """Refuse what a split backward pass would recompute many times, measured by test_zero_bubble.py."""
    setting = train.activation_checkpointing
    if setting in ("auto", "none"):
        return
    shown = setting if isinstance(setting, str) else json.dumps(setting.model_dump(exclude_none=True))
    raise ConfigError(
        f"train.activation_checkpointing={shown} does not work with parallel.schedule=zero_bubble: PyTorch computes "
        "the gradient of each weight in a backward pass of its own; each would recompute the layer, and all of it "
        "would be kept. Use another schedule, or train.activation_checkpointing=none."
    )


def _check_tiles(recipe: "Recipe", num_tiles: int) -> None:
    """Refuse tiles in layers that are compiled, and more of them than tokens."""
    length = recipe.data.sequence_len
    ways = (
        (recipe.train.compile is True, "train.compile=true", "the tiles are not compiled; set train.compile=auto"),
        ("fp8" in recipe.train.precision, "train.precision=fp8", "the tiles are not compiled; use bf16"),
        (num_tiles > length, f"data.sequence_len={length}", "a tile has at least one token; use fewer tiles"),
    )
    for is_given, key, why in ways:
        if is_given:
            raise ConfigError(f"{_KEY}.mlp_tiles={num_tiles} does not go with {key}: {why}.")


def _check_budget(recipe: "Recipe", budget: float, cluster: Cluster) -> None:
    """Refuse a memory budget where layers are not compiled: the compiler is what keeps it."""
    adapter, shown = recipe.adapter, f"{_BUDGET}={budget:g}"
    if recipe.train.compile is False:
        raise ConfigError(
            f"{shown} needs compiled layers, but train.compile is false; use train.compile=true, or "
            "train.activation_checkpointing=selective or full."
        )
    if adapter.target_parameters or adapter.quantize_experts:
        raise ConfigError(
            f"{shown} needs compiled layers, and layers whose expert weights an adapter replaces are not compiled; "
            "use train.activation_checkpointing=selective or full."
        )
    if not cluster.can_compile:
        raise PlanError(
            f"{shown} needs compiled layers, and {cluster.accelerator.name} has no C++ compiler or no Python "
            "headers; install them, or use train.activation_checkpointing=selective or full."
        )


def _explain_offloading(train: "TrainConfig", kept: KeptActivations) -> str | None:
    """What rules activation offloading out, because PyTorch does not hand out the tensors that a layer keeps."""
    if kept.policy == "selective":
        return f"{_KEY}=selective, which keeps its tensors where no other code can move them; use full or none."
    if kept.is_input_alone:
        return None
    compiles = "train.compile=true" if train.compile is True else "train.precision=fp8, which is compiled"
    if kept.memory_budget is not None:
        compiles = f"{_BUDGET}, which is compiled"
    if train.compile is not True and "fp8" not in train.precision and kept.memory_budget is None:
        return None
    return (
        f"{compiles}: a compiled layer keeps its tensors where no other code can move them; set {_KEY}=full, whose "
        "layer inputs can be moved, or do not compile."
    )
