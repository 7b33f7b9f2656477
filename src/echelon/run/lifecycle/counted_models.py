"""Which models are counted by formula and checked by their shape, so that none is built: torch is not imported.

A model is, if its family has a formula and each field of its config has a value with which such models are known to be
built, to be causal and to keep documents apart. tests/dist/test_checks.py builds what is taken for granted here.
"""

from collections.abc import Callable, Mapping
from typing import Any

from echelon.ground.errors import ConfigError
from echelon.learn.model.float8_limits import check_package, check_sizes
from echelon.planner.adapter_limits import check_adapter_shape, check_packages
from echelon.planner.families import FAMILIES
from echelon.planner.mixtures import MIXTURES
from echelon.planner.model_shape import ModelShape
from echelon.planner.shape import build_shape
from echelon.recipe import AdapterConfig, Recipe

# Fields that the formula checks. Their values are not null, or the formula would take a default where a model has none.
COUNTED = {
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings", "tie_word_embeddings", "attention_dropout",
}  # fmt: skip
_NULLABLE = {"q_lora_rank"}  # a part that a model then lacks
NUMBERS: dict[str, tuple[type, ...]] = {"rope_theta": (int, float), "rms_norm_eps": (float,)}
"""Fields of any positive number, by its types."""

_EXPERT_ROW = 8  # grouped products of experts need rows of a multiple of 16 bytes, which is so many numbers in bf16
_LLAMA3 = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}


def _is_name(value: Any) -> bool:
    return isinstance(value, str)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_activation(value: Any) -> bool:
    return value in ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")


def _is_dtype(value: Any) -> bool:
    return value in ("float32", "float16", "bfloat16")


def _is_false(value: Any) -> bool:
    return value is False


def _is_null(value: Any) -> bool:
    return value is None


def _is_size(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_cap(value: Any) -> bool:
    return value is None or (isinstance(value, float) and value > 0)


def _is_window(value: Any) -> bool:
    return value is None or _is_size(value)


def _names_decoder(value: Any) -> bool:
    return isinstance(value, list) and all(str(name).endswith("ForCausalLM") for name in value)


def _has_fixed_positions(value: Any) -> bool:
    """Whether rotary positions do not depend on the length of a sequence: unscaled, or scaled as in Llama 3."""
    if value is None:
        return True
    if not isinstance(value, dict):
        return False
    numbers = {name: number for name, number in value.items() if name != "rope_type"}
    needed = {"default": set[str](), "llama3": _LLAMA3}.get(value.get("rope_type", ""))
    are_positive = all(type(number) in (int, float) and number > 0 for number in numbers.values())
    return needed is not None and numbers.keys() - {"rope_theta"} == needed and are_positive


# Fields that any model may have, which change no size, and whether they have a value of which that is known.
ANYWHERE: dict[str, Callable[[Any], bool]] = {
    "_name_or_path": _is_name,
    "architectures": _names_decoder,
    "dtype": _is_dtype,
    "torch_dtype": _is_dtype,
    "initializer_range": lambda value: isinstance(value, float) and 0 < value <= 1,
    "transformers_version": _is_name,
    "use_cache": _is_flag,
}
_IDS = {"bos_token_id", "eos_token_id", "pad_token_id"}
_BIASED = {"attention_bias": _is_flag}
_ROTARY = {"rope_parameters": _has_fixed_positions, "rope_scaling": _has_fixed_positions}
_USUAL = {"head_dim": _is_size, "hidden_act": _is_activation, **_ROTARY}
_UNUSED_WINDOW = {"sliding_window": _is_window, "use_sliding_window": _is_false}
_WINDOWS = {
    "head_dim": _is_size, "hidden_activation": _is_activation, "sliding_window": _is_size,
    "query_pre_attn_scalar": _is_size, "attn_logit_softcapping": _is_cap, "final_logit_softcapping": _is_cap,
}  # fmt: skip
_ROUTED = {"hidden_act": _is_activation, "output_router_logits": _is_false, **_ROTARY}
_LAYERS = {
    "layer_types": lambda value: isinstance(value, list) and set(value) == {"full_attention"},
    "max_window_layers": lambda value: type(value) is int and value >= 0,
}
OWN: dict[str, dict[str, Callable[[Any], bool]]] = {
    "llama": {"mlp_bias": _is_flag, "pretraining_tp": _is_size, **_USUAL, **_BIASED},
    "mistral": {"sliding_window": _is_window, **_USUAL},
    "qwen2": {"hidden_act": _is_activation, **_ROTARY, **_UNUSED_WINDOW, **_LAYERS},
    "qwen3": {**_USUAL, **_UNUSED_WINDOW, **_LAYERS, **_BIASED},
    "gemma": {**_USUAL, **_BIASED},
    "gemma2": {**_WINDOWS, **_ROTARY, **_BIASED},
    "gemma3_text": {"rope_scaling": _is_null, **_WINDOWS, **_BIASED},
    "mixtral": {"sliding_window": _is_null, "router_jitter_noise": lambda value: value == 0, **_ROUTED},
    "olmoe": {"clip_qkv": _is_null, **_ROUTED},
    "qwen2_moe": {**_UNUSED_WINDOW, **_ROUTED},
    "qwen3_moe": {**_UNUSED_WINDOW, **_ROUTED},
    "deepseek_v2": {"hidden_act": _is_activation, **_ROTARY},
    "deepseek_v3": {"hidden_act": _is_activation, **_ROTARY},
}
"""Like `ANYWHERE`: the fields of each family beside those that its formula checks."""

# Fields that published checkpoints have, and which change neither sizes nor what a token attends to.
UNREAD = {
    "gemma": {"hidden_activation"}, "gemma2": {"hidden_act", "cache_implementation"},
    "gemma3_text": {"rope_local_base_freq", "sliding_window_pattern", "cache_implementation"},
    "qwen2_moe": {"max_window_layers"}, "qwen3_moe": {"max_window_layers"},
}  # fmt: skip


def is_counted(recipe: Recipe, fields: Mapping[str, Any]) -> bool:
    """Whether the shape of the model suffices to check all of the recipe's model keys."""
    kind, model, adapter = fields["model_type"], recipe.model, recipe.adapter
    asks_more = bool(model.attn_implementation or recipe.optim.learning_rate_multipliers or model.rope is not None)
    asks_more |= bool(adapter.modules_to_save or adapter.target_parameters or adapter.quantize_experts)
    asks_more |= "lm_head" in adapter.target_modules
    if asks_more or kind not in {**FAMILIES, **MIXTURES}:
        return False
    unread = UNREAD.get(kind, set()) if model.checkpoint is not None else set[str]()
    if not all(name in unread or _is_checked(name, value, fields) for name, value in fields.items()):
        return False
    return kind not in MIXTURES or _is_any_mixture(recipe, fields)


def _is_checked(name: str, value: Any, fields: Mapping[str, Any]) -> bool:
    """Whether a field of a config has a value with which every model of its family can be built."""
    kind = fields["model_type"]
    if name in COUNTED or (kind in MIXTURES and name in MIXTURES[kind].own):
        return value is not None or name in _NULLABLE
    if name in NUMBERS:
        return type(value) in NUMBERS[name] and value > 0
    if name in _IDS:
        return all(_is_id(number, fields) for number in (value if isinstance(value, list) else [value]))
    if name == "layer_types" and isinstance(value, list) and len(value) != fields.get("num_hidden_layers"):
        return False
    accepts = ANYWHERE.get(name) or OWN.get(kind, {}).get(name)
    return accepts is not None and accepts(value)


def _is_id(value: Any, fields: Mapping[str, Any]) -> bool:
    return value is None or (type(value) is int and 0 <= value < build_shape(fields).vocab_size)


def tensor_degree(recipe: Recipe) -> int:
    """The ranks among which a recipe divides matrices; 1 for a named strategy."""
    return 1 if isinstance(recipe.parallel, str) else recipe.parallel.tp


def _is_any_mixture(recipe: Recipe, fields: Mapping[str, Any]) -> bool:
    """Whether the recipe asks for nothing that only some mixtures can do: tp, tiles of MLPs, experts of odd widths,
    an adapter of layers that it names."""
    tiles = getattr(recipe.train.activation_checkpointing, "mlp_tiles", None)
    names_layers = recipe.adapter.is_adapter and recipe.adapter.target_modules != "all-linear"
    widths = (width for weight in build_shape(fields).experts for width in (weight.rows, weight.columns))
    return not (tensor_degree(recipe) > 1 or names_layers or tiles) and all(
        width % _EXPERT_ROW == 0 for width in widths
    )


def check_shape(recipe: Recipe, shape: ModelShape, elsewhere: bool, left: list[str]) -> None:
    """Check all that a recipe asks of a model that `is_counted`.

    Raises ConfigError naming the key. With `elsewhere`, checks of packages that are not here are added to `left`.
    """
    if recipe.train.precision == "fp8":
        check_sizes(shape.model_type, [(linear.in_features, linear.out_features) for linear in shape.linears])
        has_float8(elsewhere, left)
    if recipe.adapter.is_adapter:
        check_adapter_shape(recipe.adapter, shape)
        has_adapter(recipe.adapter, elsewhere, left)


def has_float8(elsewhere: bool, left: list[str]) -> bool:
    """Whether the package of float8 is installed here. With `elsewhere` it may be only where the training runs."""
    return _has(check_package, elsewhere, left, "train.precision: the package torchao (it is not installed here)")


def has_adapter(adapter: AdapterConfig, elsewhere: bool, left: list[str]) -> bool:
    """Like `has_float8`, for the packages of an adapter."""
    line = f"adapter: the packages of {adapter.method}, and optim with it (they are not all here)"
    return _has(lambda: check_packages(adapter), elsewhere, left, line)


def _has(check: Callable[[], None], elsewhere: bool, left: list[str], line: str) -> bool:
    try:
        check()
    except ConfigError:
        if not elsewhere:
            raise
        left.append(line)
        return False
    return True
