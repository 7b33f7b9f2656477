"""Training that starts from weights: an HF folder's or an earlier run's, whatever plan trains on."""

import json

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from echelon.ground.errors import ConfigError
from echelon.learn.model.build import load_config
from echelon.recipe.load import load_recipe
from echelon.run.lifecycle.model_checks import check_weights
from tests.families import small_model
from tests.parity.test_initial_weights import whole_weights
from tests.parity.training import Row, resolve, tensors_of, train, with_ranks, write_recipe
from tests.stored_models import quantize_folder, write_plain

pytestmark = pytest.mark.dist


def start_from(source, row, folder, text):
    """The row's recipe with `model.checkpoint` in the place of `model.config`."""
    path = write_recipe(row, folder, text, steps=4)
    content = json.loads(path.read_text())
    content["model"] = {"checkpoint": str(source)}
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(("parallel", "ranks"), [("ddp", 1), ("ddp", 2), ("fsdp", 4)])
def test_a_run_gives_its_weights_to_another_plan(workers, text, tmp_path, parallel, ranks):
    train(workers, with_ranks(Row("fsdp"), 2), tmp_path / "first", text)
    saved = tensors_of(tmp_path / "first" / "run", step=4)
    row = with_ranks(Row(parallel), ranks)
    path = start_from(tmp_path / "first" / "run", row, tmp_path / "second", text)
    recipe, _ = load_recipe(path)
    plan = resolve(row, load_recipe(write_recipe(row, tmp_path / "plan", text, steps=4))[0], num_samples=1000)
    for weights in workers.run(whole_weights, ranks, str(path), plan, "llama", False):
        for name, value in weights.items():
            assert np.array_equal(value, saved[f"model.{name}"].numpy()), name
    assert recipe.model.checkpoint is not None


def test_a_run_goes_on_under_a_new_schedule(workers, text, tmp_path):
    """Continued pretraining: a run that begins with the weights of another, at its own first step of warm-up."""
    first = train(workers, Row(), tmp_path / "first", text)
    held_out = [row["loss"] for row in first if row["kind"] == "eval"]
    changes = {
        "model": {"checkpoint": str(tmp_path / "first" / "run"), "config": None},
        "train": {"eval_every": 1},
        "optim": {"learning_rate": 1e-9, "warmup": 4, "schedule": "constant", "weight_decay": 0.0},
    }
    rows = train(workers, Row(changes=changes), tmp_path / "second", text)
    trained = [row for row in rows if row["kind"] == "train"]
    assert [row["step"] for row in trained] == [1, 2, 3, 4] and trained[0]["tokens"] < first[-2]["tokens"]
    assert [row["learning_rate"] for row in trained] == pytest.approx([0.25e-9, 0.5e-9, 0.75e-9, 1e-9])
    # at a rate of nothing the weights stay what the first run made of them
    assert [row["loss"] for row in rows if row["kind"] == "eval"] == pytest.approx(held_out * 4, abs=1e-5)
    before, after = (tensors_of(tmp_path / name / "run", step=4) for name in ("first", "second"))
    for name, value in before.items():
        if name.startswith("model."):
            assert (after[name] - value).abs().max() < 1e-7, name


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_an_hf_folder_gives_each_rank_its_slice(workers, text, tmp_path, family):
    expected = small_model(family, tied=True, seed=9)
    expected.save_pretrained(tmp_path / "hf")
    row = with_ranks(Row("fsdp"), 4)
    path = start_from(tmp_path / "hf", row, tmp_path / "second", text)
    plan = resolve(row, load_recipe(write_recipe(row, tmp_path / "plan", text, steps=4))[0], num_samples=1000)
    for weights in workers.run(whole_weights, 4, str(path), plan, family, True):
        for name, value in weights.items():
            assert np.array_equal(value, expected.get_parameter(name).detach().numpy()), name


@pytest.mark.parametrize(("case", "family"), [("fp8", "llama"), ("mxfp4", "gpt_oss"), ("gptq-order", "qwen3_moe")])
def test_quantized_weights_are_the_same_on_each_rank_as_in_one_process(workers, text, tmp_path, case, family):
    small_model(family, seed=9).save_pretrained(tmp_path / "hf")
    write_plain(tmp_path / "hf", tmp_path / "plain", quantize_folder(tmp_path / "hf", case))
    row = with_ranks(Row("fsdp"), 2)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype="float32")
    path = start_from(tmp_path / "hf", row, tmp_path / "second", text)
    plan = resolve(row, load_recipe(write_recipe(row, tmp_path / "plan", text, steps=4))[0], num_samples=1000)
    for weights in workers.run(whole_weights, 2, str(path), plan, family, False):
        for name, value in weights.items():
            assert np.array_equal(value, expected.get_parameter(name).detach().numpy()), name


def test_a_checkpoint_without_weights_is_refused_before_any_worker(text, tmp_path):
    small_model("llama").config.save_pretrained(tmp_path / "bare")
    path = start_from(tmp_path / "bare", Row(), tmp_path / "run", text)
    with pytest.raises(ConfigError, match=r"model\.checkpoint=.*bare: it has no model\.safetensors"):
        check_weights(load_recipe(path)[0].model.checkpoint)
    with pytest.raises(ConfigError, match=r"model\.checkpoint=\./no/such: there is no such folder"):
        load_config("./no/such")
