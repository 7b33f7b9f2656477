"""Build the recipe's data sources from another tool's file."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.foreign.importers.ledger import Ledger
from echelon.foreign.importers.wording import Wording
from echelon.recipe.data_formats import RECORD_FORMATS

FILE_SUFFIXES = (
    ".jsonl", ".json", ".parquet", ".csv", ".tsv", ".arrow", ".txt", ".gz", ".zst", ".ndjson",
)  # fmt: skip
# The role names that echelon recognises, by role.
_ROLES: Mapping[str, frozenset[str]] = {
    "system": frozenset({"system"}),
    "user": frozenset({"user", "human"}),
    "assistant": frozenset({"assistant", "gpt", "model", "bot", "chatbot"}),
    "tool": frozenset({"tool", "function", "observation", "function_response", "ipython"}),
}


@dataclass(frozen=True)
class Read:
    """The training and validation sources of a file.

    `wordings`: the templates of their conversations, without repetition. `plain`: True if no source has conversations;
    None if the file does not show it.
    """

    train: tuple[dict[str, Any], ...]
    validation: tuple[dict[str, Any], ...] = ()
    wordings: tuple[Wording, ...] = ()
    plain: bool | None = None


def is_hub_id(path: str) -> bool:
    """Whether a path is a Hub id, OWNER/NAME, rather than a file: no file suffix and not an existing path."""
    if path.startswith((".", "/", "~")) or "://" in path or path.endswith(FILE_SUFFIXES) or Path(path).exists():
        return False
    return bool(re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path))


def build_source(path: str, form: str | None, fields: Mapping[str, str], config: str | None = None) -> dict[str, Any]:
    """Build a source of the recipe.

    `form`: the format of its records, None for plain text. `config`: the configuration of a Hub dataset. The key
    `format` of a Hub dataset is `hub`, so its `fields` specify the format of the records.
    """
    renamed = {ours: theirs for ours, theirs in fields.items() if ours != theirs}
    if is_hub_id(path):
        row = RECORD_FORMATS.get(form or "")
        needed = {name: fields.get(name, name) for name in row.required} if row is not None else {}
        named = {**needed, **renamed}
        source: dict[str, Any] = {"path": f"{path}/{config}" if config else path, "format": "hub"}
        return {**source, **({"fields": named} if named else {})}
    return {"path": path, **({"format": form} if form else {}), **({"fields": renamed} if renamed else {})}


def put_split(ledger: Ledger, name: str, source: dict[str, Any]) -> None:
    """Set the split of a source: the value of `name` in the file, or `train` for a Hub dataset."""
    full = ledger.find(name)
    if full is not None and source["path"].endswith(FILE_SUFFIXES):
        ledger.need_not(full, "a file has no splits.")
    elif full is not None:
        source["split"] = ledger.take(full)
    elif source.get("format") == "hub":
        source["split"] = "train"


def unknown_roles(roles: Mapping[str, Any]) -> list[str]:
    """Return the role names, of a mapping from roles to names, that would be read as another role or are unknown."""
    return [
        str(name)
        for role, names in roles.items()
        for name in (names if isinstance(names, list) else [names])
        if str(name) not in _ROLES.get(str(role), frozenset())
    ]


def once(wordings: Iterable[Wording | None]) -> tuple[Wording, ...]:
    """Return the given wordings without None and without repetition."""
    by_text: dict[tuple[str | None, str | None], Wording] = {}
    for wording in wordings:
        if wording is not None:
            by_text.setdefault((wording.template, wording.system), wording)
    return tuple(by_text.values())
