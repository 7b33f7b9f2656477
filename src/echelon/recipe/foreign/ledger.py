"""The books of an import: what became of every key of the file, and where every value of the recipe is from."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from echelon.errors import ConfigError
from echelon.recipe.aliases import spellings
from echelon.recipe.yaml_text import show_value
from echelon.redaction import redact

Fate = Literal["carried", "differs", "lost", "needless", "off", "refused"]
"""carried: in the recipe with the same meaning. differs: in the recipe, with a small difference that is told. lost: not
in the recipe, and what is trained does not depend on it. needless: echelon does so by itself. off: null, false or the
tool's own default, which asks for nothing. refused: without it the training would be another."""

_WEIGHT: Mapping[Fate, int] = {"refused": 3, "lost": 2}

_OFF: tuple[Any, ...] = (None, False, "", (), [], {})
_UNKNOWN = (
    "what it does is not known here; if the training is the same without it, take it out of the file, and import it "
    "again."
)


@dataclass(frozen=True)
class Entry:
    """What became of one key; `text` says it in plain words."""

    name: str
    value: Any
    fate: Fate
    text: str = ""

    def __str__(self) -> str:
        shown = redact({self.name: self.value})[self.name]
        return f"{self.name}: {show_value(shown)}" + (f": {self.text}" if self.text else "")


class Ledger:
    """Takes the keys of a file one by one, and puts values into the recipe under their reasons.

    A key is found under its last name, whichever group it stands in; one of a list's entries under its full name.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given = dict(given)
        self.entries: dict[str, Entry] = {}
        self.values: dict[str, Any] = {}
        self.reasons: dict[str, str] = {}
        self.remarks: list[str] = []

    def expand(self, name: str, items: Mapping[str, Any]) -> None:
        """Account for the parts of a key one by one, instead of the whole: those of its mapping, or of its list's."""
        if not items:
            self._enter(name, "off")
            return
        del self.given[name]
        self.given.update({f"{name}.{key}": value for key, value in items.items()})

    def find(self, *names: str) -> str | None:
        """The full name of the first of `names` that is given and not null, and not yet accounted for."""
        for name in names:
            for full, value in self.given.items():
                in_a_list = any(part.isdigit() for part in full.split("."))
                is_it = full == name or (full.endswith("." + name) and not in_a_list)
                if is_it and value is not None and full not in self.entries:
                    return full
        return None

    def peek(self, *names: str) -> Any:
        """The value of the first of `names` that is given, or None."""
        full = self.find(*names)
        return None if full is None else self.given[full]

    def take(self, *names: str) -> Any:
        """As `peek`, and the key counts as carried, unless something else is said about it later.

        What is given besides under another of the names is told as lost.
        """
        full = self.find(*names)
        if full is None:
            return None
        self._enter(full, "carried")
        while other := self.find(*names):
            if self.given[other] == self.given[full]:
                self._enter(other, "carried")
            else:
                self.lose(other, f"{full} says the same and goes first.")
        return self.given[full]

    def number(self, *names: str) -> float | None:
        """As `take`, for what is counted with. Raises ConfigError for what is no number."""
        full = self.find(*names)
        value = self.take(*names)
        if isinstance(value, str):
            with suppress(ValueError):
                value = float(value)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ConfigError(f"{full}: {show_value(value)} is not a number; correct it, and import the file again.")
        return value

    def words(self, *names: str, between: str | None = ",") -> list[str]:
        """As `take`, for a list of words, or a text of them. Raises ConfigError for what is neither."""
        full = self.find(*names)
        value = self.take(*names)
        value = value.split(between) if isinstance(value, str) else [] if value is None else value
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise ConfigError(f"{full}: {show_value(value)} is not a list of words; correct it, and import it again.")
        return [word.strip() for word in value]

    def move(self, key: str, *more: str) -> Any:
        """Carry what is given under another spelling of the recipe's `key`, or under `more`, to it unchanged; returns
        its value."""
        names = (*more, *spellings(key))
        full = self.find(*names)
        value = self.take(*names)
        if full is not None:
            self.put(key, value, f"{full}: {show_value(value)}")
        return value

    def put(self, key: str, value: Any, reason: str) -> None:
        """Set a key of the recipe, with the reason that stands beside it."""
        self.values[key] = value
        self.reasons[key] = reason

    def differ(self, name: str, text: str) -> None:
        """The key is in the recipe, but does not mean quite the same."""
        self._tell(name, "differs", text)

    def lose(self, name: str, text: str) -> None:
        """The key is not in the recipe, and the training is the same without it."""
        self._tell(name, "lost", text)

    def refuse(self, name: str, text: str) -> None:
        """The training would be another: no recipe can come of the file."""
        self._tell(name, "refused", text)

    def need_not(self, name: str, text: str) -> None:
        """The key is not in the recipe, and nothing is lost."""
        self._tell(name, "needless", text)

    def remark(self, text: str) -> None:
        """Something to know that belongs to no key of the file."""
        self.remarks.append(text)

    def close(
        self,
        defaults: Mapping[str, Any],
        needless: Mapping[str, str],
        lost: Mapping[str, str],
        refused: Mapping[str, str],
        settings: tuple[str, ...],
    ) -> None:
        """Account for what is left: by the tools' defaults and the tables of reasons. `settings`: how the names begin
        of what does nothing by itself. A key that nobody knows may make another training, and is refused."""
        for full, value in self.given.items():
            if full in self.entries:
                continue
            name = full.rpartition(".")[2]
            if value in _OFF or value is False or (name in defaults and defaults[name] == value):
                self._enter(full, "off")
            elif name in needless:
                self._enter(full, "needless", needless[name])
            elif name in lost:
                self._enter(full, "lost", lost[name])
            elif name not in refused and name.startswith(settings):
                self._enter(full, "needless", "it is a setting of what another key asks for, and nothing by itself.")
            else:
                self._enter(full, "refused", refused.get(name, _UNKNOWN))

    def by_fate(self, fate: Fate) -> Iterator[Entry]:
        """The entries of one fate, in the order of the file."""
        return (self.entries[name] for name in self.given if self.entries[name].fate == fate)

    def _tell(self, name: str, fate: Fate, text: str) -> None:
        full = name if name in self.given else self.find(name)
        if full is None:  # accounted for already: say more about it
            full = next((each for each in self.entries if each == name or each.endswith("." + name)), None)
        if full is None and fate == "refused":
            raise ConfigError(f"{name}: {text}")
        if full is None:
            self.remark(f"{name}: {text}")
        else:
            self._enter(full, fate, text)

    def _enter(self, full: str, fate: Fate, text: str = "") -> None:
        before = self.entries.get(full)
        if before is not None and before.text:
            text = f"{before.text} {text}".strip()
            fate = max(fate, before.fate, key=lambda each: _WEIGHT.get(each, 0))
        self.entries[full] = Entry(full, self.given[full], fate, text)
