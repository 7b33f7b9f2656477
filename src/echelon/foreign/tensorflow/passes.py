"""Forward passes of a decoder in this process: the loss, the logits of a next token, the search for a bad value."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from echelon.foreign.tensorflow.decoder import Decoder
from echelon.foreign.tensorflow.library import Library
from echelon.learn.engines.engine import Finding

Array = npt.NDArray[Any]


class Passes:
    """Runs a decoder without gradients, in this process alone."""

    def __init__(self, library: Library, decoder: Decoder) -> None:
        """`decoder`: its weights must be in this process."""
        tf = library.tf
        self._library, self._decoder = library, decoder
        ids = tf.TensorSpec([None, None], tf.int32)
        self._evaluate = tf.function(
            lambda ids, labels: decoder.loss_sum(decoder.hidden_states(ids), labels), input_signature=[ids, ids]
        )
        self._score = tf.function(
            lambda ids, labels: -decoder.losses(decoder.hidden_states(ids), labels), input_signature=[ids, ids]
        )
        self._predict = tf.function(self._logits_at, input_signature=[ids, tf.TensorSpec([None], tf.int32)])

    def loss_sum(self, ids: Tensor, labels: Tensor) -> float:
        """Return the summed cross-entropy of labelled tokens."""
        return float(self._evaluate(to_int32(ids), to_int32(labels)))

    def log_probabilities(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Return the log-probability of each label, [batch, seq], fp32, 0 where there is none."""
        return torch.from_numpy(self._score(to_int32(ids), to_int32(labels)).numpy())

    def logits_at(self, ids: Tensor, places: Tensor) -> Tensor:
        """Return fp32 logits [batch, vocabulary] of the token after position `places` [batch] of ids [batch, seq]."""
        return torch.from_numpy(self._predict(to_int32(ids), to_int32(places)).numpy())

    def find_nonfinite(self, ids: Tensor, labels: Tensor) -> Finding | None:
        """Return the first value of a microbatch, or of its gradients, that is not finite; None if all are."""
        return find_nonfinite(self._library, self._decoder, ids, labels)

    def _logits_at(self, ids: Any, places: Any) -> Any:
        hidden = self._decoder.hidden_states(ids)
        return self._decoder.logits(self._library.tf.gather(hidden, places, batch_dims=1))


def to_int32(tensor: Tensor) -> Array:
    """Return what TensorFlow takes for ids and labels."""
    return tensor.cpu().numpy().astype(np.int32)


def find_nonfinite(library: Library, decoder: Decoder, input_ids: Tensor, labels: Tensor) -> Finding | None:
    """Run a microbatch without tracing; return the first value that is not finite, None if all are."""
    tf = library.tf
    ids, targets = (tf.constant(tensor.numpy().astype(np.int32)) for tensor in (input_ids, labels))
    weights = [(name, variable) for name, group in decoder.variables.items() for variable in group]
    with tf.GradientTape() as tape:
        outputs: list[tuple[str, Any]] = []
        for name, value in decoder.parts(ids):
            outputs.append((name, value))
            if not _is_finite(library, value):
                return Finding(0, len(outputs) - 1, name)
        loss = decoder.loss_sum(outputs[-1][1], targets)
    if not _is_finite(library, loss):
        return Finding(1, 0, decoder.head)
    found = tape.gradient(loss, [value for _, value in outputs] + [value for _, value in weights])
    for place, ((name, _), gradient) in reversed(list(enumerate(zip(outputs, found, strict=False)))):
        if gradient is not None and not _is_finite(library, gradient):
            return Finding(2, len(outputs) - 1 - place, name)
    for place, ((name, _), gradient) in enumerate(zip(weights, found[len(outputs) :], strict=True)):
        if not _is_finite(library, gradient):
            return Finding(3, place, name)
    return None


def _is_finite(library: Library, value: Any) -> bool:
    tf = library.tf
    return bool(tf.reduce_all(tf.math.is_finite(tf.convert_to_tensor(value))))
