"""Files of other training tools as recipes: Axolotl, the Hugging Face Trainer and TRL, LLaMA-Factory.

Every key of the file ends in the ledger, carried or with a reason. `model`, `data`, `training` and `operation` take the
keys that mean something, by topic; `reasons` has the words for the rest.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from echelon.errors import ConfigError
from echelon.recipe.foreign.data import carry_data, read_data
from echelon.recipe.foreign.defaults import defaults_of
from echelon.recipe.foreign.ledger import Entry, Fate, Ledger
from echelon.recipe.foreign.model import carry_adapter, carry_model
from echelon.recipe.foreign.objective import TRAINERS, carry_objective, carry_v1_objective, find_trainer
from echelon.recipe.foreign.operation import carry_operation, carry_parallel, carry_run
from echelon.recipe.foreign.reading import TOOLS, Tool, detect_tool, read_foreign
from echelon.recipe.foreign.reasons import DEFAULTS, LOST, NEEDLESS, SETTINGS
from echelon.recipe.foreign.refusals import REFUSED, refuse_plugins
from echelon.recipe.foreign.result import render_imported, render_notes, render_refusal
from echelon.recipe.foreign.training import Amounts, carry_optimizer, carry_training
from echelon.recipe.load import parse_recipe
from echelon.recipe.unbuilt import check_built

__all__ = ["TOOLS", "TRAINERS", "Amounts", "Entry", "Fate", "Imported", "Tool", "import_recipe"]


@dataclass(frozen=True)
class Imported:
    """A recipe made of another tool's file: its YAML, lines for the user, and what became of every key."""

    tool: Tool
    text: str
    notes: tuple[str, ...]
    entries: tuple[Entry, ...]


def import_recipe(
    path: Path, tool: str | None = None, amounts: Amounts | None = None, trainer: str | None = None
) -> Imported:
    """Turn a file of another tool into a recipe. `tool` None: told from the keys. `trainer`: which of the Hugging Face
    family's trainers it is for, where the file does not tell.

    Raises ConfigError for a file that cannot be read, a training that echelon does not have, and where the recipe that
    came of it would be refused.
    """
    given = read_foreign(path)
    if tool is not None and tool not in TOOLS:
        raise ConfigError(f"--from {tool} is not known; use {', '.join(TOOLS)}.")
    kind: Tool = detect_tool(given, path) if tool is None else tool
    if trainer is not None and kind not in ("hf", "llamafactory-v1"):
        raise ConfigError(f"--trainer {trainer}: a file of {kind} says itself what it trains; leave --trainer out.")
    ledger = Ledger(given)
    _carry(ledger, kind, path, amounts or Amounts(), trainer)
    ledger.close(DEFAULTS, NEEDLESS, LOST, REFUSED, SETTINGS)
    if any(ledger.by_fate("refused")):
        raise ConfigError(render_refusal(ledger, str(path)))
    text = render_imported(ledger, path.name)
    try:
        check_built(parse_recipe(text, "the imported recipe")[0])
    except ConfigError as error:
        raise ConfigError(f"{path} makes no recipe: {error} Change it there, and import it again.") from None
    return Imported(
        kind, text, tuple(render_notes(ledger, path.name)), tuple(ledger.entries[name] for name in ledger.given)
    )


def _carry(ledger: Ledger, tool: Tool, path: Path, amounts: Amounts, asked: str | None) -> None:
    """Take what means something, by topic, in an order in which each finds what it goes by."""
    trainer = find_trainer(ledger, asked) if tool == "hf" else None
    defaults = defaults_of(tool, trainer)
    carry_run(ledger, defaults, path)
    dpo = tool != "llamafactory-v1" and carry_objective(ledger, tool, trainer)
    refuse_plugins(ledger)
    carry_model(ledger, tool)
    carry_adapter(ledger, tool, defaults)
    read = read_data(ledger, tool, trainer, path.parent)
    if tool == "llamafactory-v1":
        dpo = carry_v1_objective(ledger, read, asked)
    carry_data(ledger, tool, read, defaults, dpo)
    named = carry_parallel(ledger, path.parent)
    steps = carry_training(ledger, tool, defaults, replace(amounts, devices=amounts.devices or named))
    carry_optimizer(ledger, tool, defaults, steps)
    carry_operation(ledger, defaults, steps)
