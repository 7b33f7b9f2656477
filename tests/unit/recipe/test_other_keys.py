"""Keys of earlier versions and other tools' spellings are read, with a message; two spellings of a key are refused."""

import json
import re
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from echelon.ground.errors import ConfigError
from echelon.recipe.aliases import ALIASES, NO_EQUIVALENT, apply_aliases, read_former, replace_former
from echelon.recipe.aliases import FORMER as FORMER_KEYS
from echelon.recipe.document import Recipe
from echelon.recipe.draft import Draft
from echelon.recipe.keys import recipe_keys
from echelon.recipe.load import build_recipe, parse_recipe
from echelon.recipe.render import recipe_mapping
from tests.unit.recipe_samples import RECIPE, SMALL, load_text

FORMER = {
    "train.old": "train.new",
    "launch.pods.tolerations": lambda value: {"launch.pods.patch": {"spec": {"tolerations": value}}},
    "train.needless": lambda value: {},
}


def test_a_renamed_key_takes_the_value_and_says_so():
    draft = Draft({"train": {"old": 3}}, {}, "recipe.yaml")
    assert replace_former(draft, FORMER) == [
        "recipe.yaml: train.old: 3 is of an earlier version and is read as train.new: 3."
    ]
    assert draft.data == {"train": {"new": 3}}


def test_a_key_that_became_part_of_another_is_added_to_it():
    given = {"patch": {"spec": {"nodeName": "a"}}, "tolerations": [{"key": "y"}]}
    draft = Draft({"launch": {"pods": given}}, {}, "recipe.yaml")
    assert len(replace_former(draft, FORMER)) == 1
    assert draft.data["launch"] == {"pods": {"patch": {"spec": {"nodeName": "a", "tolerations": [{"key": "y"}]}}}}


def test_a_needless_key_is_removed_with_its_empty_section():
    draft = Draft({"train": {"needless": 1}, "run": {"name": "a"}}, {}, "recipe.yaml")
    assert replace_former(draft, FORMER) == [
        "recipe.yaml: train.needless: 1 is of an earlier version and is read as nothing; remove it."
    ]
    assert draft.data == {"run": {"name": "a"}}


def test_keys_of_sagemaker_are_parts_of_the_request():
    old = {"sdk": "a", "remote_debug": True, "profiler": {"DisableProfiler": True}, "endpoint": {"nodes": 1}}
    recipe, notes = build_recipe({**RECIPE, "launch": {"sagemaker": old}})
    patch = {"ProfilerConfig": {"DisableProfiler": True}, "RemoteDebugConfig": {"EnableRemoteDebug": True}}
    assert recipe.launch.sagemaker.patch == patch
    assert (
        "recipe: launch.sagemaker.sdk: a is of an earlier version and is read as nothing, because every "
        "job is the same CreateTrainingJob request, sent by boto3; remove it."
    ) in notes
    assert len(notes) == 4
    off = {"sdk": "boto3", "remote_debug": False, "profiler": {}}
    assert build_recipe({**RECIPE, "launch": {"sagemaker": off}})[0].launch.sagemaker.patch == {}


def test_both_spellings_are_refused():
    with pytest.raises(ConfigError, match=r"train\.old is now train\.new, which is also given"):
        replace_former(Draft({"train": {"old": 1, "new": 2}}, {}, "recipe.yaml"), FORMER)
    for key, new in {"objective.clip_low": "clip: [0, 1]", "train.float8_scaling": "precision: fp8_rowwise"}.items():
        section, _, old = key.partition(".")
        with pytest.raises(ConfigError, match=f"line 1: {key} is now {section}.*, which is also given"):
            parse_recipe(f"{section}: {{{old}: 0, {new}}}", "recipe.yaml")


def test_an_override_in_the_earlier_spelling_wins_over_the_file(monkeypatch):
    monkeypatch.setitem(FORMER_KEYS, "train.num_steps", "train.steps")
    recipe, notes = build_recipe(RECIPE, ["train.num_steps=7"])
    assert recipe.train.steps == 7
    assert notes == ["command line: train.num_steps: 7 is of an earlier version and is read as train.steps: 7."]


def test_a_quote_is_read_where_the_job_has_it_now():
    quote = {"hours": 2.0, "usd": 10.0}
    recipe, notes = build_recipe({**RECIPE, "budget": {"quote": quote}})
    assert json.loads(recipe.launch.env["ECHELON_QUOTE"]) == quote
    assert len(notes) == 1 and "budget.quote" in notes[0]


def test_described_machines_are_refused_with_the_file_that_has_them_now():
    machine = {"name": "ml.x9.huge", "gpus": 8, "usd_per_hour": 3}
    with pytest.raises(ConfigError, match=r"extra_types is of .*prices/mine\.yaml .*ml\.x9\.huge: \{gpus: 8\}"):
        build_recipe({**RECIPE, "launch": {"sagemaker": {"extra_types": [machine]}}})


def test_an_override_of_a_part_of_an_earlier_mapping_is_read():
    new, note = read_former(("launch", "kubernetes", "labels", "team"), "nlp", "command line")
    assert new == {
        ("launch", "kubernetes", patch, "metadata", "labels", "team"): "nlp" for patch in ("patch", "pod_patch")
    }
    assert note.startswith("command line: launch.kubernetes.labels: {team: nlp} is of an earlier version")


def test_a_former_value_of_a_key_is_replaced_and_others_are_kept():
    given = {**RECIPE, "engine": "tensorflow"}
    recipe, notes = build_recipe({**given, "tensorflow": {"strategy": "single"}})
    assert recipe.tensorflow.strategy == "multi_worker"
    assert notes == [
        "recipe: tensorflow.strategy: single is of an earlier version and is read as tensorflow.strategy: multi_worker."
    ]
    assert build_recipe(given, ["tensorflow.strategy=mirrored"])[1] == []
    recipe, notes = build_recipe(given, ["tensorflow={strategy: single}"])
    assert recipe.tensorflow.strategy == "multi_worker" and len(notes) == 1


def test_a_quorum_is_read_as_a_reaction_to_losses():
    given = {**RECIPE, "sync": {"name": "quorum", "min_replicas": 2}}
    recipe, notes = build_recipe(given)
    assert recipe.sync.name == "every_step" and recipe.fault.on_lost_process == "continue" and recipe.num_replicas == 2
    assert notes == [
        "recipe: sync.name: quorum is of an earlier version and is read as fault.on_lost_process: continue."
    ]
    recipe, notes = build_recipe(RECIPE, ["sync={name: quorum, replicas: 3}"])
    assert recipe.goes_on == "fault.on_lost_process=continue" and recipe.num_replicas == 3 and len(notes) == 1


OLD = {
    "optim": {"learning_rate": 1e-3, "warmup_steps": 0, "warmup_tokens": 0, "schedule_unit": "tokens"},
    "train": {"steps": 100, "global_batch_size": 2, "eval_every": None, "evals_per_epoch": 2, "precision": "fp8",
              "float8_scaling": "rowwise", "activation_offloading": True, "activation_loading_horizon": 3},
    "checkpoint": {"every_steps": None, "saves_per_epoch": 3},
    "parallel": {"tp": 2, "placement": "spread"},
    "objective": {"name": "grpo", "clip_low": 0.2, "clip_high": 0.28},
    "rollout": {"skip_uniform_groups": True, "skip_truncated": False, "max_new_tokens": 8, "group_size": 2},
    "reward": "exact",
    "mlflow": {"system_metrics": False, "register_model": "mine"},
    "wandb": {"project": "echelon", "entity": "team", "mode": "offline"},
    "prometheus": {"host": "::", "port": 9400},
    "horovod": {"fusion_threshold_mb": 2, "cycle_time_ms": 3.5, "compression": "none"},
    "launch": {
        "torchrun": {"user": "me", "ssh_options": ["-p", "22"]}, "slurm": {"partition": "a", "memory": 0},
        "ray": {"cpus_per_node": 0}, "skypilot": {"file_mounts": {"/a": "s3://b"}},
        "sagemaker": {"max_attempts": 3, "encrypt_traffic": True}, "kubernetes": {"node_selector": {}},
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        ([], "optim.warmup", "0 tokens"), (["optim.warmup_steps=7", "optim.schedule_unit=steps"], "optim.warmup", 7),
        (["optim.warmup_tokens=1K"], "optim.warmup", "1000 tokens"),
        (["optim.warmup_fraction=0.07"], "optim.warmup", "7% of tokens"),
        (["optim.warmup_fraction=null"], "optim.warmup", "0 tokens"), (["optim.warmup=5"], "optim.warmup", 5),
        ([], "train.eval_every", "0.5 epochs"), (["train.evals_per_epoch=null"], "train.eval_every", 100),
        ([], "checkpoint.every", "1/3 epochs"), (["checkpoint.saves_per_epoch=0.3"], "checkpoint.every", "10/3 epochs"),
        ([], "train.precision", "fp8_rowwise"), ([], "train.activation_offloading", 3),
        ([], "parallel.order", ("tp", "pp", "dp_replicate", "dp_shard", "cp")), ([], "objective.clip", (0.2, 0.28)),
        (["rollout.skip_truncated=true"], "rollout.skip", ("uniform", "truncated")),
        (["rollout.skip=[]"], "rollout.skip", ()), (["objective.clip=[0.1, 0.3]"], "objective.clip", (0.1, 0.3)),
        (["objective.clip=[0, 0.3]", "objective.clip_high=0.4"], "objective.clip", (0, 0.4)),
        (["prometheus.address=::1:7", "prometheus.port=8"], "prometheus.address", "::1:8"),
        (["train.activation_offloading=5"], "train.activation_offloading", 5), ([], "mlflow.log_model", "mine"),
        (["rollout.skip_uniform_groups=false"], "rollout.skip", ()), ([], "prometheus.address", ":::9400"),
        ([], "launch.env", {"WANDB_ENTITY": "team", "WANDB_MODE": "offline", "HOROVOD_CYCLE_TIME": "3.5",
         "HOROVOD_FUSION_THRESHOLD": "2097152", "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING": "false"}),
        ([], "launch.torchrun.ssh_options", ("-p", "22", "-l", "me")),
        (["launch.slurm.options={mem: 9G}"], "launch.slurm.options", {"partition": "a", "mem": "9G"}),
        ([], "launch.ray.resources", {"CPU": 0}), ([], "launch.skypilot.patch", {"file_mounts": {"/a": "s3://b"}}),
        ([], "launch.sagemaker.patch", {"RetryStrategy": {"MaximumRetryAttempts": 2},
         "EnableInterContainerTrafficEncryption": True}), ([], "launch.kubernetes.pod_patch", {}),
    ],
)  # fmt: skip
def test_keys_that_became_parts_of_others_mean_what_they_meant(overrides, key, value):
    recipe, notes = build_recipe({**RECIPE, **OLD}, overrides)
    assert attrgetter(key)(recipe) == value
    assert all("of an earlier version" in note or "is read as" in note for note in notes) and len(notes) > 15
    assert build_recipe(recipe_mapping(recipe)) == (recipe, [])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim={warmup_tokens: 5, warmup_fraction: 0.1}", "warmup_tokens=5 and warmup_fraction=0.1 must"),
        ("optim={warmup: 5, warmup_fraction: 0.1}", "warmup_fraction=0.1 and warmup=5 must be a number"),
        ("train.evals_per_epoch=0", "train.eval_every=1/0 epochs must be a number of steps"),
        (
            "train.float8_scaling=row",
            "float8_scaling=row, of an earlier version, must be tensorwise or rowwise; correct",
        ),
        ("optim.schedule_unit=[1]", "optim.schedule_unit=[1], of an earlier version, must be steps or tokens"),
        ("launch.kubernetes.ttl_seconds=-3", "ttl_seconds=-3, of an earlier version, must be a whole number"),
        ("horovod.cycle_time_ms=fast", "horovod.cycle_time_ms, of an earlier version, has a value of another kind"),
        ("launch.kubernetes={node_selector: {a: b}, pod_patch: 5}", "has a value of another kind"),
    ],
)
def test_values_of_earlier_keys_that_mean_nothing_are_refused(override, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        build_recipe({**RECIPE, **OLD}, [override])


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
