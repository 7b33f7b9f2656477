"""Import training from rewards: GRPO of TRL, and of Axolotl, whose section `trl` has the settings of TRL."""

import math
from collections.abc import Mapping
from typing import Any

from echelon.foreign.importers.ledger import Ledger
from echelon.recipe.yaml_text import show_value

_NORMALIZE = {"grpo": "sequence", "dr_grpo": "constant", "dapo": "token", "bnpo": "token"}
_ADVANTAGES = {"group": "normalized", True: "normalized", "none": "centered", False: "centered"}
_TRLS_OWN: Mapping[str, Any] = {
    "think_format_reward": {"name": "regex", "options": {"pattern": r"^<think>(?!.*<think>)(.*?)</think>.*$"}}
}
"""TRL's rewards that are one of echelon's."""
_ACCUMULATION = "gradient_accumulation_steps"
_NO_REWARD = "rewards:reward"
_IN_STEPS = ("train.steps", "optim.warmup", "checkpoint.every", "train.eval_every", "train.log_every")


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
