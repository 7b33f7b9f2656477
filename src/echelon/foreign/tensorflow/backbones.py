"""The models of `engine: tensorflow`: HF configs as arguments of keras-hub's backbones, and the names of their weights.

Only the backbone classes of keras-hub 0.32 are used. Its converters read fewer fields of a config than `transformers`
(not the epsilon of a norm, nor Llama 3's scaling of rotary positions as transformers 5 writes it), and some backbones
ignore an argument (Llama a linear scaling of positions, Qwen3 and Gemma the epsilon of some norms). So every field is
either an argument here, or checked to have the value that the backbone has built in, or known not to matter; any other
field is refused. A family belongs here once tests/engines/test_tensorflow_families.py finds its logits equal.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PretrainedConfig

from echelon.ground.errors import ConfigError
from echelon.recipe.yaml_text import read_table

Array = npt.NDArray[Any]

# Fields that do not change logits or their gradients, and the epsilons, which `find_epsilon` reads. Initial weights are
# echelon's own; rotary positions have no table that `max_position_embeddings` would limit.
_WITHOUT_EFFECT = frozenset(
    {
        "_name_or_path", "architectures", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id",
        "finetuning_task", "id2label", "initializer_range", "label2id", "layer_norm_epsilon",
        "max_position_embeddings", "model_type", "output_attentions", "output_hidden_states", "pad_token_id",
        "pretraining_tp", "problem_type", "return_dict", "rms_norm_eps", "transformers_version", "use_cache",
    }
)  # fmt: skip


class Form(Enum):
    """How a variable of a backbone stores a tensor of `transformers`."""

    PLAIN = "the same numbers in the same order, in another shape"
    TRANSPOSED = "[in, out] for [out, in], either of them divided into heads"
    BY_HEAD = "[heads, in, head size] for [heads * head size, in]"


@dataclass(frozen=True)
class WeightRow:
    """A tensor of `transformers`, and the variables that it is in.

    `name` is as in `transformers`, `variables` are paths in the backbone; `{}` is the number of a layer. Several
    variables together are the tensor, divided along its last dimension.
    """

    name: str
    variables: tuple[str, ...]
    form: Form = Form.PLAIN

    def at(self, layer: int) -> "WeightRow":
        """The row of one layer."""
        return WeightRow(
            self.name.format(layer), tuple(variable.format(layer) for variable in self.variables), self.form
        )

    def divide(self, whole: Array, shapes: list[tuple[int, ...]]) -> list[Array]:
        """Return what each variable stores of a tensor. `shapes`: those of the variables."""
        parts = np.split(whole, len(shapes), axis=-1)
        return [self._store(part, shape) for part, shape in zip(parts, shapes, strict=True)]

    def join(self, parts: list[Array], shape: tuple[int, ...]) -> Array:
        """Return the tensor, of the given shape, that the variables store."""
        one = (*shape[:-1], shape[-1] // len(parts))
        return np.concatenate([self._read(part, one) for part in parts], axis=-1)

    def _store(self, whole: Array, shape: tuple[int, ...]) -> Array:
        if self.form is Form.TRANSPOSED:
            return whole.T.reshape(shape)
        if self.form is Form.BY_HEAD:
            heads, width, size = shape
            return whole.reshape(heads, size, width).transpose(0, 2, 1)
        return whole.reshape(shape)

    def _read(self, part: Array, shape: tuple[int, ...]) -> Array:
        if self.form is Form.TRANSPOSED:
            return part.reshape(shape[::-1]).T
        if self.form is Form.BY_HEAD:
            return part.transpose(0, 2, 1).reshape(shape)
        return part.reshape(shape)


class Fields:
    """Reads the fields of an HF config, and refuses those that nobody has read."""

    def __init__(self, config: PretrainedConfig) -> None:
        self._values: Mapping[str, Any] = config.to_dict()
        self._defaults: Mapping[str, Any] = type(config)().to_dict()
        self._seen = set(_WITHOUT_EFFECT)

    def take(self, name: str) -> Any:
        """The value of a field that becomes an argument; None if the config has no such field."""
        self._seen.add(name)
        return self._values.get(name)

    def ignore(self, *names: str) -> None:
        """Leave fields out that do not change logits."""
        self._seen.update(names)

    def require(self, name: str, *possible: Any) -> None:
        """Raise ConfigError unless a field has one of the values that the backbone has built in; absent is fine."""
        value = self.take(name)
        if name in self._values and value not in possible:
            words = " or ".join("null" if choice is None else str(choice).lower() for choice in possible)
            raise ConfigError(
                f"model.config.{name}={value!r:.80}: engine=tensorflow can run {words} only, because the backbone of "
                "keras-hub has no argument for it; change it, or use engine=native."
            )

    def refuse_rest(self) -> None:
        """Raise ConfigError for a field that was not read and does not have its default."""
        for name, value in self._values.items():
            if name not in self._seen and value != self._defaults.get(name):
                raise ConfigError(
                    f"model.config.{name}={value!r:.80} is not a field that engine=tensorflow can pass to "
                    "keras-hub; remove it, or use engine=native."
                )


@dataclass(frozen=True)
class Family:
    """One model type.

    Attributes:
        backbone: the class in `keras_hub.models`.
        arguments: returns the arguments of its constructor; raises ConfigError for a config that it cannot be.
        inside: the weights of a layer.  outside: the other ones.
        mask: the argument of a layer that takes the padding mask.
        scales_embedding: whether token embeddings are multiplied by the square root of their size.
        has_positions: whether there is a table of learned positions.
        embedding, layer, norm: the names of these modules in `transformers`.
    """

    backbone: str
    arguments: Callable[[Fields], dict[str, Any]]
    inside: tuple[WeightRow, ...]
    outside: tuple[WeightRow, ...]
    mask: str = "decoder_padding_mask"
    scales_embedding: bool = False
    has_positions: bool = False
    embedding: str = "model.embed_tokens"
    layer: str = "model.layers.{}"
    norm: str = "model.norm"


def _read_rope(fields: Fields, *types: str) -> dict[str, Any]:
    """The parameters of rotary positions. `types`: those that the backbone has arguments for."""
    given = dict(fields.take("rope_parameters") or {})
    kind = given.pop("rope_type", "default")
    known = {"default": (), "linear": ("factor",), "llama3": _LLAMA3}
    if kind not in types or set(given) - {"rope_theta", *known[kind]}:
        shown = {"rope_type": kind, **given}
        raise ConfigError(
            f"model.config.rope_parameters={shown}: engine=tensorflow can run rope_type {' or '.join(types)} of this "
            "model type, without further keys; change it, or use engine=native."
        )
    return given


_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def _read_sizes(fields: Fields) -> dict[str, Any]:
    fields.require("attention_dropout", 0.0)
    return {
        "vocabulary_size": fields.take("vocab_size"),
        "num_layers": fields.take("num_hidden_layers"),
        "num_query_heads": fields.take("num_attention_heads"),
        "num_key_value_heads": fields.take("num_key_value_heads"),
        "hidden_dim": fields.take("hidden_size"),
        "intermediate_dim": fields.take("intermediate_size"),
    }


def _require_even_heads(fields: Fields, sizes: Mapping[str, Any]) -> None:
    fields.require("head_dim", None, sizes["hidden_dim"] // sizes["num_query_heads"])


def _llama(fields: Fields) -> dict[str, Any]:
    sizes, rope = _read_sizes(fields), _read_rope(fields, "default", "llama3")
    _require_even_heads(fields, sizes)
    fields.require("hidden_act", "silu")
    fields.require("attention_bias", False)
    fields.require("mlp_bias", False)
    scaled = {}
    if "low_freq_factor" in rope:
        scaled = {
            "rope_frequency_adjustment_factor": rope["factor"],
            "rope_low_freq_factor": rope["low_freq_factor"],
            "rope_high_freq_factor": rope["high_freq_factor"],
            "rope_pretraining_sequence_length": rope["original_max_position_embeddings"],
        }
    tied = fields.take("tie_word_embeddings")
    return {**sizes, "rope_max_wavelength": rope["rope_theta"], **scaled, "tie_word_embeddings": tied}


def _mistral(fields: Fields) -> dict[str, Any]:
    sizes, rope = _read_sizes(fields), _read_rope(fields, "default", "linear")
    fields.require("hidden_act", "silu")
    fields.require("tie_word_embeddings", False)
    return {
        **sizes,
        "rope_max_wavelength": rope["rope_theta"],
        "rope_scaling_factor": rope.get("factor", 1.0),
        "sliding_window": fields.take("sliding_window"),
        "head_dim": fields.take("head_dim"),
    }


def _qwen2(fields: Fields) -> dict[str, Any]:
    sizes, rope = _read_sizes(fields), _read_rope(fields, "default", "linear")
    _require_even_heads(fields, sizes)
    _require_full_attention(fields)
    return {
        **sizes,
        "rope_max_wavelength": rope["rope_theta"],
        "rope_scaling_factor": rope.get("factor", 1.0),
        "tie_word_embeddings": fields.take("tie_word_embeddings"),
    }


def _qwen3(fields: Fields) -> dict[str, Any]:
    sizes, rope = _read_sizes(fields), _read_rope(fields, "default", "linear")
    _require_full_attention(fields)
    fields.require("attention_bias", False)
    return {
        **sizes,
        "rope_max_wavelength": rope["rope_theta"],
        "rope_scaling_factor": rope.get("factor", 1.0),
        "tie_word_embeddings": fields.take("tie_word_embeddings"),
        "head_dim": fields.take("head_dim"),
        "sliding_window_size": None,
    }


def _require_full_attention(fields: Fields) -> None:
    fields.require("hidden_act", "silu")
    fields.require("use_sliding_window", False)
    fields.ignore("sliding_window", "max_window_layers")
    fields.require("layer_types", None, ["full_attention"] * fields.take("num_hidden_layers"))


def _gemma(fields: Fields) -> dict[str, Any]:
    sizes, rope = _read_sizes(fields), _read_rope(fields, "default")
    if rope["rope_theta"] != 10_000:
        raise ConfigError(
            f"model.config.rope_parameters.rope_theta={rope['rope_theta']}: engine=tensorflow can run 10000 only for "
            "gemma, because the backbone of keras-hub has no argument for it; change it, or use engine=native."
        )
    fields.require("hidden_act", "gelu_pytorch_tanh")
    fields.require("hidden_activation", None, "gelu_pytorch_tanh")
    fields.require("attention_bias", False)
    fields.require("use_bidirectional_attention", None, False)
    fields.require("tie_word_embeddings", True)
    doubled = 2 * sizes["intermediate_dim"]  # the backbone halves it
    return {**sizes, "intermediate_dim": doubled, "head_dim": fields.take("head_dim")}


def _gpt2(fields: Fields) -> dict[str, Any]:
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        fields.require(name, 0.0)
    fields.require("activation_function", "gelu_new", "gelu_pytorch_tanh")
    fields.require("scale_attn_weights", True)
    fields.require("scale_attn_by_inverse_layer_idx", False)
    fields.require("add_cross_attention", False)
    fields.require("is_encoder_decoder", False)
    fields.require("tie_word_embeddings", True)
    summaries = ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")
    fields.ignore("reorder_and_upcast_attn", *(f"summary_{key}" for key in summaries))
    width = fields.take("n_embd")
    return {
        "vocabulary_size": fields.take("vocab_size"),
        "num_layers": fields.take("n_layer"),
        "num_heads": fields.take("n_head"),
        "hidden_dim": width,
        "intermediate_dim": fields.take("n_inner") or 4 * width,
        "max_sequence_length": fields.take("n_positions"),
        "dropout": 0.0,
    }


_TABLE = read_table(Path(__file__).with_name("backbones.yaml"))


def _rows(name: str) -> tuple[WeightRow, ...]:
    """The rows of a part of the table, which describes them."""
    rows = []
    for weight, stored in _TABLE[name].items():
        form, paths = next(iter(stored.items())) if isinstance(stored, dict) else ("plain", stored)
        rows.append(WeightRow(weight, (paths,) if isinstance(paths, str) else tuple(paths), Form[form.upper()]))
    return tuple(rows)


_LLAMA_LAYER, _LLAMA_REST = _rows("llama_layer"), _rows("llama_rest")
FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaBackbone", _llama, _LLAMA_LAYER, _LLAMA_REST),
    "mistral": Family("MistralBackbone", _mistral, _LLAMA_LAYER, _LLAMA_REST),
    "qwen2": Family("QwenBackbone", _qwen2, (*_LLAMA_LAYER, *_rows("biases")), _LLAMA_REST),
    "qwen3": Family("Qwen3Backbone", _qwen3, (*_LLAMA_LAYER, *_rows("head_norms")), _LLAMA_REST),
    "gemma": Family(
        "GemmaBackbone",
        _gemma,
        _rows("gemma_layer"),
        _rows("gemma_rest"),
        mask="padding_mask",
        scales_embedding=True,
    ),
    "gpt2": Family(
        "GPT2Backbone",
        _gpt2,
        _rows("gpt2_layer"),
        _rows("gpt2_rest"),
        has_positions=True,
        embedding="transformer.wte",
        layer="transformer.h.{}",
        norm="transformer.ln_f",
    ),
}
"""The families by `model_type`."""


def find_family(config: PretrainedConfig) -> Family:
    """The family of a config. Raises ConfigError if there is none."""
    if config.model_type not in FAMILIES:
        raise ConfigError(
            f"model.config.model_type={config.model_type}: engine=tensorflow runs {', '.join(FAMILIES)}; use one of "
            "these, or engine=native."
        )
    return FAMILIES[config.model_type]


def find_arguments(config: PretrainedConfig) -> dict[str, Any]:
    """The arguments of the backbone for a config. Raises ConfigError for a field that it cannot honour."""
    fields = Fields(config)
    arguments = find_family(config).arguments(fields)
    fields.refuse_rest()
    return arguments


def find_epsilon(config: PretrainedConfig) -> float:
    """The epsilon of all norms of a model."""
    return float(config.layer_norm_epsilon if config.model_type == "gpt2" else config.rms_norm_eps)


def find_rows(config: PretrainedConfig) -> list[WeightRow]:
    """Every weight of a model; with tied embeddings the head has none."""
    family = find_family(config)
    layers = config.num_hidden_layers  # GPT-2's own spelling has this alias
    outside = [weight for weight in family.outside if weight.name != "lm_head.weight" or not config.tie_word_embeddings]
    return [row.at(layer) for layer in range(layers) for row in family.inside] + outside
