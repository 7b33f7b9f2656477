"""Differences between recipes, and which of them prevent a resume."""

from pathlib import Path

import pytest

from echelon.recipe.difference import Difference, blocking_differences, diff_recipes
from tests.unit.recipe_samples import SMALL, load_text


def blocked(folder: Path, before: list[str], after: list[str]) -> list[str]:
    old, new = load_text(folder, SMALL, *before)[0], load_text(folder, SMALL, *after)[0]
    return [difference.key for difference in blocking_differences(old, new)]


def test_differences_are_dotted_keys_in_recipe_order(tmp_path: Path) -> None:
    old, _ = load_text(tmp_path)
    overrides = ("optim.betas=[0.9, 0.99]", "train.tokens=640", "data.train.0.fields={text: body}")
    new, _ = load_text(tmp_path, SMALL, *overrides, "model.config.num_hidden_layers=2")
    assert diff_recipes(old, new) == [
        Difference("train.steps", 100, None),
        Difference("optim.betas", [0.9, 0.95], [0.9, 0.99]),
        Difference("model.config.num_hidden_layers", None, 2),
        Difference("data.train.0.fields.text", None, "body"),
        Difference("train.tokens", None, 640),
    ]
    assert diff_recipes(old, old) == []
    assert str(Difference("train.steps", 100, 200)) == "train.steps: 100 -> 200"
    assert str(Difference("parallel", "ddp", {"dp_shard": 2})) == "parallel: ddp -> {dp_shard: 2}"
    assert str(Difference("train.compile", None, True)) == "train.compile: null -> true"


@pytest.mark.parametrize(
    "override",
    [
        "run.name=other", "run.dir=elsewhere", "train.steps=101", "train.log_every=10", "train.eval_every=null",
        "evaluate.batches=3", "checkpoint.every=7", "checkpoint.async=false", "track=[tensorboard]",
        "parallel=fsdp", "parallel.dp_shard=2", "train.micro_batch_size=2", "data.prepare_workers=1",
    ],
)  # fmt: skip
def test_what_a_resumed_run_may_change(tmp_path: Path, override: str) -> None:
    assert blocked(tmp_path, [], [override]) == []
    old, new = load_text(tmp_path)[0], load_text(tmp_path, SMALL, override)[0]
    assert diff_recipes(old, new)


@pytest.mark.parametrize(
    "override",
    ["train.steps=99", "optim.learning_rate=1e-3", "data.sequence_len=32", "train.global_batch_size=16",
     "tokenizer=other", "model.config.hidden_size=128", "data.train.0.path=other.txt", "train.precision=bf16",
     "train.activation_checkpointing=full", "train.compile=false", "data.validation_fraction=0.1",
     "data.train.0.weight=2", "optim.schedule=linear"],
)  # fmt: skip
def test_what_a_resumed_run_may_not_change(tmp_path: Path, override: str) -> None:
    assert blocked(tmp_path, [], [override]) == [override.partition("=")[0]]


@pytest.mark.parametrize(
    ("before", "after", "is_blocked"),
    [
        ("train.tokens=64000", "train.tokens=128000", False),
        ("train.tokens=64000", "train.tokens=32000", True),
        ("train.epochs=1", "train.epochs=2", False),
        ("train.epochs=2", "train.epochs=1", True),
        ("train.steps=10", "train.tokens=5120", False),  # 10 steps of 8 sequences of 64
        ("train.steps=10", "train.tokens=4608", True),  # 9 steps
        ("train.steps=10", "train.epochs=50", True),  # not known from the recipe
    ],
)
def test_a_run_may_become_longer_but_not_shorter(tmp_path: Path, before: str, after: str, is_blocked: bool) -> None:
    assert bool(blocked(tmp_path, [before], [after])) is is_blocked


def test_a_longer_run_does_not_excuse_another_difference(tmp_path: Path) -> None:
    assert blocked(tmp_path, [], ["train.steps=200", "optim.eps=1e-6"]) == ["optim.eps"]


def test_a_mixture_and_a_ramp_may_not_change(tmp_path: Path) -> None:
    before = [
        "data.train=[{path: a, weight: 1}, {path: b}]",
        "train.batch_ramp={from: 4, over_tokens: 1e6, increment: 2}",
    ]
    for change in ("data.train.0.weight=2", "data.train.1.weight=3", "train.batch_ramp.over_tokens=2e6"):
        assert blocked(tmp_path, before, [*before, change]) == [change.partition("=")[0]]
    assert blocked(tmp_path, before, [*before, "train.steps=200"]) == []
