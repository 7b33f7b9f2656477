"""Building a decoder: its config, and the model on meta. No weight is read or made here."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from echelon.errors import ConfigError
from echelon.model.attention import choose_attention
from echelon.recipe import Recipe
from echelon.shape import resolve_vocab_size


def load_config(source: Mapping[str, Any] | str, trust_remote_code: bool = False) -> PretrainedConfig:
    """The HF config of `model.config` (a mapping) or of `model.checkpoint` (a folder or a hub id).

    Raises:
        ConfigError: the model type is unknown, or the checkpoint has no readable config.json.
    """
    if isinstance(source, str):
        try:
            config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"model.checkpoint={source}: no config of a model could be read there; give a folder with config.json "
                f"and safetensors, or a hub id ({str(error).splitlines()[0]})"
            ) from error
        assert isinstance(config, PretrainedConfig)
        return config
    fields = dict(source)
    try:
        return AutoConfig.for_model(fields.pop("model_type"), **fields)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"model.config: {str(error).splitlines()[0]}") from error


def build_on_meta(
    config: PretrainedConfig, attn_implementation: str | None = None, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The model with fp32 parameters on the meta device: every shape, no byte. Dropout and names are the config's."""
    options: dict[str, Any] = {"dtype": torch.float32, "trust_remote_code": trust_remote_code}
    attention = choose_attention(config, attn_implementation)
    if attention is not None:
        options["attn_implementation"] = attention
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, **options)
    assert isinstance(model, PreTrainedModel)
    return model


def is_model_folder(path: Path) -> bool:
    """Whether a folder holds an HF model (rather than an echelon run)."""
    return (path / "config.json").is_file()


def parameter_names(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter once, under its HF name; a tied weight stands under the name it has first."""
    return dict(model.named_parameters())


def resolve_config(recipe: Recipe, vocab_size: int, tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
    """The HF config that a run builds its model from.

    A checkpoint's config stays as it is. One given in the recipe takes its vocabulary and its special tokens from the
    tokenizer where it does not state them: a default bos or pad id of the family would name an ordinary token here.

    Raises:
        ConfigError: the vocabulary is smaller than the tokenizer's, or the config is not one `transformers` accepts.
    """
    if recipe.model.config is None:
        assert recipe.model.checkpoint is not None
        config = load_config(recipe.model.checkpoint, recipe.model.trust_remote_code)
        resolve_vocab_size(config.to_dict(), vocab_size)
        return config
    fields = dict(recipe.model.config)
    fields["vocab_size"], _ = resolve_vocab_size(fields, vocab_size)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        fields.setdefault(name, getattr(tokenizer, name))
    config = load_config(fields)
    config.architectures = [type(build_on_meta(config)).__name__]
    return config
