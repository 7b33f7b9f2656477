"""Locates the parts of a decoder and describes how its head computes logits, in a table with one row per family.

The head's arithmetic is part of the loss: a chunked loss without Gemma-2's soft-capping would be silently wrong. A
family without a row in the table therefore uses the model's own forward, unchunked.
"""

from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class HeadArithmetic:
    """Applied to `hidden @ weight.T (+ bias)` before the softmax: `softcap * tanh(scale * logits / softcap)`."""

    scale: float = 1.0
    softcap: float | None = None

    def apply(self, logits: Tensor) -> Tensor:
        """Return the model's logits, given the raw output of its head, [tokens, vocabulary]."""
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


@dataclass(frozen=True)
class Family:
    """Dotted paths inside an HF `...ForCausalLM`, the config fields its head uses, and the form of its masks.

    `mask`: `full` is causal attention in every layer; `window` is a sliding window in every layer, where the config
    sets one; `by_layer` follows `layer_types`, and the forward takes one mask per kind of layer.
    """

    backbone: str = "model"
    layers: str = "model.layers"
    head: str = "lm_head"
    softcap_field: str | None = None
    multiply_field: str | None = None
    divide_field: str | None = None
    mask: Literal["full", "window", "by_layer"] = "full"

    def head_arithmetic(self, config: Any) -> HeadArithmetic:
        """Read the head's constants from an HF config."""
        scale = 1.0
        if self.multiply_field is not None:
            scale *= getattr(config, self.multiply_field)
        if self.divide_field is not None:
            scale /= getattr(config, self.divide_field)
        softcap = getattr(config, self.softcap_field) if self.softcap_field is not None else None
        return HeadArithmetic(scale=scale, softcap=softcap)


LLAMA_LIKE = Family()
LAYERS_DIFFER = Family(mask="by_layer")
FAMILIES: dict[str, Family] = {
    "llama": LLAMA_LIKE,
    "mistral": Family(mask="window"),
    "qwen2": LAYERS_DIFFER,
    "qwen3": LAYERS_DIFFER,
    "gemma": LLAMA_LIKE,
    "gemma2": Family(softcap_field="final_logit_softcapping", mask="by_layer"),
    "gemma3_text": Family(softcap_field="final_logit_softcapping", mask="by_layer"),
    "cohere": Family(multiply_field="logit_scale"),
    "granite": Family(divide_field="logits_scaling"),
    "gpt2": Family(backbone="transformer", layers="transformer.h"),
}


@dataclass(frozen=True)
class DecoderParts:
    """The modules of one decoder.

    `backbone` and `head` are None if the family has no row in the table, or if the head has an adapter.
    """

    layers: nn.ModuleList
    backbone: nn.Module | None
    head: Any
    arithmetic: HeadArithmetic

    @property
    def head_weight(self) -> Tensor:
        """The head's effective weight, [vocabulary, hidden], including the trained rows of new tokens."""
        tokens = getattr(self.head, "token_adapter", None)
        is_plain = tokens is None or tokens.disable_adapters
        return cast(Tensor, (unwrapped(self.head) if is_plain else self.head).weight)

    @property
    def head_bias(self) -> Tensor | None:
        """The head's bias, [vocabulary], or None."""
        return cast(Tensor | None, unwrapped(self.head).bias)


def unwrapped(module: Any) -> Any:
    """Return an embedding or head without PEFT's wrapper for new tokens, which copies the weight at every access."""
    tokens = getattr(module, "token_adapter", None)
    return module if tokens is None else tokens.base_layer


def find_parts(model: nn.Module) -> DecoderParts:
    """Find the parts of an HF causal language model.

    Raises:
        ValueError: the model has no list of decoder layers, so it cannot be sharded layer by layer.
    """
    config: Any = model.config
    family = FAMILIES.get(config.model_type)
    if family is None:
        return DecoderParts(find_layers(model), None, None, HeadArithmetic())
    layers, head = model.get_submodule(family.layers), model.get_submodule(family.head)
    assert isinstance(layers, nn.ModuleList)
    if hasattr(head, "base_layer"):
        return DecoderParts(layers, None, None, HeadArithmetic())
    return DecoderParts(layers, model.get_submodule(family.backbone), head, family.head_arithmetic(config))


def find_layers(model: nn.Module) -> nn.ModuleList:
    """Return the `ModuleList` with the most parameters: the decoder layers of a family without a row in the table.

    The longest may be another: a layer's experts, or Gemma 3n's projections.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 0]
    if not lists:
        raise ValueError(f"{type(model).__name__} has no list of decoder layers; echelon trains decoder-only models.")
    return max(lists, key=lambda each: sum(parameter.numel() for parameter in each.parameters()))


def weight_groups(model: nn.Module) -> list[tuple[str, nn.Module, bool]]:
    """Return the units in which weights are initialised, read and sharded: (name, module, whole).

    Each decoder layer is one unit, including its submodules (`whole`). Outside the layers, each module that directly
    owns parameters or buffers is one unit (embedding, positions, norm, head, rotary tables).
    """
    layers = {id(layer) for layer in find_parts(model).layers}
    groups: list[tuple[str, nn.Module, bool]] = []
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if inside and name.startswith(inside):
            continue
        if id(module) in layers:
            groups.append((name, module, True))
            inside = (*inside, name + ".")
        elif any(True for _ in module.parameters(recurse=False)) or any(True for _ in module.buffers(recurse=False)):
            groups.append((name, module, False))
    return groups
