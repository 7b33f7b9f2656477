"""Shapes of model types without a formula in `families.py`: the model is built on the meta device and counted."""

import difflib
from collections import Counter
from collections.abc import Mapping
from typing import Any

from echelon.errors import ConfigError, PlanError
from echelon.planner.families import FAMILIES
from echelon.planner.model_shape import LinearShape, ModelShape

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")  # config keys for the number of experts


def measure_shape(config: Mapping[str, Any]) -> ModelShape:
    """Shape of a model type without a formula: built once on the meta device, without memory, and counted.

    Raises ConfigError for an invalid `model.config`, and PlanError if torch is not installed.
    """
    model = _build_on_meta(config)
    text_config = model.config.get_text_config()
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    layers = _find_layers(model)
    heads = _read_field(text_config, "num_attention_heads") or 1
    hidden = embedding.shape[1]
    experts, idle = _count_experts(text_config, layers)
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
        linears=_count_linears(layers),
        num_expert_parameters=experts,
        num_idle_parameters=idle,
    )


def _read_field(config: Any, name: str) -> Any:
    """Return a field of a config; None if it has none. Of one value per layer the largest, if the config lists them."""
    try:
        value = getattr(config, name, None)
    except Exception:  # transformers raises an error of its own type for a field that differs between layers
        return None
    return max(value) if isinstance(value, list | tuple) else value


def _build_on_meta(config: Mapping[str, Any]) -> Any:
    """Build the model of a config with transformers on the meta device. Raises like `measure_shape`."""
    model_type = config["model_type"]
    try:
        import torch
        from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM
    except ImportError as missing:
        raise PlanError(
            f"model.config.model_type={model_type}: only {', '.join(FAMILIES)} and gpt2 can be counted without "
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
    return list(max(stacks, key=lambda stack: sum(each.numel() for each in stack.parameters()), default=[]))


def _count_linears(layers: list[Any]) -> tuple[LinearShape, ...]:
    """The linear layers inside decoder layers, by name and widths."""
    from torch import nn

    linears = Counter(
        (name.rpartition(".")[2], module.in_features, module.out_features)
        for layer in layers
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear)
    )
    return tuple(LinearShape(*widths, count) for widths, count in linears.items())


def _count_experts(config: Any, layers: list[Any]) -> tuple[int, int]:
    """The number of expert parameters of a mixture, and of those that a token does not use.

    A layer has the weights of all its experts in one tensor, [experts, rows, columns].
    """
    num_experts = next((count for name in EXPERT_COUNTS if (count := getattr(config, name, None))), None)
    num_chosen = getattr(config, "num_experts_per_tok", None)
    if not isinstance(num_experts, int) or not isinstance(num_chosen, int):
        return 0, 0
    tensors = [parameter for layer in layers for parameter in layer.parameters() if parameter.dim() == 3]
    total = sum(each.numel() for each in tensors if each.shape[0] == num_experts)
    return total, total * max(0, num_experts - num_chosen) // num_experts
