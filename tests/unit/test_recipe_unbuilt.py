"""A feature that is not built is refused with key, value and alternatives; built features pass."""

from pathlib import Path

import pytest

from echelon.errors import ConfigError
from echelon.recipe import Recipe, check_built
from echelon.recipe.keys import recipe_keys
from echelon.recipe.unbuilt import UNBUILT, Unbuilt
from recipe_samples import SMALL, load_text

REFUSED = {
    "tensorflow.strategy": ("engine=tensorflow", "tensorflow.strategy=parameter_server"),
}

BUILT = [
    "data.train.0.format=jsonl", "data.train.0.fields={text: body}", "train.precision=bf16",
    "data.document_mask=false", "data.document_mask=true", "data.packing=false", "data.on_overlong=drop",
    "train.precision=fp32", "train.precision=fp16", "train.deterministic=true", "train.master_weights=bf16_kahan",
    "train.precision=fp8", "optim.name=muon", "optim.no_decay=[]", "optim.learning_rate_multipliers={x: 2}",
    "train.compile=true", "train.activation_checkpointing=selective",
    "train.activation_checkpointing=full", "train.activation_offloading=true",
    "train.activation_checkpointing={every: 2}", "train.activation_checkpointing.memory_budget=0.5",
    "train={steps: 1, global_batch_size: 8, activation_offloading: true, activation_loading_horizon: 2}",
    "train.micro_batch_size=2", "parallel=hsdp", "parallel.cpu_offload=true",
    "parallel={dp_shard: auto, prefetch: 2}", "parallel={cp: 2, cp_method: ulysses}",
    "parallel={tp: 2, sequence_parallel: true}",
    "parallel={dp_replicate: 2, dp_shard: 2, placement: spread}", "parallel.order=[dp_shard, dp_replicate]",
    "parallel={dp_replicate: 2, dp_shard: auto, reshard_after_forward: false, reduce_gradients: last}",
    "checkpoint={every_steps: 7, keep_last: 1, async: false}", "checkpoint.every_steps=auto",
    "fault.mean_hours_between_failures=8", "evaluate.batches=3",
    "evaluate={prompts: [Once], prompt_tokens: 3, select_by: code, early_stopping: 3}",
    "checkpoint.keep_best=true", "profile={steps: [20, 5], ranks: [0, 1], memory: true}",
    "track=[tensorboard, mlflow, wandb]", "mlflow.experiment=other", "wandb.mode=offline",
    "tokenizer.train.vocab_size=500", "tokenizer=some/folder", "model.attn_implementation=eager", "train.epochs=2",
    "model.trust_remote_code=true", "fault.max_restarts=0", "adapter.method=full", "adapter.method=qlora",
    "model.new_tokens=['<|im_end|>']",
    "fault={on_bad_step: rollback, max_bad_steps: 2, spike_factor: 5, spike_window: 50}", "fault.on_bad_step=skip",
    "fault.verify_replicas_every=10",
    "data.train.0.format=parquet", "data.train.0.split=train", "data.train.0.fields={input_ids: ids}",
    "data.train.0={path: x, format: sharegpt, fields: {conversations: talk, from: who}}", "data.chat_template=chatml",
    "data.validation=[{path: x, format: messages}]", "data.train_on=last", "data.system_prompt=Hello",
    "data.deduplicate=true", "data.document_separator=null", "data.max_broken_fraction=0",
    "launch={to: local, nodes: '1:4', env: {A: b}}",
    "data.train.0.weight=2", "train.batch_ramp={from: 4, to: 8, over_tokens: 1e6, increment: 2}", "optim.schedule=wsd",
    "optim={learning_rate: 1, schedule_unit: tokens, warmup_tokens: 10}",
]  # fmt: skip


@pytest.mark.parametrize("row", UNBUILT, ids=lambda row: row.key)
def test_each_row_refuses_a_value(tmp_path: Path, row: Unbuilt) -> None:
    overrides = REFUSED[row.key]
    with pytest.raises(ConfigError) as caught:
        load_text(tmp_path, SMALL, *overrides)
    assert " is not built yet; possible now: " in str(caught.value)
    # The key as the user writes it, with the index of a list entry.
    assert str(caught.value).startswith(row.key.replace("[]", ".0") + "=")


def test_the_message_states_key_value_and_alternatives(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_text(tmp_path, SMALL, *REFUSED["tensorflow.strategy"])
    possible = "multi_worker, mirrored or single"
    assert str(caught.value) == (f"tensorflow.strategy=parameter_server is not built yet; possible now: {possible}.")


@pytest.mark.parametrize("override", BUILT)
def test_built_features_pass(tmp_path: Path, override: str) -> None:
    check_built(load_text(tmp_path, SMALL, override)[0])


def test_each_row_names_a_recipe_key_once() -> None:
    keys = [row.key for row in UNBUILT]
    assert len(set(keys)) == len(keys)
    assert set(keys) <= set(recipe_keys(Recipe))
