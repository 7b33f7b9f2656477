"""Files for GRPO become the recipe of the same training, or are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from echelon.foreign.importers import Imported, import_recipe
from echelon.ground.errors import ConfigError
from echelon.recipe.document import Recipe
from echelon.recipe.load import parse_recipe
from echelon.recipe.objective import ObjectiveConfig
from echelon.recipe.rollout import RewardConfig, RolloutConfig

# As Axolotl's pages show it, with a function that makes the prompts and two that judge the answers.
AXOLOTL: dict[str, Any] = {
    "base_model": "m", "rl": "grpo", "chat_template": "tokenizer_default", "micro_batch_size": 2, "max_steps": 200,
    "gradient_accumulation_steps": 4, "learning_rate": 5e-6, "sequence_len": 512, "skip_prepare_dataset": True,
    "vllm": {"host": "0.0.0.0", "port": 8000, "max_model_len": 2048},
    "trl": {
        "use_vllm": True, "vllm_server_host": "0.0.0.0", "vllm_lora_sync": True, "num_generations": 4,
        "max_completion_length": 256, "temperature": 0.7, "reward_weights": [1.0, 0.5],
        "reward_funcs": ["rewards.accuracy_reward", "my.package.rewards.format_reward"],
    },
    "datasets": [{"path": "openai/gsm8k", "name": "main", "type": "rewards.prompt_transform", "split": "train"}],
}  # fmt: skip
# As a configuration of TRL's script: `trl grpo --config FILE`.
TRL: dict[str, Any] = {
    "model_name_or_path": "m", "dataset_name": "o/n", "num_generations": 8, "max_completion_length": 128,
    "reward_funcs": ["think_format_reward", "my_lib.rewards.custom"], "log_completions": True,
}  # fmt: skip


def bring_in(folder: Path, given: dict[str, Any], trainer: str | None = None) -> tuple[Recipe, Imported]:
    (folder / "file.json").write_text(json.dumps(given))
    found = import_recipe(folder / "file.json", trainer=trainer)
    return parse_recipe(found.text, "imported")[0], found


def trl(**changes: Any) -> dict[str, Any]:
    return {**AXOLOTL, "trl": {**AXOLOTL["trl"], **changes}}


def test_axolotl(tmp_path: Path) -> None:
    recipe, found = bring_in(tmp_path, AXOLOTL)
    assert recipe.objective == ObjectiveConfig(name="grpo", normalize="token", router_loss=False)
    assert recipe.rollout == RolloutConfig(group_size=4, max_new_tokens=256, temperature=0.7)
    assert recipe.reward == (
        RewardConfig(name="rewards:accuracy_reward"),
        RewardConfig(name="my.package.rewards:format_reward", weight=0.5),
    )
    assert (recipe.global_batch_size, recipe.train.steps, recipe.data.sequence_len) == (8, 200, 512 + 256)
    [source] = recipe.data.train
    assert (source.path, source.format) == ("path/to/prompts.jsonl", "prompt")
    differs = {entry.name: entry.text for entry in found.entries if entry.fate == "differs"}
    assert "write them to path/to/prompts.jsonl" in differs["datasets.0.type"]
    assert "a function gets (answers, records)" in differs["trl.reward_funcs"]
    assert {entry.fate for entry in found.entries if entry.name.startswith(("vllm", "trl.use_vllm"))} == {"needless"}


def test_axolotl_with_prompts_in_a_file(tmp_path: Path) -> None:
    recipe, _ = bring_in(tmp_path, {**AXOLOTL, "datasets": [{"path": "prompts.jsonl"}]})
    assert [(source.path, source.format) for source in recipe.data.train] == [("prompts.jsonl", "prompt")]


def test_trl(tmp_path: Path) -> None:
    recipe, _ = bring_in(tmp_path, TRL, "grpo")
    assert recipe.objective == ObjectiveConfig(name="grpo", normalize="token", router_loss=False)
    assert recipe.rollout == RolloutConfig(group_size=8, max_new_tokens=128)
    think, custom = recipe.reward
    assert (think.name, custom.name) == ("regex", "my_lib.rewards:custom")
    assert think.options == {"pattern": r"^<think>(?!.*<think>)(.*?)</think>.*$"}
    assert recipe.optim.learning_rate == 1e-6 and recipe.global_batch_size == 8
    [source] = recipe.data.train
    assert (source.path, source.format, source.fields) == ("o/n", "hub", {"prompt": "prompt"})


def test_the_column_of_the_prompts(tmp_path: Path) -> None:
    """As scripts around TRL's trainer name it."""
    recipe, _ = bring_in(tmp_path, {**TRL, "dataset_prompt_column": "problem"}, "grpo")
    assert recipe.data.train[0].fields == {"prompt": "problem"}


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"loss_type": "grpo"}, {"normalize": "sequence"}),
    "dr grpo": (
        {"loss_type": "dr_grpo", "scale_rewards": "none"}, {"normalize": "constant", "advantage": "centered"}
    ),
    "scale_rewards as it was": ({"scale_rewards": False}, {"normalize": "token", "advantage": "centered"}),
    "clip": ({"epsilon": 0.1}, {"normalize": "token", "clip": (0.1, 0.1)}),
    "asymmetric clip": ({"epsilon_high": 0.28}, {"normalize": "token", "clip": (0.2, 0.28)}),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
        {"normalize": "sequence", "ratio": "sequence", "clip": (3e-4, 4e-4)},
    ),
    "kl": ({"beta": 0.04}, {"normalize": "token", "kl_weight": 0.04, "kl_unbiased": True}),
    "kl as it was": (
        {"beta": 0.04, "use_bias_correction_kl": False}, {"normalize": "token", "kl_weight": 0.04}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_variant_is_that_of_the_file(tmp_path: Path, name: str) -> None:
    changes, expected = CASES[name]
    recipe, _ = bring_in(tmp_path, {**TRL, **changes}, "grpo")
    assert recipe.objective == ObjectiveConfig(name="grpo", **expected, router_loss=False)


def test_keys_that_only_grpo_has_name_the_trainer(tmp_path: Path) -> None:
    recipe, _ = bring_in(tmp_path, {**TRL, "scale_rewards": "none"})
    assert recipe.objective.name == "grpo" and recipe.objective.advantage == "centered"


def test_steps_of_several_updates_are_counted_once(tmp_path: Path) -> None:
    given = {**TRL, "num_iterations": 4, "max_steps": 100, "warmup_steps": 10, "save_steps": 50, "logging_steps": 1}
    recipe, found = bring_in(tmp_path, given, "grpo")
    assert (recipe.rollout.updates, recipe.train.steps, recipe.optim.warmup) == (4, 25, 3)
    assert recipe.checkpoint.every == 13 and recipe.train.log_every == 1
    assert any("all with the learning rate of the step" in entry.text for entry in found.entries)


def test_a_file_without_rewards_says_what_to_set(tmp_path: Path) -> None:
    given = {key: value for key, value in TRL.items() if key != "reward_funcs"}
    recipe, found = bring_in(tmp_path, given, "grpo")
    assert recipe.reward == (RewardConfig(name="rewards:reward"),)
    assert "the file names no reward; set reward" in " ".join(found.notes)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({**TRL, "loss_type": "cispo"}, "loss_type: cispo: echelon supports the losses grpo, dr_grpo, dapo, bnpo"),
        ({**TRL, "scale_rewards": "batch"}, "scale_rewards: batch: echelon divides by the deviation of a group"),
        ({**TRL, "delta": 2.0}, "delta: 2.0: GRPO has the losses"),
        ({**TRL, "top_entropy_quantile": 0.2}, "top_entropy_quantile: 0.2: GRPO has the losses"),
        ({**TRL, "multi_objective_aggregation": "normalize_then_sum"}, "multi_objective_aggregation: normalize_then"),
        ({**TRL, "repetition_penalty": 1.1}, "repetition_penalty: 1.1: answers are drawn with a temperature"),
        ({**TRL, "sync_ref_model": True}, "sync_ref_model: true"),
        ({**TRL, "steps_per_generation": 4}, "steps_per_generation: 4: TRL makes several updates with different"),
        ({**TRL, "generation_batch_size": 64}, "generation_batch_size: 64: TRL makes several updates"),
        ({**TRL, "reward_funcs": ["org/reward-model"]}, "reward_funcs: .*org/reward-model is a reward model"),
        ({**TRL, "reward_weights": [1.0]}, "reward_weights: .*there are 2 rewards"),
        (
            {**TRL, "loss_type": "grpo", "mask_truncated_completions": True},
            "mask_truncated_completions: true: the loss grpo also divides",
        ),
        ({**TRL, "num_generations": 3}, "train.global_batch_size=8.*which rollout.group_size=3 does not divide"),
        (trl(beta=0.001), "beta: 0.001: TRL's default of use_bias_correction_kl"),
        (trl(async_prefetch=True), "async_prefetch: true: the answers of a step are drawn with the weights of that"),
        (trl(vllm_sync_interval=5), "vllm_sync_interval: 5: the answers of a step"),
        (trl(rollout_func="my.rollout"), "rollout_func: my.rollout"),
        ({**AXOLOTL, "rl": "gdpo"}, "rl: gdpo is not supported"),
    ],
)
def test_other_training_is_refused(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bring_in(tmp_path, given, None if "rl" in given else "grpo")
