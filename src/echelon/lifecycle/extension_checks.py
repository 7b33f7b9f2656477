"""What a recipe names from outside of echelon, looked at before anything starts."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from echelon.extensions import check_options, find_named, is_extension
from echelon.recipe import Recipe


@dataclass(frozen=True)
class Named:
    """A key of a recipe that holds a name from outside, and the options beside it."""

    key: str
    name: str
    options: Mapping[str, Any] | None


def list_extensions(recipe: Recipe) -> list[Named]:
    """Every name from outside, in the order of the recipe. Nothing is imported."""
    return [each for each in _list_named(recipe) if is_extension(each.name)]


def _list_named(recipe: Recipe) -> Iterator[Named]:
    for part, sources in (("train", recipe.data.train), ("validation", recipe.data.validation)):
        for index, source in enumerate(sources):
            yield Named(f"data.{part}.{index}.format", source.format, source.options)
    for index, callback in enumerate(recipe.train.callbacks):
        yield Named(f"train.callbacks.{index}.name", callback.name, callback.options)
    for key, section in (("objective", recipe.objective), ("optim", recipe.optim), ("sync", recipe.sync)):
        yield Named(f"{key}.name", section.name, section.options)


def describe_extensions(recipe: Recipe) -> list[str]:
    """A line about each name, for a machine that is not the one that trains."""
    return [
        f"{each.key}={each.name}: whether the package {each.name.partition(':')[0].partition('.')[0]} is installed on "
        "every machine that trains"
        for each in list_extensions(recipe)
    ]


def check_extensions(recipe: Recipe) -> None:
    """Import what the recipe names from outside, and refuse what cannot be used. Nothing is called.

    Raises ConfigError, naming the key, for what cannot be imported here, is of another kind, or does not take its
    options. Every process that trains imports it again.
    """
    for each in list_extensions(recipe):
        kind, num_arguments = _find_kind(each.key)
        found = find_named(each.key, each.name, {}, kind)
        check_options(each.key, each.name, found, num_arguments, each.options)


def _find_kind(key: str) -> tuple[type, int]:
    """What a key's name must be, and how many arguments it is called with beside its options."""
    from echelon.data.readers.record import Reader
    from echelon.objectives.objective import Objective
    from echelon.optimizer.rules import Rule
    from echelon.sync.synchronizer import Synchronizer
    from echelon.training.callbacks import Callback

    kinds: dict[str, tuple[type, int]] = {
        "optim": (Rule, 2),
        "objective": (Objective, 1),
        "sync": (Synchronizer, 3),
        "data": (Reader, 0),
        "train": (Callback, 0),
    }
    return kinds[key.partition(".")[0]]
