"""Convert configuration files of other training tools to recipes, such as Axolotl, TRL and LLaMA-Factory.

The ledger records every key of the file: imported, or not imported with a reason. `model`, `data`, `objective`,
`training` and `operation` import the keys by topic; `keys.yaml` has the reasons for the other keys.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from echelon.foreign.importers.data import carry_data, read_data
from echelon.foreign.importers.defaults import defaults_of
from echelon.foreign.importers.ledger import Entry, Fate, Ledger
from echelon.foreign.importers.model import carry_adapter, carry_model
from echelon.foreign.importers.objective import TRAINERS, carry_objective, carry_v1_objective, find_trainer
from echelon.foreign.importers.operation import carry_operation, carry_parallel, carry_run, refuse_plugins
from echelon.foreign.importers.result import refuse_keys, render_imported, render_notes
from echelon.foreign.importers.reward_keys import carry_grpo_sizes
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
from echelon.ground.errors import ConfigError
from echelon.recipe.load import parse_recipe

__all__ = ["IMPORTERS", "TRAINERS", "Amounts", "Entry", "Fate", "Imported", "import_recipe"]


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
