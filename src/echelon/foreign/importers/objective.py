"""Import the objective of another tool's file, also training from rewards, and detect the trainer of a file of the
Hugging Face family."""

import math
from collections.abc import Callable, Mapping
from typing import Any, get_args

from echelon.foreign.importers.ledger import Ledger, Trainer
from echelon.foreign.importers.source_file import TABLE
from echelon.foreign.importers.sources import Read
from echelon.foreign.importers.swift import find_swift_method
from echelon.ground.errors import ConfigError
from echelon.recipe.names import OBJECTIVES, Answers
from echelon.recipe.objective import SMOOTHED
from echelon.recipe.yaml_text import show_value

TRAINERS: Mapping[str, Trainer] = {name: name for name in get_args(Trainer)}

_SCORES_TEXTS = "ForSequenceClassification"

_SFT, _GRPO, _GKD, _REWARD, _PAIRS, _TRL, _SCRIPTS, _SFT_LOSSES = (
    tuple(TABLE["trainer_keys"][kind].split())
    for kind in ("sft", "grpo", "gkd", "reward", "pairs", "trl", "scripts", "sft_losses")
)
_NORMALIZE = {"grpo": "sequence", "dr_grpo": "constant", "dapo": "token", "bnpo": "token"}
_ADVANTAGES = {"group": "normalized", True: "normalized", "none": "centered", False: "centered"}
_TRLS_OWN: Mapping[str, Any] = {
    "think_format_reward": {"name": "regex", "options": {"pattern": r"^<think>(?!.*<think>)(.*?)</think>.*$"}}
}
"""TRL's rewards that are one of echelon's."""
_ACCUMULATION = "gradient_accumulation_steps"
_NO_REWARD = "rewards:reward"
_IN_STEPS = ("train.steps", "optim.warmup", "checkpoint.every", "train.eval_every", "train.log_every")


def find_trainer(ledger: Ledger, asked: str | None) -> Trainer:
    """Find the trainer of a file of the Hugging Face family: `asked`, the user's choice, else detected from the keys.

    Raises ConfigError if `asked` is unknown, or if the keys are ambiguous and the training depends on the trainer.
    """
    if asked is not None:
        if asked not in TRAINERS:
            raise ConfigError(f"--trainer {asked} is not supported; use one of {', '.join(TRAINERS)}.")
        return TRAINERS[asked]
    if ledger.find(*_GKD) is not None:
        return "gkd"
    if ledger.find(*_REWARD) is not None:
        return "reward"
    if ledger.find(*_SFT) is not None or ledger.peek("loss_type") in _SFT_LOSSES:
        return "sft"
    if ledger.find(*_GRPO) is not None:
        return "grpo"
    if (pairs := ledger.find(*_PAIRS, "loss_type")) is not None:
        raise ConfigError(
            f"{pairs}: {show_value(ledger.given[pairs])}: several trainers of TRL have this key, and the file does not "
            "specify the trainer; import it with --trainer, for example --trainer dpo, one of dpo, orpo, cpo, kto, "
            "grpo and gkd."
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


def carry_objective(ledger: Ledger, tool: str, trainer: Trainer | None) -> Answers | None:
    """Import the objective and return what it compares, if it does. Raises ConfigError for an unsupported objective."""
    full, method = _find_method(ledger, tool, trainer)
    if method in (None, "sft", "pt", False):
        if tool == "hf" and (loss := ledger.find("loss_type")) is not None:
            if ledger.given[loss] in ("nll", "chunked_nll"):
                ledger.need_not(loss, "the loss is next-token cross-entropy, computed in chunks.")
            else:
                ledger.refuse(loss, "echelon supports only the next-token cross-entropy loss.")
        return None
    if not isinstance(method, str) or method not in _METHODS:
        raise ConfigError(
            f"{full}: {method} is not supported; echelon supports causal_lm (pt, sft) and the methods "
            f"{', '.join(_METHODS)}."
        )
    _METHODS[method](ledger, f"{full}: {show_value(ledger.given[full])}" if full else f"--trainer {trainer}")
    _put_dropout(ledger)
    if (name := ledger.find("max_prompt_length")) is not None and method != "grpo":
        ledger.differ(name, "prompts have no separate limit: data.sequence_len limits prompt and answer together.")
    return OBJECTIVES[str(ledger.values["objective.name"])].answers


def _find_method(ledger: Ledger, tool: str, trainer: Trainer | None) -> tuple[str | None, Any]:
    """Return the key that names the method, if one does, and the method: one of `_METHODS`, or of the user's."""
    full = ledger.find("stage", "rl")
    if tool == "ms-swift":
        return ledger.find("rlhf_type"), find_swift_method(ledger)
    if full is None and tool == "axolotl" and ledger.peek("reward_model") is True:
        ledger.take("reward_model")
        return "reward_model", "reward"
    return full, ledger.take("stage", "rl") if full is not None else trainer if trainer in _METHODS else None


def _put_dpo(ledger: Ledger, reason: str) -> None:
    """Import DPO and its variants; in LLaMA-Factory, `pref_loss` may name another method."""
    asks_ipo = reason.endswith(": ipo")
    loss = ledger.find("pref_loss", "dpo_loss_type", "loss_type")
    values = ledger.take("pref_loss", "dpo_loss_type", "loss_type") or ("ipo" if asks_ipo else "sigmoid")
    value, *more = values if isinstance(values, list) and values else [values]
    said = f"{loss}: {show_value(values)}" if loss else "the tool's default"
    if loss == "pref_loss" and value in ("orpo", "simpo"):
        _put_of_factory(ledger, value, said)
        return
    ledger.put("objective.name", "dpo", reason)
    _put_beta(ledger)
    if value in OBJECTIVES["dpo"].losses and more in ([], ["sft"]):
        ledger.put("objective.loss", value, said)
    else:
        losses = ", ".join(OBJECTIVES["dpo"].losses)
        ledger.refuse(str(loss), f"echelon supports the DPO losses {losses}, alone or with sft.")
    if more == ["sft"]:
        _put_sft_weight(ledger, said)
    elif ledger.peek("rpo_alpha"):
        ledger.move("objective.sft_weight", "rpo_alpha")
    _put_smoothing(ledger, str(value))


def _put_sft_weight(ledger: Ledger, said: str) -> None:
    """Import the weights of a loss and of the cross-entropy beside it."""
    name = ledger.find("loss_weights", "dpo_loss_weights")
    weights = ledger.take("loss_weights", "dpo_loss_weights") or [1.0, 1.0]
    if not isinstance(weights, list) or len(weights) != 2 or weights[0] != 1:
        ledger.refuse(str(name), "echelon weights the preference loss with 1, and the cross-entropy with sft_weight.")
        return
    ledger.put("objective.sft_weight", weights[1], f"{name}: {show_value(weights)}" if name else said)


def _put_of_factory(ledger: Ledger, method: str, said: str) -> None:
    """Import ORPO or SimPO of LLaMA-Factory, where they are losses of the stage dpo."""
    ledger.put("objective.name", method, said)
    _put_beta(ledger)
    if method == "simpo":
        ledger.move("objective.gamma", "simpo_gamma")
    else:
        ledger.differ("pref_loss", "echelon averages the cross-entropy over tokens, LLaMA-Factory over answers.")


def _put_orpo(ledger: Ledger, reason: str) -> None:
    ledger.put("objective.name", "orpo", reason)
    _put_beta(ledger, "orpo_alpha")
    ledger.remark("ORPO: the tool also trains on the tokens of prompts; echelon trains on answers, as the paper does.")


def _put_cpo(ledger: Ledger, reason: str) -> None:
    """Import TRL's CPOTrainer, which is also that of SimPO. The default weight of its cross-entropy is 1."""
    loss = ledger.find("loss_type")
    value = ledger.take("loss_type") or ("simpo" if reason.endswith(": simpo") else "sigmoid")
    is_simpo = value in ("simpo", "alphapo")
    ledger.put("objective.name", "simpo" if is_simpo else "cpo", f"{loss}: {value}" if loss else reason)
    _put_beta(ledger)
    if is_simpo:
        ledger.move("objective.gamma", "simpo_gamma")
    elif value in OBJECTIVES["cpo"].losses:
        ledger.put("objective.loss", value, f"{loss}: {value}" if loss else "the tool's default")
    if value not in ("simpo", *OBJECTIVES["cpo"].losses):
        ledger.refuse(str(loss), "echelon supports the losses simpo, sigmoid, hinge and ipo of CPO.")
    if ledger.move("objective.sft_weight", "cpo_alpha") is None:
        ledger.put("objective.sft_weight", 1.0, "the tool's default")
    _put_smoothing(ledger, "sigmoid" if is_simpo else str(value))


def _put_kto(ledger: Ledger, reason: str) -> None:
    ledger.put("objective.name", "kto", reason)
    _put_beta(ledger)
    loss = ledger.find("loss_type")
    if (value := ledger.take("loss_type")) in OBJECTIVES["kto"].losses:
        ledger.put("objective.loss", value, f"{loss}: {value}")
    elif value is not None:
        ledger.refuse(str(loss), f"echelon supports the KTO losses {', '.join(OBJECTIVES['kto'].losses)}.")
    ledger.move("objective.desirable_weight", "kto_desirable_weight", "kto_chosen_weight", "desirable_weight")
    ledger.move("objective.undesirable_weight", "kto_undesirable_weight", "kto_rejected_weight", "undesirable_weight")
    ledger.remark("KTO: the baseline is the mean over the batch of a step; that of the tool is over a microbatch.")


def _put_distill(ledger: Ledger, reason: str) -> None:
    """Import TRL's GKDTrainer, whose `temperature` is that of sampling alone."""
    ledger.put("objective.name", "distill", reason)
    if ledger.move("objective.teacher", "teacher_model_name_or_path") is None:
        ledger.put("objective.teacher", ledger.peek("model_name_or_path"), "the default of TRL: the model itself")
    name, beta = ledger.find("beta"), ledger.number("beta")
    said = "the default of TRL" if beta is None else f"{name}: {show_value(beta)}"
    beta = 0.5 if beta is None else beta
    ledger.put("objective.loss", {0.0: "forward", 1.0: "reverse"}.get(beta, "jsd"), said)
    if 0 < beta < 1:
        ledger.put("objective.beta", beta, said)
    if ledger.move("objective.on_policy_fraction", "lmbda") is None:
        ledger.put("objective.on_policy_fraction", 0.5, "the default of TRL")
    if ledger.values["objective.on_policy_fraction"]:
        for key, value in (("max_new_tokens", 128), ("temperature", 0.9)):
            if ledger.move(f"rollout.{key}", key) is None:
                ledger.put(f"rollout.{key}", value, "the default of TRL")
    else:
        for key in ("max_new_tokens", "temperature"):
            if (full := ledger.find(key)) is not None:
                ledger.need_not(full, "no step samples answers (lmbda: 0).")
    if (full := ledger.find("seq_kd")) is not None and ledger.given[full]:
        ledger.refuse(full, "answers of the teacher are not sampled during training; write them before.")


def _put_reward(ledger: Ledger, reason: str) -> None:
    """Import a reward model: TRL's RewardTrainer, which Axolotl calls, and the stage `rm` of LLaMA-Factory."""
    ledger.put("objective.name", "reward", reason)
    ledger.move("objective.center_weight", "center_rewards_coefficient")
    if (name := ledger.find("num_labels")) is not None and ledger.given[name] == 1:
        ledger.need_not(name, "a reward model has one score.")
    if (name := ledger.find("model_type")) is not None and str(ledger.given[name]).endswith(_SCORES_TEXTS):
        ledger.need_not(name, "the model is one that scores texts.")
    saved = ledger.find("lora_modules_to_save", "modules_to_save", "additional_target")
    if saved is not None and ledger.given[saved] in ("score", ["score"]):
        ledger.need_not(saved, "the head is trained in full beside an adapter.")
    if reason == "stage: rm":
        ledger.remark(
            "reward model: LLaMA-Factory stores the head apart, with a bias and with dropout before it; echelon writes "
            "one model without them. A bias changes no difference of scores."
        )


def put_grpo(ledger: Ledger, reason: str) -> None:
    """Import the objective, how answers are drawn, and the rewards."""
    ledger.put("objective.name", "grpo", reason)
    _put_loss(ledger)
    _put_advantage(ledger)
    low, high = ledger.take("epsilon"), ledger.take("epsilon_high")
    if low is not None or high is not None:
        low = 0.2 if low is None else low
        ledger.put("objective.clip", [low, low if high is None else high], "epsilon and epsilon_high")
    _put_divergence(ledger)
    _put_rollout(ledger)
    _put_rewards(ledger)


def _put_loss(ledger: Ledger) -> None:
    name, value = ledger.find("loss_type"), ledger.take("loss_type") or "dapo"
    said = f"{name}: {value}" if name else "the tool's default, dapo"
    if value in _NORMALIZE:
        ledger.put("objective.normalize", _NORMALIZE[value], said)
    else:
        ledger.refuse(str(name), f"echelon supports the losses {', '.join(_NORMALIZE)}.")
    if value == "bnpo":
        ledger.differ("loss_type", "the mean is over the tokens of a whole step, that of the tool over a microbatch.")
    level = ledger.take("importance_sampling_level")
    if level is not None:
        ledger.put("objective.ratio", level, f"importance_sampling_level: {level}")
    if ledger.take("mask_truncated_completions"):
        if _NORMALIZE.get(value) == "token":
            ledger.put("rollout.skip", ["truncated"], "mask_truncated_completions: true")
        else:
            ledger.refuse(
                "mask_truncated_completions",
                f"the loss {value} also divides by the answers that are left out, echelon by the others; use "
                "loss_type: dapo.",
            )


def _put_advantage(ledger: Ledger) -> None:
    name, value = ledger.find("scale_rewards"), ledger.take("scale_rewards")
    if value is not None and value not in _ADVANTAGES:
        ledger.refuse(str(name), "echelon divides by the deviation of a group (group), or by nothing (none).")
    elif name is not None:
        ledger.put("objective.advantage", _ADVANTAGES[value], f"{name}: {show_value(value)}")


def _put_divergence(ledger: Ledger) -> None:
    weight = ledger.move("objective.kl_weight", "trl.beta", "beta", "rl_beta")
    name, value = ledger.find("use_bias_correction_kl"), ledger.take("use_bias_correction_kl")
    if not weight:
        return
    if name is None and "base_model" in ledger.given:  # which brings a TRL of its own
        ledger.refuse(
            "beta",
            "TRL's default of use_bias_correction_kl, which changes the gradient, differs between versions; add the "
            "key to the file, or set beta: 0.",
        )
    unbiased = value is not False
    ledger.put("objective.kl_unbiased", unbiased, f"{name}: {show_value(value)}" if name else "the default of TRL")


def _put_rollout(ledger: Ledger) -> None:
    for key, name, default in (("group_size", "num_generations", 8), ("max_new_tokens", "max_completion_length", 512)):
        if ledger.move(f"rollout.{key}", name) is None:
            ledger.put(f"rollout.{key}", default, "the default of TRL")
    for key in ("temperature", "top_p", "top_k"):
        ledger.move(f"rollout.{key}", key)
    ledger.move("rollout.updates", "num_iterations")


def _put_rewards(ledger: Ledger) -> None:
    name, weights = ledger.find("reward_funcs"), ledger.take("reward_weights")
    names = ledger.words("reward_funcs")
    if not names:
        ledger.values["reward"] = [{"name": _NO_REWARD}]
        ledger.reasons["reward"] = "not in the file"
        ledger.remark(f"the file names no reward; set reward (currently {_NO_REWARD}).")
        return
    assert name is not None
    if not isinstance(weights, list) or len(weights) != len(names):
        if weights is not None:
            ledger.refuse("reward_weights", f"there are {len(names)} rewards; give as many weights.")
        weights = [1.0] * len(names)
    rewards = [
        {**_find_reward(ledger, name, word), "weight": weight} for word, weight in zip(names, weights, strict=True)
    ]
    ledger.values["reward"] = rewards
    ledger.reasons["reward"] = name
    if any(":" in reward["name"] for reward in rewards):
        ledger.differ(
            name,
            "a function gets (answers, records), the texts and the records of their prompts, instead of prompts, "
            "completions and columns; wrap yours.",
        )


def _find_reward(ledger: Ledger, full: str, word: str) -> dict[str, Any]:
    """Return the reward with a name of TRL's; a function by its import path becomes `package.module:function`."""
    if word in _TRLS_OWN:
        return dict(_TRLS_OWN[word])
    module, _, function = word.rpartition(".")
    if "/" in word or not module:
        ledger.refuse(
            full,
            f"{word} is a reward model or a reward of TRL that echelon lacks; give a function of your own as "
            "module.function, or for mathematics set `reward: math` in a recipe.",
        )
    return {"name": f"{module or 'rewards'}:{function}"}


def carry_grpo_sizes(ledger: Ledger) -> None:
    """Import what depends on the length of prompts and on the size of a step, once these are known."""
    room, answer = ledger.values["data.sequence_len"], ledger.values["rollout.max_new_tokens"]
    limit = ledger.number("max_prompt_length")
    room = room if limit is None else int(limit)
    ledger.put(
        "data.sequence_len", room + answer, f"a prompt of at most {room} tokens, and an answer of at most {answer}"
    )
    ledger.put("data.on_overlong", "drop", "prompts that leave no room for an answer are dropped")
    batch = ledger.values["train.global_batch_size"]
    count, steps = ledger.find("generation_batch_size"), ledger.find("steps_per_generation")
    accumulation = next((value for name, value in ledger.given.items() if name.endswith(_ACCUMULATION)), None) or 1
    for name, same in ((count, batch), (steps, accumulation)):
        if name is not None and ledger.number(name) != same:
            ledger.refuse(
                name,
                "TRL makes several updates with different answers of one generation; in echelon a step draws the "
                f"{batch} answers of its update. Remove the key, or set num_iterations.",
            )
    _carry_updates(ledger)


def _carry_updates(ledger: Ledger) -> None:
    """Count steps as echelon does, where each has all updates on its answers."""
    updates = int(ledger.values.get("rollout.updates", 1))
    if updates == 1:
        return
    for key in _IN_STEPS:
        if isinstance(value := ledger.values.get(key), int):
            ledger.put(key, math.ceil(value / updates), f"{value} updates, {updates} in a step")
    ledger.differ("num_iterations", f"a step of echelon has {updates} updates, all with the learning rate of the step.")


_METHODS: Mapping[str, Callable[[Ledger, str], None]] = {
    "dpo": _put_dpo, "ipo": _put_dpo, "orpo": _put_orpo, "simpo": _put_cpo, "cpo": _put_cpo, "kto": _put_kto,
    "grpo": put_grpo, "gkd": _put_distill, "rm": _put_reward, "reward": _put_reward,
}  # fmt: skip
"""The methods by `rl` of Axolotl, `stage` of LLaMA-Factory, and the trainer of TRL."""


def _put_dropout(ledger: Ledger) -> None:
    name, text = ledger.find("disable_dropout"), "dropout is that of the model's config"
    if name is not None and ledger.given[name] is True:
        ledger.differ(name, f"{text}, which most have set to 0.")
    elif name is not None and ledger.given[name] is False:
        ledger.need_not(name, f"{text}.")


def _put_beta(ledger: Ledger, *more: str) -> None:
    if ledger.move("objective.beta", *more, "pref_beta", "rl_beta", "dpo_beta", "beta") is None:
        ledger.put("objective.beta", 0.1, "the tool's default")


def _put_smoothing(ledger: Ledger, loss: str) -> None:
    name = ledger.find("dpo_label_smoothing", "label_smoothing")
    if name is not None and ledger.given[name] and loss in SMOOTHED:
        ledger.move("objective.label_smoothing", "dpo_label_smoothing", "label_smoothing")
    elif name is not None and ledger.given[name]:
        ledger.need_not(name, f"it has no effect with the loss {loss}.")


def carry_v1_objective(ledger: Ledger, read: Read, asked: str | None) -> Answers | None:
    """Import the objective of a LLaMA-Factory v1 file and return what it compares, if it does.

    The command specifies it, not the file: preference pairs are for DPO or for a reward model.
    """
    kinds = {source.get("format") == "preference" or "chosen" in source.get("fields", {}) for source in read.train}
    if kinds != {True}:
        if ledger.find("pref_beta", "pref_loss") is not None:
            ledger.remark("the data has no preference pairs, so pref_beta and pref_loss have no effect.")
        for name in ("pref_beta", "pref_loss", "pref_ftx", "simpo_gamma", "dpo_label_smoothing", "ld_alpha"):
            if ledger.find(name) is not None:
                ledger.need_not(name, "the data has no preference pairs.")
        return None
    if asked == "dpo":
        _put_dpo(ledger, "--trainer dpo")
    elif asked == "reward":
        _put_reward(ledger, "--trainer reward")
    else:
        ledger.refuse(
            "train_dataset", "the data has preference pairs, for llamafactory-cli dpo or rm, and the file does not "
            "specify which; import it with --trainer dpo or --trainer reward."
        )  # fmt: skip
    return "pairs"
