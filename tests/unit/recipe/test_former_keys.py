"""Keys of earlier versions are read as those that replace them."""

import json
import re
from operator import attrgetter

import pytest

from echelon.ground.errors import ConfigError
from echelon.recipe.draft import Draft
from echelon.recipe.former_keys import FORMER as FORMER_KEYS
from echelon.recipe.former_keys import read_former, replace_former
from echelon.recipe.load import build_recipe, parse_recipe
from echelon.recipe.render import recipe_mapping
from tests.unit.recipe_samples import RECIPE

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
