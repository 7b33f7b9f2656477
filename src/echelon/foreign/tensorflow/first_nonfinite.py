"""Finds the first value of a microbatch that is not finite, in the layers of a decoder or in their gradients."""

from typing import Any

import numpy as np
from torch import Tensor

from echelon.foreign.tensorflow.decoder import Decoder
from echelon.foreign.tensorflow.library import Library
from echelon.learn.engines.engine import Finding


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
