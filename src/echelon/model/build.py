"""Building a decoder: its config, and the model on meta. No weight is read or made here."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from echelon.errors import ConfigError
from echelon.model.attention import choose_attention
from echelon.recipe import Recipe
from echelon.run_folder import find_model_dir
from echelon.shape import resolve_vocab_size

WEIGHT_FILES = ["*.safetensors", "*.safetensors.index.json", "config.json"]


def load_config(source: Mapping[str, Any] | str, trust_remote_code: bool = False) -> PretrainedConfig:
    """The HF config of `model.config` (a mapping) or of `model.checkpoint` (a run, an HF folder or a hub id).

    Raises:
        ConfigError: the model type is unknown, or the checkpoint has no readable config.json.
    """
    if isinstance(source, str):
        try:
            config = AutoConfig.from_pretrained(find_model_dir(source), trust_remote_code=trust_remote_code)
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


def find_weights(source: str, download: bool) -> Path:
    """The folder of a checkpoint's safetensors: the source itself, or the local copy of a hub id.

    Args:
        download: fetch what is missing. Only the process that prepares a run does; its workers find the copy.

    Raises:
        ConfigError: there is no such folder, and no such model on the hub.
    """
    path = Path(source)
    if path.is_dir():
        return path
    try:
        return Path(snapshot_download(source, allow_patterns=WEIGHT_FILES, local_files_only=not download))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.checkpoint={source}: it is no folder, and could not be fetched from the hub "
            f"({str(error).splitlines()[0]}); give a folder with config.json and safetensors, or check the id."
        ) from error


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
