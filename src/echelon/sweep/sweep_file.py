"""The sweep file: frozen pydantic models, and from a file to a Sweep or to one message that says what to change."""

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, ValidationError, field_validator, model_validator

from echelon.errors import ConfigError
from echelon.recipe.draft import Draft
from echelon.recipe.keys import KeyPath, dotted, find_unknown_keys, nearest_key, section_fields
from echelon.recipe.messages import explain_errors
from echelon.recipe.section import AnyPath, Count, CountOrZero, Flag, Number, Positive, Section, check_folder_name
from echelon.recipe.yaml_text import parse_yaml, show_value

Metric = Literal[
    "eval_loss", "best_eval_loss", "eval_bits_per_byte", "eval_reward_accuracy", "eval_reward_margin", "train_loss",
    "tokens_per_second", "mfu",
]  # fmt: skip
Direction = Literal["minimize", "maximize"]

_MAXIMIZED = ("eval_reward_accuracy", "eval_reward_margin", "tokens_per_second", "mfu")
_NUMBERS_ONLY = ("cmaes", "qmc")


class SweepSettings(Section):
    """How the search goes on, and what decides."""

    name: str = Field(description="Name of the sweep: letters, digits, `.`, `_` and `-`.")
    dir: AnyPath = Field(
        default_factory=lambda sweep: Path("sweeps") / sweep["name"],
        description="The sweep's folder. Default: `sweeps/NAME`. The same command goes on with an existing one.",
    )
    sampler: Literal["grid", "random", "tpe", "cmaes", "gp", "qmc"] = Field(
        "tpe", description="Who chooses the values: Optuna's sampler of that name."
    )
    pruner: Literal["none", "median", "asha", "hyperband"] = Field(
        "none", description="Who ends trials early that do worse than others did at the same step."
    )
    trials: Count | None = Field(None, description="Trials in all. Default, for `grid` alone: one for each point.")
    parallel: Count = Field(1, description="Trials at a time.")
    metric: Metric = Field("eval_loss", description="What is compared, from metrics.jsonl.")
    direction: Direction | None = Field(None, description="Default: what is better of the metric.")
    last_steps: Count = Field(10, description="Steps that a metric of training is the mean of: the last ones.")
    seed: CountOrZero = Field(0, lt=2**32, description="Of the sampler.")
    max_failures: Count = Field(3, description="Trials failing one after the other that end the sweep.")

    @field_validator("name")
    @classmethod
    def _name_is_a_folder_name(cls, name: str) -> str:
        return check_folder_name("sweep.name", name)

    @model_validator(mode="after")
    def _pruning_needs_evaluations(self) -> Self:
        if self.pruner != "none" and not self.metric.endswith("eval_loss"):
            raise ValueError(
                f"sweep.pruner={self.pruner} compares evaluations while training goes on, and sweep.metric="
                f"{self.metric} is known at the end; use metric: eval_loss or pruner: none."
            )
        return self

    @property
    def better(self) -> Direction:
        """The direction, where it is not given that of the metric."""
        return self.direction or ("maximize" if self.metric in _MAXIMIZED else "minimize")


class RangeConfig(Section):
    """Numbers from `low` to `high`, both included."""

    low: Number = Field(description="The least.")
    high: Number = Field(description="The most.")
    log: Flag = Field(False, description="Every order of magnitude is as likely as another.")
    step: Positive | None = Field(None, description="Only `low`, `low` + `step`, and so on.")


def _list_or_mapping(value: Any) -> str:
    return "list" if isinstance(value, list | tuple) else "range"


Searched = Annotated[
    Annotated[RangeConfig, Tag("range")] | Annotated[tuple[Any, ...], Tag("list")], Discriminator(_list_or_mapping)
]


class Sweep(Section):
    """What is tried: a recipe, what all trials change in it, and the keys whose values are searched."""

    sweep: SweepSettings
    recipe: AnyPath = Field(description="The recipe, relative to the sweep file.")
    fixed: dict[str, Any] = Field(default_factory=dict, alias="set", description="Keys that all trials change.")
    search: dict[str, Searched] = Field(
        min_length=1, description="By recipe key: a list of values, or `{low: , high: , log: , step: }`."
    )

    @model_validator(mode="after")
    def _sampler_knows_the_values(self) -> Self:
        sampler = self.sweep.sampler
        lists = [key for key, values in self.search.items() if isinstance(values, tuple)]
        if sampler in _NUMBERS_ONLY and lists:
            raise ValueError(
                f"sweep.sampler={sampler} searches ranges of numbers only, and search.{lists[0]} is a list; use "
                "sampler: tpe, or give {low: , high: }."
            )
        if sampler == "cmaes" and len(self.search) == 1:
            raise ValueError(
                f"sweep.sampler=cmaes searches two keys or more, and search has {next(iter(self.search))} alone; use "
                "sampler: tpe or gp."
            )
        if sampler != "grid" and self.sweep.trials is None:
            raise ValueError(f"sweep.trials is missing: sampler: {sampler} has no end of its own; use trials: 20.")
        return self


def load_sweep(path: Path) -> Sweep:
    """Read a sweep file. Raises ConfigError, naming the file's line, for anything it cannot mean.

    What the keys of `search` mean to the recipe is not looked at: see `build_space`.
    """
    draft = _parse_draft(path)
    _refuse_unknown_keys(draft)
    try:
        return Sweep.model_validate(draft.data)
    except ValidationError as error:
        raise ConfigError(explain_errors(error, draft)) from None


def _parse_draft(path: Path) -> Draft:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"{path} does not exist; name a sweep file, a YAML file with sweep, recipe and search."
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text; a sweep file is a YAML file.") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    data, origins = parse_yaml(text, str(path))
    if not isinstance(data, dict) or not {"sweep", "search"} & data.keys():
        what = "is a recipe" if isinstance(data, dict) and "model" in data else "is no sweep file"
        raise ConfigError(f"{path} {what}; a sweep file is a YAML file with the keys sweep, recipe and search.")
    return Draft({key: value for key, value in data.items() if value is not None}, origins, str(path))


def _refuse_unknown_keys(draft: Draft) -> None:
    lines = []
    outer = {key: value for key, value in draft.data.items() if key != "search"}
    for path, section in find_unknown_keys(outer, Sweep):
        nearest = nearest_key(path, Sweep, {})
        lines.append(_explain_unknown(draft, path, section, nearest))
    search = draft.get(("search",))
    for key, values in search.items() if isinstance(search, dict) else ():
        if not isinstance(values, dict | list):
            raise ConfigError(
                f"{draft.origin(('search', key))}: search.{key}={show_value(values)} must be a list of values or "
                "{low: , high: }; what all trials have in common goes below set."
            )
        if not isinstance(values, list):
            for path, section in find_unknown_keys(values, RangeConfig, ("search", key)):
                near = difflib.get_close_matches(str(path[-1]), section_fields(section), 1)
                lines.append(_explain_unknown(draft, path, section, near[0] if near else None))
    if lines:
        raise ConfigError("\n".join(lines))


def _explain_unknown(draft: Draft, path: KeyPath, section: type[Section], nearest: str | None) -> str:
    parent = dotted(path[:-1]) or "a sweep file"
    hint = f"did you mean {nearest}?" if nearest else f"{parent} has the keys {', '.join(section_fields(section))}."
    return f"{draft.origin(path)}: {dotted(path)} is not a key of a sweep file; {hint}"
