"""Check the extensions that a recipe names, before anything starts."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from echelon.ground.errors import ConfigError
from echelon.ground.extensions import check_options, find_named, is_extension
from echelon.ground.extras import require_extra
from echelon.learn.answers.environments import check_environment
from echelon.learn.answers.rewards import check_rewards
from echelon.learn.benchmarks.task_files import name_tasks
from echelon.recipe.document import Recipe
from echelon.recipe.names import LOOPS


@dataclass(frozen=True)
class Named:
    """A recipe key whose value is the name of an extension, and its options."""

    key: str
    name: str
    options: Mapping[str, Any] | None


def list_extensions(recipe: Recipe) -> list[Named]:
    """Every extension, in the order of the recipe. Imports nothing."""
    return [entry for entry in _list_named(recipe) if is_extension(entry.name)]


def _list_named(recipe: Recipe) -> Iterator[Named]:
    for part, sources in (("train", recipe.data.train), ("validation", recipe.data.validation)):
        for index, source in enumerate(sources):
            yield Named(f"data.{part}.{index}.format", source.format, source.options)
    if recipe.data.source is not None:
        yield Named("data.source", recipe.data.source, recipe.data.options)
    if recipe.train.loop is not None:
        yield Named("train.loop", recipe.train.loop, None)
    for index, reward in enumerate(recipe.reward):
        yield Named(f"reward.{index}.name", reward.name, reward.options)
    if recipe.rollout.environment is not None:
        yield Named("rollout.environment.name", recipe.rollout.environment.name, recipe.rollout.environment.options)
    for index, callback in enumerate(recipe.train.callbacks):
        yield Named(f"train.callbacks.{index}.name", callback.name, callback.options)
    for key, section in (("objective", recipe.objective), ("optim", recipe.optim), ("sync", recipe.sync)):
        yield Named(f"{key}.name", section.name, section.options)


def describe_extensions(recipe: Recipe) -> list[str]:
    """A line about each extension, for a machine that does not train itself."""
    return [
        f"{extension.key}={extension.name}: whether the package {extension.name.partition(':')[0].partition('.')[0]} "
        "is installed on every machine that trains"
        for extension in list_extensions(recipe)
    ]


def check_extensions(recipe: Recipe) -> None:
    """Import the recipe's extensions and refuse those that cannot be used. Calls nothing.

    Raises ConfigError, with the key, for an extension that cannot be imported here, is of another kind, or does not
    accept its options; and for `evaluate.tasks` without lm-eval, or with a file that cannot be used. Every training
    process imports an extension again.
    """
    if tasks := recipe.evaluate.tasks:
        require_extra(f"evaluate.tasks={list(tasks)}", "lm-eval", "or remove it")
        name_tasks(tasks, "evaluate.tasks")
    for extension in list_extensions(recipe):
        if extension.key == "train.loop":
            find_loop(extension.name)
            continue
        if extension.key.startswith(("reward.", "rollout.")):
            continue  # they are imported in a process of their own
        kind, num_arguments = _find_kind(extension)
        imported = find_named(extension.key, extension.name, {}, kind)
        check_options(extension.key, extension.name, imported, num_arguments, extension.options)
    check_rewards(recipe.reward)
    if any(reward.is_model for reward in recipe.reward):
        from echelon.learn.answers.reward_models import check_reward_models  # it imports torch

        check_reward_models(recipe)
    check_environment(recipe.rollout.environment)


def find_loop(name: str) -> Callable[..., None]:
    """Import the function that `train.loop` names. Raises ConfigError if it is not a function of (learner, run)."""
    loop = find_named("train.loop", name, LOOPS)
    if not inspect.isfunction(loop):
        raise ConfigError(
            f"train.loop={name}: it must be a function of (learner, run), but it is a {type(loop).__name__}."
        )
    try:
        inspect.signature(loop).bind(None, None)
    except TypeError:
        raise ConfigError(
            f"train.loop={name}: it must be a function of (learner, run), but it is "
            f"{loop.__name__}{inspect.signature(loop)}; change its parameters."
        ) from None
    return loop


def _find_kind(named: Named) -> tuple[type | None, int]:
    """The class whose methods an extension must have, None for a function; its number of arguments without options."""
    from echelon.learn.data.loader import BatchSource
    from echelon.learn.data.readers.record import Reader
    from echelon.learn.objectives.objective import Objective, find_loss
    from echelon.learn.optimizer.rules import Rule
    from echelon.learn.sync.synchronizer import Synchronizer
    from echelon.run.training.callbacks import Callback

    kinds: dict[str, tuple[type, int]] = {
        "optim": (Rule, 2),
        "objective": (Objective, 1),
        "sync": (Synchronizer, 3),
        "data": (BatchSource, 3) if named.key == "data.source" else (Reader, 0),
        "train": (Callback, 0),
    }
    section = named.key.partition(".")[0]
    if section == "objective" and find_loss(named.name) is not None:
        return None, 3  # logits, labels, extra
    return kinds[section]
