"""Where a decoder's parts are, and what its head does to the logits: one row per family.

The head's arithmetic is part of the loss. A chunked loss that forgets Gemma-2's soft-capping is silently wrong, so
a family without a row here takes the unchunked path through the model's own forward.
"""

from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class HeadArithmetic:
    """What happens to `hidden @ weight.T (+ bias)` before the softmax: `softcap * tanh(scale * logits / softcap)`."""

    scale: float = 1.0
    softcap: float | None = None

    def apply(self, logits: Tensor) -> Tensor:
        """The model's own logits from the head's raw ones, [tokens, vocabulary]."""
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


@dataclass(frozen=True)
class Family:
    """Dotted paths inside an HF `...ForCausalLM`, the config fields its head reads, and the form of its masks.

    `mask`: what attention sees, the whole past in every layer, a window of it in every layer (where the config has
    one), or what `layer_types` says; then the forward takes a mask for each kind of layer.
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

    `backbone` and `head` are None where the family has no row in the table, or its head has an adapter of its own.
    """

    layers: nn.ModuleList
    backbone: nn.Module | None
    head: Any
    arithmetic: HeadArithmetic

    @property
    def head_weight(self) -> Tensor:
        """The head's weight as it computes, [vocabulary, hidden]: with the rows of new tokens that are trained."""
        tokens = getattr(self.head, "token_adapter", None)
        is_plain = tokens is None or tokens.disable_adapters
        return cast(Tensor, (unwrapped(self.head) if is_plain else self.head).weight)

    @property
    def head_bias(self) -> Tensor | None:
        """The head's bias, [vocabulary]; None where it has none."""
        return cast(Tensor | None, unwrapped(self.head).bias)


def unwrapped(module: Any) -> Any:
    """An embedding or a head without the rows of new tokens that PEFT puts into a copy of it at each look."""
    tokens = getattr(module, "token_adapter", None)
    return module if tokens is None else tokens.base_layer


def find_parts(model: nn.Module) -> DecoderParts:
    """Find the parts of an HF causal language model.

    Raises:
        ValueError: no list of decoder layers can be found, so nothing could be sharded layer by layer.
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
    """The longest list of equal modules: the decoder layers of a family without a row in the table."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 0]
    if not lists:
        raise ValueError(f"{type(model).__name__} has no list of decoder layers; echelon trains decoder-only models.")
    return max(lists, key=len)


def weight_groups(model: nn.Module) -> list[tuple[str, nn.Module, bool]]:
    """The units that weights are made, read and sharded in: (name, module, whole).

    Each decoder layer is one unit with everything below it (`whole`); outside the layers each module that owns
    parameters or buffers itself is one (embedding, positions, norm, head, rotary tables).
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
