"""The optimizer that DeepSpeed steps: echelon's own rules on the flat partitions that DeepSpeed makes of parameters."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from echelon.ground.errors import ConfigError, first_line
from echelon.learn.optimizer import clip_gradients
from echelon.learn.optimizer.rules import Item, Rule
from echelon.learn.optimizer.sharded_parameter import ParameterPlacement
from echelon.learn.optimizer.stepper import choose_rule, find_members
from echelon.recipe.training import OptimConfig


class FlatOptimizer(torch.optim.Optimizer):
    """Applies an elementwise rule to whatever parameters its groups hold: DeepSpeed replaces them by flat partitions.

    Each group has `rule`, `weight_decay` and `rate_factor`; `lr` is set before every step. Where DeepSpeed partitions
    nothing, it leaves to this optimizer what its own do around the step: `clip_grad`, and `find_norm` as in
    `Partitions.answer_norm`.
    """

    clip_grad = 0.0
    find_norm: Callable[[], Tensor] | None = None

    @override
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient, in place."""
        if self.find_norm is not None:
            norm = self.find_norm()
            if norm < 0:
                return
            if self.clip_grad:
                gradients = [parameter.grad for group in self.param_groups for parameter in group["params"]]
                clip_gradients([gradient for gradient in gradients if gradient is not None], self.clip_grad, norm)
        for group in self.param_groups:
            items = [
                _open(parameter, group["rule"], self.state[parameter])
                for parameter in group["params"]
                if parameter.grad is not None
            ]
            if items:
                commit = torch.ones((), dtype=torch.bool, device=items[0].weight.device)
                group["rule"].update(items, group["lr"], group["weight_decay"], commit)


def _open(parameter: Tensor, rule: Rule, state: dict[str, Tensor]) -> Item:
    layout = ParameterPlacement(parameter)
    if not state:
        state.update(rule.build_state(parameter.detach(), layout))
    assert parameter.grad is not None
    return Item(parameter.detach(), parameter.grad, state, layout)


def build_flat_optimizer(model: nn.Module, config: OptimConfig, offloads: bool) -> torch.optim.Optimizer:
    """The optimizer of a model that DeepSpeed will partition.

    Offloaded AdamW is DeepSpeed's own, whose kernel steps partitions in host memory.

    Raises:
        ConfigError: that kernel cannot be compiled here.
    """
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for member in find_members(model, config):
        groups.setdefault((member.weight_decay, member.rate_factor), []).append(member.parameter)
    rule = choose_rule(config, is_layer_matrix=False)
    described: Sequence[dict[str, Any]] = [
        {"params": members, "rule": rule, "weight_decay": decay, "rate_factor": factor, "lr": config.learning_rate}
        for (decay, factor), members in groups.items()
    ]
    if offloads and config.name == "adamw":
        return _build_cpu_adam(described, config)
    return FlatOptimizer(described, {"lr": config.learning_rate})


def _build_cpu_adam(groups: Sequence[dict[str, Any]], config: OptimConfig) -> torch.optim.Optimizer:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    try:
        made: torch.optim.Optimizer = DeepSpeedCPUAdam(groups, betas=config.betas, eps=config.eps, adamw_mode=True)
    except (RuntimeError, ImportError, OSError) as error:
        raise ConfigError(
            "deepspeed.offload_optimizer=true: DeepSpeed's CPUAdam cannot be compiled on this machine "
            f"({first_line(error)}); install a C++ compiler and ninja (both on PATH), or use "
            "deepspeed.offload_optimizer=false."
        ) from error
    return made


def build_state(optimizer: torch.optim.Optimizer, flat: Tensor, rule: Rule) -> None:
    """Give a flat partition the state that the optimizer would give it in its first step."""
    state: dict[str, Any] = dict(rule.build_state(flat.detach(), ParameterPlacement(flat)))
    if not isinstance(optimizer, FlatOptimizer):
        state["step"] = 0  # CPUAdam counts on the host
    optimizer.state[flat].update(state)


def count_steps(state: dict[str, Any]) -> float | None:
    """The number of steps that a partition's state was updated in; None for a rule that does not count them."""
    return None if "step" not in state else float(state["step"])


def set_steps(state: dict[str, Any], count: float) -> None:
    """Set the number of steps of a partition's state."""
    if isinstance(state["step"], Tensor):
        state["step"].fill_(count)
    else:
        state["step"] = int(count)
