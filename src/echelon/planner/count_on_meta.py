"""Shapes of model types without a formula: the model is built on the meta device and counted."""

import difflib
from collections import Counter
from collections.abc import Mapping
from typing import Any

from echelon.ground.errors import ConfigError, PlanError
from echelon.planner.experts import EXPERT_COUNTS, count_experts, find_expert_weights, find_unadaptable
from echelon.planner.families import FAMILIES, check_divides
from echelon.planner.model_shape import ExpertShape, LayerParts, LinearShape, ModelShape, count_idle

_OWN_KEYS = ("deepseek_v2", "deepseek_v3")
_METHODS = (None, "greedy", "group_limited_greedy")


def measure_shape(config: Mapping[str, Any], has_adapter: bool = True) -> ModelShape:
    """Shape of a model type without a formula: built once on the meta device, without memory, and counted.

    Without `has_adapter`, whether a layer can have an adapter is not looked up, which imports PEFT for a mixture.

    Raises ConfigError for an invalid `model.config`, and PlanError if torch is not installed.
    """
    model = _build_on_meta(config)
    text_config = model.config.get_text_config(decoder=True)
    _check_routing(text_config)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    layers = _find_layers(model)
    heads = _read_field(text_config, "num_attention_heads") or 1
    hidden = embedding.shape[1]
    experts = _count_experts(model, layers)
    num_chosen = _read_field(text_config, "num_experts_per_tok")
    return ModelShape(
        model_type=config["model_type"],
        num_layers=len(layers),
        hidden_size=hidden,
        intermediate_size=_read_field(text_config, "intermediate_size") or 4 * hidden,
        num_heads=heads,
        num_kv_heads=_read_field(text_config, "num_key_value_heads") or heads,
        head_dim=_read_field(text_config, "head_dim") or hidden // heads,
        vocab_size=embedding.shape[0],
        tied_embeddings=head is not None and head.weight is embedding,
        max_positions=_read_field(text_config, "max_position_embeddings"),
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        num_embedding_parameters=embedding.numel(),
        # layers may differ (experts in some, dense in others): the mean keeps the sum right
        num_layer_parameters=sum(p.numel() for layer in layers for p in layer.parameters()) // max(1, len(layers)),
        parts=LayerParts(
            norm="layer" if any(type(module).__name__ == "LayerNorm" for module in model.modules()) else "rms",
            head_norms=any(name.endswith(".q_norm") for name, _ in model.named_modules()),
            **_find_window(text_config),
        ),
        linears=_count_linears(model, layers, is_limited=has_adapter and bool(experts)),
        experts=experts,
        num_idle_parameters=count_idle(experts, num_chosen) if isinstance(num_chosen, int) else 0,
    )


def _read_field(config: Any, name: str) -> Any:
    """Return a field of a config; None if it has none. Of one value per layer the largest, if the config lists them."""
    try:
        value = getattr(config, name, None)
    except Exception:  # transformers raises an error of its own type for a field that differs between layers
        return None
    return max(value) if isinstance(value, list | tuple) else value


def _find_window(config: Any) -> dict[str, Any]:
    """`window` and `windowed` of `LayerParts`; without a kind of each layer, a window is that of all."""
    window, kinds = _read_field(config, "sliding_window"), getattr(config, "layer_types", None)
    if not isinstance(window, int) or window < 1:
        return {}
    return {"window": window, "windowed": kinds.count("sliding_attention") / len(kinds) if kinds else 1.0}


def _build_on_meta(config: Mapping[str, Any]) -> Any:
    """Build the model of a config with transformers on the meta device. Raises like `measure_shape`."""
    model_type = config["model_type"]
    try:
        import torch
        from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM
    except ImportError as missing:
        raise PlanError(
            f"model.config.model_type={model_type}: only {', '.join(FAMILIES)} and gpt2 can be planned without "
            f"building the model, and {missing.name} is not installed; install it."
        ) from missing
    if model_type not in CONFIG_MAPPING:
        close = difflib.get_close_matches(model_type, list(CONFIG_MAPPING), n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else f"use for example {', '.join(FAMILIES)} or gpt2."
        raise ConfigError(f"model.config.model_type={model_type!r:.80} is not a model type of transformers; {hint}")
    try:
        built_config = AutoConfig.for_model(**config)
    except Exception as wrong:  # transformers raises many types
        raise ConfigError(f"model.config is not a valid {model_type} config: {wrong}; correct that field.") from wrong
    if type(built_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(
            f"model.config.model_type={model_type!r} has no causal language model in transformers; "
            f"use a decoder, for example {', '.join(FAMILIES)} or gpt2."
        )
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(built_config)
    except Exception as wrong:  # as above
        raise ConfigError(
            f"transformers cannot build a {model_type} model from model.config: {wrong}; correct that field."
        ) from wrong


def _find_layers(model: Any) -> list[Any]:
    """The decoder layers: the list of modules with the most parameters, as in `model.parts`."""
    from torch import nn

    stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return list(max(stacks, key=lambda stack: sum(parameter.numel() for parameter in stack.parameters()), default=[]))


def _count_linears(model: Any, layers: list[Any], is_limited: bool) -> tuple[LinearShape, ...]:
    """The linear layers inside decoder layers, by name and widths."""
    from torch import nn

    inside = {id(module) for layer in layers for module in layer.modules() if isinstance(module, nn.Linear)}
    modules = {name: module for name, module in model.named_modules() if id(module) in inside}
    left_out = find_unadaptable(model, modules) if is_limited else set()
    linears = Counter(
        (name.rpartition(".")[2], module.in_features, module.out_features, name not in left_out)
        for name, module in modules.items()
    )
    return tuple(
        LinearShape(name, rows, columns, count, adaptable)
        for (name, rows, columns, adaptable), count in linears.items()
    )


def _count_experts(model: Any, layers: list[Any]) -> tuple[ExpertShape, ...]:
    """The expert weights of a mixture, by name and shape."""
    weights = Counter(
        (name, *weight.shape) for layer in layers for name, weight in find_expert_weights(model, layer).items()
    )
    return tuple(
        ExpertShape(name, num_experts, rows, columns, count)
        for (name, num_experts, rows, columns), count in weights.items()
    )


def _check_routing(config: Any) -> None:
    """Raise ConfigError, naming the key, for a text config of a mixture with which no token can be routed.

    `transformers` builds such a model, whose forward pass fails.
    """
    num_experts = count_experts(config) or 1
    if num_experts == 1 or not hasattr(config, "num_experts_per_tok"):
        return
    chosen, heads = config.num_experts_per_tok, getattr(config, "num_attention_heads", None)
    if chosen is None:
        raise ConfigError("model.config.num_experts_per_tok is missing: the experts that a token uses; give a number.")
    if isinstance(chosen, int) and chosen > num_experts:
        raise ConfigError(
            f"model.config.num_experts_per_tok={chosen}: the model has only {num_experts} experts; use {num_experts} "
            "or less."
        )
    if config.model_type in _OWN_KEYS and (keyed := config.num_key_value_heads) != heads:
        raise ConfigError(
            f"model.config.num_key_value_heads={keyed} differs from num_attention_heads={heads}, but each head has "
            f"keys and values of its own in this attention; use {heads}."
        )
    _check_groups(config, num_experts)


def _check_groups(config: Any, num_experts: int) -> None:
    """Like `_check_routing`, for the groups of experts that a router chooses from."""
    method = getattr(config, "topk_method", None)
    if method not in _METHODS:
        raise ConfigError(
            f"model.config.topk_method={method!r:.80} is unknown; use greedy or group_limited_greedy, or omit it."
        )
    groups, chosen = getattr(config, "n_group", None), getattr(config, "topk_group", None)
    if not groups or not chosen or method == "greedy":
        return
    key = next(name for name in EXPERT_COUNTS if name in vars(config))
    check_divides("n_group", groups, key, num_experts)
    if chosen > groups:
        raise ConfigError(
            f"model.config.topk_group={chosen}: the router has only {groups} groups; use {groups} or less."
        )
    if method is None and num_experts == groups:  # a group counts as its two best experts do
        raise ConfigError(
            f"model.config.n_group={groups} leaves one expert to each group, which needs two; use {groups // 2} or "
            "less."
        )
