"""Recipes from a file and `key=value` overrides, which take precedence; each mistake is one message with the fix."""

import time
from pathlib import Path

import pytest
from pydantic import ValidationError

from echelon.ground.errors import ConfigError
from echelon.recipe.document import Recipe
from echelon.recipe.inputs import ModelConfig, TrainedTokenizerConfig
from echelon.recipe.load import load_recipe
from echelon.recipe.render import render_recipe
from echelon.recipe.training import ParallelConfig
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


def test_values_are_yaml(tmp_path: Path) -> None:
    recipe, _ = load_text(
        tmp_path, SMALL, "optim.betas=[0.8, 0.9]", "train.compile=false", "train.eval_every=null",
        "optim.learning_rate=1e-3", "run.name=other", "data.train.0.path=a=b.txt", "train.steps=2e3",
    )  # fmt: skip
    assert recipe.optim.betas == (0.8, 0.9)
    assert recipe.train.compile is False
    assert recipe.train.eval_every is None
    assert recipe.optim.learning_rate == 0.001
    assert recipe.run.dir == Path("runs/other")
    assert recipe.data.train[0].path == "a=b.txt"
    assert recipe.train.steps == 2000


def test_an_override_creates_the_sections_it_needs(tmp_path: Path) -> None:
    recipe, _ = load_text(
        tmp_path, SMALL, "checkpoint.keep_last=1", "parallel.dp_shard=2", "tokenizer.train.vocab_size=300"
    )
    assert recipe.checkpoint.keep_last == 1
    assert recipe.parallel == ParallelConfig(dp_shard=2)
    assert recipe.tokenizer == TrainedTokenizerConfig.model_validate({"train": {"vocab_size": 300}})


@pytest.mark.parametrize("train", ["some/path", "[some/path]"])
def test_a_shorthand_can_be_overridden_by_index(tmp_path: Path, train: str) -> None:
    recipe, _ = load_text(tmp_path, SMALL.replace("[{path: text.txt}]", train), "data.train.0.format=text")
    assert (recipe.data.train[0].path, recipe.data.train[0].format) == ("some/path", "text")


def test_an_override_replaces_the_files_other_choice(tmp_path: Path) -> None:
    overrides = ("train.tokens=6400", "train.global_batch_tokens=128", "model.checkpoint=gpt2", "data.validation=v.txt")
    text = SMALL.replace("  sequence_len", "  validation_fraction: 0.1\n  sequence_len")
    recipe, _ = load_text(tmp_path, text, *overrides)
    assert (recipe.train.steps, recipe.train.tokens) == (None, 6400)
    assert (recipe.global_batch_size, recipe.num_steps(0)) == (2, 50)
    assert (recipe.model.checkpoint, recipe.model.config) == ("gpt2", None)
    assert (recipe.data.validation[0].path, recipe.data.validation_fraction) == ("v.txt", None)


def test_an_override_inside_the_model_config_keeps_the_rest_of_it(tmp_path: Path) -> None:
    recipe, _ = load_text(tmp_path, SMALL, "model.config.num_hidden_layers=2")
    assert recipe.model.config == {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2}


def test_the_last_of_two_equal_keys_is_used(tmp_path: Path) -> None:
    assert load_text(tmp_path, SMALL, "train.steps=5", "train.steps=6")[0].train.steps == 6


def test_counts_of_tokens_may_have_a_suffix(tmp_path: Path) -> None:
    text = (
        SMALL.replace(
            "steps: 100\n  global_batch_size: 8",
            "tokens: 1.5m\n  global_batch_tokens: 32K\n"
            "  batch_ramp: {from: 16k, to: 32_000, over_tokens: 0.5M, increment: 8K}",
        )
        + "  warmup: 1e2K tokens\n"
    )
    train = load_text(tmp_path, text)[0].train
    assert (train.tokens, train.global_batch_tokens) == (1_500_000, 32_000)
    ramp = train.batch_ramp
    assert ramp is not None
    assert (ramp.start, ramp.to, ramp.over_tokens, ramp.increment) == (16_000, 32_000, 500_000, 8_000)
    assert load_text(tmp_path, text)[0].optim.warmup == "100000 tokens"
    for given, count in (("2B", 2 * 10**9), ("2e9", 2 * 10**9), ("1.7T", 17 * 10**11), ("30 m", 30 * 10**6)):
        assert load_text(tmp_path, text, f"train.tokens={given}")[0].train.tokens == count


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.stps=5"], "command line: train.stps is not a recipe key; did you mean train.steps?"),
        (["train.steps=0"], "command line: train.steps=0 must be at least 1; use 1 or more."),
        (["train.steps"], "command line: 'train.steps' is not KEY=VALUE; for example train.steps=100."),
        (["=5"], "command line: '=5' is not KEY=VALUE"),
        (["train..steps=5"], "command line: 'train..steps=5' is not KEY=VALUE"),
        (["run.name=[a"], "command line, run.name=[a, line 1: this is not valid YAML"),
        (["data.train.1.path=x"], "command line: data.train.1 does not exist; data.train is a list of 1"),
        (["data.train.path=x"], "command line: data.train.path does not exist; data.train is a list of 1"),
        (["train.tokens=64", "train.epochs=1"], "command line: train.tokens=64 and train.epochs=1.0 are both given"),
        (["train.global_batch_tokens=100"], "command line: train.global_batch_tokens=100 is not a whole number of"),
        (["train.tokens=2GB"], "command line: train.tokens=2GB must be a whole number, or one with K, M, B or T"),
        (["train.tokens=2X"], "command line: train.tokens=2X must be a whole number, or one with K, M, B or T"),
        (["train.tokens=0.0001K"], "command line: train.tokens=0.0001K must be a whole number, or one with K"),
        (["train.tokens=0K"], "command line: train.tokens=0K must be at least 1; use 1 or more."),
        (["train.tokens='64'"], "command line: train.tokens='64' must be a whole number, or one with K, M, B or T"),
        (["train.steps=2K"], "command line: train.steps=2K must be a whole number; use 2000."),
        (["optim.warmup=101"], "command line: optim.warmup=101 is more than the 100 steps"),
    ],
)
def test_an_invalid_override_is_refused(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_text(tmp_path, SMALL, *overrides)
    assert str(caught.value).startswith(message)
