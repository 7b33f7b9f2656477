"""Adafactor: second moments kept as one number a row and one a column."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from echelon.optimizer.rules import Item, assign
from echelon.optimizer.sharded_parameter import Layout
from echelon.recipe import OptimConfig

EPS = torch.finfo(torch.float32).eps  # below this a root of a second moment counts as this
SMALLEST_SCALE = 1e-3  # the least root mean square a parameter is taken to have
DECAY_EXPONENT = -0.8


@dataclass(frozen=True)
class Adafactor:
    """Adafactor (Shazeer & Stern 2018) without momentum, in the form of `torch.optim.Adafactor`.

    The learning rate is relative to a parameter's root mean square, and at most 1 / sqrt(step). The statistics are
    those of whole parameters however they are sharded.
    """

    def build_state(self, parameter: Tensor, layout: Layout) -> dict[str, Tensor]:
        """`step`, and the second moments: of rows and columns, or, of a vector, of each number."""
        step = torch.zeros((), device=parameter.device)
        if parameter.ndim < 2:
            return {"step": step, "variance": torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)}
        return {"step": step, "row_variance": layout.zeros(-1, 1), "column_variance": layout.zeros(-2, 1)}

    def update(self, items: Sequence[Item], rate: float, weight_decay: float, commit: Tensor) -> None:
        """See Rule. Collective where parameters are sharded."""
        for item in items:
            size = item.layout.shape.numel()
            step = item.state["step"] + 1
            variance = self._update_variance(item, step.pow(DECAY_EXPONENT), commit)
            update = item.gradient * variance.clamp(min=EPS * EPS).rsqrt()
            scales = torch.stack([item.weight.square().sum(), update.square().sum()])
            weight_rms, update_rms = (item.layout.add_up(scales) / size).sqrt().unbind()
            relative = step.rsqrt().clamp(max=rate) * weight_rms.clamp(min=SMALLEST_SCALE)
            moved = item.weight * (1 - rate * weight_decay) - update * (relative / update_rms.clamp(min=1.0))
            assign(item.weight, moved, commit)
            assign(item.state["step"], step, commit)

    def _update_variance(self, item: Item, newness: Tensor, commit: Tensor) -> Tensor:
        """The second moments, brought up to date where the step commits; the new estimate for each number."""
        squares, state, layout = item.gradient.square(), item.state, item.layout
        if "variance" in state:
            variance = state["variance"].lerp(squares, newness)
            assign(state["variance"], variance, commit)
            return variance
        rows, columns = layout.shape[-2:]
        row = state["row_variance"].lerp(layout.add_up(squares.sum(-1, keepdim=True), -1) / columns, newness)
        column = state["column_variance"].lerp(layout.add_up(squares.sum(-2, keepdim=True), -2) / rows, newness)
        assign(state["row_variance"], row, commit)
        assign(state["column_variance"], column, commit)
        mean = layout.add_up(row.sum(-2, keepdim=True), -2) / rows
        return row * column / mean.clamp(min=EPS)


def build_adafactor(config: OptimConfig, is_layer_matrix: bool) -> Adafactor:
    """The rule of the recipe's section."""
    return Adafactor()
