"""Locates the parts of a decoder: its layers and its head, which gives each token a number, or a text its scores."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from echelon.ground.errors import ConfigError
from echelon.planner.model_shape import SCORE_HEAD, count_scores


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

    def at_temperature(self, temperature: float) -> "HeadArithmetic":
        """The same, followed by a division of the logits by the temperature of sampling."""
        softcap = None if self.softcap is None else self.softcap / temperature
        return HeadArithmetic(self.scale / temperature, softcap)

    def differentiate(self, factor: Tensor, logits: Tensor) -> Tensor:
        """Return `factor` times the derivative of `apply`, given its result; the derivative of tanh is 1 - tanh^2.

        Args:
            factor: fp32, [tokens, 1].
            logits: what `apply` returned, [tokens, vocabulary].

        Returns:
            fp32; [tokens, 1] if the derivative is the same for the whole vocabulary.
        """
        factor = factor * self.scale
        if self.softcap is None:
            return factor
        return logits.to(torch.float32, copy=True).div_(self.softcap).square_().neg_().add_(1.0).mul_(factor)


@dataclass(frozen=True)
class DecoderParts:
    """The modules around the last hidden states of a decoder, and how its head computes logits from them."""

    backbone: nn.Module
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


def find_parts(model: Any, arithmetic: HeadArithmetic | None) -> DecoderParts | None:
    """Find the backbone and the head of an HF causal language model.

    Args:
        arithmetic: see Traits.

    Returns:
        None if the arithmetic is not known, or if the head has an adapter: losses need the model's own forward then.
        Also None for a model that scores texts, which has no head for tokens.
    """
    if arithmetic is None:
        return None
    head = model.get_output_embeddings()
    return None if head is None or hasattr(head, "base_layer") else DecoderParts(model.base_model, head, arithmetic)


def scores_texts(config: PretrainedConfig) -> bool:
    """Whether a config is of a model that scores texts, by the architecture that it names.

    Such is a sequence-classification model of `transformers`: the layers of a language model, and a head `score`.
    """
    return count_scores({"architectures": config.architectures}) is not None


def check_has_vocabulary(config: PretrainedConfig, source: str, fix: str) -> None:
    """Raise ConfigError if a config is of a model that scores texts. `source`, `fix`: parts of the message."""
    if scores_texts(config):
        kind = (config.architectures or ["?"])[0]
        raise ConfigError(f"{source} is a model that scores texts ({kind}) and has no head for tokens; {fix}.")


def find_score_head(model: Any) -> nn.Linear | None:
    """Return the head of a model that scores texts, with or without an adapter; None for any other model.

    Raises:
        ConfigError: its head is not a matrix, so echelon cannot train it.
    """
    if not scores_texts(model.config):
        return None
    head = getattr(model, SCORE_HEAD, None)
    if not isinstance(head, nn.Linear):
        raise ConfigError(
            f"model: {type(model).__name__} computes scores otherwise than by a linear layer `{SCORE_HEAD}`, which "
            "echelon does not train; use another model, for example llama, qwen2, qwen3, mistral or gemma2."
        )
    return head


def vocabulary_class(model: PreTrainedModel) -> type[PreTrainedModel]:
    """Return the class of a model; of one that scores texts, that of the language model with the same layers.

    So what is found out by the logits of each position holds for the layers of both.
    """
    if not scores_texts(model.config):
        return type(model)
    causal_class: type[PreTrainedModel] = MODEL_FOR_CAUSAL_LM_MAPPING[type(model.config)]
    return causal_class


def find_layers(model: nn.Module) -> nn.ModuleList:
    """Return the decoder layers of a model: its `ModuleList` with the most parameters.

    The longest may be another: a layer's experts, or Gemma 3n's projections.

    Raises:
        ValueError: the model has no list of decoder layers, so it cannot be sharded layer by layer.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 0]
    if not lists:
        raise ValueError(f"{type(model).__name__} has no list of decoder layers; echelon trains decoder-only models.")
    return max(lists, key=lambda layers: sum(parameter.numel() for parameter in layers.parameters()))


def find_end(model: Any) -> list[nn.Module]:
    """Return the norm after the layers of a model, or of a pipeline stage, and the head for tokens.

    Nothing if it lacks one, or if a weight of them is also another module's, as a tied head's is the embedding's.
    """
    layers, head = set(find_layers(model).modules()), model.get_output_embeddings() or nn.Identity()
    others = [module for module in model.modules() if module not in set(head.modules())]
    owners = [module for module in others if any(True for _ in module.parameters(recurse=False))]
    after = list(takewhile(lambda module: module not in layers, reversed(owners)))
    weights = {weight for module in (head, *after) for weight in module.parameters()}
    shared = any(weight in weights for module in owners[: -len(after)] for weight in module.parameters(recurse=False))
    return [] if len(after) != 1 or not any(True for _ in head.parameters()) or shared else [*after, head]


def weight_groups(model: nn.Module) -> list[tuple[str, nn.Module, bool]]:
    """Return the units in which weights are initialised, read and sharded: (name, module, whole).

    Each decoder layer is one unit, including its submodules (`whole`). Outside the layers, each module that directly
    owns parameters or buffers is one unit (embedding, positions, norm, head, rotary tables).
    """
    layers = {id(layer) for layer in find_layers(model)}
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


def autocast_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype of a matmul on this tensor: autocast's if enabled, else the tensor's own."""
    device_type = tensor.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else tensor.dtype


@contextmanager
def disabled_adapter(model: nn.Module) -> Iterator[None]:
    """Disable the adapter in this scope: the model computes as it did before training. No parameter changes."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)]
    before = [layer._disable_adapters for layer in layers]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer, was in zip(layers, before, strict=True):
            layer._disable_adapters = was
