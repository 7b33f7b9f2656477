"""Which parameters belong together: the role of each, its weight decay, and its factor on the learning rate."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from echelon.ground.errors import ConfigError
from echelon.learn.model.parts import find_layers
from echelon.recipe.training import OptimConfig


@dataclass(frozen=True)
class Member:
    """One trained parameter. `is_layer_matrix`: a 2-D weight inside a decoder layer, what Muon is for."""

    name: str
    parameter: nn.Parameter
    weight_decay: float
    rate_factor: float
    is_layer_matrix: bool


def find_members(model: nn.Module, config: OptimConfig) -> list[Member]:
    """Every trained parameter once, under the name it has first, with what `optim` says about it."""
    inside = {id(parameter) for layer in find_layers(model) for parameter in layer.parameters()}
    roles = find_roles(model)
    return [
        Member(
            name,
            parameter,
            weight_decay=0.0 if roles[name] & set(config.no_decay) else config.weight_decay,
            rate_factor=find_factor(name, config.learning_rate_multipliers),
            is_layer_matrix=id(parameter) in inside and parameter.ndim == 2 and not roles[name],
        )
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]


def find_roles(model: nn.Module) -> dict[str, frozenset[str]]:
    """The words of `optim.no_decay` that fit each parameter, by its name; none for an ordinary weight.

    A tied head is the input embedding. Vectors of other modules count as norms: gains are what they are.
    """
    roles: dict[int, frozenset[str]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            roles.setdefault(id(parameter), _roles_of(module, name, parameter))
    return {name: roles[id(parameter)] for name, parameter in model.named_parameters()}


def _roles_of(module: nn.Module, name: str, parameter: nn.Parameter) -> frozenset[str]:
    if isinstance(module, nn.Embedding):
        return frozenset({"embeddings"})
    is_bias = name == "bias" or name.endswith("_bias")
    is_norm = "norm" in type(module).__name__.lower() or (parameter.ndim < 2 and not is_bias)
    return frozenset(role for role, fits in (("norms", is_norm), ("biases", is_bias)) if fits)


def find_factor(name: str, multipliers: dict[str, float]) -> float:
    """The factor of the first glob that matches a parameter's name; 1 where none does."""
    return next((factor for glob, factor in multipliers.items() if fnmatchcase(name, glob)), 1.0)


def check_groups(names: Iterable[str], config: OptimConfig) -> None:
    """Raise ConfigError for a glob of `optim.learning_rate_multipliers` that no parameter's name matches."""
    known = list(names)
    for glob, factor in config.learning_rate_multipliers.items():
        if not any(fnmatchcase(name, glob) for name in known):
            near = difflib.get_close_matches(glob.strip("*"), known, n=3, cutoff=0.3) or known[:3]
            raise ConfigError(
                f"optim.learning_rate_multipliers: {glob!r} (factor {factor:g}) matches no parameter of the model; "
                f"names near it: {', '.join(near)}; a glob such as '*embed_tokens*' matches anywhere in a name."
            )
