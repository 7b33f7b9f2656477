"""Loads an HF checkpoint folder: each rank reads its slices, and converts one group of weights at a time."""

import logging
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import PreTrainedModel

from echelon.ground.errors import CheckpointError
from echelon.learn.model.build import persistent_buffers
from echelon.learn.model.conversion import Conversion, Shape, conversions_to_model
from echelon.learn.model.safetensors_folder import FLOATING, SafetensorsFolder, StoredWeight
from echelon.learn.model.weights import (
    WeightPlace,
    buffer_places,
    grown,
    head_names,
    initialize_buffers,
    initialize_head,
    names_by_place,
    vocabulary_names,
)

logger = logging.getLogger(__name__)

# Tables that older releases of transformers stored; today every model computes them.
_COMPUTED = re.compile(r"rotary_emb\.inv_freq$|attn\.(masked_)?bias$|attention\.(masked_)?bias$|position_ids$")

# The head for tokens, of which a model that scores texts has no use.
_TOKEN_HEAD = re.compile(r"^(lm_head|embed_out)\.")


class PretrainedWeights:
    """The weights of an HF checkpoint folder, which fill a model, or one part of it after another.

    Weights that are stored as the model has them are read by slices. Weights that `transformers` converts, for example
    the experts of a layer, which are one tensor in the model, are read and converted one group at a time; of sharded
    experts a rank reads only its own. A rank therefore needs memory for its share of the model and for one group.
    """

    def __init__(self, skeleton: PreTrainedModel, path: Path, may_grow: bool = False, seed: int = 0) -> None:
        """Read the headers of the files, but no weight.

        Args:
            skeleton: the model on meta, without any transform.
            may_grow: fill embedding and head rows beyond those of the files with the mean of the rows in the files.
            seed: of the head that scores texts, which is new if the files are of a language model.

        Raises:
            CheckpointError: the files do not belong together.
        """
        from echelon.learn.model.stored_folder import open_folder

        self._skeleton, self._path = skeleton, path
        self._files = open_folder(path)
        if self._files.is_quantized:
            logger.info(f"model.checkpoint={path}: {self._files}")
        self._stored = self._files.read_headers()
        try:
            conversions = conversions_to_model(skeleton, {name: tensor.shape for name, tensor in self._stored.items()})
        except CheckpointError as error:
            raise CheckpointError(
                f"model.checkpoint={path}: {error}; the files of the folder do not belong together."
            ) from error
        self._made_by = {name: conversion for conversion in conversions for name in conversion.targets}
        self._growing = vocabulary_names(skeleton) if may_grow else set[str]()
        self._seed = seed
        head = head_names(skeleton)
        self._new = set[str]() if head <= self._made_by.keys() else head
        used = {name for conversion in conversions for name in conversion.sources}
        unread = persistent_buffers(skeleton).keys() - self._made_by.keys()
        _warn_of_difference(path, skeleton, sorted(self._stored.keys() - used), sorted(unread))

    @torch.no_grad()
    def fill(self, model: PreTrainedModel) -> None:
        """Fill this rank's part of a model, and set its buffers. Modules that are still on meta are left out.

        Raises:
            CheckpointError: a parameter of the model is missing in the folder, or has another shape.
        """
        matched = self._match_places(model)
        initialize_buffers(model, self._skeleton, stored={name for _, places in matched for name in places})
        for conversion, places in matched:
            _fill_places(self._files, conversion, places)
        if self._new:
            initialize_head(model, self._skeleton, self._seed)

    def _match_places(self, model: PreTrainedModel) -> list[tuple[Conversion, dict[str, WeightPlace]]]:
        """Return the conversions that this rank needs, each with the places it fills, by name. Reads no weight."""
        where, made_by = f"model.checkpoint={self._path}", self._made_by
        needed: dict[int, tuple[Conversion, dict[str, WeightPlace]]] = {}
        for names, place in names_by_place(model, self._skeleton):
            if not self._new.isdisjoint(names):
                continue
            name = next((name for name in names if name in made_by), None)
            if name is None:
                raise CheckpointError(f"{where}: the weight {names[0]} is missing; the files belong to another model.")
            conversion = made_by[name]
            _check_shape(f"{where}: {names[0]}", conversion.targets[name], place, name in self._growing)
            _check_floating({name: self._stored[name] for name in conversion.sources})
            needed.setdefault(id(conversion), (conversion, {}))[1][name] = place
        buffers = buffer_places(model, self._skeleton)
        for name in buffers.keys() & made_by.keys():
            _check_shape(f"{where}: {name}", made_by[name].targets[name], buffers[name], False)
            needed.setdefault(id(made_by[name]), (made_by[name], {}))[1][name] = buffers[name]
        return list(needed.values())


def _check_shape(what: str, stored: Shape, place: WeightPlace, may_grow: bool) -> None:
    grows = may_grow and stored[1:] == place.shape[1:] and stored[0] < place.shape[0]
    if stored != place.shape and not grows:
        raise CheckpointError(
            f"{what} has shape {stored} in the weights and {place.shape} by config.json; the files of the folder do "
            "not belong together."
        )


def _check_floating(weights: Mapping[str, StoredWeight]) -> None:
    """Raise CheckpointError for a weight that is not stored as plain floating-point numbers."""
    for name, weight in weights.items():
        if weight.dtype not in FLOATING:
            raise CheckpointError(
                f"{weight.file}: {name} is stored as {weight.dtype}, and only {', '.join(FLOATING)} can be read; "
                "convert the checkpoint, or download the file again if it is damaged."
            )


def _warn_of_difference(path: Path, skeleton: PreTrainedModel, unused: list[str], unread: list[str]) -> None:
    """Warn of stored weights without a parameter, and of buffers that are not stored, unless the family expects it."""
    ignored = [re.compile(pattern) for pattern in skeleton._keys_to_ignore_on_load_unexpected or ()]
    if head_names(skeleton):
        ignored.append(_TOKEN_HEAD)
    unused = [name for name in unused if not any(pattern.search(name) for pattern in (*ignored, _COMPUTED))]
    owner = type(skeleton).__name__
    if unused:
        logger.warning(
            f"model.checkpoint={path}: {len(unused)} stored weights are not used, because {owner} has no such "
            f"parameters: {', '.join(unused[:3])}{', ...' if len(unused) > 3 else ''}"
        )
    if unread:
        logger.warning(
            f"model.checkpoint={path}: {len(unread)} buffers of {owner} are not stored and keep their initial values: "
            f"{', '.join(unread[:3])}{', ...' if len(unread) > 3 else ''}"
        )


def _fill_places(files: SafetensorsFolder, conversion: Conversion, places: Mapping[str, WeightPlace]) -> None:
    """Read and convert what these places need of one conversion's sources, and write it.

    The error of 4-bit weights is measured where the files already have quantized ones.
    """
    name, place = next(iter(places.items()))
    measures = files.is_quantized
    block, has_shape = place.block, conversion.targets[name] == place.shape
    if len(places) == 1 and block is not None and has_shape:
        if conversion.only_renames:
            place.write(files.read(conversion.sources[0], block), measures)
            return
        rows = conversion.of_rows(block[0]) if block else None
        if rows is not None:
            if rows.sources:
                part = rows.convert(files.read_whole(rows.sources))[name]
                place.write(part[(slice(None), *block[1:])], measures)
            return
    made = conversion.convert(files.read_whole(conversion.sources))
    for name, place in places.items():
        whole = made.pop(name)
        has_shape = whole.shape == place.shape
        place.write(place.take(whole if has_shape else grown(whole, place.shape[0])), measures)
