"""The protocol of update rules, and the elementwise rules: AdamW, SGD with momentum, Lion.

A rule never asks the host whether a step counts: `commit` stays on the device, and where it is false nothing changes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd
from typing_extensions import override

from echelon.learn.optimizer.sharded_parameter import ParameterPlacement
from echelon.recipe.training import OptimConfig


@dataclass(frozen=True)
class Item:
    """This rank's part of one parameter as a rule sees it: all fp32, weight and state to be changed in place."""

    weight: Tensor
    gradient: Tensor
    state: dict[str, Tensor]
    layout: ParameterPlacement


@dataclass(frozen=True)
class Gradient:
    """This rank's part of one gradient as it is stored, fp32 or bf16, and the state of its parameter."""

    values: Tensor
    state: dict[str, Tensor]
    layout: ParameterPlacement


class Rule(Protocol):
    """How gradients move weights."""

    def build_state(self, parameter: Tensor, layout: ParameterPlacement) -> dict[str, Tensor]:
        """The first state of one parameter, fp32, sharded like it."""

    def update(self, items: Sequence[Item], rate: float, weight_decay: float, commit: Tensor) -> None:
        """One step of some parameters, in place, unless `commit` (a boolean scalar on their device) is false.

        Weight decay is decoupled: weights shrink by rate * weight_decay (Loshchilov & Hutter 2019). Every rank calls
        it with the same parameters in the same order.
        """


@runtime_checkable
class PreconditioningRule(Rule, Protocol):
    """A rule that first replaces the gradients of all its parameters together."""

    def precondition(self, gradients: Sequence[Gradient], commit: Tensor) -> None:
        """Replace gradients in place by what `update` is given, and bring the state up to date where `commit` is true.

        Every rank calls it with the same parameters in the same order.
        """


@runtime_checkable
class ElementwiseRule(Rule, Protocol):
    """A rule whose update of a number depends on no other: compiled, it is one pass over memory with the storing.

    Attributes:
        has_kernel: whether `update` is a single pass over fp32 tensors already.
    """

    has_kernel: ClassVar[bool]

    def begin(self, states: Sequence[dict[str, Tensor]], rate: float, weight_decay: float, commit: Tensor) -> Tensor:
        """The coefficients of a step for each parameter, fp32 [parameters, coefficients], on their device.

        Counts the step in those states that have a count, where `commit` is true.
        """

    def move(
        self, weight: Tensor, gradient: Tensor, state: dict[str, Tensor], coefficients: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The new weight and moments, by the formula of `update`. All tensors are fp32; none is changed.

        A compiled graph serves all steps, so whatever may differ between calls must be among the coefficients.
        """


@runtime_checkable
class CompilableRule(Rule, Protocol):
    """A rule with functions of tensors that are worth compiling."""

    def compiled(self, compile_function: Callable[..., Any]) -> Rule:
        """The rule with its functions compiled by `compile_function`, which takes one and returns one like it."""


def spread(values: Sequence[float | Tensor], count: int, device: torch.device) -> Tensor:
    """Coefficients for `count` parameters from numbers, or fp64 tensors [count], without a copy from the host."""
    columns = [
        value if isinstance(value, Tensor) else torch.full((count,), value, dtype=torch.float64, device=device)
        for value in values
    ]
    return torch.stack(columns, -1).float()


def assign(target: Tensor, value: Tensor, commit: Tensor) -> None:
    """Put a value in place where `commit` is true."""
    target.copy_(torch.where(commit, value, target))


@dataclass(frozen=True)
class AdamW(ElementwiseRule):
    """AdamW (Loshchilov & Hutter 2019), by PyTorch's fused kernel."""

    betas: tuple[float, float]
    eps: float
    has_kernel: ClassVar[bool] = True

    @override
    def build_state(self, parameter: Tensor, layout: ParameterPlacement) -> dict[str, Tensor]:
        """`step`, and the two moments."""
        return {
            "step": torch.zeros((), device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False),
        }

    @override
    def update(self, items: Sequence[Item], rate: float, weight_decay: float, commit: Tensor) -> None:
        """All items in one call."""
        adamw(
            [item.weight for item in items],
            [item.gradient for item in items],
            [item.state["exp_avg"] for item in items],
            [item.state["exp_avg_sq"] for item in items],
            [],
            [item.state["step"] for item in items],
            fused=True,
            found_inf=(~commit).float(),
            amsgrad=False,
            beta1=self.betas[0],
            beta2=self.betas[1],
            lr=rate,
            weight_decay=weight_decay,
            eps=self.eps,
            maximize=False,
        )

    @override
    def begin(self, states: Sequence[dict[str, Tensor]], rate: float, weight_decay: float, commit: Tensor) -> Tensor:
        counts = [state["step"] for state in states]
        steps = torch.stack(counts).double() + 1
        torch._foreach_add_(counts, commit.float())
        size, root = rate / (1 - self.betas[0] ** steps), (1 - self.betas[1] ** steps).sqrt()
        fixed = (1 - rate * weight_decay, 1 - self.betas[0], self.betas[1], 1 - self.betas[1], self.eps)
        return spread((size, root, *fixed), len(states), steps.device)

    @override
    def move(
        self, weight: Tensor, gradient: Tensor, state: dict[str, Tensor], coefficients: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        size, root, shrink, new, kept, new_square, eps = coefficients.unbind()
        exp_avg = state["exp_avg"] + (gradient - state["exp_avg"]) * new
        exp_avg_sq = state["exp_avg_sq"] * kept + gradient.square() * new_square
        moved = weight * shrink - size * exp_avg / (exp_avg_sq.sqrt() / root + eps)
        return moved, {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}


def build_adamw(config: OptimConfig, is_layer_matrix: bool) -> AdamW:
    """The rule of the recipe's section."""
    return AdamW(config.betas, config.eps)


@dataclass(frozen=True)
class MomentumSGD(ElementwiseRule):
    """SGD with momentum, b = momentum * b + g, w -= rate * b, by PyTorch's fused kernel; weight decay decoupled."""

    momentum: float
    has_kernel: ClassVar[bool] = True

    @override
    def build_state(self, parameter: Tensor, layout: ParameterPlacement) -> dict[str, Tensor]:
        """The momentum, which begins at zero: then the first step takes the gradient as it is."""
        return {"momentum": torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)}

    @override
    def update(self, items: Sequence[Item], rate: float, weight_decay: float, commit: Tensor) -> None:
        """All items in one call."""
        weights = [item.weight for item in items]
        if weights and weight_decay:
            torch._foreach_mul_(weights, torch.where(commit, 1.0 - rate * weight_decay, 1.0))
        sgd(
            weights,
            [item.gradient for item in items],
            [item.state["momentum"] for item in items],
            fused=True,
            found_inf=(~commit).float(),
            weight_decay=0.0,
            momentum=self.momentum,
            lr=rate,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )

    @override
    def begin(self, states: Sequence[dict[str, Tensor]], rate: float, weight_decay: float, commit: Tensor) -> Tensor:
        return spread((1 - rate * weight_decay, rate, self.momentum), len(states), commit.device)

    @override
    def move(
        self, weight: Tensor, gradient: Tensor, state: dict[str, Tensor], coefficients: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        shrink, rate, kept = coefficients.unbind()
        momentum = state["momentum"] * kept + gradient
        return weight * shrink - rate * momentum, {"momentum": momentum}


def build_sgd(config: OptimConfig, is_layer_matrix: bool) -> MomentumSGD:
    """The rule of the recipe's section."""
    return MomentumSGD(config.momentum)


@dataclass(frozen=True)
class Lion(ElementwiseRule):
    """Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2)."""

    betas: tuple[float, float]
    has_kernel: ClassVar[bool] = False

    @override
    def build_state(self, parameter: Tensor, layout: ParameterPlacement) -> dict[str, Tensor]:
        """The momentum."""
        return {"momentum": torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)}

    @override
    def update(self, items: Sequence[Item], rate: float, weight_decay: float, commit: Tensor) -> None:
        """The sign of a mix of momentum and gradient; the momentum itself mixes by the second beta."""
        for item in items:
            momentum = item.state["momentum"]
            sign = momentum.lerp(item.gradient, 1 - self.betas[0]).sign_()
            assign(item.weight, item.weight * (1 - rate * weight_decay) - rate * sign, commit)
            assign(momentum, momentum.lerp(item.gradient, 1 - self.betas[1]), commit)

    @override
    def begin(self, states: Sequence[dict[str, Tensor]], rate: float, weight_decay: float, commit: Tensor) -> Tensor:
        fixed = (1 - rate * weight_decay, rate, 1 - self.betas[0], 1 - self.betas[1])
        return spread(fixed, len(states), commit.device)

    @override
    def move(
        self, weight: Tensor, gradient: Tensor, state: dict[str, Tensor], coefficients: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        shrink, rate, mixed, new = coefficients.unbind()
        difference = gradient - state["momentum"]
        sign = (state["momentum"] + difference * mixed).sign()
        return weight * shrink - rate * sign, {"momentum": state["momentum"] + difference * new}


def build_lion(config: OptimConfig, is_layer_matrix: bool) -> Lion:
    """The rule of the recipe's section."""
    return Lion(config.betas)
