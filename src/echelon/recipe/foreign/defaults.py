"""The default values of each tool. An imported recipe contains them explicitly."""

from dataclasses import dataclass, replace
from typing import Literal

from echelon.recipe.foreign.ledger import Ledger
from echelon.recipe.foreign.reading import Tool

Trainer = Literal["transformers", "sft", "dpo"]
"""The trainer that a file of the Hugging Face family is for: transformers' Trainer, or TRL's SFT or DPO trainer."""


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
    split: str | None = "train"


# transformers 5.17: `TrainingArguments`; `run_clm.py`, which joins texts and cuts them at 1024. PEFT: `LoraConfig`.
_TRANSFORMERS = Defaults("transformers", packing=True)
# TRL (July 2026): `trainer/base_config.py`, `sft_config.py`, `dpo_config.py`, `model_config.py`; `scripts/utils.py`.
_TRL = replace(
    _TRANSFORMERS, name="TRL", packing=False, learning_rate=2e-5, precision="bf16", recomputes=True, log_every=10,
    rank=16, alpha=32, dropout=0.05,
)  # fmt: skip
# Axolotl (July 2026): `utils/schemas/`, `core/builders/base.py`, `utils/config/`, `loaders/model.py`.
_AXOLOTL = Defaults(
    "Axolotl", micro_batch_size=1, epochs=1, learning_rate=None, schedule="cosine", warmup=0.03, sequence_len=512,
    on_overlong="drop", precision="auto", log_every=None, saves="epoch", keep_last=4, double_quant=True,
)  # fmt: skip
# LLaMA-Factory (August 2026): `hparams/`, `model/adapter.py`, `model/patcher.py`; the rest is TrainingArguments'.
_FACTORY = Defaults(
    "LLaMA-Factory", sequence_len=2048, recomputes=True, alpha_of_rank=2, targets="all-linear", double_quant=True
)
# LLaMA-Factory v1: `v1/config/`, `v1/core/base_trainer.py` (torch.optim.AdamW with its own weight decay, on everything;
# no schedule), `v1/plugins/model_plugins/peft.py` and `quantization.py`.
_FACTORY_V1 = Defaults(
    "LLaMA-Factory v1", micro_batch_size=1, learning_rate=1e-4, weight_decay=0.01, decays_all=True,
    schedule="constant", sequence_len=2048, precision="bf16", recomputes=True, log_every=1, saves=None, alpha=16,
    dropout=0.05, targets="all-linear", double_quant=True,
)  # fmt: skip


def defaults_of(tool: Tool, trainer: Trainer | None) -> Defaults:
    """Return the defaults of a tool. `trainer` is used only for the Hugging Face family."""
    match tool:
        case "axolotl":
            return _AXOLOTL
        case "llamafactory":
            return _FACTORY
        case "llamafactory-v1":
            return _FACTORY_V1
        case "hf":
            return {"sft": _TRL, "dpo": replace(_TRL, learning_rate=1e-6)}.get(str(trainer), _TRANSFORMERS)


def put_default(ledger: Ledger, defaults: Defaults, key: str, value: object) -> None:
    """Put the tool's default into the recipe, for a key that the file does not set."""
    ledger.put(key, value, f"the default of {defaults.name}")
