"""Passes of a model in TensorFlow, with and without an update, under a strategy that copies the model."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from echelon.foreign.tensorflow.llama import Array, Decoder
from echelon.foreign.tensorflow.placement import Library, Placement
from echelon.ground.errors import ConfigError
from echelon.learn.data.loader import Microbatch
from echelon.learn.engines.engine import Evaluation, NonFinite
from echelon.learn.objectives.loss import IGNORE
from echelon.learn.objectives.outputs import OutputsFn
from echelon.learn.optimizer.stepper import Member
from echelon.recipe.training import OptimConfig

WEIGHTS, GRADIENTS = "weights", "gradients"
MOMENTS = ("exp_avg", "exp_avg_sq")


class TensorflowEvaluation(Evaluation):
    """Runs the copy of the decoder in this process, alone."""

    def __init__(self, library: Library, decoder: Decoder) -> None:
        self._tf, self._decoder = library.tf, decoder
        ids = self._tf.TensorSpec([None, None], self._tf.int32)
        places = self._tf.TensorSpec([None], self._tf.int32)
        self._losses = self._tf.function(self._losses_of, input_signature=[ids, ids])
        self._predict = self._tf.function(self._logits_at, input_signature=[ids, places])

    @override
    def sums(self, microbatch: Microbatch) -> Tensor:
        losses = self._losses(to_int32(microbatch.input_ids), to_int32(microbatch.labels))
        return torch.tensor([float(self._tf.reduce_sum(losses))])

    @override
    def run(self, microbatch: Microbatch, compute: OutputsFn) -> Tensor:
        """Raises ConfigError: TensorFlow's passes end in a loss of their own."""
        raise ConfigError("engine=tensorflow runs no function in PyTorch on its model; use engine=native.")

    @override
    def log_probabilities(self, microbatch: Microbatch, temperature: float = 1.0) -> Tensor:
        if temperature != 1.0:
            raise ConfigError("engine=tensorflow has log-probabilities at temperature 1 alone; use engine=native.")
        return -torch.from_numpy(self._losses(to_int32(microbatch.input_ids), to_int32(microbatch.labels)).numpy())

    @override
    def logits(self, input_ids: Tensor) -> Tensor:
        """Raises ConfigError: TensorFlow's passes return the logits of one position."""
        raise ConfigError("engine=tensorflow computes the logits of one position of a text alone; use engine=native.")

    @override
    def next_token_logits(self, input_ids: Tensor, places: Tensor) -> Tensor:
        return torch.from_numpy(self._predict(to_int32(input_ids), to_int32(places)).numpy())

    @override
    def start_cached(self) -> None:
        pass

    def find_nonfinite(self, input_ids: Tensor, labels: Tensor) -> NonFinite | None:
        """Return the first value of a microbatch, or of its gradients, that is not finite; None if all are."""
        tf, variables = self._tf, self._decoder.variables
        outputs: dict[str, Any] = {}
        with tf.GradientTape() as tape:
            for name, value in self._decoder.parts(tf.constant(to_int32(input_ids))):
                outputs[name] = value
                if not self._is_finite(value):
                    return NonFinite(0, len(outputs) - 1, name)
            loss = tf.reduce_sum(self._decoder.losses(value, tf.constant(to_int32(labels))))
        if not self._is_finite(loss):
            return NonFinite(1, 0, self._decoder.head)
        for_outputs, for_weights = tape.gradient(loss, [list(outputs.values()), list(variables.values())])
        for index, (name, gradient) in enumerate(reversed(list(zip(outputs, for_outputs, strict=True)))):
            if gradient is not None and not self._is_finite(gradient):
                return NonFinite(2, index, name)
        for index, (name, gradient) in enumerate(zip(variables, for_weights, strict=True)):
            if not self._is_finite(gradient):
                return NonFinite(3, index, name)
        return None

    def _losses_of(self, ids: Any, labels: Any) -> Any:
        return self._decoder.losses(self._decoder.hidden_states(ids), labels)

    def _logits_at(self, ids: Any, places: Any) -> Any:
        return self._decoder.logits(self._tf.gather(self._decoder.hidden_states(ids), places, batch_dims=1))

    def _is_finite(self, value: Any) -> bool:
        return bool(self._tf.reduce_all(self._tf.math.is_finite(self._tf.convert_to_tensor(value))))


def to_int32(tensor: Tensor) -> Array:
    """Return what TensorFlow takes for ids and labels."""
    return tensor.cpu().numpy().astype(np.int32)


class Steps:
    """Runs microbatches on the copies of this process, and sums gradients over all copies. Every method is collective.

    The gradients of a copy are added up in variables of its own; the others get them once, after the last microbatch.
    The tensors of a key are those of all weights, by name and in the shapes of `transformers`. A key is WEIGHTS,
    GRADIENTS or one of MOMENTS.
    """

    def __init__(
        self, library: Library, placement: Placement, decoder: Decoder, members: Sequence[Member], optim: OptimConfig
    ) -> None:
        """Built in the scope of the strategy. `members`: the parts of the optimizer that the weights have."""
        tf = library.tf
        self._tf, self._decoder, self._optim = tf, decoder, optim
        self._members = {member.name: member for member in members}
        self._strategy, self._num_copies, varies = placement
        self._sums = {name: self._build_sum(variable) for name, variable in decoder.variables.items()}
        self._moments = {
            key: {
                name: tf.Variable(tf.zeros(variable.shape, tf.float32), trainable=False)
                for name, variable in decoder.variables.items()
            }
            for key in MOMENTS
        }
        ids, scalar = tf.TensorSpec([None, None], tf.int32), tf.TensorSpec([], tf.float32)
        signature = [ids, ids, scalar] if varies else None
        self._differentiate = tf.function(self._differentiate_all, input_signature=signature)
        self.add_up = tf.function(self._add_up_all)
        self.clear = tf.function(self._clear_all)
        """Sets the gradients to zero."""
        self._measure = tf.function(self._measure_one)
        self._scale = tf.function(self._scale_all, input_signature=[scalar])
        self._update = tf.function(self._update_all, input_signature=[scalar, scalar, scalar])

    def accumulate(self, microbatches: Sequence[Microbatch], divisor: float) -> float:
        """Set the gradients to those of the summed loss / divisor, of all processes; return this one's summed loss."""
        losses = [self._add_gradients(microbatch, divisor) for microbatch in microbatches]
        self.add_up()
        return math.fsum(losses) if all(map(math.isfinite, losses)) else math.nan

    def norm(self) -> float:
        """Return the norm of all gradients."""
        return float(self._measure())

    def scale(self, factor: float) -> None:
        """Multiply the gradients by a number."""
        self._scale(np.float32(factor))

    def update(self, rate: float, step: int) -> None:
        """Apply the gradients at a learning rate. `step`: the number of this update, from 1."""
        b1, b2 = self._optim.betas  # in double precision, as in PyTorch
        self._update(np.float32(rate), np.float32(rate / (1 - b1**step)), np.float32((1 - b2**step) ** 0.5))

    def read(self, key: str) -> dict[str, Array]:
        """Return copies of the tensors of a key."""
        return self._decoder.read(self._find(key))

    def write(self, key: str, values: Mapping[str, Array]) -> None:
        """Set the tensors of a key, given on every process."""
        self._decoder.write(self._find(key), values)

    def _find(self, key: str) -> Mapping[str, Any]:
        if key == GRADIENTS:
            return {name: self._here(gradient) for name, gradient in self._sums.items()}
        return self._decoder.variables if key == WEIGHTS else self._moments[key]

    def _here(self, value: Any) -> Any:
        """The first copy of a distributed value."""
        return self._strategy.experimental_local_results(value)[0]

    def _build_sum(self, weight: Any) -> Any:
        """A variable that has a value of its own on each copy."""
        tf = self._tf
        return tf.Variable(
            tf.zeros(weight.shape, tf.float32),
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )

    def _add_gradients(self, microbatch: Microbatch, divisor: float) -> float:
        pairs = ((microbatch.input_ids, 0), (microbatch.labels, IGNORE))
        rows = [_divide_rows(tensor, self._num_copies, filler) for tensor, filler in pairs]
        return float(self._differentiate(*map(self._tf.constant, rows), self._tf.constant(divisor, self._tf.float32)))

    def _differentiate_all(self, ids: Any, labels: Any, divisor: Any) -> Any:
        tf, strategy, copies = self._tf, self._strategy, self._num_copies

        def run(ids: Any, labels: Any) -> Any:
            if copies > 1:
                number = tf.distribute.get_replica_context().replica_id_in_sync_group
                ids, labels = (tf.stack(tf.split(tensor, copies))[number] for tensor in (ids, labels))
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(self._decoder.losses(self._decoder.hidden_states(ids), labels))
            # 0 * loss is 0, or NaN for a loss that is not finite: then all gradients are, on every copy.
            weights = list(self._decoder.variables.values())
            gradients = tape.gradient(loss, weights, output_gradients=(1 + 0 * loss) / divisor)
            for total, gradient in zip(self._sums.values(), gradients, strict=True):
                total.assign_add(tf.convert_to_tensor(gradient))
            return loss

        losses = strategy.run(run, (ids, labels))
        return tf.add_n(list(strategy.experimental_local_results(losses)))

    def _add_up_all(self) -> None:
        def run() -> None:
            context = self._tf.distribute.get_replica_context()
            values = [gradient.read_value() for gradient in self._sums.values()]
            summed = context.all_reduce(self._tf.distribute.ReduceOp.SUM, values)
            for total, value in zip(self._sums.values(), summed, strict=True):
                total.assign(value)

        if self._strategy.num_replicas_in_sync > 1:
            self._strategy.run(run)

    def _clear_all(self) -> None:
        def run() -> None:
            for gradient in self._sums.values():
                gradient.assign(self._tf.zeros_like(gradient))

        self._strategy.run(run)

    def _measure_one(self) -> Any:
        def run() -> Any:
            tf = self._tf
            squares = [tf.reduce_sum(tf.square(gradient.read_value())) for gradient in self._sums.values()]
            return tf.sqrt(tf.add_n(squares))

        return self._here(self._strategy.run(run))

    def _scale_all(self, factor: Any) -> None:
        def run() -> None:
            for gradient in self._sums.values():
                gradient.assign(gradient * factor)

        self._strategy.run(run)

    def _update_all(self, rate: Any, size: Any, root: Any) -> None:
        """AdamW (Loshchilov & Hutter 2019) as in PyTorch: eps is added to the corrected root. Keras adds it elsewhere.

        w = w * (1 - rate * decay) - size * m / (sqrt(v) / root + eps), size = rate / (1 - b1^t), root = sqrt(1 - b2^t).
        """
        for name, weight in self._decoder.variables.items():
            member = self._members[name]
            shrink, scaled = 1 - rate * member.rate_factor * member.weight_decay, size * member.rate_factor
            moments = [self._moments[key][name] for key in MOMENTS]
            arguments = (*moments, self._sums[name], shrink, scaled, root)
            self._strategy.extended.update(weight, self._move, args=arguments)

    def _move(self, weight: Any, mean: Any, square: Any, gradient: Any, shrink: Any, size: Any, root: Any) -> None:
        b1, b2 = self._optim.betas
        mean.assign_add((gradient - mean) * (1 - b1))
        square.assign(square * b2 + gradient * gradient * (1 - b2))
        weight.assign(weight * shrink - size * mean / (self._tf.sqrt(square) / root + self._optim.eps))


def _divide_rows(tensor: Tensor, copies: int, filler: int) -> Array:
    """The rows, with rows of `filler` at the end, so that every copy has as many."""
    missing = -tensor.shape[0] % copies
    return np.pad(to_int32(tensor), ((0, missing), (0, 0)), constant_values=filler)
