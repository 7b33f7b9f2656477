"""Which keys of a recipe go together: keys of some names only, and limits on a key while another has some value.

Each is declared once; the messages, the JSON schema and the pages about keys and engines are made from it.
"""

from dataclasses import dataclass
from typing import Any

from echelon.ground.sizes import join_words

OWN = "package.module:Name"
"""Stands for every name of an extension among the values of a key."""


@dataclass(frozen=True)
class OnlyWith:
    """Marks a key that has an effect only while another key has one of some values; otherwise it keeps its default.

    Attributes:
        key: the other key, dotted.
        values: those that give it an effect, with OWN for code from outside echelon. None: all that are set.
        why: completes the sentence "... has no effect with KEY=VALUE, ...".
        also: a further key that gives it an effect if it is set, or has a value: KEY=VALUE.
    """

    key: str
    values: tuple[Any, ...] = ()
    why: str = ""
    also: str = ""

    def describe(self, around: str) -> str:
        """The values in words, for the description of a marked key in a section whose keys begin with `around`."""
        key = self.key.removeprefix(around)
        names = [value if "." not in key else f"{key}: {value}" for value in self.values if value != OWN]
        words = [*names, *([self.also] if self.also else [])] if self.values else [key]
        return join_words([f"`{word}`" for word in words]) if words else ""


@dataclass(frozen=True)
class Limit:
    """The values that a key may have in some case; every other value is refused.

    Attributes:
        key: dotted. A key inside a section is not checked where the recipe has a name, or nothing, instead of it.
        values: those that are possible, with `auto` where `auto` resolves to one of them, and OWN for code from
            outside echelon.
        why: completes the sentence "engine=NAME ...", as the reason.
    """

    key: str
    values: tuple[Any, ...]
    why: str


@dataclass(frozen=True)
class Case:
    """A key that limits others while it has one of some values.

    Attributes:
        key: dotted.
        values: those that limit others. None: all that are set.
        limits: those of the other keys.
        instead: another way out than a possible value, for the message: `use engine=native`.
    """

    key: str
    values: tuple[Any, ...]
    limits: tuple[Limit, ...]
    instead: str = ""
