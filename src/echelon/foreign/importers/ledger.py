"""The ledger of an import: the result for every key of the file, and the origin of every value of the recipe.

The defaults of each tool come last: an imported recipe contains them explicitly.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from typing_extensions import override

from echelon.foreign.importers.source_file import TABLE
from echelon.ground.errors import ConfigError
from echelon.ground.redaction import redact
from echelon.recipe.aliases import spellings
from echelon.recipe.yaml_text import show_value

Fate = Literal["carried", "differs", "lost", "needless", "off", "refused"]
"""The result for a key.

carried: in the recipe with the same meaning. differs: in the recipe, with a small difference that is reported. lost:
not in the recipe; it does not affect what is trained. needless: echelon does it anyway. off: null, false or the tool's
default, so there is nothing to import. refused: without it, the training would be different.
"""

_WEIGHT: Mapping[Fate, int] = {"refused": 3, "lost": 2}

_OFF: tuple[Any, ...] = (None, False, "", (), [], {})
_UNKNOWN = (
    "this key is unknown to echelon; if it does not change the training, remove it from the file and import it again."
)
Trainer = Literal["sft", "dpo", "orpo", "cpo", "kto", "grpo", "gkd", "reward", "transformers"]
"""The trainer that a file of the Hugging Face family is for: one of TRL's, or transformers' own."""


@dataclass(frozen=True)
class Entry:
    """The result for one key; `text` explains it to the user."""

    name: str
    value: Any
    fate: Fate
    text: str = ""

    def show(self) -> str:
        """The value on a line, without secrets."""
        return show_value(redact({self.name: self.value})[self.name])

    @override
    def __str__(self) -> str:
        return f"{self.name}: {self.show()}" + (f": {self.text}" if self.text else "")


class Ledger:
    """Records the keys of a file one by one, and the values of the recipe with their origins.

    A key is found by its last name, in any group; a key inside a list only by its full name.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given = dict(given)
        self.entries: dict[str, Entry] = {}
        self.values: dict[str, Any] = {}
        self.reasons: dict[str, str] = {}
        self.remarks: list[str] = []

    def expand(self, name: str, items: Mapping[str, Any]) -> None:
        """Replace a key by the items of its mapping or list, which are then recorded one by one."""
        if not items:
            self._enter(name, "off")
            return
        del self.given[name]
        self.given.update({f"{name}.{key}": value for key, value in items.items()})

    def find(self, *names: str) -> str | None:
        """Return the full name of the first of `names` that is given, not null and not yet recorded."""
        for name in names:
            for full, value in self.given.items():
                in_a_list = any(part.isdigit() for part in full.split("."))
                is_it = full == name or (full.endswith("." + name) and not in_a_list)
                if is_it and value is not None and full not in self.entries:
                    return full
        return None

    def peek(self, *names: str) -> Any:
        """Return the value of the first of `names` that is given, or None."""
        full = self.find(*names)
        return None if full is None else self.given[full]

    def take(self, *names: str) -> Any:
        """Like `peek`, and record the key as carried, unless another result is recorded later.

        Other given keys among `names` are recorded as carried if their value is equal, else as lost.
        """
        if (full := self.find(*names)) is None:
            return None
        self._enter(full, "carried")
        while other := self.find(*names):
            if self.given[other] == self.given[full]:
                self._enter(other, "carried")
            else:
                self.lose(other, f"{full} sets the same and takes precedence.")
        return self.given[full]

    def number(self, *names: str) -> float | None:
        """Like `take`, for a number. Raises ConfigError for a value that is not a number."""
        full = self.find(*names)
        value = self.take(*names)
        if isinstance(value, str):
            with suppress(ValueError):
                value = float(value)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ConfigError(f"{full}: {show_value(value)} is not a number; correct it and import the file again.")
        return value

    def words(self, *names: str, between: str | None = ",") -> list[str]:
        """Like `take`, for a list of words, given as a list or a text. Raises ConfigError for other values."""
        full = self.find(*names)
        value = self.take(*names)
        value = value.split(between) if isinstance(value, str) else [] if value is None else value
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise ConfigError(f"{full}: {show_value(value)} is not a list of words; correct it and import it again.")
        return [word.strip() for word in value]

    def move(self, key: str, *more: str) -> Any:
        """Import the value given under a spelling of the recipe's `key`, or under `more`, unchanged. Returns it."""
        names = (*more, *spellings(key))
        full = self.find(*names)
        value = self.take(*names)
        if full is not None:
            self.put(key, value, f"{full}: {show_value(value)}")
        return value

    def put(self, key: str, value: Any, reason: str) -> None:
        """Set a key of the recipe, with the comment that explains its origin."""
        self.values[key] = value
        self.reasons[key] = reason

    def differ(self, name: str, text: str) -> None:
        """Record that the key is in the recipe with a slightly different meaning."""
        self._tell(name, "differs", text)

    def lose(self, name: str, text: str) -> None:
        """Record that the key is not in the recipe and does not affect the training."""
        self._tell(name, "lost", text)

    def refuse(self, name: str, text: str) -> None:
        """Record that the training would be different without the key: the file cannot be imported."""
        self._tell(name, "refused", text)

    def need_not(self, name: str, text: str) -> None:
        """Record that the key is not in the recipe and is not needed."""
        self._tell(name, "needless", text)

    def remark(self, text: str) -> None:
        """Add a note that does not belong to a key of the file."""
        self.remarks.append(text)

    def close(
        self,
        defaults: Mapping[str, Any],
        needless: Mapping[str, str],
        lost: Mapping[str, str],
        refused: Mapping[str, str],
        settings: tuple[str, ...],
    ) -> None:
        """Record the remaining keys, using the tools' defaults and the tables of reasons.

        `settings`: prefixes of keys that have no effect by themselves. An unknown key may change the training and is
        refused.
        """
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
                self._enter(
                    full,
                    "needless",
                    "it is a setting of a feature that another key enables; it has no effect by itself.",
                )
            else:
                self._enter(full, "refused", refused.get(name, _UNKNOWN))

    def by_fate(self, fate: Fate) -> Iterator[Entry]:
        """Yield the entries with a given result, in the order of the file."""
        return (self.entries[name] for name in self.given if self.entries[name].fate == fate)

    def _tell(self, name: str, fate: Fate, text: str) -> None:
        full = name if name in self.given else self.find(name)
        if full is None:  # already recorded: add to its text
            full = next((entry for entry in self.entries if entry == name or entry.endswith("." + name)), None)
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
            fate = max(fate, before.fate, key=lambda kind: _WEIGHT.get(kind, 0))
        self.entries[full] = Entry(full, self.given[full], fate, text)


@dataclass(frozen=True)
class Defaults:
    """The default values of the tool `name`. None: the tool has no default, or it is not needed here.

    `alpha_of_rank`: alpha is this many times the rank. `targets` None: PEFT's default for the model type. `warmup`: a
    fraction of the run. `saves`: `epoch`, a number of steps, or None: only at the end. `decays_all`: weight decay also
    applies to norms and biases.
    """

    name: str
    micro_batch_size: int = 8
    epochs: float = 3
    learning_rate: float | None = 5e-5
    weight_decay: float = 0.0
    decays_all: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    max_grad_norm: float = 1.0
    schedule: str = "linear"
    warmup: float = 0.0
    seed: int = 42
    sequence_len: int = 1024
    on_overlong: str = "cut"
    packing: bool = False
    precision: str = "fp32"
    recomputes: bool = False
    log_every: int | None = 500
    saves: Literal["epoch"] | int | None = 500
    keep_last: int | None = None
    rank: int = 8
    alpha: float | None = None
    alpha_of_rank: float = 1.0
    dropout: float = 0.0
    targets: str | None = None
    double_quant: bool = False


def defaults_of(tool: str, trainer: Trainer | None) -> Defaults:
    """Return the defaults of a tool (`tools.yaml`). `trainer` is used only for the Hugging Face family."""
    of_trainer = TABLE["trainers"].get(trainer, {}) if tool == "hf" else {}
    return Defaults(**{**TABLE["tools"][tool]["defaults"], **of_trainer})


def put_default(ledger: Ledger, defaults: Defaults, key: str, value: object) -> None:
    """Put the tool's default into the recipe, for a key that the file does not set."""
    ledger.put(key, value, f"the default of {defaults.name}")
