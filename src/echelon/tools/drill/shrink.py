"""Shrink a recipe: the same kind of model, data, optimizer and plan, but a run of seconds."""

import json
import math
from pathlib import Path
from typing import Any

import torch

from echelon.learn.model.build import load_config
from echelon.recipe.document import Recipe
from echelon.recipe.render import plain_value
from echelon.recipe.training import ParallelConfig

# Upper limits, by the generic names of `transformers`, whatever a model family calls them.
_DIMENSIONS = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "moe_intermediate_size": 64,
}
_SEQUENCE_LEN = 128
_EVALUATIONS = 3
_GROUP_SIZE, _NEW_TOKENS = 4, 8
HANG_SECONDS = 10
"""`fault.hang_seconds` of a drill's run."""

REWARD_SECONDS = 3
"""`reward[].timeout_seconds` of a drill's run, at most."""

SAVES = 6
"""Number of checkpoints of a drill's run."""


def shrink(recipe: Recipe, folder: Path, num_processes: int, num_steps: int) -> list[str]:
    """The overrides, KEY=VALUE, that turn a recipe into its drill: a run of `num_steps` in `folder`."""
    model = shrink_model(recipe, num_processes)
    overrides = {
        "run.dir": folder,
        "model.config": json.dumps(model),
        "data.prepared_dir": recipe.prepared_dir,
        "data.sequence_len": min(_choose_length(recipe), recipe.data.sequence_len),
        "train.steps": num_steps,
        "train.global_batch_size": _choose_batch(recipe, num_processes),
        "train.batch_ramp": "null",
        "train.micro_batch_size": "auto",
        "train.log_every": 1,
        "train.eval_every": max(1, num_steps // _EVALUATIONS),
        "train.compile": "false",
        "optim.warmup": 2 if recipe.optim.warms_up else 0,
        "checkpoint.every": max(1, num_steps // SAVES),
        "checkpoint.keep_last": 3,
        "checkpoint.keep_best": "false",
        "evaluate.batches": 2,
        "evaluate.prompts": "[]",
        "evaluate.early_stopping": "null",
        "fault": f"{{hang_seconds: {HANG_SECONDS}, notice_seconds: 60, max_restarts: 3, "
        f"on_lost_process: {recipe.fault.on_lost_process}}}",
        "budget.max_usd": "null",
        "budget.max_hours": "null",
        "track": "[]",
    }
    if recipe.draws_answers:
        overrides |= _shrink_rollout(recipe)
    if not isinstance(recipe.train.activation_checkpointing, str):
        overrides["train.activation_checkpointing"] = "full"  # a budget is for compiled layers, and few are left
    if isinstance(recipe.parallel, ParallelConfig) and recipe.parallel.stages is not None:
        overrides["parallel.stages"] = [1] * len(recipe.parallel.stages)
    if torch.cuda.is_available():
        overrides["train.deterministic"] = "true"
    if recipe.tokenizer is None:
        overrides["tokenizer"] = recipe.model.checkpoint
    return [f"{key}={value}" for key, value in overrides.items()]


def _shrink_rollout(recipe: Recipe) -> dict[str, Any]:
    """The overrides for answers of the model: few and short ones, and rewards that are soon given up."""
    rewards = [
        reward.model_copy(update={"timeout_seconds": min(REWARD_SECONDS, reward.timeout_seconds)})
        for reward in recipe.reward
    ]
    overrides: dict[str, Any] = {
        "rollout.group_size": min(_GROUP_SIZE, recipe.rollout.group_size),
        "rollout.max_new_tokens": min(_NEW_TOKENS, recipe.rollout.max_new_tokens),
        "reward": json.dumps([plain_value(reward) for reward in rewards]),
    }
    if (environment := recipe.rollout.environment) is not None:
        overrides["rollout.environment.timeout_seconds"] = min(REWARD_SECONDS, environment.timeout_seconds)
    return overrides


def shrink_model(recipe: Recipe, num_processes: int) -> dict[str, Any]:
    """A `model.config` of the same family, with a few hundred thousand parameters plus the vocabulary.

    The degrees of `parallel` divide it if they divide the model of the recipe.
    """
    source = recipe.model.config if recipe.model.config is not None else recipe.model.checkpoint
    assert source is not None
    config = load_config(source, recipe.model.trust_remote_code)
    small: dict[str, Any] = {"model_type": config.model_type}
    if isinstance(source, str):
        small["tie_word_embeddings"] = config.tie_word_embeddings
    else:
        own_names = {its_name for name, its_name in config.attribute_map.items() if name in _DIMENSIONS}
        small |= {key: value for key, value in source.items() if key not in own_names and key != "layer_types"}
    for name, most in _limit_dimensions(recipe, num_processes).items():
        value = getattr(config, name, None)
        if isinstance(value, int):
            small[name] = min(value, most)
    return small


def _limit_dimensions(recipe: Recipe, num_processes: int) -> dict[str, int]:
    """The upper limits, rounded up to what the degrees of `parallel` divide."""
    parallel = recipe.parallel
    if not isinstance(parallel, ParallelConfig):
        return _DIMENSIONS
    keys = _round_up(_DIMENSIONS["num_key_value_heads"], parallel.tp)
    heads = _round_up(_DIMENSIONS["num_attention_heads"], math.lcm(keys, parallel.tp * parallel.cp))
    limits = {**_DIMENSIONS, "num_key_value_heads": keys, "num_attention_heads": heads}
    if parallel.tp * parallel.ep > 1:
        for name in ("hidden_size", "intermediate_size", "moe_intermediate_size"):
            limits[name] = _round_up(limits[name], math.lcm(heads, num_processes))
    stages = len(parallel.stages or ()) or parallel.pp * (2 if parallel.schedule == "interleaved" else 1)
    limits["num_hidden_layers"] = max(stages, limits["num_hidden_layers"])
    return limits


def _choose_length(recipe: Recipe) -> int:
    """The tokens of a sequence, of which every process of `tp` and `cp` gets as many."""
    parallel = recipe.parallel
    return _round_up(_SEQUENCE_LEN, 2 * parallel.cp * parallel.tp if isinstance(parallel, ParallelConfig) else 1)


def _choose_batch(recipe: Recipe, num_processes: int) -> int:
    """Two sequences, or the answers to two prompts, for each process, and what `parallel.microbatches` needs."""
    parallel = recipe.parallel
    if recipe.draws_answers:
        return 2 * num_processes * min(_GROUP_SIZE, recipe.rollout.group_size)
    if not isinstance(parallel, ParallelConfig) or parallel.microbatches is None:
        return 2 * num_processes
    readers = max(1, num_processes // (parallel.tp * parallel.cp * parallel.pp))
    return readers * math.lcm(2 * num_processes // readers, parallel.microbatches)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
