"""Keys of earlier versions are read as those that replace them."""

import json

import pytest

from echelon.ground.errors import ConfigError
from echelon.recipe.draft import Draft
from echelon.recipe.former_keys import FORMER as FORMER_KEYS
from echelon.recipe.former_keys import read_former, replace_former
from echelon.recipe.load import build_recipe

MINIMAL = {
    "run": {"name": "tiny"},
    "optim": {"learning_rate": 1e-3},
    "model": {"config": {"model_type": "llama", "hidden_size": 64}},
    "tokenizer": "bytes",
    "data": {"train": "text.txt", "sequence_len": 32},
}

FORMER = {
    "train.old": "train.new",
    "launch.pods.tolerations": lambda value: {"launch.pods.patch": {"spec": {"tolerations": value}}},
    "train.needless": lambda value: {},
    "train.unused": "it is unused",
}


def make_draft(data):
    return Draft(data, {}, "recipe.yaml")


def test_a_renamed_key_takes_the_value_and_says_so():
    draft = make_draft({"train": {"old": 3}})
    assert replace_former(draft, FORMER) == [
        "recipe.yaml: train.old: 3 is of an earlier version and is read as train.new: 3."
    ]
    assert draft.data == {"train": {"new": 3}}


def test_a_key_that_became_part_of_another_is_added_to_it():
    given = {"patch": {"spec": {"nodeName": "a"}}, "tolerations": [{"key": "y"}]}
    draft = make_draft({"launch": {"pods": given}})
    assert len(replace_former(draft, FORMER)) == 1
    assert draft.data["launch"] == {"pods": {"patch": {"spec": {"nodeName": "a", "tolerations": [{"key": "y"}]}}}}


def test_a_needless_key_is_removed_with_its_empty_section():
    draft = make_draft({"train": {"needless": 1}, "run": {"name": "a"}})
    assert replace_former(draft, FORMER) == [
        "recipe.yaml: train.needless: 1 is of an earlier version and is read as nothing; remove it."
    ]
    assert draft.data == {"run": {"name": "a"}}


def test_a_needless_key_may_have_a_reason():
    draft = make_draft({"train": {"unused": 1, "steps": 2}})
    assert replace_former(draft, FORMER) == [
        "recipe.yaml: train.unused: 1 is of an earlier version and is read as nothing, because it is unused; remove it."
    ]
    assert draft.data == {"train": {"steps": 2}}


def test_keys_of_sagemaker_are_parts_of_the_request():
    old = {
        "sdk": "model_trainer",
        "remote_debug": True,
        "profiler": {"DisableProfiler": True},
        "endpoint": {"nodes": 1},
    }
    recipe, notes = build_recipe(
        {**MINIMAL, "train": {"steps": 5, "global_batch_size": 2}, "launch": {"sagemaker": old}}, []
    )
    assert recipe.launch.sagemaker.patch == {
        "ProfilerConfig": {"DisableProfiler": True},
        "RemoteDebugConfig": {"EnableRemoteDebug": True},
    }
    assert (
        "recipe: launch.sagemaker.sdk: model_trainer is of an earlier version and is read as nothing, because every "
        "job is the same CreateTrainingJob request, sent by boto3; remove it."
    ) in notes
    assert len(notes) == 4
    off = {"sdk": "boto3", "remote_debug": False, "profiler": {}}
    recipe, _ = build_recipe(
        {**MINIMAL, "train": {"steps": 5, "global_batch_size": 2}, "launch": {"sagemaker": off}}, []
    )
    assert recipe.launch.sagemaker.patch == {}


def test_both_spellings_are_refused():
    with pytest.raises(ConfigError, match=r"train\.old is now train\.new, which is also given"):
        replace_former(make_draft({"train": {"old": 1, "new": 2}}), FORMER)


def test_an_override_in_the_earlier_spelling_wins_over_the_file(monkeypatch):
    monkeypatch.setitem(FORMER_KEYS, "train.num_steps", "train.steps")
    recipe, notes = build_recipe({**MINIMAL, "train": {"steps": 5, "global_batch_size": 2}}, ["train.num_steps=7"])
    assert recipe.train.steps == 7
    assert notes == ["command line: train.num_steps: 7 is of an earlier version and is read as train.steps: 7."]


def test_a_quote_is_read_where_the_job_has_it_now():
    quote = {"hours": 2.0, "usd": 10.0}
    recipe, notes = build_recipe({**MINIMAL, "train": {"steps": 5, "global_batch_size": 2}, "budget": {"quote": quote}})
    assert json.loads(recipe.launch.env["ECHELON_QUOTE"]) == quote
    assert len(notes) == 1 and "budget.quote" in notes[0]


def test_described_machines_are_refused_with_the_file_that_has_them_now():
    machine = {"name": "ml.x9.huge", "gpus": 8, "usd_per_hour": 3}
    launch = {"sagemaker": {"extra_types": [machine]}}
    with pytest.raises(ConfigError, match=r"extra_types is of .*prices/mine\.yaml .*ml\.x9\.huge: \{gpus: 8\}"):
        build_recipe({**MINIMAL, "launch": launch})


def test_an_override_of_a_part_of_an_earlier_mapping_is_read():
    new, note = read_former(("launch", "kubernetes", "labels", "team"), "nlp", "command line")
    assert new == {
        ("launch", "kubernetes", patch, "metadata", "labels", "team"): "nlp" for patch in ("patch", "pod_patch")
    }
    assert note.startswith("command line: launch.kubernetes.labels: {team: nlp} is of an earlier version")


def test_a_former_value_of_a_key_is_replaced_and_others_are_kept():
    given = {**MINIMAL, "train": {"steps": 5, "global_batch_size": 2}, "engine": "tensorflow"}
    recipe, notes = build_recipe({**given, "tensorflow": {"strategy": "single"}})
    assert recipe.tensorflow.strategy == "multi_worker"
    assert notes == [
        "recipe: tensorflow.strategy: single is of an earlier version and is read as tensorflow.strategy: multi_worker."
    ]
    assert build_recipe(given, ["tensorflow.strategy=mirrored"])[1] == []


def test_a_former_key_in_a_section_of_an_override_is_read():
    given = {**MINIMAL, "train": {"steps": 5, "global_batch_size": 2}, "engine": "tensorflow"}
    recipe, notes = build_recipe(given, ["tensorflow={strategy: single}"])
    assert recipe.tensorflow.strategy == "multi_worker" and len(notes) == 1
