"""A decoder of `transformers` as a backbone of keras-hub: its forward pass, and its weights under their own names."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PretrainedConfig

from echelon.foreign.tensorflow.backbones import find_arguments, find_epsilon, find_family, find_rows
from echelon.foreign.tensorflow.library import Library
from echelon.learn.objectives.loss import IGNORE

Array = npt.NDArray[Any]


class Decoder:
    """A backbone with its head. Variables are created under the strategy in whose scope this is built."""

    def __init__(self, library: Library, config: PretrainedConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """`shapes`: those of the parameters in `transformers`, by name.

        Raises ConfigError for a config that no backbone can be.
        """
        self._tf, self._keras = library.tf, library.keras
        self._family = find_family(config)
        backbone = getattr(library.keras_hub.models, self._family.backbone)
        self._backbone = backbone(**find_arguments(config), dtype="float32")
        for layer in self._backbone._flatten_layers():  # not every backbone gives all of its norms the same one
            if hasattr(layer, "epsilon"):
                layer.epsilon = find_epsilon(config)
        self._config = config
        variables = {variable.path: variable.value for variable in self._backbone.trainable_variables}
        self._rows = find_rows(config)
        self.shapes = shapes
        """The shape of each weight in `transformers`, by name."""
        self.variables: dict[str, list[Any]] = {
            row.name: [variables.pop(path) for path in row.variables] for row in self._rows
        }
        """The TensorFlow variables of each weight, by its name in `transformers`."""
        if variables or self.variables.keys() != shapes.keys():
            extra = sorted([*variables, *(self.variables.keys() ^ shapes.keys())])
            raise AssertionError(f"weights of keras-hub and transformers without a counterpart: {extra}")

    @property
    def head(self) -> str:
        """The name of the weight that logits are computed with, without `.weight`."""
        names = ("lm_head.weight", f"{self._family.embedding}.weight")
        return next(name for name in names if name in self.variables).removesuffix(".weight")

    def group(self, flat: Sequence[Any]) -> dict[str, list[Any]]:
        """Return one value for each variable, in the order of `self.variables`, by name like them."""
        rest = iter(flat)
        return {name: [next(rest) for _ in group] for name, group in self.variables.items()}

    def computing_with(self, values: Sequence[Any]) -> AbstractContextManager[Any]:
        """Return a scope in which the decoder computes with these tensors, in the order of `self.variables`."""
        by_path = {variable.path: variable for variable in self._backbone.trainable_variables}
        paths = [path for row in self._rows for path in row.variables]
        pairs = [(by_path[path], value) for path, value in zip(paths, values, strict=True)]
        scope: AbstractContextManager[Any] = self._keras.StatelessScope(state_mapping=pairs)
        return scope

    def parts(self, ids: Any) -> Iterator[tuple[str, Any]]:
        """Run the decoder; yield the name of each module in `transformers` and its output, at last that of the norm.

        `ids`: int32 [batch, seq]. Every output is [batch, seq, hidden size].
        """
        tf, family, backbone = self._tf, self._family, self._backbone
        tokens = backbone.token_embedding(ids)
        if (pad := self._config.pad_token_id) is not None and not family.has_positions:
            # In `transformers` this row of the embedding gets no gradient.
            tokens = tf.where((ids == pad)[..., None], tf.stop_gradient(tokens), tokens)
        hidden = tokens
        if family.scales_embedding:
            hidden = hidden * float(np.float32(self._config.hidden_size**0.5))
        if family.has_positions:
            hidden = tokens + backbone.position_embedding(tokens)
        yield family.embedding, hidden
        mask = tf.ones_like(ids)  # padding is on the right, where causal attention does not see it
        for number, layer in enumerate(backbone.transformer_layers):
            hidden = layer(hidden, **{family.mask: mask})
            yield family.layer.format(number), hidden
        yield family.norm, backbone.layer_norm(hidden)

    def hidden_states(self, ids: Any) -> Any:
        """Return the output of the last norm, [batch, seq, hidden size], for ids [batch, seq]."""
        *_, (_, hidden) = self.parts(ids)
        return hidden

    def logits(self, hidden: Any) -> Any:
        """Return fp32 logits [..., vocabulary] of hidden states [..., hidden size]."""
        return self._backbone.token_embedding(hidden, reverse=True)

    def loss_sum(self, hidden: Any, labels: Any) -> Any:
        """Return the summed cross-entropy of labels, int32 [batch, seq], IGNORE where there is no target."""
        return self._tf.reduce_sum(self.losses(hidden, labels))

    def losses(self, hidden: Any, labels: Any) -> Any:
        """Return the cross-entropy of each label, fp32 [batch, seq], 0 where there is no target."""
        tf, has_target = self._tf, labels != IGNORE
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.where(has_target, labels, 0), self.logits(hidden))
        return tf.where(has_target, losses, 0.0)

    def read(self, variables: Mapping[str, list[Any]]) -> dict[str, Array]:
        """Return what variables like `self.variables` hold, by name and in the shapes of `transformers`."""
        return {
            row.name: np.ascontiguousarray(
                row.join([variable.numpy() for variable in variables[row.name]], self.shapes[row.name])
            )
            for row in self._rows
        }

    def write(self, variables: Mapping[str, list[Any]], values: Mapping[str, Array]) -> None:
        """Store values by name, in the shapes of `transformers`, in variables like `self.variables`."""
        for row in self._rows:
            targets = variables[row.name]
            shapes = [tuple(tensor.shape) for tensor in targets]
            for target, part in zip(targets, row.divide(values[row.name], shapes), strict=True):
                target.assign(part)
