"""Render an imported recipe as YAML, with the origin of each value as a comment, and the notes for the user."""

from collections.abc import Iterator
from typing import Any

from echelon.foreign.importers.ledger import Entry, Fate, Ledger
from echelon.ground.errors import ConfigError, Fault
from echelon.recipe.yaml_text import LONGEST_SHOWN, parse_yaml, render_inline

_SECTIONS = (
    "run", "model", "tokenizer", "adapter", "data", "objective", "rollout", "reward", "train", "optim", "parallel",
    "checkpoint", "evaluate", "track", "mlflow", "launch",
)  # fmt: skip
_COLUMN = 40


def render_imported(ledger: Ledger, source: str) -> str:
    """Render the ledger's values as YAML, with a comment for each."""
    lines = [f"# Imported from {source}; `echelon import` lists the keys that could not be imported."]
    for section in _SECTIONS:
        if section in ledger.values:
            lines += ["", *_render(section, ledger.values[section], ledger.reasons.get(section, ""), "")]
            continue
        keys = [key for key in ledger.values if key.partition(".")[0] == section]
        if keys:
            lines += ["", f"{section}:"]
        for key in keys:
            lines += _render(key.partition(".")[2], ledger.values[key], ledger.reasons.get(key, ""), "  ")
    return "\n".join(lines) + "\n"


def _render(key: str, value: Any, reason: str, indent: str) -> Iterator[str]:
    comment = f"  # {' '.join(reason.split())}" if reason else ""
    if isinstance(value, str) and (block := _block(value, indent)):
        yield f"{indent}{key}: |-{comment}"
        yield from block
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        yield f"{indent}{key}:{comment}"
        yield from (f"{indent}  - {render_inline(item)}" for item in value)
    else:
        yield f"{indent}{key}: {render_inline(value)}".ljust(_COLUMN if comment else 0) + comment


def _block(text: str, indent: str) -> list[str]:
    """Return a multi-line text as lines of a YAML block; none if it has one line or YAML would change it."""
    lines = [f"{indent}  {line}" for line in text.split("\n")]
    try:
        same = "\n" in text and parse_yaml("text: |-\n" + "\n".join(lines) + "\n", "")[0] == {"text": text}
    except ConfigError:
        return []
    return lines if same else []


def refuse_keys(ledger: Ledger, path: str) -> ConfigError:
    """Return the error with the refused keys and the reasons."""
    refused = list(ledger.by_fate("refused"))
    shown = f" {refused[0]}" if len(refused) == 1 else "\n" + "\n".join(f"  {entry}" for entry in refused)
    return ConfigError(f"{path} cannot be imported:{shown}", [_find_fault(entry, path) for entry in refused])


def _find_fault(entry: Entry, path: str) -> Fault:
    rule, _, fix = entry.text.removesuffix(".").partition("; ")
    return Fault(path, entry.name, entry.show(), rule, fix or None)


def render_notes(ledger: Ledger, source: str) -> list[str]:
    """Render the notes for the user: remarks, then every key that was not imported unchanged, with the reason."""
    lines = [f"note: {remark}" for remark in ledger.remarks]
    headings: tuple[tuple[Fate, str], ...] = (("differs", "different in echelon"), ("lost", "not imported"))
    for fate, heading in headings:
        lines += [f"{heading}: {entry}" for entry in ledger.by_fate(fate)]
    needless: dict[str, list[str]] = {}
    for entry in ledger.by_fate("needless"):
        needless.setdefault(entry.text, []).append(entry.name)
    lines += [f"not needed: {', '.join(names)}: {reason}" for reason, names in needless.items()]
    if off := [entry.name for entry in ledger.by_fate("off")]:
        lines.append(f"off or default in {source}: {', '.join(off)}")
    return [line if len(line) < 20 * LONGEST_SHOWN else line[: 20 * LONGEST_SHOWN] + "..." for line in lines]
