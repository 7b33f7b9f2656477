"""Import the objective of another tool's file, and detect the trainer of a file of the Hugging Face family."""

from collections.abc import Mapping

from echelon.foreign.importers.defaults import Trainer
from echelon.foreign.importers.ledger import Ledger
from echelon.foreign.importers.source_file import TABLE, Tool
from echelon.foreign.importers.sources import Read
from echelon.ground.errors import ConfigError
from echelon.recipe.yaml_text import show_value

TRAINERS: Mapping[str, Trainer] = {"sft": "sft", "dpo": "dpo", "transformers": "transformers"}

_SFT, _PAIRS, _TRL, _SCRIPTS, _SFT_LOSSES = (
    tuple(TABLE["trainer_keys"][kind].split()) for kind in ("sft", "pairs", "trl", "scripts", "sft_losses")
)


def find_trainer(ledger: Ledger, asked: str | None) -> Trainer:
    """Find the trainer of a file of the Hugging Face family: `asked`, the user's choice, else detected from the keys.

    Raises ConfigError if `asked` is unknown, or if the keys are ambiguous and the training depends on the trainer.
    """
    if asked is not None:
        if asked not in TRAINERS:
            raise ConfigError(f"--trainer {asked} is not supported; use one of {', '.join(TRAINERS)}.")
        return TRAINERS[asked]
    if ledger.find(*_SFT) is not None or ledger.peek("loss_type") in _SFT_LOSSES:
        return "sft"
    if (pairs := ledger.find(*_PAIRS, "loss_type")) is not None:
        raise ConfigError(
            f"{pairs}: {show_value(ledger.given[pairs])}: several trainers of TRL have this key (DPO, ORPO, CPO, KTO, "
            "GRPO), and the file does not specify the trainer; if it is for DPO, import it with --trainer dpo."
        )
    name = ledger.find(*_TRL, "dataset_name")
    if name is not None and ledger.find(*_SCRIPTS) is None:
        raise ConfigError(
            f"{name}: {show_value(ledger.given[name])}: the file does not specify the trainer; import it with "
            f"--trainer, one of {', '.join(TRAINERS)}."
        )
    ledger.remark(
        "the file is read as arguments of transformers' Trainer for plain text; for a TRL trainer, set --trainer."
    )
    return "transformers"


def carry_objective(ledger: Ledger, tool: Tool, trainer: Trainer | None) -> bool:
    """Import the objective and return whether it is DPO. Raises ConfigError for an unsupported objective."""
    full = ledger.find("stage", "rl")
    wanted = ledger.take("stage", "rl") if full is not None else "dpo" if trainer == "dpo" else None
    if wanted in (None, "sft", "pt", False):
        if tool == "hf" and (loss := ledger.find("loss_type")) is not None:
            if ledger.given[loss] in ("nll", "chunked_nll"):
                ledger.need_not(loss, "the loss is next-token cross-entropy, computed in chunks.")
            else:
                ledger.refuse(loss, "echelon supports only the next-token cross-entropy loss.")
        return False
    if wanted not in ("dpo", "ipo"):
        raise ConfigError(
            f"{full}: {wanted} is not supported; echelon supports causal_lm (pt, sft) and dpo (dpo, ipo)."
        )
    ledger.put("objective.name", "dpo", f"{full}: {wanted}" if full else "--trainer dpo")
    put_preference(ledger, str(wanted))
    return True


def put_preference(ledger: Ledger, wanted: str = "dpo") -> None:
    """Import the settings of the DPO loss."""
    if ledger.move("objective.beta", "pref_beta", "rl_beta", "dpo_beta", "beta") is None:
        ledger.put("objective.beta", 0.1, "the tool's default")
    loss = ledger.find("pref_loss", "dpo_loss_type", "loss_type")
    value = ledger.take("pref_loss", "dpo_loss_type", "loss_type") or ("ipo" if wanted == "ipo" else "sigmoid")
    value = value[0] if isinstance(value, list) and len(value) == 1 else value
    if value in ("sigmoid", "ipo"):
        ledger.put("objective.loss", value, f"{loss}: {value}" if loss else "the tool's default")
    else:
        ledger.refuse(str(loss), "echelon supports the DPO losses sigmoid and ipo.")
    if ledger.peek("dpo_label_smoothing", "label_smoothing"):
        ledger.move("objective.label_smoothing", "dpo_label_smoothing", "label_smoothing")
    if (name := ledger.find("max_prompt_length")) is not None:
        ledger.differ(name, "prompts have no separate limit: data.sequence_len limits prompt and answer together.")


def carry_v1_objective(ledger: Ledger, read: Read, asked: str | None) -> bool:
    """Import the objective of a LLaMA-Factory v1 file and return whether it is DPO.

    The command specifies it, not the file: preference pairs are for DPO or for a reward model.
    """
    kinds = {source.get("format") == "preference" or "chosen" in source.get("fields", {}) for source in read.train}
    if kinds != {True}:
        if ledger.find("pref_beta", "pref_loss") is not None:
            ledger.remark("the data has no preference pairs, so pref_beta and pref_loss have no effect.")
        for name in ("pref_beta", "pref_loss", "pref_ftx", "simpo_gamma", "dpo_label_smoothing", "ld_alpha"):
            if ledger.find(name) is not None:
                ledger.need_not(name, "the data has no preference pairs.")
        return False
    if asked != "dpo":
        ledger.refuse(
            "train_dataset", "the data has preference pairs, for llamafactory-cli dpo or rm, and the file does not "
            "specify which; if it is for dpo, import it with --trainer dpo."
        )  # fmt: skip
        return True
    ledger.put("objective.name", "dpo", "--trainer dpo")
    put_preference(ledger)
    return True
