"""The shapes of known families by formula, with the defaults of `transformers` for missing fields."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from echelon.ground.errors import ConfigError
from echelon.planner.model_shape import ExpertShape, LayerParts, LinearShape, ModelShape, divisors

MAX_WIDTH = 10**9


@dataclass(frozen=True)
class ConfigFields:
    """Reads a config with the defaults of a family; every error names the key under `model.config`."""

    config: Mapping[str, Any]
    defaults: Mapping[str, Any]
    aliases: Mapping[str, str] = field(default_factory=dict)

    def get(self, key: str) -> Any:
        """The given value, under either spelling; a missing or null one takes the family's default."""
        for spelling in (key, self.aliases.get(key, key)):
            if self.config.get(spelling) is not None:
                return self.config[spelling]
        return self.defaults.get(key)

    def count(self, key: str) -> int:
        """A whole number above 0. Raises ConfigError for anything else."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"model.config.{key}={value!r:.80} is not a whole number above 0; give one, or omit it.")
        if value > MAX_WIDTH:
            raise ConfigError(f"model.config.{key}={value} is more than a model can have; use {MAX_WIDTH} or less.")
        return value

    def share(self, key: str) -> float:
        """A fraction from 0 to below 1. Raises ConfigError for anything else."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
            raise ConfigError(
                f"model.config.{key}={value!r:.80} is not a fraction from 0 to below 1; use for example 0.0."
            )
        return float(value)

    def flag(self, key: str) -> bool:
        """True or false. Raises ConfigError for anything else."""
        value = self.get(key)
        if not isinstance(value, bool):
            raise ConfigError(f"model.config.{key}={value!r:.80} is not true or false.")
        return value


@dataclass(frozen=True)
class Family:
    """Properties of a Llama-like family: transformers' defaults, biases, norms. A bias is a config key or fixed."""

    defaults: Mapping[str, Any]
    parts: LayerParts = field(default_factory=LayerParts)
    qkv_bias: str | bool = False
    output_bias: str | bool = False
    mlp_bias: str | bool = False
    heads_must_divide_hidden: bool = False  # transformers refuses such a config even with an explicit head_dim


def _defaults(
    vocab: int,
    hidden: int,
    inner: int,
    layers: int,
    heads: tuple[int, int | None],
    head_dim: int | None,
    positions: int,
    tied: bool = False,
) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": head_dim,
        "max_position_embeddings": positions,
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    }


# The defaults of transformers 5; tests/unit/planner/test_shape.py compares every family with what transformers builds.
FAMILIES: dict[str, Family] = {
    "llama": Family(
        _defaults(32000, 4096, 11008, 32, (32, None), None, 2048),
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias="mlp_bias",
        heads_must_divide_hidden=True,
    ),
    "mistral": Family(_defaults(32000, 4096, 14336, 32, (32, 8), None, 131072)),
    "qwen2": Family(_defaults(151936, 4096, 22016, 32, (32, 32), None, 32768), qkv_bias=True),
    "qwen3": Family(
        _defaults(151936, 4096, 22016, 32, (32, 32), 128, 32768),
        LayerParts(head_norms=True),
        qkv_bias="attention_bias",
        output_bias="attention_bias",
    ),
    "gemma": Family(
        _defaults(256000, 3072, 24576, 28, (16, 16), 256, 8192, tied=True),
        LayerParts(norm="rms_fp32"),
        qkv_bias="attention_bias",
        output_bias="attention_bias",
    ),
    "gemma2": Family(
        {**_defaults(256000, 2304, 9216, 26, (8, 4), 256, 8192, tied=True), "attn_logit_softcapping": 50.0}
        | {"final_logit_softcapping": 30.0},
        LayerParts(norm="rms_fp32", num_norms=4),
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        heads_must_divide_hidden=True,
    ),
    "gemma3_text": Family(
        _defaults(262208, 2304, 9216, 26, (8, 4), 256, 131072, tied=True),
        LayerParts(norm="rms_fp32", num_norms=4, head_norms=True),
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        heads_must_divide_hidden=True,
    ),
}

# Mixtures of experts: a family's attention and norms, with experts and a router in place of the MLP.
MIXTURES: dict[str, Family] = {
    "mixtral": Family(
        {**_defaults(32000, 4096, 14336, 32, (32, 8), None, 131072), "num_local_experts": 8, "num_experts_per_tok": 2}
    ),
}

_GPT2_DEFAULTS: dict[str, Any] = {
    "vocab_size": 50257,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 1024,
    "activation_function": "gelu_new",
    "attn_pdrop": 0.1,
    "resid_pdrop": 0.1,
    "tie_word_embeddings": True,
    "add_cross_attention": False,
}
_GPT2_ALIASES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
}


def count_shape(config: Mapping[str, Any]) -> ModelShape | None:
    """Shape of a config of a known family, a mixture or GPT-2, by formula; None for any other model type.

    Raises ConfigError naming the key under `model.config` that is wrong.
    """
    model_type = config["model_type"]
    if model_type == "gpt2":
        return _gpt2_shape(config)
    if model_type in MIXTURES:
        return _mixture_shape(config, MIXTURES[model_type])
    return _llama_like_shape(config, FAMILIES[model_type]) if model_type in FAMILIES else None


def _check_divides(divisor_key: str, divisor: int, number_key: str, number: int) -> None:
    """Raises ConfigError naming the values below and above that would divide."""
    if number % divisor == 0:
        return
    fitting = divisors(number)
    near = [max(d for d in fitting if d < divisor), min((d for d in fitting if d > divisor), default=number)]
    raise ConfigError(
        f"model.config.{divisor_key}={divisor} does not divide model.config.{number_key}={number}; "
        f"use {divisor_key} {' or '.join(str(d) for d in dict.fromkeys(near))}."
    )


def _llama_like_shape(config: Mapping[str, Any], family: Family) -> ModelShape:
    fields = ConfigFields(config, family.defaults)
    hidden, inner, layers = (fields.count(key) for key in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    heads, vocab = fields.count("num_attention_heads"), fields.count("vocab_size")
    kv_heads = heads if fields.get("num_key_value_heads") is None else fields.count("num_key_value_heads")
    _check_divides("num_key_value_heads", kv_heads, "num_attention_heads", heads)
    if fields.get("head_dim") is None or family.heads_must_divide_hidden:
        _check_divides("num_attention_heads", heads, "hidden_size", hidden)
    head_dim = hidden // heads if fields.get("head_dim") is None else fields.count("head_dim")
    if head_dim % 2:
        raise ConfigError(
            f"model.config.head_dim={head_dim} (by default hidden_size / num_attention_heads) is odd, but rotary "
            f"positions rotate pairs; use {head_dim + 1}."
        )

    def has(bias: str | bool) -> bool:
        return fields.flag(bias) if isinstance(bias, str) else bias

    query, key_value = heads * head_dim, kv_heads * head_dim
    attention = hidden * (query + 2 * key_value) + query * hidden
    attention += has(family.qkv_bias) * (query + 2 * key_value) + has(family.output_bias) * hidden
    mlp = 3 * hidden * inner + has(family.mlp_bias) * (2 * inner + hidden)
    norms = family.parts.num_norms * hidden + (2 * head_dim if family.parts.head_norms else 0)
    layer, embedding = attention + mlp + norms, vocab * hidden
    tied = fields.flag("tie_word_embeddings")
    parts = replace(
        family.parts,
        attention_dropout=fields.share("attention_dropout"),
        # Only Gemma2 has soft-capped scores by default; Gemma3 configs may have the key, but the model ignores it.
        attention_matrix=family is FAMILIES["gemma2"] and fields.get("attn_logit_softcapping") is not None,
        logits_softcap=fields.get("final_logit_softcapping") is not None,
    )
    return ModelShape(
        model_type=str(config["model_type"]),
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=inner,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        tied_embeddings=tied,
        max_positions=fields.count("max_position_embeddings"),
        num_parameters=layers * layer + hidden + embedding * (1 if tied else 2),
        num_embedding_parameters=embedding,
        num_layer_parameters=layer,
        parts=parts,
        linears=_linears(
            layers,
            q_proj=(hidden, query),
            k_proj=(hidden, key_value),
            v_proj=(hidden, key_value),
            o_proj=(query, hidden),
            gate_proj=(hidden, inner),
            up_proj=(hidden, inner),
            down_proj=(inner, hidden),
        ),
    )


def _mixture_shape(config: Mapping[str, Any], family: Family) -> ModelShape:
    """The shape with all layers' MLPs replaced: experts as two stacked tensors, and a router without bias."""
    dense, fields = _llama_like_shape(config, family), ConfigFields(config, family.defaults)
    hidden, inner, layers = dense.hidden_size, dense.intermediate_size, dense.num_layers
    num_experts, num_chosen = fields.count("num_local_experts"), fields.count("num_experts_per_tok")
    experts = (
        ExpertShape("mlp.experts.gate_up_proj", num_experts, 2 * inner, hidden, layers),
        ExpertShape("mlp.experts.down_proj", num_experts, hidden, inner, layers),
    )
    expert = 3 * hidden * inner
    added = (num_experts - 1) * expert + num_experts * hidden
    return replace(
        dense,
        num_parameters=dense.num_parameters + layers * added,
        num_layer_parameters=dense.num_layer_parameters + added,
        linears=dense.linears[:4],  # those of attention
        experts=experts,
        num_idle_parameters=layers * expert * max(0, num_experts - num_chosen),
    )


def _linears(num_layers: int, **widths: tuple[int, int]) -> tuple[LinearShape, ...]:
    return tuple(LinearShape(name, *width, num_layers) for name, width in widths.items())


def _gpt2_shape(config: Mapping[str, Any]) -> ModelShape:
    fields = ConfigFields(config, _GPT2_DEFAULTS, _GPT2_ALIASES)
    if fields.flag("add_cross_attention"):
        raise ConfigError(
            "model.config.add_cross_attention=true: only decoders without cross-attention are supported; omit it."
        )
    hidden, layers, heads = (fields.count(key) for key in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    _check_divides("num_attention_heads", heads, "hidden_size", hidden)
    inner = 4 * hidden if fields.get("intermediate_size") is None else fields.count("intermediate_size")
    vocab, positions = fields.count("vocab_size"), fields.count("max_position_embeddings")
    attention = hidden * 3 * hidden + 3 * hidden + hidden * hidden + hidden
    mlp = hidden * inner + inner + inner * hidden + hidden
    layer = attention + mlp + 2 * 2 * hidden
    tied = fields.flag("tie_word_embeddings")
    return ModelShape(
        model_type="gpt2",
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=inner,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        vocab_size=vocab,
        tied_embeddings=tied,
        max_positions=positions,
        num_parameters=layers * layer + 2 * hidden + (vocab * (1 if tied else 2) + positions) * hidden,
        num_embedding_parameters=vocab * hidden,
        num_layer_parameters=layer,
        num_position_parameters=positions * hidden,
        parts=LayerParts(
            norm="layer",
            num_mlp_matrices=2,
            # gelu_new is written out in Python and keeps its intermediate results; the others are one kernel.
            mlp_saved=5 if fields.get("activation_function") == "gelu_new" else 2,
            separate_projections=False,
            attention_dropout=fields.share("attn_pdrop"),
            residual_dropout=fields.share("resid_pdrop"),
        ),
        linears=(
            *_linears(layers, c_attn=(hidden, 3 * hidden), c_proj=(hidden, hidden), c_fc=(hidden, inner)),
            *_linears(layers, c_proj=(inner, hidden)),
        ),
    )
