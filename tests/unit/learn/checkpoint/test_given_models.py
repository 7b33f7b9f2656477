"""Fingerprints of models: what changes them and what does not, and the record of a run's models."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from echelon.ground.errors import CheckpointError, ConfigError
from echelon.learn.checkpoint.given_models import RECORD, check_base, fingerprint_model, keep_given_models
from echelon.recipe.document import Recipe
from tests.families import small_model


@pytest.fixture
def base(tmp_path):
    small_model("llama", seed=1).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def write_large(folder, values):
    """A file whose matrix is larger than a block, beside a small tensor; as in a shard of a large model."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    save_file(values, folder / "model.safetensors")


def recipe_with(base, teacher):
    return Recipe.model_validate(
        {
            "run": {"name": "x"},
            "model": {"checkpoint": str(base)},
            "objective": {"name": "distill", "teacher": str(teacher)},
            "data": {"train": "text.txt", "sequence_len": 32},
            "train": {"steps": 1, "global_batch_size": 1},
            "optim": {"learning_rate": 1e-3},
        }
    )


def test_the_place_and_the_times_of_files_do_not_count(base, tmp_path):
    mark = fingerprint_model(base)
    shutil.copytree(base, tmp_path / "copy")
    for path in base.iterdir():
        os.utime(path, (1, 1))
    save_file({"other": torch.ones(3)}, tmp_path / "copy" / "consolidated.safetensors")  # no weight of the model
    (tmp_path / "copy" / "README.md").write_text("text")
    assert fingerprint_model(base) == fingerprint_model(tmp_path / "copy") == mark
    assert fingerprint_model(tmp_path) is None and fingerprint_model(tmp_path / "nowhere") is None


def test_other_values_in_any_one_tensor_count(base):
    mark, weights = fingerprint_model(base), load_file(base / "model.safetensors")
    found = {mark}
    for name in weights:
        save_file(weights | {name: weights[name] + 1e-3}, base / "model.safetensors", metadata={"format": "pt"})
        found.add(fingerprint_model(base))
    assert len(found) == 1 + len(weights)
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    assert fingerprint_model(base) == mark
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"rope_theta": 7.0}))
    assert fingerprint_model(base) != mark


def test_a_small_tensor_beside_large_ones_counts_and_a_single_row_does_not(tmp_path):
    """The last line is what the docstring says is not seen."""
    values = {"head": torch.zeros(512, 512), "layers": torch.zeros(512, 512), "norm": torch.zeros(8)}
    write_large(tmp_path / "large", values)
    mark = fingerprint_model(tmp_path / "large")
    for name in values:
        write_large(tmp_path / "large", values | {name: values[name] + 1})
        assert fingerprint_model(tmp_path / "large") != mark, name
    row = values["head"].clone()
    row[0] = 1
    write_large(tmp_path / "large", values | {"head": row})
    assert fingerprint_model(tmp_path / "large") == mark


def test_every_file_of_a_sharded_model_counts(base):
    small_model("llama", seed=1).save_pretrained(base, max_shard_size="50KB")
    (base / "model.safetensors").unlink()
    files = sorted(base.glob("model-*.safetensors"))
    found = {fingerprint_model(base)}
    for path in files:
        save_file({name: each + 1 for name, each in load_file(path).items()}, path)
        found.add(fingerprint_model(base))
    assert len(found) == 1 + len(files) > 2


@pytest.mark.parametrize(
    "header", [b"\xff" * 8 + b"{", b"\x02" + b"\0" * 7 + b"{]", b"", b"\x04" + b"\0" * 7 + b"null"]
)
def test_a_damaged_file_is_another_model_or_named(base, header):
    mark = fingerprint_model(base)
    (base / "model.safetensors").write_bytes(header)
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        fingerprint_model(base)
    (base / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model.safetensors"}}')
    assert fingerprint_model(base) not in (mark, None)


def test_a_run_refuses_another_model_under_each_key(base, tmp_path):
    shutil.copytree(base, tmp_path / "teacher")
    record, recipe = tmp_path / RECORD, recipe_with(base, tmp_path / "teacher")
    keep_given_models(tmp_path, recipe)
    marks = json.loads(record.read_text())
    assert marks == dict.fromkeys(("model.checkpoint", "objective.teacher"), fingerprint_model(base))
    keep_given_models(tmp_path, recipe)
    small_model("llama", seed=2).save_pretrained(tmp_path / "teacher")
    with pytest.raises(ConfigError, match=r"objective\.teacher=.*teacher is not the model that the run .* began with"):
        keep_given_models(tmp_path, recipe)
    check_base(tmp_path, recipe)  # a command that reads the base alone
    small_model("llama", seed=2).save_pretrained(base)
    with pytest.raises(ConfigError, match=r"model\.checkpoint=.*restore that folder from a copy, or train again"):
        check_base(tmp_path, recipe)
    assert json.loads(record.read_text()) == marks


@pytest.mark.parametrize("content", [None, "{", '{"model.checkpoint": 5}', '{"objective.teacher": "0"}'])
def test_without_a_record_a_run_goes_on_and_records_its_models(base, tmp_path, content):
    record, recipe = tmp_path / RECORD, recipe_with(base, tmp_path / "gone")
    if content is not None:
        record.write_text(content)
    check_base(tmp_path, recipe)
    assert not record.exists() or record.read_text() == content
    keep_given_models(tmp_path, recipe)
    assert json.loads(record.read_text())["model.checkpoint"] == fingerprint_model(base)
