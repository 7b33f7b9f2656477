"""Checks of the `evaluate` section against the prepared data. Imports no torch: `train` calls them before training."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from echelon.ground.errors import ConfigError
from echelon.learn.data.panics import panics_told
from echelon.learn.data.prepared import PreparedData
from echelon.learn.data.prompt_records import PromptDataset
from echelon.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_evaluation(recipe: Recipe, data: PreparedData) -> None:
    """Raise ConfigError if the settings of `evaluate` and `checkpoint.keep_best` do not fit the validation sets."""
    wanted, sets = recipe.evaluate, data.validation
    if not recipe.draws_answers and any(isinstance(held_out.dataset, PromptDataset) for held_out in sets):
        raise ConfigError(
            "held-out prompts without an answer cannot be evaluated by what a teacher predicts; give records with an "
            "answer in data.validation, or set data.validation_fraction=0."
        )
    names = [held_out.name for held_out in sets]
    if wanted.select_by is not None and wanted.select_by not in names:
        have = f"use one of {', '.join(names)}" if names else "there are none; set data.validation_fraction"
        raise ConfigError(f"evaluate.select_by={wanted.select_by}: no validation set has this name; {have}.")
    for key, value in (
        ("checkpoint.keep_best", recipe.checkpoint.keep_best),
        ("evaluate.early_stopping", wanted.early_stopping),
        ("evaluate.prompts", wanted.prompts),
    ):
        if value and not sets:
            raise ConfigError(
                f"{key} requires evaluations, and the recipe holds out no text; set data.validation_fraction or "
                "data.validation."
            )
    if wanted.early_stopping and recipe.train.eval_every is None and recipe.train.evals_per_epoch is None:
        raise ConfigError(
            "evaluate.early_stopping requires evaluations during training, and train.eval_every is null; set "
            "train.eval_every to a number of steps, or train.evals_per_epoch."
        )
    if wanted.prompts:
        _check_prompts(recipe, data)


def _check_prompts(recipe: Recipe, data: PreparedData) -> None:
    wanted = recipe.evaluate
    room = recipe.data.sequence_len - wanted.prompt_tokens
    for prompt, ids in zip(wanted.prompts, encode_prompts(wanted.prompts, data.tokenizer), strict=True):
        if len(ids) > room:
            raise ConfigError(
                f"evaluate.prompts: {prompt[:40]!r} has {len(ids)} tokens, which with evaluate.prompt_tokens="
                f"{wanted.prompt_tokens} exceeds data.sequence_len={recipe.data.sequence_len}; shorten the prompt or "
                "lower evaluate.prompt_tokens."
            )


def encode_prompts(prompts: Sequence[str], tokenizer: "PreTrainedTokenizerBase") -> list[list[int]]:
    """Return the token ids of each prompt. Raises ConfigError for a prompt without tokens."""
    with panics_told(tokenizer.name_or_path, "evaluate.prompts"):
        encoded = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    for prompt, ids in zip(prompts, encoded, strict=True):
        if not ids:
            raise ConfigError(f"evaluate.prompts: {prompt!r} contains no token; give at least one.")
    return encoded
