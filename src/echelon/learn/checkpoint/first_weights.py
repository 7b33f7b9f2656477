"""The initial weights of a run: generated from the seed, or read from another run or an HF checkpoint."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from transformers import PreTrainedModel

from echelon.ground.errors import CheckpointError
from echelon.ground.run_files import is_run
from echelon.learn.checkpoint.fill import load_alone, read_metadata
from echelon.learn.checkpoint.folder import newest_of
from echelon.learn.model.build import build_on_meta, load_config, materialize
from echelon.learn.model.weights import (
    PretrainedWeights,
    buffer_places,
    find_places,
    grown,
    head_names,
    initialize_buffers,
    initialize_head,
    initialize_weights,
    vocabulary_names,
)
from echelon.recipe.document import Recipe
from echelon.recipe.inputs import ModelConfig

Fill = Callable[[PreTrainedModel], None]
"""Fills a materialised model; it may be sharded, quantised or have an adapter. Modules on meta are left out."""


def open_weights(skeleton: PreTrainedModel, recipe: Recipe) -> Fill:
    """Return the function that fills a model, or one part of it after another, with the run's initial weights.

    Args:
        skeleton: the plain model on meta, without any transform.
        recipe: with hub ids replaced by local copies (`hub.with_copies`).
    """
    source, may_grow = recipe.model.checkpoint, bool(recipe.model.new_tokens)
    if source is None:
        return partial(initialize_weights, skeleton=skeleton, seed=recipe.run.seed)
    if is_run(Path(source)):
        checkpoint = newest_of(Path(source)).path
        seed = recipe.run.seed
        return partial(load_from_run, skeleton=skeleton, checkpoint=checkpoint, may_grow=may_grow, seed=seed)
    return PretrainedWeights(skeleton, Path(source), may_grow, recipe.run.seed).fill


def load_frozen(recipe: Recipe, source: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Load another model that a recipe names, whole and in evaluation mode.

    Args:
        source: a run, or an HF folder.

    Raises:
        ConfigError: there is no such model.
        CheckpointError: its weights are damaged.
    """
    trusted = recipe.model.trust_remote_code
    of_source = recipe.model_copy(update={"model": ModelConfig(checkpoint=source, trust_remote_code=trusted)})
    skeleton = build_on_meta(load_config(source, trusted), None, trusted)
    model = build_on_meta(load_config(source, trusted), None, trusted, dtype).requires_grad_(False)
    materialize(model, device)
    open_weights(skeleton, of_source)(model)
    return model.eval()


@torch.no_grad()
def load_from_run(
    model: PreTrainedModel, skeleton: PreTrainedModel, checkpoint: Path, may_grow: bool = False, seed: int = 0
) -> None:
    """Load weights in place; those that are quantised or grown one at a time, through a full copy.

    A head that scores texts is new, from the seed, if the run trained a language model.
    """
    initialize_buffers(model, skeleton, stored=buffer_places(model, skeleton))
    saved, places = read_metadata(checkpoint).state_dict_metadata, find_places(model, skeleton)
    vocabulary, head = vocabulary_names(skeleton), head_names(skeleton)
    if is_new := not {f"model.{name}" for name in head} <= saved.keys():
        initialize_head(model, skeleton, seed)
    direct = {f"model.{name}": place.tensor for name, place in buffer_places(model, skeleton).items()}
    for name, parameter in skeleton.named_parameters():
        if name not in places or (is_new and name in head):
            continue
        place, entry = places[name], saved.get(f"model.{name}")
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f"Checkpoint {checkpoint} has no model.{name}; it belongs to another model.")
        grows = may_grow and name in vocabulary and entry.size[0] < parameter.shape[0]
        if place.quantized is None and not grows:
            direct[f"model.{name}"] = place.tensor.detach()
            continue
        held = torch.empty(entry.size if grows else parameter.shape)
        load_alone(checkpoint, {f"model.{name}": held})
        place.write(place.take(grown(held, parameter.shape[0]) if grows else held))
    load_alone(checkpoint, direct)
