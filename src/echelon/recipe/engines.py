"""The engines that a recipe can name: where each is built, what it can run, and the settings of its own.

To add one, write a builder and a row, and register the row as an entry point of the group `echelon.engines`.
"""

from dataclasses import dataclass
from typing import Any

from echelon.ground.plugins import Plugins
from echelon.recipe.section import Section

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
