"""Adafactor: second moments kept as one number a row and one a column."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from echelon.learn.optimizer.rules import CompilableRule, Item, assign
from echelon.learn.optimizer.sharded_parameter import ParameterPlacement
from echelon.recipe.training import OptimConfig

EPS = torch.finfo(torch.float32).eps  # below this a root of a second moment counts as this
SMALLEST_SCALE = 1e-3  # the least root mean square a parameter is taken to have
DECAY_EXPONENT = -0.8


def sum_squares(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """The sums of the squares of each row and of each column, with the dims that were summed."""
    squares = gradient.square()
    return squares.sum(-1, keepdim=True), squares.sum(-2, keepdim=True)


def find_update(weight: Tensor, gradient: Tensor, row: Tensor, column: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient over the root of the second moment row * column / mean; the sums of squares of weight and update."""
    variance = row * column / mean.clamp(min=EPS)
    update = gradient * variance.clamp(min=EPS * EPS).rsqrt()
    return update, torch.stack([weight.square().sum(), update.square().sum()])


def move(weight: Tensor, update: Tensor, size: Tensor, shrink: Tensor, commit: Tensor) -> None:
    """Shrink the weight and subtract the update, whose factor is `size`, where `commit` is true."""
    assign(weight, weight * shrink - update * size, commit)


class Passes(NamedTuple):
    """The passes over memory of a step, between which sharded parameters add up sums."""

    sum_squares: Callable[[Tensor], tuple[Tensor, Tensor]] = sum_squares
    find_update: Callable[..., tuple[Tensor, Tensor]] = find_update
    move: Callable[..., None] = move


_EAGER = Passes()


@dataclass(frozen=True)
class Adafactor(CompilableRule):
    """Adafactor (Shazeer & Stern 2018) without momentum, in the form of `torch.optim.Adafactor`.

    The learning rate is relative to a parameter's root mean square, and at most 1 / sqrt(step). The statistics are
    those of whole parameters however they are sharded.
    """

    passes: Passes = _EAGER

    @override
    def compiled(self, compile_function: Callable[..., Any]) -> "Adafactor":
        return Adafactor(Passes(*map(compile_function, self.passes)))

    @override
    def build_state(self, parameter: Tensor, layout: ParameterPlacement) -> dict[str, Tensor]:
        """`step`, and the second moments: of rows and columns, or, of a vector, of each number."""
        step = torch.zeros((), device=parameter.device)
        if parameter.ndim < 2:
            return {"step": step, "variance": torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)}
        return {"step": step, "row_variance": layout.zeros(-1, 1), "column_variance": layout.zeros(-2, 1)}

    @override
    def update(self, items: Sequence[Item], rate: float, weight_decay: float, commit: Tensor) -> None:
        """Collective where parameters are sharded."""
        shrink = torch.full((), 1 - rate * weight_decay, device=commit.device)
        for item in items:
            size = item.layout.shape.numel()
            step = item.state["step"] + 1
            moments = self._update_moments(item, step.pow(DECAY_EXPONENT), commit)
            update, sums = self.passes.find_update(item.weight, item.gradient, *moments)
            weight_rms, update_rms = (item.layout.add_up(sums) / size).sqrt().unbind()
            relative = step.rsqrt().clamp(max=rate) * weight_rms.clamp(min=SMALLEST_SCALE)
            self.passes.move(item.weight, update, relative / update_rms.clamp(min=1.0), shrink, commit)
            assign(item.state["step"], step, commit)

    def _update_moments(self, item: Item, newness: Tensor, commit: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Bring the second moments up to date where the step commits; row, column and mean for `find_update`."""
        state, layout = item.state, item.layout
        if "variance" in state:
            variance = state["variance"].lerp(item.gradient.square(), newness)
            assign(state["variance"], variance, commit)
            return variance, torch.ones_like(newness), torch.ones_like(newness)
        rows, columns = layout.shape[-2:]
        of_rows, of_columns = self.passes.sum_squares(item.gradient)
        row = state["row_variance"].lerp(layout.add_up(of_rows, -1) / columns, newness)
        column = state["column_variance"].lerp(layout.add_up(of_columns, -2) / rows, newness)
        assign(state["row_variance"], row, commit)
        assign(state["column_variance"], column, commit)
        mean = layout.add_up(row.sum(-2, keepdim=True), -2) / rows
        return row, column, mean


def build_adafactor(config: OptimConfig, is_layer_matrix: bool) -> Adafactor:
    """The rule of the recipe's section."""
    return Adafactor()
