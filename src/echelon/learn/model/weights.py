"""Initialises or loads a model's weights one unit at a time, so that no rank ever holds the full model.

Initial weights depend only on the seed and the unit's name: each unit is initialised in full on the CPU, by the model's
own rules with the unit's own seed, and each rank copies its slice. Never initialise a sharded parameter in place:
DTensor's CPU generator gives every shard the same numbers.
"""

import copy
import logging
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from echelon.ground.errors import CheckpointError, ConfigError
from echelon.learn.model.adapters import plain_name
from echelon.learn.model.build import persistent_buffers
from echelon.learn.model.conversion import Conversion, Shape, conversions_to_model
from echelon.learn.model.parts import find_score_head, weight_groups
from echelon.learn.model.quantization import Quantized
from echelon.learn.model.safetensors_folder import FLOATING, SafetensorsFolder, StoredWeight
from echelon.learn.model.seeds import derive_seed
from echelon.learn.model.sharding import local_part, local_places, take

logger = logging.getLogger(__name__)

# Tables that older releases of transformers stored; today every model computes them.
_COMPUTED = re.compile(r"rotary_emb\.inv_freq$|attn\.(masked_)?bias$|attention\.(masked_)?bias$|position_ids$")

# The head for tokens, of which a model that scores texts has no use.
_TOKEN_HEAD = re.compile(r"^(lm_head|embed_out)\.")


@dataclass(frozen=True)
class WeightPlace:
    """The parameter of the training model that stores a weight of the plain model, unquantised or in 4 bits."""

    tensor: Tensor
    quantized: Quantized | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the full weight."""
        return tuple(self.tensor.shape if self.quantized is None else self.quantized.weight_shape)

    @property
    def block(self) -> tuple[slice, ...] | None:
        """The slices that `take` cuts out of the full weight; None if this rank's part is not one block."""
        if self.quantized is not None:
            return (slice(None),) * len(self.shape)
        slices = tuple(index for index in local_places(self.tensor) if isinstance(index, slice))
        return slices if len(slices) == self.tensor.ndim else None

    def take(self, whole: Tensor) -> Tensor:
        """Return the part of the full weight that `write` needs: this rank's part, or all of it for quantisation."""
        return take(whole, local_places(self.tensor)) if self.quantized is None else whole

    def write(self, part: Tensor, measures: bool = False) -> None:
        """Store the part of the full weight that `take` returned. `measures`: see `Quantized.fill`."""
        if self.quantized is None:
            local_part(self.tensor).copy_(part)
        else:
            self.quantized.fill(part, measures)


def weight_places(model: nn.Module) -> dict[str, WeightPlace]:
    """Return the place of every weight of the plain model by its name there; a tied weight by each of its names.

    Parameters that an adapter adds are not included, and neither are those on meta, which this process does not hold.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    places = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        plain, owner = plain_name(name), modules[name.rpartition(".")[0]]
        if plain is None or name.endswith(".scales") or parameter.is_meta:
            continue
        is_packed = isinstance(owner, Quantized) and parameter is owner.packed
        places[plain] = WeightPlace(parameter, owner if is_packed and isinstance(owner, Quantized) else None)
    return places


@torch.no_grad()
def initialize_weights(model: PreTrainedModel, skeleton: PreTrainedModel, seed: int) -> None:
    """Initialise every parameter and buffer of `model` by the architecture's own rules.

    Args:
        model: materialised (`to_empty`), sharded or not; a pipeline stage gets only its own parameters.
        skeleton: the same model on meta, without any transform.
        seed: run.seed; the same seed gives the same weights on any number of ranks and under any strategy.

    Raises:
        ConfigError: the architecture has a parameter that its own rules do not initialise.
    """
    buffers = {name: WeightPlace(buffer) for name, buffer in _held_buffers(model).items()}
    _initialize_places(find_places(model, skeleton) | buffers, skeleton, seed)


@torch.no_grad()
def initialize_head(model: PreTrainedModel, skeleton: PreTrainedModel, seed: int) -> None:
    """Initialise the head of a model that scores texts, like `initialize_weights`."""
    names = head_names(skeleton)
    places = {name: place for name, place in find_places(model, skeleton).items() if name in names}
    _initialize_places(places, skeleton, seed)


def head_names(skeleton: PreTrainedModel) -> set[str]:
    """Return the names of the weights of the head that scores texts; none for a model without one."""
    head = find_score_head(skeleton)
    weights = set() if head is None else {id(parameter) for parameter in head.parameters()}
    return {name for name, parameter in skeleton.named_parameters() if id(parameter) in weights}


def _initialize_places(places: Mapping[str, WeightPlace], skeleton: PreTrainedModel, seed: int) -> None:
    filled: set[int] = set()
    for name, tensor in _initial_tensors(skeleton, seed, places.keys()):
        if id(places[name].tensor) not in filled:  # a tied weight keeps the values of its first name
            filled.add(id(places[name].tensor))
            places[name].write(places[name].take(tensor))
    assert filled == {id(place.tensor) for place in places.values()}, "a parameter is in no unit of the skeleton"


@torch.no_grad()
def initialize_buffers(model: PreTrainedModel, skeleton: PreTrainedModel, stored: Collection[str] = ()) -> None:
    """Compute the initial values of the buffers, such as rotary tables, except those named in `stored`."""
    targets = {name: buffer for name, buffer in _held_buffers(model).items() if name not in stored}
    for name, tensor in _initial_tensors(skeleton, 0, targets.keys()):
        targets[name].copy_(tensor)


def _held_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that are not on meta, by their names in the plain model."""
    named = ((plain_name(name), buffer) for name, buffer in model.named_buffers(remove_duplicate=False))
    return {name: buffer for name, buffer in named if name is not None and not buffer.is_meta}


def _initial_tensors(skeleton: PreTrainedModel, seed: int, wanted: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    """Initialise, in full on the CPU, each unit that has a tensor of these names, and yield those tensors."""
    for unit_name, module, whole in weight_groups(skeleton) if wanted else ():
        if not any(name in wanted for name, _ in _named_tensors(module, unit_name, whole)):
            continue
        unit = make_unit(skeleton, unit_name, module, seed)
        for name, tensor in _named_tensors(unit, unit_name, whole):
            if name not in wanted:
                continue
            if tensor.is_floating_point() and bool(tensor.isnan().any()):
                is_computed = name not in skeleton.state_dict()
                fix = "use another family" if is_computed else "use model.checkpoint instead of model.config"
                raise ConfigError(f"model: {type(skeleton).__name__} has no rule to initialise {name}; {fix}.")
            yield name, tensor


def _named_tensors(module: nn.Module, prefix: str, recurse: bool) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_buffers(prefix, recurse)
    yield from module.named_parameters(prefix, recurse)


def _owner(skeleton: PreTrainedModel, name: str) -> PreTrainedModel:
    """Return the innermost model of `transformers` around a unit, whose rules initialise it."""
    parts = name.split(".")
    around = (skeleton.get_submodule(".".join(parts[:length])) for length in range(len(parts), -1, -1))
    return next(module for module in around if isinstance(module, PreTrainedModel))


def make_unit(skeleton: PreTrainedModel, name: str, module: nn.Module, seed: int) -> nn.Module:
    """Return a copy of a module of the skeleton with initial weights, on the CPU."""
    unit = copy.deepcopy(module).to_empty(device="cpu")
    for tensor in [*unit.parameters(), *unit.buffers()]:
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))  # to detect tensors that no rule initialises
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, name))
        unit.apply(_owner(skeleton, name)._init_weights)
    return unit


def vocabulary_names(skeleton: PreTrainedModel) -> set[str]:
    """Return the names of the weights with one row per token: the embedding's and the head's."""
    modules = [skeleton.get_input_embeddings(), skeleton.get_output_embeddings()]
    weights = {id(module.weight) for module in modules if module is not None}
    return {name for name, parameter in skeleton.named_parameters(remove_duplicate=False) if id(parameter) in weights}


def grown(weight: Tensor, num_rows: int) -> Tensor:
    """Return an embedding or head grown to `num_rows`; each new row is the mean of the existing ones."""
    mean = weight.float().mean(dim=0, keepdim=True).to(weight.dtype)
    return torch.cat([weight, mean.expand(num_rows - len(weight), *weight.shape[1:])])


def find_places(model: nn.Module, skeleton: nn.Module) -> dict[str, WeightPlace]:
    """Return this rank's place of each weight of the plain model, by all its names, without what it does not hold.

    A tied weight has a place if one of its names has one.
    """
    places = weight_places(model)
    return {
        name: place
        for names in tied_names(skeleton)
        for place in [next((places[name] for name in names if name in places), None)]
        if place is not None
        for name in names
    }


def tied_names(skeleton: nn.Module) -> list[list[str]]:
    """Return the names of each weight of the plain model, one list per weight."""
    names: dict[int, list[str]] = {}
    for name, parameter in skeleton.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return list(names.values())


def buffer_places(model: nn.Module, skeleton: nn.Module) -> dict[str, WeightPlace]:
    """The place of each buffer that belongs to a checkpoint and is not on meta, by its name in the plain model."""
    stored = skeleton.state_dict().keys()
    return {name: WeightPlace(buffer) for name, buffer in _held_buffers(model).items() if name in stored}


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
        from echelon.learn.model.model_folder import open_folder

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
        places = find_places(model, self._skeleton)
        for names in tied_names(self._skeleton):
            if names[0] not in places or not self._new.isdisjoint(names):
                continue
            place = places[names[0]]
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
