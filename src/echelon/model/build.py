"""Building a decoder: its config, and the model on meta. No weight is read or made here."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from echelon.errors import ConfigError, EchelonError, first_line
from echelon.model.attention import choose_attention
from echelon.model.config import build_config
from echelon.model.hub import HubModel, Part, fetch, is_hub_name
from echelon.model.model_folder import find_model_dir
from echelon.planner.shape import check_depth, resolve_vocab_size
from echelon.recipe import Recipe
from echelon.stored import read_json


def load_config(source: Mapping[str, Any] | str, trust_remote_code: bool = False) -> PretrainedConfig:
    """The HF config of `model.config` (a mapping) or of `model.checkpoint` (a run, an HF folder or a hub id).

    Raises:
        ConfigError: the model type is unknown, or the checkpoint has no readable config.json; HubUnreachableError: it
            is on the hub, which cannot be asked.
    """
    if isinstance(source, str):
        return _read_config(source, trust_remote_code)
    return build_config(source)


def _read_config(source: str, trust_remote_code: bool) -> PretrainedConfig:
    folder = Path(find_model_dir(source))
    if is_hub_name(source):
        folder = fetch(HubModel(source, "model.checkpoint", Part.CONFIG, trust_remote_code))
    elif not folder.is_dir():
        raise ConfigError(
            f"model.checkpoint={source}: there is no such folder, seen from {Path.cwd()}; give one with config.json "
            "and safetensors, or a hub id."
        )
    try:
        check_depth(read_json(folder / "config.json"))
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except EchelonError:
        raise
    except Exception as error:  # in a damaged file transformers raises whatever it trips over
        raise ConfigError(
            f"model.checkpoint={source}: no config of a model can be read there ({first_line(error)}); give one with "
            "config.json and safetensors, or a hub id."
        ) from error
    assert isinstance(config, PretrainedConfig)
    return config


def build_on_meta(
    config: PretrainedConfig, attn_implementation: str | None = None, trust_remote_code: bool = False
) -> PreTrainedModel:
    """The model with fp32 parameters on the meta device: every shape, no byte. Dropout and names are the config's.

    Raises:
        ConfigError: `transformers` has no such model, activation, attention or rotary embedding.
    """
    options: dict[str, Any] = {"dtype": torch.float32, "trust_remote_code": trust_remote_code}
    attention = choose_attention(config, attn_implementation)
    if attention is not None:
        options["attn_implementation"] = attention
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, **options)
    except Exception as error:  # as above
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"model: transformers cannot build a {config.model_type} model from this config "
            f"({type(error).__name__}: {reason}); correct model.config or model.attn_implementation."
        ) from error
    assert isinstance(model, PreTrainedModel)
    return model


def materialize(module: nn.Module, device: torch.device | str) -> None:
    """Give a module on meta its memory, uninitialised, in place, sharded or not; what was tied stays tied.

    `transformers` itself ties by the names of its own modules, which an adapter takes the place of.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    module.to_empty(device=device)
    for first, *others in names.values():
        for other in others:
            path, _, leaf = other.rpartition(".")
            setattr(module.get_submodule(path), leaf, module.get_parameter(first))


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
        config.vocab_size, _ = resolve_vocab_size(
            config.to_dict(), vocab_size, f"model.checkpoint={recipe.model.checkpoint}", bool(recipe.model.new_tokens)
        )
        return config
    fields = dict(recipe.model.config)
    fields["vocab_size"], _ = resolve_vocab_size(fields, vocab_size)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        fields.setdefault(name, getattr(tokenizer, name))
    config = load_config(fields)
    config.architectures = [type(build_on_meta(config)).__name__]
    return config
