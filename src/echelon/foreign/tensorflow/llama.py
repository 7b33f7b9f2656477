"""A Llama of `transformers` as keras-hub's backbone: its config, its weights under their own names, its forward pass.

Only the backbone class of keras-hub 0.32 is used: its converter leaves out the epsilon of the norms, and Llama 3's
scaling of rotary positions as transformers 5 writes it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PretrainedConfig

from echelon.foreign.tensorflow.placement import Library
from echelon.ground.errors import ConfigError
from echelon.learn.objectives.loss import IGNORE
from echelon.recipe.yaml_text import show_value

Array = npt.NDArray[Any]

# Fields that do not change logits or their gradients. Initial weights are echelon's own; rotary positions have no table
# that `max_position_embeddings` would limit.
_WITHOUT_EFFECT = frozenset(
    {
        "_name_or_path", "architectures", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id",
        "finetuning_task", "id2label", "initializer_range", "label2id", "max_position_embeddings", "model_type",
        "output_attentions", "output_hidden_states", "pad_token_id", "pretraining_tp", "problem_type", "return_dict",
        "transformers_version", "use_cache",
    }
)  # fmt: skip
_ARGUMENTS = {
    "vocab_size": "vocabulary_size", "num_hidden_layers": "num_layers", "num_attention_heads": "num_query_heads",
    "num_key_value_heads": "num_key_value_heads", "hidden_size": "hidden_dim", "intermediate_size": "intermediate_dim",
    "rms_norm_eps": "layer_norm_epsilon", "tie_word_embeddings": "tie_word_embeddings",
}  # fmt: skip
_ROTARY = {"rope_theta": "rope_max_wavelength"}
_ROTARY_ARGUMENTS = {
    "default": _ROTARY,
    "llama3": {
        **_ROTARY, "factor": "rope_frequency_adjustment_factor", "low_freq_factor": "rope_low_freq_factor",
        "high_freq_factor": "rope_high_freq_factor",
        "original_max_position_embeddings": "rope_pretraining_sequence_length",
    },
}  # fmt: skip
"""The arguments of the backbone for each field of a config, and of rotary positions by their type."""

# The variables of the weights, in the backbone and in a layer. A kernel [in, out] is a weight [out, in], and either of
# them may be divided into heads.
_OUTSIDE = {
    "model.embed_tokens.weight": "token_embedding/embeddings",
    "model.norm.weight": "sequence_output_layernorm/scale",
    "lm_head.weight": "token_embedding/reverse_embeddings",
}
_INSIDE = {
    "self_attn.q_proj.weight": "self_attention/query/kernel",
    "self_attn.k_proj.weight": "self_attention/key/kernel",
    "self_attn.v_proj.weight": "self_attention/value/kernel",
    "self_attn.o_proj.weight": "self_attention/attention_output/kernel",
    "mlp.gate_proj.weight": "feedforward_gate_dense/kernel",
    "mlp.up_proj.weight": "feedforward_intermediate_dense/kernel",
    "mlp.down_proj.weight": "feedforward_output_dense/kernel",
    "input_layernorm.weight": "self_attention_layernorm/scale",
    "post_attention_layernorm.weight": "feedforward_layernorm/scale",
}
_TRANSPOSED = ("kernel", "reverse_embeddings")


def find_arguments(config: PretrainedConfig) -> dict[str, Any]:
    """Return the arguments of the backbone. Raises ConfigError for a model or a field that it cannot be given."""
    if config.model_type != "llama":
        raise ConfigError(
            f"model.config.model_type={config.model_type}: engine=tensorflow trains llama alone; use engine=native."
        )
    values, usual = config.to_dict(), type(config)().to_dict()
    usual["head_dim"] = config.hidden_size // config.num_attention_heads
    rotary = dict(values.pop("rope_parameters"))
    kind = rotary.pop("rope_type", "default")
    if rotary.keys() != _ROTARY_ARGUMENTS.get(kind, {}).keys():
        raise ConfigError(
            f"model.config.rope_parameters={ {'rope_type': kind, **rotary} }: engine=tensorflow can run rope_type "
            f"{' or '.join(_ROTARY_ARGUMENTS)}, without further keys; change it, or use engine=native."
        )
    for name, value in values.items():
        if name not in _WITHOUT_EFFECT | _ARGUMENTS.keys() and value != usual.get(name):
            raise ConfigError(
                f"model.config.{name}={value!r:.80}: engine=tensorflow can run {show_value(usual.get(name))} alone, "
                "because the backbone of keras-hub has no argument for it; change it, or use engine=native."
            )
    arguments = {argument: values[name] for name, argument in _ARGUMENTS.items()}
    return arguments | {_ROTARY_ARGUMENTS[kind][name]: value for name, value in rotary.items()}


def _find_paths(config: PretrainedConfig) -> dict[str, str]:
    """The path of each weight's variable, by its name in `transformers`; with tied embeddings the head has none."""
    paths = {
        f"model.layers.{layer}.{name}": f"transformer_layer_{layer}/{path}"
        for layer in range(config.num_hidden_layers)
        for name, path in _INSIDE.items()
    }
    head = {"lm_head.weight"} if config.tie_word_embeddings else set()
    return paths | {name: path for name, path in _OUTSIDE.items() if name not in head}


class Decoder:
    """A backbone with its head. Variables are created under the strategy in whose scope this is built."""

    def __init__(self, library: Library, config: PretrainedConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """`shapes`: those of the parameters in `transformers`, by name.

        Raises ConfigError for a config that the backbone cannot be.
        """
        self._tf, self._pad, self._shapes = library.tf, config.pad_token_id, shapes
        self._backbone = library.keras_hub.models.LlamaBackbone(**find_arguments(config), dtype="float32")
        by_path = {variable.path: variable.value for variable in self._backbone.trainable_variables}
        paths = _find_paths(config)
        self.variables: dict[str, Any] = {name: by_path.pop(path) for name, path in paths.items()}
        """The TensorFlow variable of each weight, by its name in `transformers`."""
        self._transposed = {name for name, path in paths.items() if path.endswith(_TRANSPOSED)}
        if by_path or paths.keys() != shapes.keys():
            extra = sorted([*by_path, *(paths.keys() ^ shapes.keys())])
            raise AssertionError(f"weights of keras-hub and transformers without a counterpart: {extra}")

    @property
    def head(self) -> str:
        """The name of the weight that logits are computed with, without `.weight`."""
        return "lm_head" if "lm_head.weight" in self.variables else "model.embed_tokens"

    def parts(self, ids: Any) -> Iterator[tuple[str, Any]]:
        """Run the decoder; yield the name of each module in `transformers` and its output, at last that of the norm.

        `ids`: int32 [batch, seq]. Every output is [batch, seq, hidden size].
        """
        tf = self._tf
        hidden = self._backbone.token_embedding(ids)
        if self._pad is not None:  # in `transformers` this row of the embedding gets no gradient
            hidden = tf.where((ids == self._pad)[..., None], tf.stop_gradient(hidden), hidden)
        yield "model.embed_tokens", hidden
        mask = tf.ones_like(ids)  # padding is on the right, where causal attention does not see it
        for number, layer in enumerate(self._backbone.transformer_layers):
            hidden = layer(hidden, decoder_padding_mask=mask)
            yield f"model.layers.{number}", hidden
        yield "model.norm", self._backbone.layer_norm(hidden)

    def hidden_states(self, ids: Any) -> Any:
        """Return the output of the last norm, [batch, seq, hidden size], for ids [batch, seq]."""
        *_, (_, hidden) = self.parts(ids)
        return hidden

    def logits(self, hidden: Any) -> Any:
        """Return fp32 logits [..., vocabulary] of hidden states [..., hidden size]."""
        return self._backbone.token_embedding(hidden, reverse=True)

    def losses(self, hidden: Any, labels: Any) -> Any:
        """Return the cross-entropy of each label of int32 [batch, seq], fp32, 0 where it is IGNORE."""
        tf, has_target = self._tf, labels != IGNORE
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.where(has_target, labels, 0), self.logits(hidden))
        return tf.where(has_target, losses, 0.0)

    def read(self, variables: Mapping[str, Any]) -> dict[str, Array]:
        """Return copies of what variables like `self.variables` hold, by name and in the shapes of `transformers`."""
        return {name: self._read(name, variable.numpy()) for name, variable in variables.items()}

    def write(self, variables: Mapping[str, Any], values: Mapping[str, Array]) -> None:
        """Store values by name, in the shapes of `transformers`, in variables like `self.variables`."""
        for name, variable in variables.items():
            value = values[name].T if name in self._transposed else values[name]
            variable.assign(value.reshape(variable.shape))

    def _read(self, name: str, stored: Array) -> Array:
        shape = self._shapes[name]
        if name in self._transposed:
            return np.ascontiguousarray(stored.reshape(shape[::-1]).T)
        return stored.reshape(shape)
