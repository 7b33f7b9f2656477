"""The search space: the values of each searched recipe key, and the recipe for a choice of values."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from echelon.ground.errors import ConfigError, DataError, HubUnreachableError, PlanError
from echelon.recipe.aliases import ALIASES
from echelon.recipe.document import Recipe
from echelon.recipe.keys import dotted, find_unknown_keys, nearest_key, recipe_keys
from echelon.recipe.load import COMMAND_LINE, EXCLUSIVE_KEYS, load_recipe
from echelon.recipe.yaml_text import KeyPath, render_inline, show_value
from echelon.run.lifecycle.model_checks import check_model, find_checkpoint_out_of_reach
from echelon.tools.sweep.sweep_file import RangeConfig, Sweep

if TYPE_CHECKING:
    from optuna import Trial

Values = dict[str, Any]
"""A choice of values, by recipe key."""

MAX_CHECKED = 500
"""If the space has more corners, only those that differ from the first in one key are checked."""

MAX_GRID = 10_000

# The keys that `check_model` reads.
_OF_THE_MODEL: dict[str, Any] = {
    **dict.fromkeys(("model", "tokenizer", "adapter", "track", "mlflow"), True),
    "data": {"train", "sequence_len"},
    "train": {"deterministic"},
    "optim": {"learning_rate_multipliers"},
}


@dataclass(frozen=True)
class Dimension:
    """One searched key: a list has `choices`, a range `low` to `high`. `whole`: its values are whole numbers."""

    key: str
    choices: tuple[Any, ...] = ()
    low: float = 0
    high: float = 0
    step: float | None = None
    log: bool = False
    whole: bool = False

    def points(self) -> tuple[Any, ...] | None:
        """All the values, in order; None for a range without a step."""
        if self.choices:
            return self.choices
        step = 1 if self.step is None and self.whole and not self.log else self.step
        if step is None:
            return None
        low, high, spacing = (Fraction(str(number)) for number in (self.low, self.high, step))
        return tuple(self._number(low + index * spacing) for index in range(int((high - low) / spacing) + 1))

    def corners(self) -> tuple[Any, ...]:
        """The values that are checked against the recipe before the sweep starts."""
        return self.choices or (self._number(self.low), self._number(self.high))

    def label(self, value: Any) -> Any:
        """A value as passed to Optuna; lists and mappings as inline YAML."""
        return render_inline(value) if isinstance(value, list | dict) else value

    def suggest(self, trial: "Trial") -> Any:
        """The trial's value: chosen by the sampler now, or already stored in the trial."""
        if self.choices:
            by_label = {self.label(value): value for value in self.choices}
            return by_label[trial.suggest_categorical(self.key, list(by_label))]
        if self.whole:
            step = 1 if self.step is None else int(self.step)
            return trial.suggest_int(self.key, int(self.low), int(self.high), step=step, log=self.log)
        return trial.suggest_float(self.key, self.low, self.high, step=self.step, log=self.log)

    def describe(self) -> str:
        """`optim.learning_rate: 0.0001 to 0.01, logarithmic`."""
        if self.choices:
            return f"{self.key}: {show_value(list(self.choices)).strip('[]')}"
        low, high = self._number(self.low), self._number(self.high)
        step = "" if self.step is None else f" in steps of {show_value(self._number(self.step))}"
        return f"{self.key}: {show_value(low)} to {show_value(high)}{step}{', logarithmic' if self.log else ''}"

    def _number(self, value: Fraction | float) -> float:
        return int(value) if self.whole else float(value)


class Space:
    """The searched keys of a sweep, and the recipes of their values."""

    def __init__(self, sweep: Sweep, source: Path) -> None:
        """Raises ConfigError, with `source` and the key, for keys and ranges that a recipe does not accept."""
        _check_keys(sweep, source)
        self.dimensions = tuple(_build_dimension(key, values, source) for key, values in sweep.search.items())
        self._recipe_path = source.parent / sweep.recipe
        self._fixed = [f"{key}={render_inline(value)}" for key, value in sweep.fixed.items()]
        self._source = source

    def base_recipe(self) -> Recipe:
        """The recipe with the keys in `set`, which all trials share."""
        try:
            return load_recipe(self._recipe_path, self._fixed)[0]
        except ConfigError as error:
            raise ConfigError(str(error).replace(f"{COMMAND_LINE}: ", f"{self._source}, set: ")) from None

    def recipe(self, values: Values, own: Mapping[str, Any] | None = None) -> Recipe:
        """The recipe with these values, and the trial's `own` keys. Raises ConfigError with the values."""
        chosen = [f"{key}={render_inline(value)}" for key, value in {**values, **(own or {})}.items()]
        with self._refused(values):
            return load_recipe(self._recipe_path, [*self._fixed, *chosen])[0]

    @contextmanager
    def _refused(self, values: Values) -> Iterator[None]:
        """Add the values to errors raised in the block."""
        try:
            yield
        except (ConfigError, DataError, PlanError) as error:
            message = str(error).replace(f"{COMMAND_LINE}: ", "")
            raise ConfigError(f"{self._source}: the trial with {show_values(values)} is refused: {message}") from None

    def grid(self) -> list[Values]:
        """Every point of the grid; the last key changes fastest. Raises ConfigError for a range without a step."""
        points = []
        for dimension in self.dimensions:
            if (values := dimension.points()) is None:
                raise ConfigError(
                    f"{self._source}: sweep.sampler=grid needs a list of values, but search.{dimension.key} is a range "
                    f"without a step; use a list such as [{dimension.low:g}, {dimension.high:g}], a step, or "
                    "sampler: random."
                )
            points.append(values)
        count = 1
        for values in points:
            count *= len(values)
        if count > MAX_GRID:
            raise ConfigError(
                f"{self._source}: sweep.sampler=grid gives {count:,} points; use {MAX_GRID:,} or fewer, or sampler: "
                "random."
            )
        keys = [dimension.key for dimension in self.dimensions]
        return [dict(zip(keys, values, strict=True)) for values in itertools.product(*points)]

    def check(self, is_grid: bool) -> None:
        """Check the recipe at every point of a grid, else at the corners; each distinct model is checked once.

        Raises ConfigError for the first point that is refused.
        """
        checked: set[str] = set()
        for values in self.grid() if is_grid else self._corners():
            recipe = self.recipe(values)
            if (key := recipe.model_dump_json(include=_OF_THE_MODEL)) not in checked:
                checked.add(key)
                with self._refused(values):
                    _check_model(recipe)

    def _corners(self) -> Iterator[Values]:
        corners = {dimension.key: dimension.corners() for dimension in self.dimensions}
        count = 1
        for values in corners.values():
            count *= len(values)
        if count <= MAX_CHECKED:
            for chosen in itertools.product(*corners.values()):
                yield dict(zip(corners, chosen, strict=True))
            return
        first = {key: values[0] for key, values in corners.items()}
        for key, values in corners.items():
            yield from ({**first, key: value} for value in values)


def _check_model(recipe: Recipe) -> None:
    """Raise the errors of `echelon train` about the model, as far as this machine can check it."""
    elsewhere = recipe.launch.to not in (None, "local")
    if elsewhere and find_checkpoint_out_of_reach(recipe) is not None:
        return
    try:
        check_model(recipe, elsewhere)
    except HubUnreachableError:
        if not elsewhere:
            raise


def show_values(values: Values) -> str:
    """Format values as `optim.learning_rate=0.001 train.steps=50`, with floats rounded to four digits."""
    return " ".join(f"{key}={show_value(_rounded(value))}" for key, value in values.items())


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _check_keys(sweep: Sweep, source: Path) -> None:
    places = {key: f"search.{key}" for key in sweep.search}
    for key in sweep.fixed:
        if key in places:
            raise ConfigError(f"{source}: {key} is in both set and search; keep one.")
        places[key] = f"set.{key}"
    for key, path in places.items():
        _check_key(key, path, source)
    for one, other in itertools.combinations(places, 2):
        if reason := _name_the_same(_path(one), _path(other)):
            raise ConfigError(f"{source}: {places[one]} and {places[other]} {reason}; keep one.")


def _check_key(key: str, place: str, source: Path) -> None:
    if not all(key.split(".")):
        raise ConfigError(f"{source}: {place} is not a recipe key; write it like optim.learning_rate.")
    path = _path(key)
    for unknown, _ in find_unknown_keys(_nest(path), Recipe):
        nearest = nearest_key(path, Recipe, ALIASES)
        hint = f"did you mean {nearest}?" if nearest else "docs/recipe.md lists them."
        raise ConfigError(f"{source}: {place}: {dotted(unknown)} is not a recipe key; {hint}")
    if key in ("run", "run.name", "run.dir"):
        raise ConfigError(f"{source}: {place} cannot be set: the sweep gives every trial its own name and folder.")
    if key in ("launch", "launch.to") and place.startswith("search"):
        raise ConfigError(f"{source}: {place} cannot be searched: all trials use one target; move it to set.")


def _name_the_same(one: KeyPath, other: KeyPath) -> str | None:
    shorter = min(len(one), len(other))
    if one[:shorter] == other[:shorter]:
        return "overlap"
    for group in EXCLUSIVE_KEYS:
        if one[:2] in group and other[:2] in group and one[:2] != other[:2]:
            return "exclude each other in a recipe"
    return None


def _build_dimension(key: str, values: RangeConfig | Sequence[Any], source: Path) -> Dimension:
    where = f"{source}: search.{key}"
    if isinstance(values, RangeConfig):
        return _build_range(key, values, where)
    for index, value in enumerate(values):
        if value in values[:index]:
            raise ConfigError(f"{where} has {show_value(value)} twice; keep one.")
    if not values:
        raise ConfigError(f"{where} is an empty list; give the values to try.")
    return Dimension(key, choices=tuple(values))


def _build_range(key: str, values: RangeConfig, place: str) -> Dimension:
    if (whole := _takes_whole_numbers(key, values)) is None:
        raise ConfigError(f"{place}: {key} is not a number; give a list of values instead of low and high.")
    low, high, step = values.low, values.high, values.step
    for name, number in (("low", low), ("high", high), ("step", step or 1)):
        if whole and number != int(number):
            raise ConfigError(f"{place}.{name}={number:g}: {key} must be a whole number.")
    if low >= high:
        raise ConfigError(f"{place}.low={low:g} must be less than high={high:g}.")
    if values.log and (low <= 0 or step is not None):
        wrong = f"low={low:g} must be more than 0" if low <= 0 else "step excludes log; keep one"
        raise ConfigError(f"{place}.log=true: {wrong}.")
    if step is not None and (rest := (Fraction(str(high)) - Fraction(str(low))) % Fraction(str(step))):
        raise ConfigError(
            f"{place}.step={step:g} does not divide the range low={low:g} to high={high:g}; use "
            f"high={float(Fraction(str(high)) - rest):g}."
        )
    return Dimension(key, low=low, high=high, step=step, log=values.log, whole=whole)


def _takes_whole_numbers(key: str, values: RangeConfig) -> bool | None:
    """Whether the recipe key accepts only whole numbers; None if it accepts no numbers."""
    path = _path(key)
    for length in range(len(path), 0, -1):
        generic = dotted(path[:length])
        for part in path[:length]:
            generic = generic.replace(f".{part}.", "[].", 1) if isinstance(part, int) else generic
        if (field := recipe_keys(Recipe).get(generic)) is not None:
            if length < len(path):  # inside a free mapping, such as model.config
                break
            kinds = _plain_types(field.annotation)
            return None if not kinds & {int, float} else float not in kinds
    return all(number is None or float(number).is_integer() for number in (values.low, values.high, values.step))


def _plain_types(annotation: Any) -> set[Any]:
    arguments = get_args(annotation)
    return (
        {annotation}
        if not arguments
        else set().union(*(_plain_types(argument) for argument in arguments if _is_type(argument)))
    )


def _is_type(argument: Any) -> bool:
    return isinstance(argument, type) or bool(get_args(argument))


def _path(key: str) -> KeyPath:
    return tuple(int(part) if part.isdigit() else part for part in key.split("."))


def _nest(path: KeyPath) -> Any:
    """The smallest recipe with this key."""
    if not path:
        return None
    return [_nest(path[1:])] if isinstance(path[0], int) else {path[0]: _nest(path[1:])}
