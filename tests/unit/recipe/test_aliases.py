"""Other tools' spellings of keys are accepted with a message; two spellings of one key are refused."""

from pathlib import Path
from typing import Any

import pytest

from echelon.ground.errors import ConfigError
from echelon.recipe.aliases import ALIASES, NO_EQUIVALENT, apply_aliases
from echelon.recipe.document import Recipe
from echelon.recipe.draft import Draft
from echelon.recipe.keys import recipe_keys
from tests.unit.recipe_samples import SMALL, load_text


def translated(data: dict[str, Any]) -> dict[str, Any]:
    draft = Draft(data, {}, "recipe.yaml")
    apply_aliases(draft)
    return draft.data


def test_a_warm_up_fraction_has_two_spellings(tmp_path: Path) -> None:
    for spelling in ("warmup_ratio", "warmup_steps"):  # the second since `transformers` 5
        recipe, notes = load_text(tmp_path, f"{spelling}: 0.03\n" + SMALL)
        assert recipe.optim.warmup == "3%"
        (note,) = notes
        assert note.endswith(f"line 1: {spelling}: 0.03 is read as optim.warmup: 0.03.")


def test_a_flat_recipe_of_hf_or_axolotl_loads(tmp_path: Path) -> None:
    text = """\
base_model: some/model
run_name: borrowed
output_dir: out
datasets:
  - {path: a.jsonl, type: completion}
val_set_size: 0.05
sequence_len: 512
sample_packing: true
bf16: true
fp16: false
gradient_checkpointing: true
per_device_train_batch_size: 2
global_batch_size: 16
max_steps: 1000
learning_rate: 2e-5
lr_scheduler_type: cosine
warmup_steps: 10
weight_decay: 0.0
max_grad_norm: 1.0
optim: adamw_torch_fused
flash_attn: auto
logging_steps: 5
eval_steps: 50
save_steps: 200
save_total_limit: 2
report_to: [tensorboard]
seed: 42
"""
    recipe, notes = load_text(tmp_path, text)
    assert recipe.model.checkpoint == "some/model"
    assert (recipe.run.name, recipe.run.dir, recipe.run.seed) == ("borrowed", Path("out"), 42)
    assert (recipe.data.train[0].path, recipe.data.train[0].format) == ("a.jsonl", "auto")
    assert (recipe.data.validation_fraction, recipe.data.sequence_len, recipe.data.packing) == (0.05, 512, True)
    assert (recipe.train.precision, recipe.train.activation_checkpointing) == ("bf16", "full")
    assert (recipe.train.micro_batch_size, recipe.global_batch_size, recipe.train.steps) == (2, 16, 1000)
    assert (recipe.optim.name, recipe.optim.learning_rate, recipe.optim.warmup) == ("adamw", 2e-5, 10)
    assert (recipe.train.log_every, recipe.train.eval_every) == (5, 50)
    assert (recipe.checkpoint.every, recipe.checkpoint.keep_last) == (200, 2)
    assert (recipe.track, recipe.model.attn_implementation) == (("tensorboard",), None)
    assert len(notes) == len(text.splitlines()) - 1  # one message per key; `datasets` has two lines
    where = tmp_path / "recipe.yaml"
    assert f"{where}, line 12: per_device_train_batch_size: 2 is read as train.micro_batch_size: 2." in notes
    assert f"{where}, line 10: fp16: false is read as train.precision left unset." in notes


def test_the_sections_of_torchtitan_are_understood() -> None:
    theirs = {
        "job": {"dump_folder": "out"},
        "training": {"steps": 10, "max_norm": 0.5, "num_tokens_per_train_step": 4096, "seq_len": 512},
        "optimizer": {"name": "AdamW", "lr": 8e-4},
        "lr_scheduler": {"warmup_steps": 3, "min_lr_factor": 0.1},
        "parallelism": {"data_parallel_shard_degree": -1, "tensor_parallel_degree": 2},
        "checkpoint": {"interval": 500, "keep_latest_k": 2},
        "activation_checkpoint": {"mode": "selective"},
    }
    assert translated(theirs) == {
        "run": {"dir": "out"},
        "train": {"steps": 10, "global_batch_tokens": 4096, "activation_checkpointing": "selective"},
        "data": {"sequence_len": 512},
        "optim": {"name": "adamw", "learning_rate": 8e-4, "max_grad_norm": 0.5, "warmup": 3,
                  "min_learning_rate_fraction": 0.1},
        "parallel": {"dp_shard": "auto", "tp": 2},
        "checkpoint": {"every": 500, "keep_last": 2},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"adapter": "lora", "lora_r": 8, "lora_alpha": 16, "lora_target_linear": True},
         {"adapter": {"method": "lora", "r": 8, "alpha": 16, "target_modules": "all-linear"}}),
        ({"lora_rank": 8, "adapter": "lora", "lora_target": "all"},
         {"adapter": {"method": "lora", "r": 8, "target_modules": "all-linear"}}),
        ({"adapter": None}, {}),
        ({"cutoff_len": 2048, "template": "chatml"}, {"data": {"sequence_len": 2048, "chat_template": "chatml"}}),
        ({"max_steps": -1, "num_train_epochs": 3}, {"train": {"epochs": 3}}),
        ({"bf16": False}, {"train": {"precision": "fp32"}}),
        ({"bf16": "auto"}, {"train": {"precision": "auto"}}),
        ({"gradient_checkpointing": False}, {"train": {"activation_checkpointing": "none"}}),
        ({"flash_attn": "fa2"}, {"model": {"attn_implementation": "flash_attention_2"}}),
        ({"report_to": "none"}, {}),
        ({"report_to": "wandb"}, {"track": ["wandb"]}),
        ({"optim": {"lr": 1}}, {"optim": {"learning_rate": 1}}),
        ({"lr_scheduler": "cosine"}, {"optim": {"schedule": "cosine"}}),
        ({"parallel": "zero3"}, {"parallel": "fsdp"}),
        ({"parallel": "full_shard"}, {"parallel": "fsdp"}),
        ({"parallel": "shard_grad_op"}, {"parallel": "zero2"}),
        ({"parallel": "no_shard"}, {"parallel": "ddp"}),
        ({"parallel": "hybrid_shard"}, {"parallel": "hsdp"}),
    ],
)  # fmt: skip
def test_spellings(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    assert translated(theirs) == ours


def test_echelons_own_keys_give_no_message(tmp_path: Path) -> None:
    assert load_text(tmp_path, SMALL + "parallel: fsdp\ncheckpoint: {every: 5}\n")[1] == []


def test_overrides_may_use_aliases(tmp_path: Path) -> None:
    recipe, notes = load_text(tmp_path, SMALL, "lr=1e-2", "parallel=zero3", "num_train_epochs=2")
    assert (recipe.optim.learning_rate, recipe.parallel) == (0.01, "fsdp")
    assert (recipe.train.steps, recipe.train.epochs) == (None, 2.0)
    assert notes[1] == "command line: parallel: zero3 is read as parallel: fsdp."


@pytest.mark.parametrize(
    ("added", "message"),
    [
        ("lr: 1e-3", "line 13: lr is another spelling of optim.learning_rate, which is also given "
         "(line 12); keep one."),
        ("parallel: fsdp\ntp_size: 2", "line 14: tp_size is another spelling of parallel.tp"),
        ("base_model: a\nmodel_name_or_path: b", "line 14: model_name_or_path is another spelling of "
         "model.checkpoint, which is also given (line 13)"),
        ("gradient_accumulation_steps: 4", "line 13: gradient_accumulation_steps has no equivalent in a "
         "recipe: gradient accumulation is derived from the global batch: set train.global_batch_size"),
        ("training: {gradient_accumulation_steps: 4}", "line 13: training.gradient_accumulation_steps"),
        ("deepspeed: ds.json", "line 13: deepspeed=ds.json must be a mapping of keys; to train with DeepSpeed"),
        ("training: {stepps: 4}", "line 13: training is not a recipe key; did you mean train?"),
        ("per_device_train_batch_size: 0",
         "line 13: train.micro_batch_size=0 must be at least 1 or auto; use 1 or more."),
    ],
)  # fmt: skip
def test_contradictions_and_keys_without_a_meaning_are_refused(tmp_path: Path, added: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_text(tmp_path, SMALL + added + "\n")
    assert str(caught.value).replace(f"{tmp_path / 'recipe.yaml'}, ", "").startswith(message)


def test_the_override_of_a_key_without_a_meaning_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="command line: gradient_accumulation_steps has no equivalent"):
        load_text(tmp_path, SMALL, "gradient_accumulation_steps=2")


def test_every_alias_leads_to_a_key_and_hides_none() -> None:
    keys = recipe_keys(Recipe)
    assert set(ALIASES.values()) <= set(keys)
    # `adapter` and `optim` are sections here, and single keys in other tools.
    assert set(ALIASES) & set(keys) == {"adapter", "optim"}
    assert not set(NO_EQUIVALENT) & (set(keys) | set(ALIASES))
