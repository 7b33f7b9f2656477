"""Values that a file does not set get the tool's default in the recipe."""

import json
from pathlib import Path
from typing import Any

import pytest

from echelon.foreign.importers import Amounts, import_recipe
from echelon.foreign.importers.ledger import defaults_of
from echelon.recipe.document import Recipe
from echelon.recipe.load import parse_recipe

CHATS = [{"path": "a.jsonl", "type": "chat_template"}]


def imported(
    tmp_path: Path, given: dict[str, Any], amounts: Amounts | None = None, trainer: str | None = None
) -> Recipe:
    (tmp_path / "sets.yaml").write_text("faq: {path: faq.json, source: local, converter: alpaca, size: 500}\n")
    (tmp_path / "file.json").write_text(json.dumps(given))
    return parse_recipe(import_recipe(tmp_path / "file.json", None, amounts, trainer).text, "imported")[0]


def values(recipe: Recipe) -> dict[str, Any]:
    """The values of a recipe that come from a tool's defaults."""
    train, optim, data = recipe.train, recipe.optim, recipe.data
    return {
        "batch": (train.micro_batch_size, recipe.global_batch_size), "length": (train.epochs, train.steps),
        "rate": (optim.name, optim.learning_rate, optim.schedule, optim.min_learning_rate_fraction),
        "warmup": optim.warmup, "decay": (optim.weight_decay, optim.no_decay),
        "moments": (optim.betas, optim.eps, optim.max_grad_norm), "seed": recipe.run.seed,
        "precision": (train.precision, train.activation_checkpointing),
        "data": (data.sequence_len, data.packing, data.document_mask, data.on_overlong, data.train_on),
        "rhythm": (train.log_every, train.eval_every, recipe.checkpoint.every),
    }  # fmt: skip


COMMON = {
    "decay": (0.0, ("norms", "biases")), "moments": ((0.9, 0.999), 1e-8, 1.0), "seed": 42, "warmup": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("given", "trainer", "expected"),
    [
        (
            # build/schemas of Axolotl: sequence_len 512, cosine, warm-up of 0.03, a save each epoch, no evaluation
            {"base_model": "m", "datasets": CHATS, "learning_rate": 1e-4},
            None,
            {"batch": (1, 1), "length": (1, None), "rate": ("adamw", 1e-4, "cosine", 0.0), "warmup": "3%",
             "precision": ("auto", "none"), "data": (512, False, "auto", "drop", "assistant"),
             "rhythm": (1, None, "1 epochs")},
        ),
        (
            # LLaMA-Factory: cutoff_len 2048, gradient checkpointing; the rest is TrainingArguments'
            {"stage": "sft", "finetuning_type": "full", "model_name_or_path": "m", "dataset": "d"},
            None,
            {"batch": (8, 8), "length": (3, None), "rate": ("adamw", 5e-5, "linear", 0.0),
             "precision": ("fp32", "full"), "data": (2048, False, "auto", "cut", "assistant"),
             "rhythm": (500, None, 500)},
        ),
        (
            # v1: torch.optim.AdamW as it is, a constant rate, bf16
            {"model": "m", "model_class": "llm", "train_dataset": "sets.yaml"},
            None,
            {"batch": (1, 1), "length": (3, None), "rate": ("adamw", 1e-4, "constant", 0.1),
             "decay": (0.01, ()), "precision": ("bf16", "full"), "data": (2048, False, "auto", "cut", "assistant"),
             "rhythm": (1, None, 100)},
        ),
        (
            # TRL's SFTConfig: everything is learned unless assistant_only_loss is set; logging_steps is 10, not 500
            {"model_name_or_path": "m", "dataset_name": "o/n"},
            "sft",
            {"batch": (8, 8), "length": (3, None), "rate": ("adamw", 2e-5, "linear", 0.0),
             "precision": ("bf16", "full"), "data": (1024, False, "auto", "cut", "all"),
             "rhythm": (10, None, 500)},
        ),
        (
            # TRL's DPOConfig
            {"model_name_or_path": "m", "dataset_name": "o/n"},
            "dpo",
            {"batch": (8, 8), "length": (3, None), "rate": ("adamw", 1e-6, "linear", 0.0),
             "precision": ("bf16", "full"), "data": (1024, False, "auto", "cut", "assistant"),
             "rhythm": (10, None, 500)},
        ),
        (
            # transformers' Trainer with run_clm.py: texts are joined and cut
            {"model_name_or_path": "m", "train_file": "a.txt"},
            None,
            {"batch": (8, 8), "length": (3, None), "rate": ("adamw", 5e-5, "linear", 0.0),
             "precision": ("fp32", "none"), "data": (1024, True, "auto", "cut", "assistant"),
             "rhythm": (500, None, 500)},
        ),
    ],
    ids=["axolotl", "llamafactory", "llamafactory-v1", "sft", "dpo", "transformers"],
)  # fmt: skip
def test_missing_values_get_the_tools_defaults(
    tmp_path: Path, given: dict[str, Any], trainer: str | None, expected: dict[str, Any]
) -> None:
    assert values(imported(tmp_path, given, trainer=trainer)) == COMMON | expected


def test_defaults_of_transformers_and_peft_equal_the_installed_versions(tmp_path: Path) -> None:
    from peft import LoraConfig
    from transformers import TrainingArguments

    theirs, lora, ours = TrainingArguments(str(tmp_path)), LoraConfig(), defaults_of("hf", "transformers")
    assert (ours.micro_batch_size, ours.epochs) == (theirs.per_device_train_batch_size, theirs.num_train_epochs)
    assert (ours.learning_rate, ours.schedule) == (theirs.learning_rate, theirs.lr_scheduler_type)
    assert (ours.weight_decay, ours.warmup) == (theirs.weight_decay, theirs.warmup_steps)
    assert (*ours.betas, ours.eps) == (theirs.adam_beta1, theirs.adam_beta2, theirs.adam_epsilon)
    assert (ours.max_grad_norm, ours.seed) == (theirs.max_grad_norm, theirs.seed)
    assert (ours.log_every, ours.saves) == (theirs.logging_steps, theirs.save_steps)
    assert (ours.precision == "fp32", ours.recomputes) == (
        not (theirs.bf16 or theirs.fp16),
        bool(theirs.gradient_checkpointing),
    )
    assert (ours.rank, ours.dropout, lora.lora_alpha) == (lora.r, lora.lora_dropout, 8)


@pytest.mark.parametrize(
    ("given", "trainer", "expected"),
    [
        ({"base_model": "m", "datasets": CHATS, "learning_rate": 1e-4, "adapter": "lora", "lora_r": 64,
          "lora_target_linear": True}, None, (64, 8, 0.0, "all-linear")),
        ({"stage": "sft", "finetuning_type": "lora", "model_name_or_path": "m", "dataset": "d"},
         None, (8, 16, 0.0, "all-linear")),
        ({"stage": "sft", "model_name_or_path": "m", "dataset": "d", "lora_rank": 4}, None, (4, 8, 0.0, "all-linear")),
        ({"model": "m", "model_class": "llm", "train_dataset": "sets.yaml", "peft_config": {"name": "lora"}},
         None, (8, 16, 0.05, "all-linear")),
        ({"model_name_or_path": "m", "dataset_name": "o/n", "use_peft": True},
         "sft", (16, 32, 0.05, ("q_proj", "v_proj"))),
        ({"model_name_or_path": "m", "train_file": "a.txt", "lora_config": {"r": 8}},
         None, (8, 8, 0.0, ("q_proj", "v_proj"))),
    ],
    ids=["axolotl", "llamafactory", "rank", "llamafactory-v1", "trl", "peft"],
)  # fmt: skip
def test_missing_adapter_values_get_the_tools_defaults(
    tmp_path: Path, given: dict[str, Any], trainer: str | None, expected: tuple[Any, ...]
) -> None:
    adapter = imported(tmp_path, given, trainer=trainer).adapter
    assert (adapter.r, adapter.alpha, adapter.dropout, adapter.target_modules) == expected


def test_llamafactorys_frozen_weights_keep_their_dtype(tmp_path: Path) -> None:
    given = {"stage": "sft", "finetuning_type": "lora", "model_name_or_path": "m", "dataset": "d"}
    assert imported(tmp_path, given).train.precision == "auto"


def test_axolotls_own_warmup_is_no_longer_than_100_steps(tmp_path: Path) -> None:
    given = {"base_model": "m", "datasets": CHATS, "learning_rate": 1e-4}
    assert imported(tmp_path, given, Amounts(samples=1000)).optim.warmup == 30
    assert imported(tmp_path, given, Amounts(samples=9000)).optim.warmup == 100


def test_processes_with_the_same_data_are_not_counted_twice(tmp_path: Path) -> None:
    given = {"base_model": "m", "datasets": CHATS, "learning_rate": 1e-4, "micro_batch_size": 2,
             "tensor_parallel_size": 2, "context_parallel_size": 2}  # fmt: skip
    assert imported(tmp_path, given, Amounts(devices=8)).global_batch_size == 4


@pytest.mark.parametrize(("asked", "learned"), [(True, "assistant"), (False, "all"), (None, "all")])
def test_targets_of_trl_are_explicit(tmp_path: Path, asked: bool | None, learned: str) -> None:
    given = {"model_name_or_path": "m", "dataset_name": "o/n", "assistant_only_loss": asked, "packing": True}
    recipe = imported(tmp_path, given, trainer="sft")
    assert (recipe.data.train_on, recipe.data.packing, recipe.data.document_mask) == (learned, True, True)


def test_v1_has_its_own_spellings(tmp_path: Path) -> None:
    given = {
        "model": "Qwen/Qwen3-0.6B", "model_class": "llm", "train_dataset": "sets.yaml", "output_dir": "out/x",
        "peft_config": {"name": "lora", "r": 4, "lora_alpha": 9, "lora_dropout": 0.1, "target_modules": "all"},
        "quant_config": {"name": "bnb", "quantization_bit": 4}, "kernel_config": {"name": "auto"},
        "dist_config": {"name": "fsdp2", "dcp_path": None}, "global_batch_size": 32, "micro_batch_size": 2,
        "cutoff_len": 300, "learning_rate": 2e-4, "max_steps": 7, "save_epochs": 0.5, "sample_backend": "hf",
        "optim_config": {"name": "muon", "momentum": 0.9, "wd": 0.2, "nesterov": True, "ns_steps": 5},
    }  # fmt: skip
    recipe = imported(tmp_path, given)
    adapter = recipe.adapter
    assert (recipe.model.checkpoint, recipe.run.dir) == ("Qwen/Qwen3-0.6B", Path("out/x"))
    assert (adapter.method, adapter.r, adapter.alpha, adapter.dropout) == ("qlora", 4, 9, 0.1)
    assert (recipe.global_batch_size, recipe.train.micro_batch_size, recipe.train.steps) == (32, 2, 7)
    assert (recipe.data.sequence_len, recipe.checkpoint.every) == (300, "0.5 epochs")
    assert (recipe.optim.name, recipe.optim.momentum, recipe.optim.weight_decay) == ("muon", 0.9, 0.2)
    assert recipe.optim.betas == (0.9, 0.95)
    (source,) = recipe.data.train
    assert (source.path, source.format, source.max_samples) == ("faq.json", "alpaca", 500)


def test_columns_and_splits_of_the_handbook(tmp_path: Path) -> None:
    given = {
        "model_name_or_path": "m", "max_seq_length": 2048, "chat_template": "{% for m in messages %}x{% endfor %}",
        "dataset_mixture": {
            "datasets": [{"id": "o/chats", "config": "all", "split": "train_sft", "columns": ["messages"],
                          "weight": 0.25},
                         {"id": "o/more", "columns": ["messages"], "weight": 1}],
            "seed": 0, "test_split_size": 0.05,
        },
    }  # fmt: skip
    recipe = imported(tmp_path, given)
    first, second = recipe.data.train
    assert (first.path, first.format, first.split) == ("o/chats/all", "hub", "train_sft[:25%]")
    assert (second.split, second.fields) == ("train", {"messages": "messages"})
    assert (recipe.data.validation_fraction, recipe.data.chat_template) == (0.05, given["chat_template"])
