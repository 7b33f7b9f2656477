"""The shapes of known families by formula, with the defaults of `transformers` for missing fields."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from echelon.ground.errors import ConfigError
from echelon.planner.model_shape import LayerParts, LinearShape, ModelShape, divisors

MAX_WIDTH = 10**9

Widths = Mapping[str, tuple[int, int]]
"""The numbers of inputs and outputs of linear layers, by name."""


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

    def get_or_null(self, key: str) -> Any:
        """The same, but a null one stays null."""
        return None if key in self.config and self.config[key] is None else self.get(key)

    def count(self, key: str, least: int = 1) -> int:
        """A whole number of at least `least`. Raises ConfigError for anything else."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            kind = "a whole number above 0" if least else "0 or a whole number above it"
            remedy = "give one" if key not in self.config and value is None else "give one, or omit it"
            raise ConfigError(f"model.config.{key}={value!r:.80} is not {kind}; {remedy}.")
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

    def has(self, part: str | bool) -> bool:
        """Whether the model has a part that a flag switches on, or that it has always or never."""
        return self.flag(part) if isinstance(part, str) else part


@dataclass(frozen=True)
class AttentionShape:
    """The heads of a layer's attention, the number of its parameters with its norms, and the widths of its linears."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_parameters: int
    linears: Widths


def grouped_attention(fields: ConfigFields, family: "Family") -> AttentionShape:
    """Heads of queries, of which groups share the keys and values of one head (Ainslie et al. 2023)."""
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    alike = fields.get_or_null("num_key_value_heads") is None
    kv_heads = heads if alike else fields.count("num_key_value_heads")
    check_divides("num_key_value_heads", kv_heads, "num_attention_heads", heads)
    head_dim = fields.get("head_dim")
    if head_dim is None or family.heads_must_divide_hidden:
        check_divides("num_attention_heads", heads, "hidden_size", hidden)
    head_dim = hidden // heads if head_dim is None else fields.count("head_dim")
    if head_dim % 2:
        raise ConfigError(
            f"model.config.head_dim={head_dim} (by default hidden_size / num_attention_heads) is odd, but rotary "
            f"positions rotate pairs; use {head_dim + 1}."
        )
    query, key_value = heads * head_dim, kv_heads * head_dim
    linears = {"q_proj": (hidden, query), "k_proj": (hidden, key_value), "v_proj": (hidden, key_value)}
    linears["o_proj"] = (query, hidden)
    num_parameters = count_linears(linears)
    num_parameters += fields.has(family.qkv_bias) * (query + 2 * key_value) + fields.has(family.output_bias) * hidden
    if family.parts.head_norms:
        num_parameters += 2 * head_dim
    return AttentionShape(heads, kv_heads, head_dim, num_parameters, linears)


@dataclass(frozen=True)
class Family:
    """Properties of a Llama-like family: transformers' defaults, biases, norms. A bias is a config key or fixed.

    full_every: every so many layers one attends to the whole past, if the config has a window; 0 if none does.
    """

    defaults: Mapping[str, Any]
    parts: LayerParts = field(default_factory=LayerParts)
    qkv_bias: str | bool = False
    output_bias: str | bool = False
    mlp_bias: str | bool = False
    full_every: int = 0
    heads_must_divide_hidden: bool = False  # transformers refuses such a config even with an explicit head_dim


def list_defaults(
    vocab: int,
    hidden: int,
    inner: int,
    layers: int,
    heads: tuple[int, int | None],
    head_dim: int | None,
    positions: int,
    tied: bool = False,
) -> dict[str, Any]:
    """The defaults of a family, by config key."""
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


# The defaults of a window that a config has to switch on.
_LAST_WINDOWED = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}

_with_bias_key = partial(Family, qkv_bias="attention_bias", output_bias="attention_bias")

# The defaults of transformers 5; tests/unit/planner/test_shape.py compares every family with what transformers builds.
FAMILIES: dict[str, Family] = {
    "llama": _with_bias_key(
        list_defaults(32000, 4096, 11008, 32, (32, None), None, 2048),
        mlp_bias="mlp_bias",
        heads_must_divide_hidden=True,
    ),
    "mistral": Family({**list_defaults(32000, 4096, 14336, 32, (32, 8), None, 131072), "sliding_window": 4096}),
    "qwen2": Family({**list_defaults(151936, 4096, 22016, 32, (32, 32), None, 32768), **_LAST_WINDOWED}, qkv_bias=True),
    "qwen3": _with_bias_key(
        {**list_defaults(151936, 4096, 22016, 32, (32, 32), 128, 32768), **_LAST_WINDOWED}, LayerParts(head_norms=True)
    ),
    "gemma": _with_bias_key(
        list_defaults(256000, 3072, 24576, 28, (16, 16), 256, 8192, tied=True), LayerParts(norm="rms_fp32")
    ),
    "gemma2": _with_bias_key(
        {**list_defaults(256000, 2304, 9216, 26, (8, 4), 256, 8192, tied=True), "attn_logit_softcapping": 50.0}
        | {"final_logit_softcapping": 30.0, "sliding_window": 4096},
        LayerParts(norm="rms_fp32", num_norms=4),
        full_every=2,
        heads_must_divide_hidden=True,
    ),
    "gemma3_text": _with_bias_key(
        {**list_defaults(262208, 2304, 9216, 26, (8, 4), 256, 131072, tied=True), "sliding_window": 4096},
        LayerParts(norm="rms_fp32", num_norms=4, head_norms=True),
        full_every=6,
        heads_must_divide_hidden=True,
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


def check_divides(divisor_key: str, divisor: int, number_key: str, number: int) -> None:
    """Raise ConfigError, naming the values below and above that would divide."""
    if number % divisor == 0:
        return
    fitting = divisors(number)
    near = [max(d for d in fitting if d < divisor), min((d for d in fitting if d > divisor), default=number)]
    raise ConfigError(
        f"model.config.{divisor_key}={divisor} does not divide model.config.{number_key}={number}; "
        f"use {divisor_key} {' or '.join(str(d) for d in dict.fromkeys(near))}."
    )


def count_decoder(config: Mapping[str, Any], family: Family) -> ModelShape:
    """The shape of a config of a Llama-like family. Raises ConfigError naming the key that is wrong."""
    fields = ConfigFields(config, family.defaults)
    hidden, inner, layers = (fields.count(key) for key in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    vocab, attention = fields.count("vocab_size"), grouped_attention(fields, family)
    mlp = {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}
    layer = attention.num_parameters + count_linears(mlp, fields.has(family.mlp_bias))
    layer, embedding = layer + family.parts.num_norms * hidden, vocab * hidden
    tied = fields.flag("tie_word_embeddings")
    parts = replace(
        family.parts,
        attention_dropout=fields.share("attention_dropout"),
        # Only Gemma2 has soft-capped scores by default; Gemma3 configs may have the key, but the model ignores it.
        attention_matrix=family is FAMILIES["gemma2"] and fields.get("attn_logit_softcapping") is not None,
        logits_softcap=fields.get("final_logit_softcapping") is not None,
        **_find_window(fields, family, layers),
    )
    return ModelShape(
        model_type=str(config["model_type"]),
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=inner,
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        vocab_size=vocab,
        tied_embeddings=tied,
        max_positions=fields.count("max_position_embeddings"),
        num_parameters=layers * layer + hidden + embedding * (1 if tied else 2),
        num_embedding_parameters=embedding,
        num_layer_parameters=layer,
        parts=parts,
        linears=_linears(layers, **attention.linears, **mlp),
    )


def _find_window(fields: ConfigFields, family: Family, num_layers: int) -> dict[str, Any]:
    """`window` and `windowed` of `LayerParts`, as transformers finds the kind of each layer from these fields."""
    window = fields.get_or_null("sliding_window") if "sliding_window" in family.defaults else None
    if not isinstance(window, int) or window < 1 or fields.get("use_sliding_window") is False:
        return {}
    kinds, first = fields.get("layer_types"), fields.get("max_window_layers")
    every = fields.get("sliding_window_pattern") or family.full_every
    if kinds and isinstance(kinds, list):
        windowed = kinds.count("sliding_attention") / len(kinds)
    elif isinstance(first, int):
        windowed = 1 - min(max(0, first), num_layers) / num_layers
    else:
        windowed = 1 - (num_layers // every / num_layers if isinstance(every, int) and every > 0 else 0)
    return {"window": window, "windowed": windowed} if windowed else {}


def count_linears(linears: Widths, has_bias: bool = False) -> int:
    """The parameters of linear layers."""
    return sum(rows * columns + has_bias * columns for rows, columns in linears.values())


def _linears(num_layers: int, **widths: tuple[int, int]) -> tuple[LinearShape, ...]:
    return tuple(LinearShape(name, *width, num_layers) for name, width in widths.items())


def count_gpt2(config: Mapping[str, Any]) -> ModelShape:
    """The shape of a config of GPT-2. Raises ConfigError naming the key that is wrong."""
    fields = ConfigFields(config, _GPT2_DEFAULTS, _GPT2_ALIASES)
    if fields.flag("add_cross_attention"):
        raise ConfigError(
            "model.config.add_cross_attention=true: only decoders without cross-attention are supported; omit it."
        )
    hidden, layers, heads = (fields.count(key) for key in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    check_divides("num_attention_heads", heads, "hidden_size", hidden)
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
