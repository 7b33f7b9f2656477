"""Convert configuration files of other training tools to recipes, such as Axolotl, TRL and LLaMA-Factory.

The ledger records every key of the file: imported, or not imported with a reason. `model`, `data`, `objective`,
`training` and `operation` import the keys by topic; `keys.yaml` has the reasons for the other keys.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from echelon.foreign.importers.data import carry_data, read_data
from echelon.foreign.importers.ledger import Entry, Fate, Ledger, defaults_of
from echelon.foreign.importers.model import carry_adapter, carry_model
from echelon.foreign.importers.objective import (
    TRAINERS,
    carry_grpo_sizes,
    carry_objective,
    carry_v1_objective,
    find_trainer,
)
from echelon.foreign.importers.operation import carry_operation, carry_parallel, carry_run, refuse_plugins
from echelon.foreign.importers.source_file import (
    DEFAULTS,
    IMPORTERS,
    LOST,
    NEEDLESS,
    REFUSED,
    SETTINGS,
    detect_tool,
    read_foreign,
)
from echelon.foreign.importers.swift import complete_swift, swift_defaults
from echelon.foreign.importers.training import Amounts, carry_optimizer, carry_training
from echelon.ground.errors import ConfigError, Fault
from echelon.recipe.load import parse_recipe
from echelon.recipe.yaml_text import LONGEST_SHOWN, parse_yaml, render_inline

__all__ = ["IMPORTERS", "TRAINERS", "Amounts", "Entry", "Fate", "Imported", "import_recipe"]
_SECTIONS = (
    "run", "model", "tokenizer", "adapter", "data", "objective", "rollout", "reward", "train", "optim", "parallel",
    "checkpoint", "evaluate", "track", "mlflow", "launch",
)  # fmt: skip
_COLUMN = 40


@dataclass(frozen=True)
class Imported:
    """A recipe imported from another tool's file: its YAML, notes for the user, and the result for every key."""

    tool: str
    text: str
    notes: tuple[str, ...]
    entries: tuple[Entry, ...]


def import_recipe(
    path: Path, tool: str | None = None, amounts: Amounts | None = None, trainer: str | None = None
) -> Imported:
    """Convert another tool's file to a recipe.

    `tool` None: detected from the keys. `trainer`: the trainer that a Hugging Face, TRL or LLaMA-Factory v1 file is
    for, if the file does not specify it.

    Raises ConfigError for a file that cannot be read, for training that echelon does not support, and if the resulting
    recipe is invalid.
    """
    content = read_foreign(path)
    if tool is not None and tool not in IMPORTERS:
        raise ConfigError(f"--from {tool} is unknown; use one of {', '.join(IMPORTERS)}.")
    kind = detect_tool(content, path) if tool is None else tool
    if trainer is not None and kind not in ("hf", "llamafactory-v1"):
        raise ConfigError(f"--trainer {trainer}: files of {kind} specify the trainer themselves; remove --trainer.")
    ledger = Ledger(content)
    IMPORTERS[kind](ledger, path, amounts or Amounts(), trainer)
    ledger.close(DEFAULTS, NEEDLESS, LOST, REFUSED, SETTINGS)
    if any(ledger.by_fate("refused")):
        raise refuse_keys(ledger, str(path))
    text = render_imported(ledger, path.name)
    try:
        parse_recipe(text, "the imported recipe")
    except ConfigError as error:
        raise ConfigError(
            f"{path} does not give a valid recipe: {error} Change it in the file and import it again."
        ) from None
    return Imported(
        kind, text, tuple(render_notes(ledger, path.name)), tuple(ledger.entries[name] for name in ledger.given)
    )


def _carry(tool: str, ledger: Ledger, path: Path, amounts: Amounts, asked: str | None) -> None:
    """Import the keys by topic. The order matters: later topics use the results of earlier ones."""
    trainer = find_trainer(ledger, asked) if tool == "hf" else None
    defaults = defaults_of(tool, trainer)
    carry_run(ledger, defaults, path)
    answers = None if tool == "llamafactory-v1" else carry_objective(ledger, tool, trainer)
    refuse_plugins(ledger)
    carry_model(ledger, tool)
    carry_adapter(ledger, tool, defaults)
    if tool == "ms-swift":
        defaults = swift_defaults(ledger, defaults)
    read = read_data(ledger, tool, trainer, path.parent)
    if tool == "llamafactory-v1":
        answers = carry_v1_objective(ledger, read, asked)
    carry_data(ledger, tool, read, defaults, answers)
    named = carry_parallel(ledger, path.parent)
    if tool == "ms-swift":
        complete_swift(ledger)
    steps = carry_training(ledger, tool, defaults, replace(amounts, devices=amounts.devices or named))
    carry_optimizer(ledger, tool, defaults, steps)
    carry_operation(ledger, defaults, steps)
    if answers == "prompts":
        carry_grpo_sizes(ledger)


AXOLOTL, HF, LLAMAFACTORY, LLAMAFACTORY_V1, MS_SWIFT = (
    partial(_carry, tool) for tool in ("axolotl", "hf", "llamafactory", "llamafactory-v1", "ms-swift")
)


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
