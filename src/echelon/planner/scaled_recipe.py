"""`echelon init --params --tokens`: a recipe for a model size, with the rule and source of each value.

Sources, by the names used below:
    GPT-3       Brown et al. 2020, arXiv:2005.14165, table 2.1 and appendix B
    Kaplan      Kaplan et al. 2020, arXiv:2001.08361, equation D.1
    Chinchilla  Hoffmann et al. 2022, arXiv:2203.15556
    Pythia      Biderman et al. 2023, arXiv:2304.01373, table 1
    LLaMA       Touvron et al. 2023, arXiv:2302.13971, table 2
    Llama 2     Touvron et al. 2023, arXiv:2307.09288, table 1
    DeepSeek    Bi et al. 2024, arXiv:2401.02954, equation 1
The initial weights' rule is that of Nguyen & Salazar 2019, arXiv:1910.05895.
"""

import math
import shlex
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

from echelon.ground.errors import ConfigError
from echelon.ground.stored import read_text
from echelon.planner.model_shape import ModelShape
from echelon.planner.shape import VOCAB_MULTIPLE, build_shape
from echelon.recipe.section import SUFFIXES, read_count
from echelon.recipe.yaml_text import render_inline

TOKENS_PER_PARAMETER = 20
"""Chinchilla's rule for the best model of a given compute."""

_PARAMS_RANGE, _TOKENS_RANGE = (1_000_000, 10**12), (100_000, 10**14)

# (parameters, layers): Pythia's below 125 M, GPT-3's up to 13 B, LLaMA's 33 B and 65 B, GPT-3.
_DEPTHS = (
    (14e6, 6), (70e6, 6), (125e6, 12), (350e6, 24), (1.3e9, 24), (2.7e9, 32), (6.7e9, 32), (13e9, 40), (33e9, 60),
    (65e9, 80), (175e9, 96),
)  # fmt: skip
# (parameters, learning rate) and (parameters, tokens of a batch): GPT-3, table 2.1.
_LEARNING_RATES = (
    (125e6, 6.0e-4), (350e6, 3.0e-4), (760e6, 2.5e-4), (1.3e9, 2.0e-4), (2.7e9, 1.6e-4), (6.7e9, 1.2e-4),
    (13e9, 1.0e-4), (175e9, 0.6e-4),
)  # fmt: skip
_BATCHES = ((125e6, 0.5e6), (760e6, 0.5e6), (1.3e9, 1e6), (2.7e9, 1e6), (6.7e9, 2e6), (13e9, 2e6), (175e9, 3.2e6))
_WARMUP_TOKENS = 375e6
_MAX_WARMUP_FRACTION = 0.05


@dataclass(frozen=True)
class ScaledValue:
    """A value of the recipe and the reason for it."""

    key: str
    value: Any
    reason: str

    @override
    def __str__(self) -> str:
        return f"{self.key}: {self.value}  ({self.reason})"


@dataclass(frozen=True)
class ScaledRecipe:
    """A recipe for a number of parameters and tokens: the model shape, the chosen values, and notes for the user."""

    arguments: str
    shape: ModelShape
    choices: tuple[ScaledValue, ...]
    notes: tuple[str, ...]

    def __getitem__(self, key: str) -> Any:
        return next(choice.value for choice in self.choices if choice.key == key)


def parse_count(option: str, text: str) -> int:
    """Parse a count such as 1.3b, 350m, 2e9 or 50B. Raises ConfigError with the name of the option."""
    count = read_count(text)
    if count is None:
        raise ConfigError(f"{option} {text} is not a count; write it like 1.3b, 350m or 2e9.")
    return round(count)


def scale_recipe(params: int | None, tokens: int | None, vocab_size: int | None = None) -> ScaledRecipe:
    """Return a recipe for a model of about `params` parameters, including embeddings, trained on `tokens` tokens.

    If one of them is None, it is computed from the other with Chinchilla's 20 tokens per parameter. Raises ConfigError
    if they or the vocabulary size are out of range.
    """
    notes = []
    if params is None and tokens is None:
        raise ConfigError("a recipe is scaled from --params, --tokens or both; give one, for example --params 350m.")
    if params is None:
        assert tokens is not None
        params = max(_PARAMS_RANGE[0], round(tokens / TOKENS_PER_PARAMETER))
        notes.append(f"--params {show_count(params)}: tokens / {TOKENS_PER_PARAMETER}, as Chinchilla found best.")
    if tokens is None:
        tokens = params * TOKENS_PER_PARAMETER
        notes.append(
            f"--tokens {show_count(tokens)}: {TOKENS_PER_PARAMETER} for each parameter, as Chinchilla found best."
        )
    for option, value, (low, high) in (("--params", params, _PARAMS_RANGE), ("--tokens", tokens, _TOKENS_RANGE)):
        if not low <= value <= high:
            raise ConfigError(
                f"{option} {show_count(value)} is out of range; use {show_count(low)} to {show_count(high)}."
            )
    choices, shape = _choose_shape(params, vocab_size)
    choices += _choose_training(shape, tokens, _sequence_len(params).value)
    arguments = f"--params {show_count(params)} --tokens {show_count(tokens)}"
    return ScaledRecipe(
        arguments, shape, tuple(choices), (*notes, *_compare_with_chinchilla(shape.num_parameters, tokens))
    )


def _compare_with_chinchilla(params: int, tokens: int) -> Iterator[str]:
    ratio = tokens / params
    best = TOKENS_PER_PARAMETER * params
    if ratio > 2 * TOKENS_PER_PARAMETER:
        yield (
            f"{ratio:.0f} tokens for each parameter: for this compute Chinchilla found a larger model on fewer tokens "
            "best (20 for each); a smaller one trained longer costs less to use."
        )
    elif ratio < TOKENS_PER_PARAMETER / 2:
        yield (
            f"{ratio:.1f} tokens for each parameter: few. For this compute Chinchilla found a smaller model on more "
            f"tokens best (20 for each: {show_count(best)} for this one)."
        )


def _choose_shape(params: int, vocab_size: int | None) -> tuple[list[ScaledValue], ModelShape]:
    if vocab_size is not None:
        vocab = ScaledValue("vocab_size", vocab_size, "as asked for")
    elif params >= 100e6:
        vocab = ScaledValue("vocab_size", 32000, "LLaMA")
    else:
        size = 8192 if params >= 10e6 else 2048
        vocab = ScaledValue("vocab_size", size, "echelon's own: a larger table would take most of so small a model")
    tied = ScaledValue("tie_word_embeddings", params < 1e9, "tied below 1b as in GPT-3, untied above as in LLaMA")
    config, target = _search_shape(params, vocab.value, tied.value)
    shape = build_shape(config)
    error = shape.num_parameters / params - 1
    if abs(error) > 0.03:
        raise ConfigError(
            f"--params {show_count(params)}: no sensible shape with a vocabulary of {vocab.value} comes within 3 % of "
            f"it; use --vocab-size {max(512, round(params / 4 / 256 / 256) * 256)} or less, or more parameters."
        )
    rows = [
        ("hidden_size", shape.hidden_size, f"gives {shape.num_parameters:,} parameters, {error:+.1%}"),
        ("num_hidden_layers", shape.num_layers, f"near {target:.0f}: Pythia, GPT-3 and LLaMA, between their sizes"),
        ("num_attention_heads", shape.num_heads, f"of {shape.head_dim}: 64 below a width of 2048, 128 above, as GPT-3"),
        ("num_key_value_heads", shape.num_kv_heads, "each head its own below 30b, 8 above, as Llama 2"),
        ("intermediate_size", shape.intermediate_size, "about 8/3 of the width, for a gated layer, as LLaMA"),
        (
            "initializer_range",
            config["initializer_range"],
            "0.02 as GPT-2, or sqrt(2 / (5 width)) where less: arXiv 1910.05895",
        ),
    ]
    return [vocab, tied, *(ScaledValue(*row) for row in rows), _sequence_len(params)], shape


def _sequence_len(params: int) -> ScaledValue:
    if params < 100e6:
        return ScaledValue("sequence_len", 1024, "GPT-2; 2048 from 100m, 4096 from 30b")
    return ScaledValue("sequence_len", 2048, "GPT-3, Pythia and LLaMA") if params < 30e9 else ScaledValue(
        "sequence_len", 4096, "Llama 2"
    )  # fmt: skip


def _search_shape(params: int, vocab_size: int, tied: bool) -> tuple[dict[str, Any], float]:
    """Return the config within 1 % of `params` that is nearest to published ones, by depth and then by MLP width."""
    target = interpolate(_DEPTHS, params)
    best: tuple[float, dict[str, Any]] = (math.inf, {})
    for width in _widths(params):
        for layers in range(max(2, math.floor(target * 0.6)), math.ceil(target * 1.6) + 1):
            for steps in (0, -1, 1):
                config = _config(params, width, layers, vocab_size, tied, steps)
                error = abs(build_shape(config).num_parameters / params - 1)
                cost = abs(math.log(layers / target)) + 0.1 * abs(steps) + 100 * max(0.0, error - 0.01) + error
                best = min(best, (cost, config), key=lambda candidate: candidate[0])
    return best[1], target


def _widths(params: int) -> Iterator[int]:
    """Yield hidden sizes near sqrt(params / 12 layers): an even number of heads, a multiple of 8 with shared keys."""
    for width in range(64, 32768, 64):
        step = (
            64 if params < 50e6 else 1024 if params >= 30e9 else 128 if width < 2048 else 256 if width < 4096 else 512
        )
        if width % step == 0 and 0.02 * params <= 12 * width**2 * interpolate(_DEPTHS, params) <= 3 * params:
            yield width


def _config(params: int, width: int, layers: int, vocab_size: int, tied: bool, steps: int) -> dict[str, Any]:
    head_dim = 64 if width < 2048 else 128
    multiple = 64 if width < 512 else 128 if width < 2048 else 256
    heads = width // head_dim
    return {
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": (math.ceil(8 * width / 3 / multiple) + steps) * multiple,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8 if params >= 30e9 else heads,
        "vocab_size": math.ceil(vocab_size / VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
        "max_position_embeddings": _sequence_len(params).value,
        "initializer_range": round(min(0.02, math.sqrt(2 / (5 * width))), 4),
        "tie_word_embeddings": tied,
    }


def _choose_training(shape: ModelShape, tokens: int, sequence_len: int) -> list[ScaledValue]:
    params = shape.num_parameters
    compute = shape.flops_per_token(sequence_len) * tokens
    table, law = interpolate(_BATCHES, params), best_batch_tokens(compute)
    batch = max(sequence_len, 2 ** round(math.log2(min(table, law))))
    source = "GPT-3, table 2.1" if table <= law else "DeepSeek, 0.2920 C^0.3271"
    steps = math.ceil(tokens / batch)
    published, whose = (2000, "2000 steps, LLaMA") if params >= 6.5e9 else (
        round(_WARMUP_TOKENS / batch), "375m tokens, GPT-3"
    )  # fmt: skip
    warmup = min(published, max(1, round(steps * _MAX_WARMUP_FRACTION)))
    rate = learning_rate(params)
    every = max(1, min(1000, round_down(steps / 20)))
    return [
        ScaledValue("tokens", tokens, f"{tokens / params:.1f} for each parameter; {compute:.2g} FLOPs"),
        ScaledValue(
            "global_batch_tokens",
            batch,
            f"{steps:,} steps; {source}: the smaller of {show_count(table)} and {show_count(law)}, as a power of two",
        ),
        ScaledValue(
            "learning_rate",
            rate,
            "GPT-3, table 2.1, between its sizes" if params >= 125e6 else "Kaplan, 0.003239 - 0.0001395 ln N",
        ),
        ScaledValue("warmup", warmup, whose if warmup == published else f"5 % of the steps, echelon's cap ({whose})"),
        ScaledValue(
            "activation_checkpointing",
            "full" if params >= 20e9 else "none",
            "echelon's own: full from 20b, so that activations fit beside the shards",
        ),
        ScaledValue("schedule", "cosine", "GPT-3"),
        ScaledValue("min_learning_rate_fraction", 0.1, "GPT-3"),
        ScaledValue("betas", [0.9, 0.95], "GPT-3"),
        ScaledValue("eps", 1e-8, "GPT-3"),
        ScaledValue("weight_decay", 0.1, "GPT-3"),
        ScaledValue("max_grad_norm", 1.0, "GPT-3"),
        ScaledValue("every", every, "echelon's own: twenty times a run, at least every 1000 steps"),
        ScaledValue(
            "validation_fraction",
            0.001 if tokens >= 1e9 else 0.01,
            "echelon's own: a thousandth from 1b tokens, else 1 %",
        ),
    ]


def learning_rate(params: int) -> float:
    """Return AdamW's peak, to two digits: GPT-3's table 2.1, interpolated; Kaplan's equation D.1 for smaller sizes."""
    if params < _LEARNING_RATES[0][0]:
        rate = 0.003239 - 0.0001395 * math.log(params)
    else:
        rate = interpolate(_LEARNING_RATES, params)
    return float(f"{rate:.1e}")


def best_batch_tokens(compute: float) -> float:
    """Return the best batch size in tokens for a compute of C FLOPs: 0.2920 C^0.3271 (DeepSeek, equation 1)."""
    return float(0.2920 * compute**0.3271)


def interpolate(table: Sequence[tuple[float, float]], params: float) -> float:
    """Interpolate a table at a number of parameters: log-linear between its rows, constant outside."""
    sizes = [size for size, _ in table]
    if params <= sizes[0] or params >= sizes[-1]:
        return table[0 if params <= sizes[0] else -1][1]
    right = bisect_right(sizes, params)
    (low, first), (high, last) = table[right - 1], table[right]
    share = math.log(params / low) / math.log(high / low)
    return float(first * (last / first) ** share)


def round_down(value: float) -> int:
    """Return the largest number of the form 1, 2 or 5 times a power of ten that is at most `value`; `value` >= 1."""
    power = 10 ** math.floor(math.log10(max(1.0, value)))
    return int(max(factor for factor in (1, 2, 5) if factor * power <= max(1.0, value)) * power)


def show_count(value: float) -> str:
    """Format a count as a user would type it: 1.3b, 350m."""
    for suffix in ("t", "b", "m", "k"):
        if value >= SUFFIXES[suffix]:
            return f"{value / SUFFIXES[suffix]:.3g}{suffix}"
    return f"{value:.3g}"


_SECTIONS = {
    "shape": (
        "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
        "initializer_range", "tie_word_embeddings",
    ),
    "data": ("validation_fraction", "sequence_len"),
    "train": ("tokens", "global_batch_tokens", "activation_checkpointing"),
    "optim": (
        "learning_rate", "warmup", "schedule", "min_learning_rate_fraction", "betas", "eps", "weight_decay",
        "max_grad_norm",
    ),
    "checkpoint": ("every",),
}  # fmt: skip


def render_scaled(scaled: ScaledRecipe, name: str, file: str = "recipe.yaml", text_path: str = "corpus") -> str:
    """Return the YAML of the recipe, with the rule for each value as a comment."""
    choices = {choice.key: choice for choice in scaled.choices}

    def lines(section: str) -> str:
        indent = "    " if section == "shape" else "  "
        rows = [
            (f"{indent}{key}: {render_inline(choices[key].value)}", choices[key].reason) for key in _SECTIONS[section]
        ]
        if section == "shape":
            rows.append((f"{indent}max_position_embeddings: {scaled['sequence_len']}", "the sequence_len"))
        return "\n".join(f"{row:<40}# {reason}" for row, reason in rows)

    return read_text(Path(__file__).with_name("scaled.yaml")).format(
        params=scaled.shape.num_parameters,
        tokens=show_count(scaled["tokens"]),
        arguments=scaled.arguments,
        file=shlex.quote(file),
        name=render_inline(name),
        path=render_inline(text_path),
        vocab=scaled["vocab_size"],
        every=scaled["every"],
        **{section: lines(section) for section in _SECTIONS},
    )
