"""The passes and the update of a step in TensorFlow, under any strategy that has copies of the model."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from echelon.engines.tensorflow.decoder import Decoder
from echelon.engines.tensorflow.library import Library
from echelon.engines.tensorflow.placement import Placement
from echelon.engines.tensorflow.update import AdamW
from echelon.objectives.loss import IGNORE

Array = npt.NDArray[Any]


class Steps:
    """Runs microbatches on the copies of this process, sums gradients over all copies, and updates the weights.

    The gradients of a copy are added up in variables of its own; the others get them once, after the last microbatch.
    """

    def __init__(self, library: Library, placement: Placement, decoder: Decoder, optimizer: AdamW) -> None:
        """Built in the scope of the strategy."""
        tf = library.tf
        self._tf, self._decoder, self._optimizer = tf, decoder, optimizer
        self._strategy, self._num_copies = placement
        self._variables = [each for group in decoder.variables.values() for each in group]
        self._sums = [
            tf.Variable(
                tf.zeros(each.shape, tf.float32),
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
            )
            for each in self._variables
        ]
        ids, scalar = tf.TensorSpec([None, None], tf.int32), tf.TensorSpec([], tf.float32)
        self._differentiate = tf.function(self._differentiate_all, input_signature=[ids, ids, scalar])
        self._add_up = tf.function(self._add_up_all)
        self._clear = tf.function(self._clear_all)
        self._measure = tf.function(self._measure_one)
        self._scale = tf.function(self._scale_all, input_signature=[scalar])
        self._update = tf.function(self._update_all, input_signature=[scalar, scalar, scalar])
        self._evaluate = tf.function(self._loss, input_signature=[ids, ids])
        self._predict = tf.function(self._logits_at, input_signature=[ids, tf.TensorSpec([None], tf.int32)])

    def differentiate(self, ids: Tensor, labels: Tensor, divisor: float) -> float:
        """Add the gradients of the summed loss / divisor of a microbatch; return the summed loss of this process."""
        rows = [_divide_rows(each, self._num_copies, filler) for each, filler in ((ids, 0), (labels, IGNORE))]
        return float(self._differentiate(*rows, np.float32(divisor)))

    def add_up(self) -> None:
        """Sum the gradients over all copies of all processes. Collective."""
        self._add_up()

    def clear(self) -> None:
        """Set the gradients to zero."""
        self._clear()

    def norm(self) -> float:
        """Return the norm of all gradients, after `add_up`."""
        return float(self._measure())

    def scale(self, factor: float) -> None:
        """Multiply the gradients by a number."""
        self._scale(np.float32(factor))

    def update(self, rate: float, step: int) -> None:
        """Apply the gradients. `step`: the number of this update, from 1."""
        size, root = self._optimizer.correct(rate, step)
        self._update(np.float32(rate), np.float32(size), np.float32(root))

    def loss_sum(self, ids: Tensor, labels: Tensor) -> float:
        """Return the summed cross-entropy of labelled tokens, without gradients, in this process alone."""
        return float(self._evaluate(_to_int32(ids), _to_int32(labels)))

    def logits_at(self, ids: Tensor, places: Tensor) -> Tensor:
        """Return fp32 logits [batch, vocabulary] of the token after position `places` [batch] of ids [batch, seq]."""
        return torch.from_numpy(self._predict(_to_int32(ids), _to_int32(places)).numpy())

    def gradients(self) -> dict[str, Array]:
        """Return the gradients by name, after `add_up`."""
        local = self._group([self._here(each) for each in self._sums])
        return self._decoder.read(local)

    def _here(self, value: Any) -> Any:
        """The first copy of a distributed value."""
        return self._strategy.experimental_local_results(value)[0]

    def _group(self, flat: list[Any]) -> dict[str, list[Any]]:
        rest = iter(flat)
        return {name: [next(rest) for _ in group] for name, group in self._decoder.variables.items()}

    def _loss(self, ids: Any, labels: Any) -> Any:
        tf = self._tf
        logits = self._decoder.logits(self._decoder.hidden_states(ids))
        has_target = labels != IGNORE
        safe = tf.where(has_target, labels, 0)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(safe, logits)
        return tf.reduce_sum(tf.where(has_target, losses, 0.0))

    def _logits_at(self, ids: Any, places: Any) -> Any:
        hidden = self._decoder.hidden_states(ids)
        return self._decoder.logits(self._tf.gather(hidden, places, batch_dims=1))

    def _differentiate_all(self, ids: Any, labels: Any, divisor: Any) -> Any:
        tf, strategy, copies = self._tf, self._strategy, self._num_copies

        def run(ids: Any, labels: Any) -> Any:
            if copies > 1:
                number = tf.distribute.get_replica_context().replica_id_in_sync_group
                ids, labels = (tf.stack(tf.split(each, copies))[number] for each in (ids, labels))
            with tf.GradientTape() as tape:
                loss = self._loss(ids, labels)
            # 0 * loss is 0, or NaN for a loss that is not finite: then all gradients are, on every copy.
            found = tape.gradient(loss, self._variables, output_gradients=(1 + 0 * loss) / divisor)
            for total, gradient in zip(self._sums, found, strict=True):
                total.assign_add(tf.convert_to_tensor(gradient))
            return loss

        losses = strategy.run(run, (ids, labels))
        return tf.add_n(list(strategy.experimental_local_results(losses)))

    def _add_up_all(self) -> None:
        def run() -> None:
            context = self._tf.distribute.get_replica_context()
            values = [each.read_value() for each in self._sums]
            summed = context.all_reduce(self._tf.distribute.ReduceOp.SUM, values)
            for total, value in zip(self._sums, summed, strict=True):
                total.assign(value)

        if self._strategy.num_replicas_in_sync > 1:
            self._strategy.run(run)

    def _clear_all(self) -> None:
        def run() -> None:
            for each in self._sums:
                each.assign(self._tf.zeros_like(each))

        self._strategy.run(run)

    def _measure_one(self) -> Any:
        def run() -> Any:
            tf = self._tf
            return tf.sqrt(tf.add_n([tf.reduce_sum(tf.square(each.read_value())) for each in self._sums]))

        return self._here(self._strategy.run(run))

    def _scale_all(self, factor: Any) -> None:
        def run() -> None:
            for each in self._sums:
                each.assign(each * factor)

        self._strategy.run(run)

    def _update_all(self, rate: Any, size: Any, root: Any) -> None:
        self._optimizer.apply(self._strategy, self._group(self._sums), rate, size, root)


def _to_int32(tensor: Tensor) -> Array:
    return tensor.cpu().numpy().astype(np.int32)


def _divide_rows(tensor: Tensor, copies: int, filler: int) -> Array:
    """The rows, with rows of `filler` at the end, so that every copy has as many."""
    missing = -tensor.shape[0] % copies
    return np.pad(_to_int32(tensor), ((0, missing), (0, 0)), constant_values=filler)
