"""A recipe file becomes a Recipe with its defaults, or one message with the line, the key, the value and the rule."""

import time
from pathlib import Path

import pytest
from pydantic import ValidationError

from echelon.ground.errors import ConfigError
from echelon.recipe.document import Recipe
from echelon.recipe.inputs import ModelConfig
from echelon.recipe.load import load_recipe
from echelon.recipe.render import render_recipe
from tests.unit.recipe_samples import SMALL, load_text, write_recipe

PARTS = {
    "run": {"name": "small"},
    "model": {"checkpoint": "gpt2"},
    "data": {"train": "text.txt"},
    "optim": {"learning_rate": 1},
}


def message_of(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_text(folder, text, *overrides)
    return str(caught.value).replace(f"{folder}/recipe.yaml, ", "").replace(f"{folder}/", "")


def test_defaults(tmp_path: Path) -> None:
    recipe, notes = load_text(tmp_path)
    assert notes == []
    assert recipe.run.dir == Path("runs/small")
    assert recipe.prepared_dir == Path("runs/prepared")
    assert recipe.data.validation_fraction == 0.01
    assert recipe.data.train[0].format == "auto"
    assert recipe.train.micro_batch_size == recipe.train.compile == recipe.train.precision == "auto"
    assert recipe.optim.betas == (0.9, 0.95)
    assert recipe.optim.learning_rate == 0.0003
    assert recipe.parallel == "auto"
    assert recipe.checkpoint.asynchronous is True
    assert recipe.track == ()


@pytest.mark.parametrize("train", ["some/path", "[some/path]", "{path: some/path}", "[{path: some/path}]"])
def test_shorthands_for_a_source(tmp_path: Path, train: str) -> None:
    recipe, _ = load_text(tmp_path, SMALL.replace("[{path: text.txt}]", train))
    assert [source.path for source in recipe.data.train] == ["some/path"]


def test_validation_replaces_the_default_fraction(tmp_path: Path) -> None:
    recipe, _ = load_text(tmp_path, SMALL.replace("  sequence_len", "  validation: held-out.txt\n  sequence_len"))
    assert recipe.data.validation[0].path == "held-out.txt"
    assert recipe.data.validation_fraction is None


@pytest.mark.parametrize(
    ("train", "batch", "steps"),
    [
        ({"steps": 7, "global_batch_size": 3}, 3, 7),
        ({"tokens": 2e9, "global_batch_tokens": 524288}, 512, 3815),  # 2e9 / 524288 = 3814.7
        ({"tokens": 1024, "global_batch_size": 1}, 1, 1),
        ({"tokens": 1025, "global_batch_size": 1}, 1, 2),
        ({"epochs": 1, "global_batch_size": 10}, 10, 10),  # of 100 samples
        ({"epochs": 1, "global_batch_size": 30}, 30, 4),
        ({"epochs": 0.1, "global_batch_size": 1}, 1, 10),
        ({"epochs": 2.5, "global_batch_size": 10}, 10, 25),
    ],
)
def test_steps_and_batch(train: dict[str, float], batch: int, steps: int) -> None:
    recipe = Recipe.model_validate({**PARTS, "train": train})
    assert recipe.global_batch_size == batch
    assert recipe.num_steps(100) == steps


def test_epochs_are_counted_in_decimal() -> None:
    # In binary 0.1 * 30 is 3.0000000000000004, which would be a fourth step.
    assert Recipe.model_validate({**PARTS, "train": {"epochs": 0.1, "global_batch_size": 1}}).num_steps(30) == 3


def test_a_recipe_is_frozen_and_hashes_by_content(tmp_path: Path) -> None:
    one, _ = load_text(tmp_path)
    same, _ = load_text(tmp_path)
    other, _ = load_text(tmp_path, SMALL, "model.config.hidden_size=128")
    assert one == same and hash(one) == hash(same)
    assert one != other and hash(one) != hash(other)
    with pytest.raises(ValidationError):
        one.train.steps = 5


def test_a_recipe_shows_the_keys_that_were_set_and_no_secrets() -> None:
    token = "hf_abcdefghijklmnopqrstuvwxyz0123456789"
    parts = {**PARTS, "train": {"steps": 3, "global_batch_size": 1}, "launch": {"env": {"HF_TOKEN": token}}}
    recipe = Recipe.model_validate(parts)
    lines = repr(recipe).splitlines()
    assert "train: {steps: 3, global_batch_size: 1}" in lines and "  env: {HF_TOKEN: '***'}" in lines
    assert len(lines) < 20 and str(recipe) == repr(recipe)


@pytest.mark.parametrize("override", ["parallel={dp_shard: auto, dp_replicate: 2}", "tokenizer.train.vocab_size=512",
                                      "data.validation=x.txt", "train.eval_every=null", "train.tokens=2e9",
                                      "model.config.rope={a: [1, {b: null}], '2': 'no'}", "run.name='2e9'",
                                      "model.checkpoint='1e5'", "checkpoint.async=false"])  # fmt: skip
def test_a_rendered_recipe_loads_as_an_equal_recipe(tmp_path: Path, override: str) -> None:
    recipe, _ = load_text(tmp_path, SMALL, override)
    again, notes = load_text(tmp_path, render_recipe(recipe))
    assert again == recipe and hash(again) == hash(recipe)
    assert notes == []
    assert render_recipe(again) == render_recipe(recipe)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("steps: 100", "steps: 0", "line 9: train.steps=0 must be at least 1; use 1 or more."),
        ("steps: 100", "steps: 2.5", "line 9: train.steps=2.5 must be a whole number; use a number such as 8."),
        ("steps: 100", "steps: '100'", "line 9: train.steps='100' must be a whole number; use 100."),
        ("steps: 100", "steps: true", "line 9: train.steps=true must be a whole number; use a number such as 8."),
        ("steps: 100", "steps: 1\n  compile: yes",
         "line 10: train.compile='yes' must be true or false or auto; use true."),
        ("3e-4", "-1", "line 12: optim.learning_rate=-1 must be more than 0; use a larger number."),
        ("3e-4", ".nan", "line 12: optim.learning_rate=.nan must be a finite number; use a number such as 0.5."),
        ("3e-4", "1\n  betas: [0.9]", "line 13: optim.betas=[0.9] must be a longer list; add what is left out."),
        ("3e-4", "1\n  betas: [0.9, 1.0]", "line 13: optim.betas=[0.9, 1.0] must both be"),
        ("3e-4", "1\n  warmup: 101", "line 13: optim.warmup=101 is more than the 100 steps"),
        ("optim:\n  learning_rate: 3e-4", "optim:\n  eps: 1e-8",
         "line 11: optim.learning_rate is missing; add it to the recipe."),
        ("run: {name: small}\n", "", "recipe.yaml: run is missing; add it to the recipe."),
        ("name: small", "name: a/b", "line 1: run.name='a/b' must be a plain folder name"),
        ("name: small", f"name: {'a' * 300}",
         f"line 1: run.name={'a' * 40}... has 300 characters, and may have 200; shorten it."),
        ("name: small", f"name: small, dir: x/{'é' * 101}",
         f"line 1: run.dir=x/{'é' * 101}: the name of the folder has 202 bytes, and may have 200; shorten it."),
        ("name: small", "name: 7",
         "line 1: run.name=7 must be text (quoted, if it looks like a number); write it in quotes."),
        ("tokenizer: bytes\n", "", "line 3: tokenizer is missing: a model made from model.config"),
        ("tokenizer: bytes", "tokenizer: {train: {vocab_size: 8}}",
         "line 4: tokenizer.train.vocab_size=8 must be at least 257; use 257 or more."),
        ("tokenizer: bytes", "parallel: {tp: none}",
         "line 4: parallel.tp=none must be a whole number; use a number such as 8."),
        ("tokenizer: bytes", "parallel: zero9",
         "line 4: parallel=zero9 must be auto, ddp, zero1, zero2, fsdp or hsdp; did you mean zero2?"),
        ("model_type: llama, ", "", "line 3: model.config.model_type is missing"),
        ("  config: {model_type: llama, hidden_size: 64}", "  checkpoint: null",
         "line 3: model needs exactly one of model.checkpoint"),
        ("  config:", "  checkpoint: gpt2\n  config:",
         "line 3: model.checkpoint and model.config are both given"),
        ("  sequence_len", "  validation: x\n  validation_fraction: 0.1\n  sequence_len",
         "line 7: data.validation and data.validation_fraction are both given"),
        ("[{path: text.txt}]", "[]", "line 6: data.train=[] must be a list of at least 1; add to it."),
        ("[{path: text.txt}]", "[{path: ''}]", "line 6: a source's path is empty"),
        ("steps: 100", "steps: 100\n  tokens: 5",
         "line 9: train.steps=100 and train.tokens=5 are both given, but only one of train.steps, train.tokens and "
         "train.epochs can set how long to train; keep one."),
        ("steps: 100", "steps: 100\n  activation_checkpointing: {every: 2, memory_budget: 0.5}",
         "line 10: train.activation_checkpointing takes one of every, memory_budget and mlp_tiles, for example "
         "{every: 2} or {memory_budget: 0.5}; every and memory_budget are given."),
        ("steps: 100", "steps: 100\n  activation_checkpointing: {memory_budget: 2}",
         "line 10: train.activation_checkpointing.memory_budget=2 must be at most 1; use 1 or less."),
        ("steps: 100", "steps: 100\n  activation_offloading: 0",
         "line 10: train.activation_offloading=0 must be true or false or at least 1"),
        ("  global_batch_size: 8\n", "", "line 8: one of train.global_batch_tokens and train.global_batch_size "
         "must set the global batch; add one."),
        ("global_batch_size: 8", "global_batch_tokens: 100", "line 10: train.global_batch_tokens=100 is "
         "not a whole number of sequences of data.sequence_len=64; use 64 or 128."),
        ("tokenizer: bytes", "tokenizer: bytes\nadapter: {method: lora, target_modules: []}",
         "line 5: adapter.target_modules=[] leaves nothing to train; name linear layers, or set it to all-linear."),
        ("config: {model_type: llama, hidden_size: 64}", "new_tokens: [a, a]\n  checkpoint: base",
         "line 3: model.new_tokens has 'a' twice; remove one."),
        ("config: {model_type: llama, hidden_size: 64}", "new_tokens: ['']\n  checkpoint: base",
         "line 3: model.new_tokens has an empty name; remove it."),
        ("tokenizer: bytes", "tokenizer: bytes\nobjective: {name: dpo}\nadapter: {method: lora, init: pissa}",
         "line 6: adapter.init=pissa: objective.name=dpo compares with the frozen weights as they were, which this "
         "start changes; use adapter.init=default, or adapter.method=full, which keeps a copy."),
        ("sequence_len: 64", "sequence_len: 64\n  document_mask: false\nobjective: {name: dpo}",
         "line 8: data.document_mask=false: objective.name=dpo has both answers of a pair in one sequence, where they "
         "must not attend to each other; use data.document_mask=auto or true."),
        ("global_batch_size: 8", "global_batch_tokens: 60", "line 10: train.global_batch_tokens=60 is "
         "not a whole number of sequences of data.sequence_len=64; use 64."),
    ],
)  # fmt: skip
def test_an_invalid_value_gets_one_clear_message(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in SMALL
    assert message_of(tmp_path, SMALL.replace(old, new)).startswith(message)


def test_every_invalid_key_has_its_own_line(tmp_path: Path) -> None:
    lines = message_of(tmp_path, SMALL.replace("steps: 100", "steps: 0").replace("small", "a b")).splitlines()
    assert [line.split(": ")[1].split("=")[0] for line in lines] == ["run.name", "train.steps"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("learning_rate: 3e-4", "learning_rat: 3e-4",
         "line 12: optim.learning_rat is not a recipe key; did you mean optim.learning_rate?"),
        ("steps: 100", "steps: 100\n  learning_rate: 1",
         "line 10: train.learning_rate is not a recipe key; did you mean optim.learning_rate?"),
        ("tokenizer: bytes", "tokeniser: bytes",
         "line 4: tokeniser is not a recipe key; did you mean tokenizer?"),
        ("path: text.txt", "path: x, wieght: 1",
         "line 6: data.train.0.wieght is not a recipe key; did you mean data.train.0.weight?"),
        ("tokenizer: bytes", "tokenizer: bytes\nwarmup_step: 3",
         "line 5: warmup_step is not a recipe key; did you mean optim.warmup?"),
        ("name: small", "name: small, zzz: 1",
         "line 1: run.zzz is not a recipe key; run has the keys name, dir, seed."),
    ],
)  # fmt: skip
def test_an_unknown_key_is_refused_with_the_nearest(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert message_of(tmp_path, SMALL.replace(old, new)) == message


def test_a_file_that_is_not_a_recipe_is_refused(tmp_path: Path) -> None:
    assert "is empty; make a recipe" in message_of(tmp_path, "# nothing\n")
    assert "is not a recipe: it must be a mapping" in message_of(tmp_path, "- a\n")
    with pytest.raises(ConfigError, match="does not exist; name a recipe file"):
        load_recipe(tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_recipe(tmp_path)
    path = write_recipe(tmp_path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        load_recipe(path)


def test_an_empty_section_gets_its_defaults(tmp_path: Path) -> None:
    recipe, _ = load_text(tmp_path, SMALL + "checkpoint:\n#  every: 5\n")
    assert recipe.checkpoint.every == 100


def test_sections_built_in_code_refuse_unknown_keys() -> None:
    with pytest.raises(ValidationError):
        ModelConfig.model_validate({"checkpoint": "gpt2", "chekpoint": "x"})


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("optim." + "b." * 9000 + "b", "is not a recipe key: it has 18,007 letters; correct it"),
        ("data.train." + "9" * 5000, "is not a recipe key: it has 5,011 letters; correct it"),
        ("a" * 900, "is not a recipe key"),
    ],
)
def test_a_long_key_on_the_command_line_is_refused_at_once(tmp_path, key, told):
    began = time.process_time()
    with pytest.raises(ConfigError, match=told):
        load_text(tmp_path, SMALL, f"{key}=1")
    assert time.process_time() - began < 10  # without a limit: minutes


def test_a_long_key_in_a_file_is_refused_at_once(tmp_path):
    """Comparing a million letters with each known key would take hours."""
    began = time.process_time()
    with pytest.raises(ConfigError, match="is not a recipe key"):
        load_text(tmp_path, SMALL + "? " + "x" * 1_000_000 + "\n: 1\n")
    assert time.process_time() - began < 10
