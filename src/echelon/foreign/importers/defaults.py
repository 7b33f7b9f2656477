"""The default values of each tool. An imported recipe contains them explicitly."""

from dataclasses import dataclass
from typing import Literal

from echelon.foreign.importers.ledger import Ledger
from echelon.foreign.importers.source_file import TABLE

Trainer = Literal["sft", "dpo", "orpo", "cpo", "kto", "grpo", "gkd", "reward", "transformers"]
"""The trainer that a file of the Hugging Face family is for: one of TRL's, or transformers' own."""


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
