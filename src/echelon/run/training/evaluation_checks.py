"""Checks of the `evaluate` section against the prepared data. Imports no torch: `train` calls them before training."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from echelon.ground.errors import ConfigError
from echelon.learn.benchmarks.task_files import name_tasks
from echelon.learn.data.prepared import PreparedData, PromptDataset
from echelon.learn.data.tokenizer import panics_told
from echelon.recipe.document import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


TASKS = "evaluate.tasks"


def try_benchmarks(recipe: Recipe) -> None:
    """Run one example of each task without the model, which also fetches the data of lm-eval's tasks.

    Raises ConfigError if one cannot run, or `evaluate.select_by` names a metric that no task has.
    """
    config = recipe.evaluate
    if not config.tasks:
        return
    from echelon.learn.benchmarks.harness import open_tasks, try_tasks  # it imports torch

    numbers = try_tasks(open_tasks(config.tasks, TASKS), TASKS).numbers
    task, _, metric = (config.select_by or "").rpartition("/")
    if task in numbers and metric not in numbers[task]:
        have = ", ".join(name for name in numbers[task] if "_stderr" not in name)
        raise ConfigError(f"evaluate.select_by={config.select_by}: the task {task} has no such metric; it has {have}.")


def check_evaluation(recipe: Recipe, data: PreparedData) -> None:
    """Raise ConfigError if the settings of `evaluate` and `checkpoint.keep_best` do not fit the validation sets."""
    if not recipe.draws_answers and any(isinstance(held_out.dataset, PromptDataset) for held_out in data.validation):
        raise ConfigError(
            "held-out prompts without an answer cannot be evaluated by what a teacher predicts; give records with an "
            "answer in data.validation, or set data.validation_fraction=0."
        )
    tasks = name_tasks(recipe.evaluate.tasks, TASKS)
    compares_task = (recipe.evaluate.select_by or "").rpartition("/")[0] in tasks
    if not compares_task:
        _check_selected_set(recipe, data, tasks)
    _check_is_evaluated(recipe, data, compares_task)
    if recipe.evaluate.prompts:
        _check_prompts(recipe, data)


def _check_selected_set(recipe: Recipe, data: PreparedData, tasks: Sequence[str]) -> None:
    """Refuse a name in `evaluate.select_by` that no validation set has."""
    chosen, names = recipe.evaluate.select_by, [held_out.name for held_out in data.validation]
    if chosen is None or chosen in names:
        return
    have = f"use one of {', '.join(names)}" if names else "there are none; set data.validation_fraction"
    also = f", or TASK/METRIC with one of the tasks {', '.join(tasks)}" if tasks else ""
    raise ConfigError(f"evaluate.select_by={chosen}: no validation set has this name; {have}{also}.")


def _check_is_evaluated(recipe: Recipe, data: PreparedData, compares_task: bool) -> None:
    """Refuse what needs evaluations that the recipe does not make. `compares_task`: by a task, not by held-out text."""
    config = recipe.evaluate
    for key, value, is_done in (
        ("checkpoint.keep_best", recipe.checkpoint.keep_best, compares_task),
        ("evaluate.early_stopping", config.early_stopping, compares_task),
        ("evaluate.prompts", config.prompts, False),
    ):
        if value and not data.validation and not is_done:
            also = ", or evaluate.select_by=TASK/METRIC to compare a task" if config.tasks else ""
            raise ConfigError(
                f"{key} requires evaluations, and the recipe holds out no text; set data.validation_fraction or "
                f"data.validation{also}."
            )
    has_rhythm = recipe.train.eval_every is not None
    if config.early_stopping and not has_rhythm and not (compares_task and config.tasks_every is not None):
        raise ConfigError(
            "evaluate.early_stopping requires evaluations during training, and train.eval_every is null; set "
            "train.eval_every to a number of steps, or of passes over the data: 0.5 epochs."
        )


def _check_prompts(recipe: Recipe, data: PreparedData) -> None:
    config = recipe.evaluate
    room = recipe.data.sequence_len - config.prompt_tokens
    for prompt, ids in zip(config.prompts, encode_prompts(config.prompts, data.tokenizer), strict=True):
        if len(ids) > room:
            raise ConfigError(
                f"evaluate.prompts: {prompt[:40]!r} has {len(ids)} tokens, which with evaluate.prompt_tokens="
                f"{config.prompt_tokens} exceeds data.sequence_len={recipe.data.sequence_len}; shorten the prompt or "
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
