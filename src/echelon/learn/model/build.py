"""Builds a decoder: its config, and the model on the meta device. No weights are read or initialised here."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from echelon.ground.errors import ConfigError, EchelonError, first_line
from echelon.ground.sizes import count_noun
from echelon.ground.stored import check_readable, read_json
from echelon.learn.model.attention import choose_attention
from echelon.learn.model.config import build_config, scale_positions
from echelon.learn.model.model_folder import find_config_folder
from echelon.learn.model.parts import check_has_vocabulary, find_score_head, scores_texts
from echelon.planner.shape import check_depth, resolve_vocab_size
from echelon.recipe.document import Recipe


def load_config(source: Mapping[str, Any] | str, trust_remote_code: bool = False) -> PretrainedConfig:
    """The HF config of `model.config` (a mapping) or of `model.checkpoint` (a run, an HF folder or a hub id).

    Raises:
        ConfigError: the model type is unknown, or the checkpoint has no readable config.json.
        HubUnreachableError: the checkpoint is a hub id, and the hub cannot be reached.
    """
    if isinstance(source, str):
        return _read_config(source, trust_remote_code)
    return build_config(source)


def _read_config(source: str, trust_remote_code: bool) -> PretrainedConfig:
    folder = find_config_folder(source, trust_remote_code)
    try:
        check_readable(folder)
        check_depth(read_json(folder / "config.json"))
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except EchelonError:
        raise
    except Exception as error:  # transformers raises many types of exception on a damaged file
        raise ConfigError(
            f"model.checkpoint={source}: cannot read its model config ({first_line(error)}); give a folder with "
            "config.json and safetensors, or a hub id."
        ) from error
    assert isinstance(config, PretrainedConfig)
    drop_quantization(config)
    return config


def drop_quantization(config: PretrainedConfig) -> None:
    """Remove from a config, in place, how its files store weights: in memory, and in what is written, they are plain.

    `dequantized.py` reads it from the files.
    """
    from echelon.learn.model.stored_format import QUANTIZATION_KEYS

    for part in (config, config.get_text_config(decoder=True)):
        for key in QUANTIZATION_KEYS:
            vars(part).pop(key, None)


def build_on_meta(
    config: PretrainedConfig,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    dtype: torch.dtype = torch.float32,
) -> PreTrainedModel:
    """Build the model with parameters of a dtype on the meta device: all shapes, no memory.

    Raises:
        ConfigError: `transformers` does not have the model, activation, attention or rotary embedding.
    """
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code}
    if (attention := choose_attention(config, attn_implementation)) is not None:
        options["attn_implementation"] = attention
    try:
        with torch.device("meta"):
            model = model_kind(config).from_config(config, **options)
    except Exception as error:  # transformers raises many types of exception
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"model: transformers cannot build a {config.model_type} model from this config "
            f"({type(error).__name__}: {reason}); correct model.config or model.attn_implementation."
        ) from error
    assert isinstance(model, PreTrainedModel)
    if find_score_head(model) is not None:
        # The id that fills batches may also end a turn: its embedding is trained like any other.
        model.get_input_embeddings().padding_idx = None
    return model


def model_kind(config: PretrainedConfig) -> Any:
    """Return the class of `transformers` that builds the models of a config."""
    return AutoModelForSequenceClassification if scores_texts(config) else AutoModelForCausalLM


def materialize(module: nn.Module, device: torch.device | str) -> None:
    """Allocate uninitialised memory for a module on meta, in place, sharded or not. Tied parameters stay tied.

    `tie_weights` of `transformers` cannot do this: it ties by module name, and an adapter replaces those modules.
    """
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    module.to_empty(device=device)
    for first, *others in names.values():
        for other in others:
            path, _, leaf = other.rpartition(".")
            setattr(module.get_submodule(path), leaf, module.get_parameter(first))


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that belong to a checkpoint, by name."""
    stored = model.state_dict(keep_vars=True).keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in stored}


def resolve_config(
    recipe: Recipe, vocab_size: int, tokenizer: PreTrainedTokenizerBase, padding: int | None = None
) -> PretrainedConfig:
    """Return the HF config that a run builds its model from.

    The config of a checkpoint is used as it is, but for positions that `model.rope` scales. A config from the recipe
    takes the vocabulary size and special token ids that it omits from the tokenizer: the family's default bos or pad id
    could be an ordinary token here.

    The embedding of the padding token is zero, and never trained. A tokenizer may pad with the end of a text, which
    the model reads: a sequence that begins with zeros would stay zero in every layer, where each norm makes its
    gradient a thousand times larger. Such a model gets no padding token. `padding`: see `apply_score_head`.

    Raises:
        ConfigError: the vocabulary is smaller than the tokenizer's, the config pads with the start or end of a text,
            or `transformers` rejects it.
    """
    if recipe.model.config is None:
        assert recipe.model.checkpoint is not None
        config = load_config(recipe.model.checkpoint, recipe.model.trust_remote_code)
        config.vocab_size, _ = resolve_vocab_size(
            config.to_dict(), vocab_size, f"model.checkpoint={recipe.model.checkpoint}", bool(recipe.model.new_tokens)
        )
        scale_positions(config, recipe)
        apply_head(config, recipe, padding)
        return config
    fields = dict(recipe.model.config)
    fields["vocab_size"], _ = resolve_vocab_size(fields, vocab_size)
    for name in ("bos_token_id", "eos_token_id"):
        fields.setdefault(name, getattr(tokenizer, name))
    ends = fields["eos_token_id"] if isinstance(fields["eos_token_id"], list) else [fields["eos_token_id"]]
    borders, pad = {fields["bos_token_id"], *ends} - {None}, tokenizer.pad_token_id
    if fields.setdefault("pad_token_id", None if pad in borders else pad) in borders:
        raise ConfigError(
            f"model.config.pad_token_id={fields['pad_token_id']} is also the start or the end of a text: its embedding "
            "would stay zero, and gradients could overflow; remove the key."
        )
    config = load_config(fields)
    scale_positions(config, recipe)
    apply_head(config, recipe, padding)
    config.architectures = [type(build_on_meta(config)).__name__]
    return config


def apply_score_head(config: PretrainedConfig, labels: Sequence[str] = (), padding: int | None = None) -> None:
    """Make a config that of the model with the same layers that scores texts, in place.

    Args:
        labels: the names of the classes, one per score; none for a reward model, which has one score.
        padding: the id that fills batches; the score of a text is taken at its last token that has another id.

    Raises:
        ConfigError: `transformers` has no such model of this type.
    """
    name = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(config.model_type)
    if not isinstance(name, str):
        raise ConfigError(
            f"model: transformers has no sequence-classification model of type {config.model_type}, which gives texts "
            "their scores; use another model, for example llama, qwen2, qwen3, mistral or gemma2."
        )
    config.architectures = [name]
    names = list(labels) or ["LABEL_0"]
    config.id2label, config.label2id = dict(enumerate(names)), {name: number for number, name in enumerate(names)}
    config.problem_type = "single_label_classification" if labels else "regression"
    config.get_text_config(decoder=True).pad_token_id = padding


def apply_head(config: PretrainedConfig, recipe: Recipe, padding: int | None = None) -> None:
    """Make a config that of a model with the head that the objective trains, in place.

    `padding`: see `apply_score_head`; without it the model has the right sizes, but cannot score several texts at once.

    Raises:
        ConfigError: `transformers` has no such model, or the checkpoint has no head for tokens.
    """
    if recipe.objective.scores_texts:
        labels = recipe.objective.labels
        if scores_texts(config) and recipe.model.checkpoint is not None:
            _check_labels(config, recipe)
        apply_score_head(config, labels, padding)
    else:
        fix = "set objective.name=reward, or give the language model that it was made from"
        check_has_vocabulary(config, f"model.checkpoint={recipe.model.checkpoint}", fix)


def _check_labels(config: PretrainedConfig, recipe: Recipe) -> None:
    """Raise ConfigError for a checkpoint that scores texts with other labels, whose head would have another meaning."""
    names = [str(config.id2label[number]) for number in sorted(config.id2label)]
    labels = list(recipe.objective.labels) or ["LABEL_0"]
    if names != labels and names != [f"LABEL_{number}" for number in range(len(labels))]:
        setting = f"objective.labels={labels}" if recipe.objective.labels else f"objective.name={recipe.objective.name}"
        raise ConfigError(
            f"model.checkpoint={recipe.model.checkpoint} is a model that scores texts with the labels {names}, and "
            f"{setting} needs {count_noun(len(labels), 'score')}; give the same labels in the same order "
            "(objective.name=classification), or the language model that it was made from."
        )
