"""Pipeline stages of a decoder: the model's own forward pass, with other stages' modules replaced by placeholders.

There is no list of model types. A model can be cut if, on a small copy, the chained stages compute what the whole copy
computes, bit for bit. Names and indices stay those of `transformers`, so that checkpoints, optimizer and export need
nothing.
"""

import copy
import itertools
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from typing_extensions import override

from echelon.ground.errors import ConfigError
from echelon.learn.model.attention import stand_in
from echelon.learn.model.parts import find_layers, weight_groups
from echelon.learn.model.small_copy import ConfigKey, random_tokens
from echelon.learn.model.traits import build_copies, describe_error, undisturbed

_LENGTH = 12


@dataclass(frozen=True)
class Ends:
    """The names of the modules with weights outside the decoder layers: those that run before and after the layers."""

    front: frozenset[str]
    back: frozenset[str]


@dataclass(frozen=True)
class StageRange:
    """The decoder layers of one stage, `first <= layer < stop`, and its index among `count` stages."""

    index: int
    count: int
    first: int
    stop: int

    @property
    def is_first(self) -> bool:
        """Whether it takes token ids."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the head."""
        return self.index == self.count - 1


def stage_ranges(layers_per_stage: Sequence[int]) -> list[StageRange]:
    """Return all stages, given the number of decoder layers of each."""
    count, stops = len(layers_per_stage), itertools.accumulate(layers_per_stage)
    return [StageRange(index, count, stop - layers_per_stage[index], stop) for index, stop in enumerate(stops)]


class Absent(nn.Module):
    """Stands for a module of another stage: returns hidden states unchanged, and 0 for token ids or positions."""

    @override
    def forward(self, inputs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return what the next module can add up or go on with."""
        return inputs if inputs.is_floating_point() else torch.zeros((), device=inputs.device)


class Inlet(Absent):
    """Stands for the last layer of the stage before: returns the hidden states that were received from there."""

    def __init__(self) -> None:
        super().__init__()
        self._received: Tensor | None = None

    @contextmanager
    def holding(self, received: Tensor) -> Iterator[None]:
        """Scope of a forward pass with these hidden states, [batch, seq, hidden]."""
        self._received = received
        try:
            yield
        finally:
            self._received = None

    @override
    def forward(self, inputs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the hidden states, whatever the placeholders before made of its inputs."""
        assert self._received is not None, "a stage runs within `holding`"
        return self._received


def own_layers(model: nn.Module) -> list[nn.Module]:
    """Return the decoder layers of a model or stage, without placeholders."""
    return [layer for layer in find_layers(model) if not isinstance(layer, Absent)]


def find_inlet(model: nn.Module) -> Inlet | None:
    """Return where a stage takes up hidden states; None for a whole model or the first stage."""
    return next((module for module in model.modules() if isinstance(module, Inlet)), None)


def find_shared(model: nn.Module, ends: Ends) -> tuple[str, ...]:
    """Return the names of the weights of a whole model that its first and its last stage both have: tied embeddings."""
    front, back = (
        {id(parameter) for name in names for parameter in model.get_submodule(name).parameters()}
        for names in (ends.front, ends.back)
    )
    return tuple(name for name, parameter in model.named_parameters() if id(parameter) in front & back)


def cut(model: nn.Module, ranges: Collection[StageRange], ends: Ends) -> None:
    """Remove what is in none of these stages from a model, in place: a placeholder without parameters replaces it.

    A weight that a stage uses under one name stays under all its names, so a tied head keeps the embedding's name.
    """
    kept: set[str] = set()
    for stage in ranges:
        kept |= ends.front if stage.is_first else frozenset()
        kept |= ends.back if stage.is_last else frozenset()
    weights = {id(parameter) for name in kept for parameter in model.get_submodule(name).parameters()}
    for name in ends.front | ends.back:
        if not any(id(parameter) in weights for parameter in model.get_submodule(name).parameters()):
            path, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(path), leaf, Absent())
    layers = find_layers(model)
    for index in range(len(layers)):
        if not any(stage.first <= index < stage.stop for stage in ranges):
            layers[index] = Absent()


def view_stage(model: PreTrainedModel, stage: StageRange, ends: Ends) -> PreTrainedModel:
    """Return one stage of a model that has at least this one; the modules that it runs are those of the model."""
    layers = find_layers(model)
    path = next(name for name, module in model.named_modules() if module is layers)
    view = _copy_around(model, [*ends.front, *ends.back, f"{path}.0"])
    cut(view, [stage], ends)
    if stage.first > 0:
        setattr(view.get_submodule(path), str(stage.first - 1), Inlet())
    return view


def _copy_around(model: PreTrainedModel, names: Collection[str]) -> PreTrainedModel:
    """Copy a model and the modules that contain those of these names, which are shared with the copy."""
    copies: dict[str, nn.Module] = {"": _copy_shallow(model)}
    for name in names:
        *parents, _ = name.split(".")
        for depth in range(1, len(parents) + 1):
            path = ".".join(parents[:depth])
            if path not in copies:
                copies[path] = _copy_shallow(model.get_submodule(path))
                setattr(copies[".".join(parents[: depth - 1])], parents[depth - 1], copies[path])
    whole = copies[""]
    assert isinstance(whole, PreTrainedModel)
    return whole


def _copy_shallow(module: nn.Module) -> nn.Module:
    clone = copy.copy(module)
    clone._modules = dict(module._modules)
    return clone


@dataclass(frozen=True)
class Inflow:
    """What a stage goes on from: the hidden states of the stage before, [batch, seq, hidden], and where they enter."""

    inlet: Inlet
    hidden: Tensor


def run_stage(module: nn.Module, inflow: Inflow | None, **inputs: Any) -> Any:
    """Run the model of a stage, or its backbone, and return its outputs.

    Args:
        inflow: None for a whole model and the first stage, which take token ids.
        inputs: those of the model's own forward, including `input_ids`.
    """
    if inflow is None:
        return module(**inputs)
    del inputs["input_ids"]
    with inflow.inlet.holding(inflow.hidden):
        # Masks and positions are made for these; what the model computes of them before the inlet is dropped.
        return module(inputs_embeds=inflow.hidden.detach(), **inputs)


def find_ends(model: PreTrainedModel) -> Ends:
    """Find the modules of a model's first and last stage; once per config and process.

    The model may be on meta; it must be without an adapter. Keeps the global random state.

    Raises:
        ConfigError: the model cannot be cut into stages, with the reason.
    """
    ends, obstacle = _find_ends(ConfigKey(model.config, type(model), stand_in(model.config._attn_implementation)))
    if ends is None:
        raise ConfigError(
            f"parallel.pp: this {model.config.model_type} model cannot be cut into pipeline stages: {obstacle}; use "
            "pp: 1 and shard it with dp_shard."
        )
    return ends


@lru_cache(maxsize=64)
def _find_ends(key: ConfigKey) -> tuple[Ends | None, str]:
    model_class, attention = key.others
    with undisturbed():
        try:
            small = build_copies(model_class, key.config, attention, None)[0]
            if len(find_layers(small)) < 2:
                return None, "it has one decoder layer"
            ends = _observe_ends(small)
            return (ends, "") if chained_equals_whole(small, ends) else (None, "its stages compute other hidden states")
        except Exception as error:  # a family may fail in any way
            return None, f"its stages do not run ({describe_error(error)})"


def _observe_ends(model: PreTrainedModel) -> Ends:
    """Run a forward pass and note which modules with weights run before the first layer and after the last one."""
    layers = find_layers(model)
    path = next(name for name, module in model.named_modules() if module is layers)
    outside = [name for name, module, inside in weight_groups(model) if not inside and list(module.parameters(False))]
    if any(not name or f"{path}.".startswith(f"{name}.") for name in outside):
        raise ValueError("a weight belongs to no module outside the layers")
    calls = _record_calls(model, [*outside, *(f"{path}.{index}" for index in range(len(layers)))])
    first, last = calls.index(f"{path}.0"), calls.index(f"{path}.{len(layers) - 1}")
    front, back = frozenset(calls[:first]), frozenset(calls[last + 1 :])
    if front & back or front | back != set(outside):
        raise ValueError("some of its modules run among the layers, or not at all")
    return Ends(front, back)


def _record_calls(model: PreTrainedModel, names: Sequence[str]) -> list[str]:
    """Return the modules of these names in the order in which a forward pass calls them."""
    calls: list[str] = []
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(lambda module, inputs, name=name: calls.append(name))
        for name in names
    ]
    try:
        model(input_ids=random_tokens(model, 1, _LENGTH), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


@torch.no_grad()
def chained_equals_whole(model: PreTrainedModel, ends: Ends) -> bool:
    """Whether stages of one layer each, one after the other, compute the model's logits bit for bit."""
    stages = [view_stage(model, stage, ends) for stage in stage_ranges([1] * len(find_layers(model)))]
    tokens = random_tokens(model, 2, _LENGTH)
    inputs, inflow = {"input_ids": tokens, "use_cache": False}, None
    for stage, following in itertools.pairwise(stages):
        hidden = run_stage(stage.base_model, inflow, **inputs).last_hidden_state
        inlet = find_inlet(following)
        assert inlet is not None
        inflow = Inflow(inlet, hidden)
    return torch.equal(run_stage(stages[-1], inflow, **inputs).logits, model(**inputs).logits)
