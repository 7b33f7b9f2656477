"""Forward passes of a decoder without an update: evaluations, and the search for a value that is not finite."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from echelon.foreign.tensorflow.llama import Array, Decoder
from echelon.foreign.tensorflow.placement import Library
from echelon.ground.errors import ConfigError
from echelon.learn.data.loader import Microbatch
from echelon.learn.engines.engine import Evaluation, NonFinite
from echelon.learn.objectives.outputs import OutputsFn


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
