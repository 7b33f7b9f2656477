"""Files of other training tools as recipes: Axolotl, the Hugging Face Trainer and TRL, LLaMA-Factory.

Every key of the file ends in the ledger, carried or with a reason. `model`, `data`, `training` and `operation` take the
keys that mean something, by topic; `reasons` has the words for the rest.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from echelon.errors import ConfigError
from echelon.recipe.foreign.data import carry_data
from echelon.recipe.foreign.ledger import Entry, Fate, Ledger
from echelon.recipe.foreign.model import carry_adapter, carry_model
from echelon.recipe.foreign.operation import carry_objective, carry_operation, carry_parallel, carry_run
from echelon.recipe.foreign.reading import TOOLS, Tool, detect_tool, read_foreign
from echelon.recipe.foreign.reasons import DEFAULTS, LOST, NEEDLESS
from echelon.recipe.foreign.text import render_imported, render_notes
from echelon.recipe.foreign.training import Amounts, carry_optimizer, carry_training
from echelon.recipe.load import parse_recipe
from echelon.recipe.unbuilt import check_built

__all__ = ["TOOLS", "Amounts", "Entry", "Fate", "Imported", "Tool", "import_recipe"]


@dataclass(frozen=True)
class Imported:
    """A recipe made of another tool's file: its YAML, lines for the user, and what became of every key."""

    tool: Tool
    text: str
    notes: tuple[str, ...]
    entries: tuple[Entry, ...]


def import_recipe(path: Path, tool: str | None = None, amounts: Amounts | None = None) -> Imported:
    """Turn a file of another tool into a recipe. `tool` None: told from the keys.

    Raises ConfigError for a file that cannot be read, a training that echelon does not have, and where the recipe that
    came of it would be refused.
    """
    given = read_foreign(path)
    if tool is not None and tool not in TOOLS:
        raise ConfigError(f"--from {tool} is not known; use {', '.join(TOOLS)}.")
    kind: Tool = detect_tool(given, path) if tool is None else tool
    ledger = Ledger(given)
    carry_run(ledger, path)
    carry_objective(ledger, kind)
    carry_model(ledger, kind)
    carry_adapter(ledger, kind)
    carry_data(ledger, kind, path.parent)
    amounts, named = amounts or Amounts(), carry_parallel(ledger, path.parent)
    steps = carry_training(ledger, kind, replace(amounts, devices=amounts.devices or named))
    carry_optimizer(ledger, kind, steps)
    carry_operation(ledger, kind, steps, ledger.values.get("train.epochs"))
    ledger.close(DEFAULTS, NEEDLESS, LOST)
    text = render_imported(ledger, path.name)
    try:
        check_built(parse_recipe(text, "the imported recipe")[0])
    except ConfigError as error:
        raise ConfigError(f"{path} makes no recipe: {error} Change it there, and import it again.") from None
    return Imported(
        kind, text, tuple(render_notes(ledger, path.name)), tuple(ledger.entries[name] for name in ledger.given)
    )
