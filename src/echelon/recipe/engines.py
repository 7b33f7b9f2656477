"""The engines that a recipe can name: where each is built, what it can run, and the settings of its own.

To add one, write a builder and a row, and register the row as an entry point of the group `echelon.engines`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from echelon.ground.extensions import EXTENSION
from echelon.ground.plugins import Plugins
from echelon.recipe.section import Section
from echelon.recipe.yaml_text import show_value

NATIVE = "native"
OWN = "package.module:Name"
"""Stands for every name of an extension among the values of a Limit."""


@dataclass(frozen=True)
class Limit:
    """The values of a recipe key that an engine can run; every other value is refused.

    Attributes:
        key: dotted. A key inside `parallel` is not checked where the recipe gives a name instead of a mapping.
        values: those that the engine can run, with `auto` where `auto` resolves to one of them, and OWN for code from
            outside echelon.
        why: completes the sentence "engine=NAME ...", as the reason.
    """

    key: str
    values: tuple[Any, ...]
    why: str


@dataclass(frozen=True)
class EngineRow:
    """One engine.

    Attributes:
        place: of the builder, `package.module:function`; it is called with an EngineSpec.
        section: for an engine of another package: the recipe's section of the engine's name, which only it reads.
        package: the package that it imports; the extra that installs it has the engine's name.
        strategies: the strategies of a plan that it can run, which `parallel: auto` chooses from; None: all.
        compiles: whether it can compile layers; `train.compile: auto` is off where it cannot.
        limits: the other keys of a recipe that it restricts.
        purpose: what it is for, for the user who chooses an engine.
        instead: what the native engine has in place of it.
        check: `package.module:function` without torch, called with a recipe and its plan; raises ConfigError or
            PlanError for what the limits cannot say.
    """

    place: str
    section: type[Section] | None = None
    package: str | None = None
    strategies: tuple[str, ...] | None = None
    compiles: bool = True
    limits: tuple[Limit, ...] = ()
    purpose: str = ""
    instead: str = ""
    check: str | None = None


ENGINES = Plugins[EngineRow]("engines", "engine")
"""The engines by the recipe's `engine`."""


def find_refused(recipe: Section, engine: str) -> Iterator[str]:
    """Yield a message for each key of a recipe that its engine cannot run, and for settings of another engine."""
    for name in (*ENGINES.own, *(recipe.model_extra or ())):
        section = getattr(recipe, name, None) if name in ENGINES else None
        if section and name != engine and section != type(section)():
            yield (
                f"{name} has settings of engine={name}, and the recipe has engine={engine}; set engine: {name}, or "
                f"remove {name}."
            )
    for limit in ENGINES[engine].limits if engine in ENGINES else ():
        found, value = _find_value(recipe, limit.key)
        if found and (OWN if isinstance(value, str) and EXTENSION.fullmatch(value) else value) not in limit.values:
            possible = " or ".join(show_value(one) for one in limit.values)
            yield (
                f"{limit.key}={show_value(value)}: engine={engine} {limit.why}; use {limit.key}={possible}, or "
                f"engine={NATIVE}."
            )


def _find_value(recipe: Section, key: str) -> tuple[bool, Any]:
    """Whether the recipe has a key, and its value."""
    value: Any = recipe
    for part in key.split("."):
        if not isinstance(value, Section):
            return False, None
        value = getattr(value, part)
    return True, value
