"""Sources of data as a recipe has them, and what a tool's file says of them."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.recipe.data_formats import RECORD_FORMATS
from echelon.recipe.foreign.ledger import Ledger
from echelon.recipe.foreign.wording import Wording

FILE_SUFFIXES = (
    ".jsonl", ".json", ".parquet", ".csv", ".tsv", ".arrow", ".txt", ".gz", ".zst", ".ndjson",
)  # fmt: skip
# How the roles of turns may be called so that they are read as what they are.
_ROLES: Mapping[str, frozenset[str]] = {
    "system": frozenset({"system"}),
    "user": frozenset({"user", "human"}),
    "assistant": frozenset({"assistant", "gpt", "model", "bot", "chatbot"}),
    "tool": frozenset({"tool", "function", "observation", "function_response", "ipython"}),
}


@dataclass(frozen=True)
class Read:
    """The sources that a file names, to train on and to evaluate on.

    `wordings`: what renders their conversations, each once.  `plain`: none of the texts is a conversation, as far as
    the file tells; None where it does not.
    """

    train: tuple[dict[str, Any], ...]
    validation: tuple[dict[str, Any], ...] = ()
    wordings: tuple[Wording, ...] = ()
    plain: bool | None = None


def is_hub_id(path: str) -> bool:
    """Whether a path is OWNER/NAME of the hub rather than a file: no suffix of a file, no place in a file system."""
    if path.startswith((".", "/", "~")) or "://" in path or path.endswith(FILE_SUFFIXES) or Path(path).exists():
        return False
    return bool(re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path))


def build_source(path: str, form: str | None, fields: Mapping[str, str], config: str | None = None) -> dict[str, Any]:
    """A source of the recipe. `form`: the format of its records, None for plain text. `config`: that of a hub dataset.

    What the records of a hub dataset are is said by naming their fields: its `format` says where it lies.
    """
    renamed = {ours: theirs for ours, theirs in fields.items() if ours != theirs}
    if is_hub_id(path):
        row = RECORD_FORMATS.get(form or "")
        needed = {name: fields.get(name, name) for name in row.required} if row is not None else {}
        named = {**needed, **renamed}
        source: dict[str, Any] = {"path": f"{path}/{config}" if config else path, "format": "hub"}
        return {**source, **({"fields": named} if named else {})}
    return {"path": path, **({"format": form} if form else {}), **({"fields": renamed} if renamed else {})}


def put_split(ledger: Ledger, name: str | None, source: dict[str, Any], default: str | None) -> None:
    """The split of a source: that under `name` in the file, or the tool's own where the dataset is of the hub."""
    full = ledger.find(name) if name else None
    if full is not None and source["path"].endswith(FILE_SUFFIXES):
        ledger.need_not(full, "a file has no splits.")
    elif full is not None:
        source["split"] = ledger.take(full)
    elif default is not None and source.get("format") == "hub":
        source["split"] = default


def unknown_roles(roles: Mapping[str, Any]) -> list[str]:
    """The names of a mapping of roles to what records call them that would be read as another role, or as none."""
    return [
        str(name)
        for role, names in roles.items()
        for name in (names if isinstance(names, list) else [names])
        if str(name) not in _ROLES.get(str(role), frozenset())
    ]


def once(wordings: Iterable[Wording | None]) -> tuple[Wording, ...]:
    """Those that there are, each template once."""
    found: dict[tuple[str | None, str | None], Wording] = {}
    for wording in wordings:
        if wording is not None:
            found.setdefault((wording.template, wording.system), wording)
    return tuple(found.values())
