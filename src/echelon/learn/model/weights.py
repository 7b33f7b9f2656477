"""Initialises or loads a model's weights one unit at a time, so that no rank ever holds the full model.

Initial weights depend only on the seed and the unit's name: each unit is initialised in full on the CPU, by the model's
own rules with the unit's own seed, and each rank copies its slice. Never initialise a sharded parameter in place:
DTensor's CPU generator gives every shard the same numbers.
"""

import copy
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from echelon.ground.errors import ConfigError
from echelon.learn.model.adapters import plain_name
from echelon.learn.model.parts import find_score_head, weight_groups
from echelon.learn.model.quantization import Quantized
from echelon.learn.model.seeds import derive_seed
from echelon.learn.model.sharding import local_part, local_places, take


@dataclass(frozen=True)
class WeightPlace:
    """The parameter of the training model that stores a weight of the plain model, unquantised or in 4 bits."""

    tensor: Tensor
    quantized: Quantized | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the full weight."""
        if self.quantized is not None:
            return tuple(self.quantized.weight_shape)
        return tuple(self.tensor.shape)

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


def names_by_place(model: nn.Module, skeleton: nn.Module) -> list[tuple[list[str], WeightPlace]]:
    """Return each place once, with all names of its weight."""
    places = find_places(model, skeleton)
    return [(names, places[names[0]]) for names in tied_names(skeleton) if names[0] in places]


def buffer_places(model: nn.Module, skeleton: nn.Module) -> dict[str, WeightPlace]:
    """The place of each buffer that belongs to a checkpoint and is not on meta, by its name in the plain model."""
    stored = skeleton.state_dict().keys()
    return {name: WeightPlace(buffer) for name, buffer in _held_buffers(model).items() if name in stored}
