"""Muon: the momentum of a matrix, orthogonalised."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from echelon.learn.optimizer.rules import AdamW, Gradient, Item, PreconditioningRule, assign, build_adamw
from echelon.learn.optimizer.sharded_parameter import ParameterPlacement
from echelon.learn.optimizer.whole_matrices import map_whole
from echelon.recipe.training import OptimConfig

# Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks": five quintic steps.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_ITERATIONS = 5
EPS = 1e-7
# The root mean square of AdamW's updates, which Muon's are scaled to (Liu et al. 2025, arXiv:2502.16982, section 2.2).
UPDATE_RMS = 0.2


@dataclass(frozen=True)
class Muon(PreconditioningRule):
    """Muon with Nesterov momentum, its updates as large as AdamW's, so that one learning rate and decay serve both.

    Matrices are orthogonalised whole, each by one of the ranks that hold it: a part's own orthogonalisation would be
    another update. `whole_matrices.py` has the bytes that are sent.
    """

    momentum: float

    @override
    def build_state(self, parameter: Tensor, layout: ParameterPlacement) -> dict[str, Tensor]:
        """The momentum."""
        return {"momentum": torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)}

    @override
    def precondition(self, gradients: Sequence[Gradient], commit: Tensor) -> None:
        """Adds the gradients to the momentum, whose orthogonalisation replaces them."""

        def find_direction(index: int) -> Tensor:
            gradient, momentum = gradients[index].values.float(), gradients[index].state["momentum"]
            mixed = momentum.lerp(gradient, 1 - self.momentum)
            direction = gradient.lerp(mixed, self.momentum)
            assign(momentum, mixed, commit)
            return direction.bfloat16()

        def replace(index: int, update: Tensor) -> None:
            gradients[index].values.copy_(update)

        map_whole(orthogonalize, [gradient.layout for gradient in gradients], find_direction, replace)

    @override
    def update(self, items: Sequence[Item], rate: float, weight_decay: float, commit: Tensor) -> None:
        for item in items:
            scale = rate * UPDATE_RMS * math.sqrt(max(item.layout.shape))
            assign(item.weight, item.weight * (1 - rate * weight_decay) - scale * item.gradient, commit)


def build_muon(config: OptimConfig, is_layer_matrix: bool) -> Muon | AdamW:
    """The rule of the recipe's section: Muon leaves all but the matrices of the layers to AdamW."""
    return Muon(config.momentum) if is_layer_matrix else build_adamw(config, is_layer_matrix)


def orthogonalize(matrix: Tensor) -> Tensor:
    """Bring the singular values of a whole matrix near 1 by Newton-Schulz iterations in bf16, which is enough."""
    a, b, c = COEFFICIENTS
    x = matrix.bfloat16()
    is_tall = x.size(0) > x.size(1)
    if is_tall:
        x = x.T
    x = x / x.norm().clamp(min=EPS)
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x
