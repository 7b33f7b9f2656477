"""The sweep file: frozen pydantic models, and reading a file into a Sweep, or into one message with the fix."""

import difflib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, ValidationError

from echelon.ground.errors import ConfigError
from echelon.ground.stored import read_text
from echelon.recipe.draft import Draft
from echelon.recipe.keys import dotted, find_unknown_keys, nearest_key, section_fields
from echelon.recipe.messages import explain_errors
from echelon.recipe.section import AnyPath, Count, CountOrZero, Flag, Number, Positive, Section, folder_name, rule
from echelon.recipe.yaml_text import MAX_TEXT_BYTES, KeyPath, parse_yaml, show_value

Metric = Literal[
    "eval_loss", "best_eval_loss", "eval_bits_per_byte", "eval_reward_accuracy", "eval_reward_margin",
    "eval_accuracy", "eval_macro_f1", "train_loss", "tokens_per_second", "mfu",
]  # fmt: skip
Direction = Literal["minimize", "maximize"]

_MAXIMIZED = (
    "eval_reward_accuracy", "eval_reward_margin", "eval_accuracy", "eval_macro_f1", "tokens_per_second", "mfu"
)  # fmt: skip
TASKS = "tasks/"
"""What a metric of a benchmark begins with."""
_NUMBERS_ONLY = ("cmaes", "qmc")


class SweepSettings(Section):
    """Settings of the search."""

    name: Annotated[str, folder_name("sweep.name")] = Field(
        description="Name of the sweep: letters, digits, `.`, `_` and `-`."
    )
    dir: AnyPath = Field(
        default_factory=lambda sweep: Path("sweeps") / sweep["name"],
        description="The sweep's folder. Default: `sweeps/NAME`. The same command resumes an existing sweep.",
    )
    sampler: Literal["grid", "random", "tpe", "cmaes", "gp", "qmc"] = Field(
        "tpe", description="The Optuna sampler that chooses the values."
    )
    pruner: Literal["none", "median", "asha", "hyperband"] = Field(
        "none", description="The Optuna pruner that ends trials early if they are worse than others at the same step."
    )
    trials: Count | None = Field(None, description="Number of trials. Default, only for `grid`: one per point.")
    parallel: Count = Field(1, description="Number of trials that run at the same time.")
    metric: Metric | Annotated[str, Field(pattern=r"^tasks/.+/.+$")] = Field(
        "eval_loss",
        description="The metric that is compared, from metrics.jsonl; `tasks/TASK/METRIC` for one of `evaluate.tasks`.",
    )
    direction: Direction | None = Field(None, description="Default: depends on the metric.")
    last_steps: Count = Field(10, description="A training metric is the mean over this many last steps.")
    seed: CountOrZero = Field(0, lt=2**32, description="Seed of the sampler.")
    max_failures: Count = Field(3, description="Number of consecutive failed trials that ends the sweep.")

    @rule
    def _pruning_needs_evaluations(self) -> None:
        if self.pruner != "none" and not self.metric.endswith("eval_loss"):
            raise ValueError(
                f"sweep.pruner={self.pruner} compares evaluations during training, but sweep.metric={self.metric} is "
                "known only at the end; use metric: eval_loss or pruner: none."
            )

    @property
    def better(self) -> Direction:
        """The direction; by default that of the metric."""
        rises = self.metric in _MAXIMIZED or self.metric.startswith(TASKS)
        return self.direction or ("maximize" if rises else "minimize")


class RangeConfig(Section):
    """Numbers from `low` to `high`, both included."""

    low: Number = Field(description="Smallest value.")
    high: Number = Field(description="Largest value.")
    log: Flag = Field(False, description="Search on a logarithmic scale.")
    step: Positive | None = Field(None, description="Only `low`, `low` + `step`, and so on.")


def _list_or_mapping(value: Any) -> str:
    return "list" if isinstance(value, list | tuple) else "range"


Searched = Annotated[
    Annotated[RangeConfig, Tag("range")] | Annotated[tuple[Any, ...], Tag("list")], Discriminator(_list_or_mapping)
]


class Sweep(Section):
    """A sweep: a recipe, keys set in all trials, and the keys whose values are searched."""

    sweep: SweepSettings
    recipe: AnyPath = Field(description="The recipe, relative to the sweep file.")
    fixed: dict[str, Any] = Field(default_factory=dict, alias="set", description="Keys set in all trials.")
    search: dict[str, Searched] = Field(
        min_length=1, description="By recipe key: a list of values, or `{low: , high: , log: , step: }`."
    )

    @rule
    def _sampler_knows_the_values(self) -> None:
        sampler = self.sweep.sampler
        lists = [key for key, values in self.search.items() if isinstance(values, tuple)]
        if sampler in _NUMBERS_ONLY and lists:
            raise ValueError(
                f"sweep.sampler={sampler} searches only ranges of numbers, but search.{lists[0]} is a list; use "
                "sampler: tpe, or give {low: , high: }."
            )
        if sampler == "cmaes" and len(self.search) == 1:
            raise ValueError(
                f"sweep.sampler=cmaes needs two or more keys, but search has only {next(iter(self.search))}; use "
                "sampler: tpe or gp."
            )
        if sampler != "grid" and self.sweep.trials is None:
            raise ValueError(
                f"sweep.trials is missing: sampler: {sampler} has no natural end; set it, such as trials: 20."
            )


def load_sweep(path: Path) -> Sweep:
    """Read a sweep file. Raises ConfigError, with the line in the file, for anything invalid.

    Does not check the keys of `search` against the recipe: see `Space`.
    """
    draft = _parse_draft(path)
    _refuse_unknown_keys(draft)
    try:
        return Sweep.model_validate(draft.data)
    except ValidationError as error:
        raise explain_errors(error, draft) from None


def _parse_draft(path: Path) -> Draft:
    try:
        text = read_text(path, MAX_TEXT_BYTES)
    except FileNotFoundError:
        raise ConfigError(
            f"{path} does not exist; give a sweep file, a YAML file with the keys sweep, recipe and search."
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text; a sweep file is a YAML file.") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    data, origins = parse_yaml(text, str(path))
    if not isinstance(data, dict) or not {"sweep", "search"} & data.keys():
        what = "is a recipe" if isinstance(data, dict) and "model" in data else "is not a sweep file"
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
                "{low: , high: }; move keys that all trials share to set."
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
