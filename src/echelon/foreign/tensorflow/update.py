"""AdamW as PyTorch computes it, on TensorFlow's variables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from echelon.foreign.tensorflow.library import Library

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Member:
    """The part of the optimizer that a weight has: its weight decay, and the factor on the learning rate."""

    weight_decay: float
    rate_factor: float


def zeros_beside(library: Library, variable: Any, lengths: Sequence[int] = ()) -> Any:
    """A new variable of zeros where another one is, with these lengths before its own. In the scope of the strategy."""
    tf = library.tf
    with tf.distribute.get_strategy().extended.colocate_vars_with(variable):
        return tf.Variable(tf.zeros([*lengths, *variable.shape], tf.float32), trainable=False)


class AdamW:
    """Loshchilov & Hutter 2019, as in `torch.optim.AdamW`: eps is added to the corrected root.

    w = w * (1 - rate * decay) - rate / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps). Keras adds eps elsewhere.
    """

    def __init__(
        self,
        library: Library,
        weights: Mapping[str, list[Any]],
        members: Mapping[str, Member],
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        """Built in the scope of the strategy, so that moments are where the weights are, by the same names."""
        self._tf = library.tf
        self._weights, self._members = weights, members
        self._betas, self._eps = betas, eps
        self.moments = {
            key: {name: [zeros_beside(library, weight) for weight in group] for name, group in weights.items()}
            for key in MOMENTS
        }
        """The moments of each weight, by key and name, as variables like those of the weight."""

    def correct(self, rate: float, step: int) -> tuple[float, float]:
        """Return rate / (1 - b1^t) and sqrt(1 - b2^t) for update t, from 1: in double precision, as in PyTorch."""
        b1, b2 = self._betas
        return rate / (1 - b1**step), float((1 - b2**step) ** 0.5)

    def apply(self, strategy: Any, gradients: Mapping[str, list[Any]], rate: Any, size: Any, root: Any) -> None:
        """Update all weights and moments. Called outside of replicas.

        Args:
            gradients: the sum over all copies, on every copy, by name.
            rate, size, root: the learning rate and the result of `correct`, fp32 scalars.
        """
        for name, variables in self._weights.items():
            member = self._members[name]
            shrink, scaled = 1 - rate * member.rate_factor * member.weight_decay, size * member.rate_factor
            means, squares = (self.moments[key][name] for key in MOMENTS)
            for parts in zip(variables, means, squares, gradients[name], strict=True):
                strategy.extended.update(parts[0], self._move, args=(*parts[1:], shrink, scaled, root))

    def _move(self, weight: Any, mean: Any, square: Any, gradient: Any, shrink: Any, size: Any, root: Any) -> None:
        b1, b2 = self._betas
        mean.assign_add((gradient - mean) * (1 - b1))
        square.assign(square * b2 + gradient * gradient * (1 - b2))
        weight.assign(weight * shrink - size * mean / (self._tf.sqrt(square) / root + self._eps))
