"""Differences between two recipes, and whether a run of the first can be resumed with the second."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from echelon.ground.redaction import redact
from echelon.recipe.document import Recipe
from echelon.recipe.render import recipe_mapping
from echelon.recipe.training import STEP_KEYS
from echelon.recipe.yaml_text import show_value

# Keys that may change on resume. None of them changes the order of the data, and none but `sync.replicas` the result of
# a step.
RESUMABLE: tuple[str, ...] = (
    "run", "data.prepared_dir", "data.prepared_remote", "data.prepare_workers", "data.stream.cache_gb",
    "train.micro_batch_size", "train.log_every", "train.eval_every", "train.callbacks", "train.allow_cpu", "parallel",
    "checkpoint", "evaluate", "fault", "sync.replicas", "sync.min_replicas", "engine", "deepspeed", "horovod",
    "tensorflow", "track", "mlflow", "prometheus", "launch", "profile", "budget", "rollout.max_num_seqs",
)  # fmt: skip


LENGTH_KEYS = tuple(f"train.{key}" for key in STEP_KEYS)
"""The keys that set how long a run is."""


@dataclass(frozen=True)
class Difference:
    """A dotted key with different values; None: the recipe does not set it. `str()` shows the values as YAML."""

    key: str
    old: Any
    new: Any

    @override
    def __str__(self) -> str:
        return f"{self.key}: {show_value(self.old)} -> {show_value(self.new)}"


def diff_recipes(old: Recipe, new: Recipe) -> list[Difference]:
    """Return the keys with different values in the two recipes, including defaults, in the order of the recipe.

    Secrets are redacted before the comparison, since the recipe in a run folder has none.
    """
    before, after = (dict(_leaves(redact(recipe_mapping(recipe)))) for recipe in (old, new))
    return [
        Difference(key, before.get(key), after.get(key)) for key in before | after if before.get(key) != after.get(key)
    ]


def blocking_differences(old: Recipe, new: Recipe) -> list[Difference]:
    """Return the differences because of which a run of `old` cannot be resumed as `new`.

    The length of the run may grow. A change between epochs and steps or tokens is not allowed: the lengths cannot be
    compared without the number of samples, which the recipe does not have.
    """
    differences = [difference for difference in diff_recipes(old, new) if not _is_resumable(difference.key)]
    if _is_at_least_as_long(old, new):
        differences = [difference for difference in differences if difference.key not in LENGTH_KEYS]
    return differences


def _is_resumable(key: str) -> bool:
    if key.partition(".")[0] not in Recipe.model_fields:
        return True  # the section of an engine or a tracker of another package
    return any(key == allowed or key.startswith(f"{allowed}.") for allowed in RESUMABLE)


def _is_at_least_as_long(old: Recipe, new: Recipe) -> bool:
    if old.train.epochs is not None and new.train.epochs is not None:
        return new.train.epochs >= old.train.epochs
    if old.train.epochs is None and new.train.epochs is None:
        return new.num_steps(0) >= old.num_steps(0)
    return False


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        items = list(enumerate(value))
    elif key:
        yield key, value
    for name, item in items:
        yield from _leaves(item, f"{key}.{name}" if key else str(name))
