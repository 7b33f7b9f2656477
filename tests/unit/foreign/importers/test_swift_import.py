"""Files of ms-swift: the methods, the defaults that differ from those of its Trainer, the datasets, what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from echelon.foreign.importers import Amounts, Imported, import_recipe
from echelon.ground.errors import ConfigError
from echelon.recipe.document import Recipe
from echelon.recipe.load import parse_recipe

SFT: dict[str, Any] = {
    "model": "Qwen/Qwen2.5-7B-Instruct", "torch_dtype": "bfloat16", "tuner_type": "lora",
    "target_modules": "all-linear", "dataset": ["a.jsonl#500", "b.jsonl"], "split_dataset_ratio": 0.1,
    "max_length": 2048, "system": "Be brief.", "num_train_epochs": 1, "warmup_ratio": 0.05, "save_steps": 50,
    "save_total_limit": 2, "model_author": "me",
}  # fmt: skip


def bring_in(folder: Path, given: dict[str, Any], devices: int | None = None) -> tuple[Recipe, Imported]:
    (folder / "sft.yaml").write_text(json.dumps(given))
    found = import_recipe(folder / "sft.yaml", amounts=Amounts(devices))
    return parse_recipe(found.text, "imported")[0], found


def test_fine_tuning(tmp_path: Path) -> None:
    """A file without accumulation has steps of about 16 samples over all devices; held-out data alone is evaluated."""
    recipe, found = bring_in(tmp_path, SFT, devices=4)
    assert found.tool == "ms-swift" and recipe.model.checkpoint == "Qwen/Qwen2.5-7B-Instruct"
    adapter = recipe.adapter
    assert (adapter.method, adapter.r, adapter.alpha, adapter.dropout) == ("lora", 8, 32, 0.05)
    first, second = recipe.data.train
    assert (first.path, first.max_samples, second.path, second.max_samples) == ("a.jsonl", 500, "b.jsonl", None)
    data = recipe.data
    assert (data.validation_fraction, data.sequence_len, data.on_overlong) == (0.1, 2048, "drop")
    assert (data.system_prompt, data.train_on, data.packing) == ("Be brief.", "assistant", False)
    assert (recipe.global_batch_size, recipe.train.eval_every, recipe.train.precision) == (16, 50, "bf16")
    optim = recipe.optim
    assert (optim.learning_rate, optim.weight_decay, optim.betas, optim.schedule) == (1e-4, 0.1, (0.9, 0.95), "cosine")


def test_all_parameters_have_a_smaller_learning_rate(tmp_path: Path) -> None:
    recipe, _ = bring_in(tmp_path, {**SFT, "tuner_type": "full", "loss_scale": "last_round"})
    assert recipe.adapter.method == "full" and recipe.optim.learning_rate == 1e-5 and recipe.data.train_on == "last"
    assert recipe.global_batch_size == 16


def test_weights_in_four_bits(tmp_path: Path) -> None:
    recipe, _ = bring_in(tmp_path, {**SFT, "quant_bits": 4, "quant_method": "bnb"})
    assert recipe.adapter.method == "qlora" and recipe.adapter.double_quant is True


def test_datasets_of_the_hub(tmp_path: Path) -> None:
    recipe, _ = bring_in(tmp_path, {**SFT, "dataset": "o/n:part#7", "use_hf": True, "val_dataset": ["c.jsonl"]})
    [source] = recipe.data.train
    assert (source.path, source.format, source.split, source.max_samples) == ("o/n/part", "hub", "train", 7)
    assert recipe.data.validation[0].path == "c.jsonl"


METHODS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dpo": ({"beta": 0.2, "rpo_alpha": 0.5}, {"name": "dpo", "loss": "sigmoid", "beta": 0.2, "sft_weight": 0.5}),
    "orpo": ({}, {"name": "orpo", "beta": 0.1}),
    "simpo": ({}, {"name": "simpo", "beta": 2.0, "gamma": 1.0, "sft_weight": 1.0}),
    "cpo": ({"cpo_alpha": 0.0}, {"name": "cpo", "beta": 0.1, "sft_weight": 0.0}),
    "kto": ({"desirable_weight": 2.0}, {"name": "kto", "beta": 0.1, "desirable_weight": 2.0}),
    "rm": ({"center_rewards_coefficient": 0.01}, {"name": "reward", "center_weight": 0.01}),
}


@pytest.mark.parametrize("method", METHODS)
def test_preferences(tmp_path: Path, method: str) -> None:
    more, expected = METHODS[method]
    recipe, _ = bring_in(tmp_path, {**SFT, "rlhf_type": method, **more})
    assert {name: getattr(recipe.objective, name) for name in expected} == expected
    assert recipe.data.train[0].format == ("unpaired_messages" if method == "kto" else "auto")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rlhf_type": "grpo"}, "rlhf_type: grpo: of ms-swift the methods dpo, orpo, simpo, cpo, kto, rm are imported"),
        ({"task_type": "seq_cls", "num_labels": 2}, "task_type: seq_cls: only causal language models are imported"),
        (
            {"dataset": "AI-ModelScope/alpaca"},
            "dataset: AI-ModelScope/alpaca: AI-ModelScope/alpaca is a dataset of Mod",
        ),
        ({"dataset": "swift/self-cognition", "use_hf": True}, "ms-swift fills in the texts of swift/self-cognition"),
        ({"tuner_type": "longlora"}, "tuner_type: longlora: echelon supports full fine-tuning and the adapters"),
        ({"quant_bits": 4, "quant_method": "hqq"}, "quant_method: hqq: 4-bit weights are supported only with"),
        ({"truncation_strategy": "left"}, "truncation_strategy: left: samples that are too long can be cut"),
        ({"loss_scale": "react"}, "loss_scale: react: the targets default, last_round, all are imported"),
        ({"train_dataloader_shuffle": False}, "train_dataloader_shuffle: false: samples are always shuffled"),
        ({"freeze_parameters_ratio": 0.5}, "freeze_parameters_ratio: 0.5: this key is unknown to echelon"),
        ({"enable_dft_loss": True}, "enable_dft_loss: true: this key is unknown to echelon"),
        ({"train_iters": 100}, "train_iters: 100: this key is unknown to echelon"),
    ],
)
def test_other_training_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        bring_in(tmp_path, {**SFT, **changes})
