"""Differences between two recipes, and whether a run of one may resume as the other."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from echelon.recipe.document import Recipe
from echelon.recipe.render import recipe_mapping
from echelon.recipe.training import STEP_KEYS
from echelon.recipe.yaml_text import show_value
from echelon.redaction import redact

# A resumed run may differ in these: none of them changes which sequence is fed when, or what a step computes.
RESUMABLE: tuple[str, ...] = (
    "run", "data.prepared_dir", "data.prepare_workers", "train.micro_batch_size", "train.log_every",
    "train.eval_every", "train.evals_per_epoch", "train.callbacks", "parallel", "checkpoint", "evaluate", "fault",
    "track", "mlflow", "wandb", "launch", "profile", "budget",
)  # fmt: skip


@dataclass(frozen=True)
class Difference:
    """One dotted key whose value differs; None where a recipe does not set it. `str()` has the values as in YAML."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key}: {show_value(self.old)} -> {show_value(self.new)}"


def diff_recipes(old: Recipe, new: Recipe) -> list[Difference]:
    """The keys in which two recipes differ, including defaults, in the order of the recipe.

    Secrets are hidden before they are compared: a run folder keeps none, so they cannot differ from it.
    """
    before, after = (dict(_leaves(redact(recipe_mapping(recipe)))) for recipe in (old, new))
    return [
        Difference(key, before.get(key), after.get(key)) for key in before | after if before.get(key) != after.get(key)
    ]


def blocking_differences(old: Recipe, new: Recipe) -> list[Difference]:
    """The differences with which a run of `old` cannot be resumed as `new`.

    The length of the run may grow. A change between epochs and the other two units blocks, since the number of
    samples is not the recipe's to know.
    """
    differences = [difference for difference in diff_recipes(old, new) if not _is_resumable(difference.key)]
    if _is_at_least_as_long(old, new):
        lengths = {f"train.{key}" for key in STEP_KEYS}
        differences = [difference for difference in differences if difference.key not in lengths]
    return differences


def _is_resumable(key: str) -> bool:
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
