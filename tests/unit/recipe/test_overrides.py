"""`key=value` overrides take precedence over the file, under the same rules."""

from pathlib import Path

import pytest

from echelon.ground.errors import ConfigError
from echelon.recipe.inputs import TrainedTokenizerConfig
from echelon.recipe.training import ParallelConfig
from tests.unit.recipe_samples import SMALL, load_text


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
