"""The importers of tools whose keys are those of TrainingArguments, or have the same topics."""

from dataclasses import replace
from functools import partial
from pathlib import Path

from echelon.foreign.importers.data import carry_data, read_data
from echelon.foreign.importers.defaults import defaults_of
from echelon.foreign.importers.ledger import Ledger
from echelon.foreign.importers.model import carry_adapter, carry_model
from echelon.foreign.importers.objective import carry_objective, carry_v1_objective, find_trainer
from echelon.foreign.importers.operation import carry_operation, carry_parallel, carry_run, refuse_plugins
from echelon.foreign.importers.reward_keys import carry_grpo_sizes
from echelon.foreign.importers.swift import complete_swift, swift_defaults
from echelon.foreign.importers.training import Amounts, carry_optimizer, carry_training


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
