"""Every command refuses the recipes that `echelon train` refuses, before it reads any text."""

import json
import os
import subprocess
import sys

import pytest

from echelon.learn.data.tokenizer import build_bytes_tokenizer, train_tokenizer
from echelon.learn.model.build import build_on_meta, load_config
from echelon.learn.model.copy_checks import check_is_causal
from echelon.learn.model.traits import find_traits
from echelon.planner.families import FAMILIES
from echelon.run.lifecycle.model_checks import COUNTED, STORED
from tests.dist.command import RECIPE, write_recipe
from tests.families import small_model

pytestmark = pytest.mark.dist

CONFIG = RECIPE["model"]["config"]
# Invalid sections of a recipe, and words of the expected message.
MISTAKES = {
    "a field of a known family": (
        {"model": {"config": {**CONFIG, "num_hidden_layer": 2}}}, "did you mean num_hidden_layers?"
    ),
    "a field of another family": (
        {"model": {"config": {**CONFIG, "model_type": "granite", "num_hidden_layer": 2}}},
        "did you mean num_hidden_layers?",
    ),
    "an activation": (
        {"model": {"config": {**CONFIG, "hidden_act": "sillu"}}}, "transformers cannot build a llama model"
    ),
    "an attention": (
        {"model": {"config": CONFIG, "attn_implementation": "flash_atention_2"}},
        "transformers cannot build a llama model",
    ),
    "a tokenizer": ({"tokenizer": "./nowhere"}, "tokenizer=./nowhere: no such folder"),
    "a layer": ({"adapter": {"method": "lora", "target_modules": ["q_prj"]}}, "did you mean q_proj?"),
    "a parameter": (
        {"optim": {"learning_rate_multipliers": {"*hed*": 2.0}}}, "'*hed*' (factor 2) matches no parameter"
    ),
}  # fmt: skip
COMMANDS = (
    ("train", "recipe.json", "--nproc", "1"),
    ("plan", "recipe.json"),
    ("plan", "recipe.json", "--devices", "2xH100"),
    ("plan", "recipe.json", "--instance", "auto"),
    ("drill", "recipe.json", "--nproc", "1"),
    ("sweep", "sweep.yaml"),
    ("launch", "recipe.json", "--to", "local", "--dry-run"),
    ("launch", "recipe.json", "--to", "slurm", "--dry-run"),
)
SWEEP = "sweep: {name: s, trials: 2, sampler: random}\nrecipe: recipe.json\nsearch: {optim.learning_rate: [0.1, 0.2]}\n"


@pytest.mark.parametrize("what", MISTAKES)
def test_training_and_planning_refuse_mistakes(echelon, tmp_path, what):
    refuse(echelon, tmp_path, what, COMMANDS[:2])


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=() if what == "a layer" else pytest.mark.slow) for what in MISTAKES]
)
def test_every_command_refuses_what_training_refuses(echelon, tmp_path, what):
    refuse(echelon, tmp_path, what, COMMANDS[2:])


def refuse(echelon, tmp_path, what, commands):
    sections, words = MISTAKES[what]
    write_recipe(tmp_path, **sections)
    (tmp_path / "text.txt").write_bytes(bytes(4096))  # refused as binary by a command that reads it
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    for command in commands:
        refused = echelon(*command)
        assert refused.code == 2 and words in refused.err, (command, refused)
    assert not (tmp_path / "runs").exists()


def test_a_sweep_checks_the_model_of_every_trial(echelon, tmp_path):
    write_recipe(tmp_path)
    (tmp_path / "sweep.yaml").write_text(
        SWEEP.replace("optim.learning_rate: [0.1, 0.2]", "model.config.hidden_act: [silu, sillu]")
    )
    refused = echelon("sweep", "sweep.yaml", "--dry-run")
    assert refused.code == 2 and "the trial with model.config.hidden_act=sillu is refused" in refused.err


def test_checks_that_need_the_training_machine_are_left_to_it(echelon, tmp_path):
    write_recipe(tmp_path, model={"config": CONFIG, "attn_implementation": "flash_attention_2"}, track=["wandb"])
    assert echelon("plan", "recipe.json").code == 2
    there = echelon("plan", "recipe.json", "--devices", "2xH100").succeeded()
    assert "left to train: model.attn_implementation: the package of flash_attention_2" in there.out
    assert "left to train: track: the packages and keys of wandb" in there.out


def run_without_torch(*arguments):
    """Run `echelon` in an environment where torch cannot be imported."""
    code = "import sys; sys.modules['torch'] = None; from echelon.cli.main import main; main()"
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, env=environment
    )


def test_without_torch_a_plan_lists_the_skipped_checks(echelon, tmp_path):
    adapter = {"method": "lora", "modules_to_save": ["norm"]}
    write_recipe(tmp_path, adapter=adapter, tokenizer="somebody/something")
    done = run_without_torch("plan", "recipe.json", "--devices", "2xH100")
    assert done.returncode == 0, done.stderr
    left = [line for line in done.stdout.splitlines() if line.startswith("left to train: ")]
    assert [line.split(": ")[1] for line in left] == ["tokenizer", "model", "adapter"]
    assert "somebody/something" in left[0] and "hub" in left[0]
    assert all("(torch is not installed here)" in line for line in left[1:])
    here = run_without_torch("plan", "recipe.json", "tokenizer=bytes")
    assert here.returncode == 2 and "torch is not installed here" in here.stderr and "--devices" in here.stderr


def test_without_torch_a_misspelt_field_is_still_refused(echelon, tmp_path):
    write_recipe(tmp_path, model={"config": {**CONFIG, "num_hidden_layer": 2}})
    refused = run_without_torch("plan", "recipe.json", "--devices", "2xH100")
    assert refused.returncode == 2 and "did you mean num_hidden_layers?" in refused.stderr, refused


def test_a_model_of_a_known_family_is_planned_without_building_it(echelon, tmp_path):
    write_recipe(tmp_path)
    done = run_without_torch("plan", "recipe.json", "--devices", "2xH100")
    assert done.returncode == 0 and "left to train" not in done.stdout, done
    assert not done.stderr  # transformers was not imported either: it would have printed that torch is missing


def test_a_mixture_needs_torch_to_be_planned(echelon, tmp_path):
    write_recipe(tmp_path, model={"config": {**CONFIG, "model_type": "mixtral"}})
    refused = run_without_torch("plan", "recipe.json", "--devices", "2xH100")
    assert refused.returncode == 2 and "model_type=mixtral: only llama" in refused.stderr, refused
    assert "torch is not installed; install it" in refused.stderr


def test_a_checkpoint_of_a_known_family_is_planned_without_torch(echelon, tmp_path):
    """Its config, tokenizer and weights are read; a tokenizer with more ids than the model has is refused."""
    folder = tmp_path / "base"
    small_model("llama").save_pretrained(folder)
    train_tokenizer(["some text to learn from, and more of it"], 300).save_pretrained(folder)
    sections = {"model": {"checkpoint": str(folder)}, "adapter": {"method": "lora"}}
    write_recipe(tmp_path)
    fields = {key: value for key, value in RECIPE.items() if key != "tokenizer"}
    (tmp_path / "recipe.json").write_text(json.dumps(fields | sections))
    command = ("plan", "recipe.json", "--devices", "2xH100")
    refused = run_without_torch(*command)
    assert refused.returncode == 2 and "model.new_tokens" in refused.stderr, refused
    build_bytes_tokenizer().save_pretrained(folder)
    done = run_without_torch(*command)
    assert done.returncode == 0 and "left to train: model" not in done.stdout, done
    assert "the tokenizer has 256 ids" in done.stdout
    (folder / "model.safetensors").write_bytes(b"damaged")
    damaged = subprocess.run(
        [sys.executable, "-m", "echelon", *command], capture_output=True, text=True, check=False, timeout=120
    )
    assert damaged.returncode == 1 and "model.safetensors cannot be read" in damaged.stderr, damaged


@pytest.mark.parametrize("stored", [{}, {"head_dim": 8, "attention_bias": True, "mlp_bias": True, "rope_theta": 5e5}])
@pytest.mark.parametrize("family", FAMILIES)
def test_counted_configs_can_be_built(family, stored):
    """Fields that are checked without building exist in transformers, and models with other values build."""
    sizes = {
        "vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
        "num_key_value_heads": 3, "max_position_embeddings": 40, "tie_word_embeddings": True,
        "attention_dropout": 0.25,
    }  # fmt: skip
    assert {"model_type", *sizes} == COUNTED
    config = load_config({"model_type": family, **sizes})
    assert set(stored) <= STORED
    for name, value in stored.items():  # as in a config.json
        setattr(config, name, value)
    model = build_on_meta(config)
    assert {name: getattr(model.config, name) for name in sizes} == sizes
    check_is_causal(config)
    assert find_traits(model, 64).mask is not None
