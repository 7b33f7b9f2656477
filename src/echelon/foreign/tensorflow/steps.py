"""The passes and the update of a step in TensorFlow: what any strategy does, and those with copies of the model."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from torch import Tensor
from typing_extensions import override

from echelon.foreign.tensorflow.decoder import Decoder
from echelon.foreign.tensorflow.library import Library
from echelon.foreign.tensorflow.passes import Array, Passes, to_int32
from echelon.foreign.tensorflow.placement import Placement
from echelon.foreign.tensorflow.update import AdamW
from echelon.learn.data.loader import Microbatch
from echelon.learn.objectives.loss import IGNORE

WEIGHTS, GRADIENTS = "weights", "gradients"


class Steps(Protocol):
    """The training steps of a model under a strategy. Every method is collective.

    The tensors of a key are those of all weights, by name and in the shapes of `transformers`. A key is WEIGHTS,
    GRADIENTS or one of `update.MOMENTS`.
    """

    def accumulate(self, microbatches: Sequence[Microbatch], divisor: float) -> float:
        """Set the gradients to those of the summed loss / divisor, of all processes; return this one's summed loss."""

    def clear(self) -> None:
        """Set the gradients to zero."""

    def norm(self) -> float:
        """Return the norm of all gradients."""

    def scale(self, factor: float) -> None:
        """Multiply the gradients by a number."""

    def update(self, rate: float, step: int) -> None:
        """Apply the gradients at a learning rate. `step`: the number of this update, from 1."""

    def passes(self) -> Passes:
        """Return forward passes with the present weights."""

    def read(self, key: str) -> dict[str, Array]:
        """Return copies of the tensors of a key, on every process."""

    def write(self, key: str, values: Mapping[str, Array]) -> None:
        """Set the tensors of a key, given on every process."""


class CopiedSteps(Steps):
    """Runs microbatches on the copies of this process, and sums gradients over all copies.

    The gradients of a copy are added up in variables of its own; the others get them once, after the last microbatch.
    """

    def __init__(self, library: Library, placement: Placement, decoder: Decoder, optimizer: AdamW) -> None:
        """Built in the scope of the strategy."""
        tf = library.tf
        self._passes = Passes(library, decoder)
        self._tf, self._decoder, self._optimizer = tf, decoder, optimizer
        self._strategy, self._num_copies, varies = placement
        self._variables = [variable for group in decoder.variables.values() for variable in group]
        self._sums = [
            tf.Variable(
                tf.zeros(variable.shape, tf.float32),
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
            )
            for variable in self._variables
        ]
        ids, scalar = tf.TensorSpec([None, None], tf.int32), tf.TensorSpec([], tf.float32)
        signature = [ids, ids, scalar] if varies else None
        self._differentiate = tf.function(self._differentiate_all, input_signature=signature)
        self.add_up = tf.function(self._add_up_all)
        self._clear = tf.function(self._clear_all)
        self._measure = tf.function(self._measure_one)
        self._scale = tf.function(self._scale_all, input_signature=[scalar])
        self._update = tf.function(self._update_all, input_signature=[scalar, scalar, scalar])

    @override
    def accumulate(self, microbatches: Sequence[Microbatch], divisor: float) -> float:
        losses = [self._add_gradients(microbatch, divisor) for microbatch in microbatches]
        self.add_up()
        return math.fsum(losses) if all(map(math.isfinite, losses)) else math.nan

    def _add_gradients(self, microbatch: Microbatch, divisor: float) -> float:
        pairs = ((microbatch.input_ids, 0), (microbatch.labels, IGNORE))
        rows = [_divide_rows(tensor, self._num_copies, filler) for tensor, filler in pairs]
        return float(self._differentiate(*map(self._tf.constant, rows), self._tf.constant(divisor, self._tf.float32)))

    @override
    def clear(self) -> None:
        self._clear()

    @override
    def norm(self) -> float:
        return float(self._measure())

    @override
    def scale(self, factor: float) -> None:
        self._scale(np.float32(factor))

    @override
    def update(self, rate: float, step: int) -> None:
        size, root = self._optimizer.correct(rate, step)
        self._update(np.float32(rate), np.float32(size), np.float32(root))

    @override
    def passes(self) -> Passes:
        """Every process has its own copy."""
        return self._passes

    @override
    def read(self, key: str) -> dict[str, Array]:
        return self._decoder.read(self._find(key))

    @override
    def write(self, key: str, values: Mapping[str, Array]) -> None:
        self._decoder.write(self._find(key), values)

    def _find(self, key: str) -> Mapping[str, list[Any]]:
        if key == GRADIENTS:
            return self._decoder.group([self._here(gradient) for gradient in self._sums])
        return self._decoder.variables if key == WEIGHTS else self._optimizer.moments[key]

    def _here(self, value: Any) -> Any:
        """The first copy of a distributed value."""
        return self._strategy.experimental_local_results(value)[0]

    def _differentiate_all(self, ids: Any, labels: Any, divisor: Any) -> Any:
        tf, strategy, copies = self._tf, self._strategy, self._num_copies

        def run(ids: Any, labels: Any) -> Any:
            if copies > 1:
                number = tf.distribute.get_replica_context().replica_id_in_sync_group
                ids, labels = (tf.stack(tf.split(tensor, copies))[number] for tensor in (ids, labels))
            with tf.GradientTape() as tape:
                loss = self._decoder.loss_sum(self._decoder.hidden_states(ids), labels)
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
            values = [gradient.read_value() for gradient in self._sums]
            summed = context.all_reduce(self._tf.distribute.ReduceOp.SUM, values)
            for total, value in zip(self._sums, summed, strict=True):
                total.assign(value)

        if self._strategy.num_replicas_in_sync > 1:
            self._strategy.run(run)

    def _clear_all(self) -> None:
        def run() -> None:
            for gradient in self._sums:
                gradient.assign(self._tf.zeros_like(gradient))

        self._strategy.run(run)

    def _measure_one(self) -> Any:
        def run() -> Any:
            tf = self._tf
            return tf.sqrt(tf.add_n([tf.reduce_sum(tf.square(gradient.read_value())) for gradient in self._sums]))

        return self._here(self._strategy.run(run))

    def _scale_all(self, factor: Any) -> None:
        def run() -> None:
            for gradient in self._sums:
                gradient.assign(gradient * factor)

        self._strategy.run(run)

    def _update_all(self, rate: Any, size: Any, root: Any) -> None:
        self._optimizer.apply(self._strategy, self._decoder.group(self._sums), rate, size, root)


def _divide_rows(tensor: Tensor, copies: int, filler: int) -> Array:
    """The rows, with rows of `filler` at the end, so that every copy has as many."""
    missing = -tensor.shape[0] % copies
    return np.pad(to_int32(tensor), ((0, missing), (0, 0)), constant_values=filler)
