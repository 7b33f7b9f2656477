"""The faults of a drill: how each is injected from outside, and which events show that the run detected it; and the
recipe of its run, shrunk to seconds with the same kind of model, data, optimizer and plan."""

import json
import math
import os
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from echelon.learn.checkpoint.folder import publish, remove
from echelon.learn.model.build import load_config
from echelon.recipe.document import Recipe
from echelon.recipe.render import plain_value
from echelon.recipe.training import ParallelConfig
from echelon.tools.drill.trial import RunningCommand, Trial, find_children, find_living, read_tensors

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
_LOOK_SECONDS = 0.02


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


@dataclass(frozen=True)
class InjectedFault:
    """A fault that is injected into a run.

    Attributes:
        name: the name in the report.
        strike: injects the fault into a running job; returns when done.
        damage: damages the files of the run after the command has ended, if given.
        repair: what a user does after the command has failed with an error that asks for it, if given.
        noticed_by: events that show that the run has detected the fault; otherwise its end does.
        over_by: events after which the next step shows that the run has recovered.
        loses_rank: whether it ends one rank, without which others may go on.
        loses_machine: whether it ends all ranks of a machine.
        starts: how often ranks usually start in its run.
        idle_seconds: how long the run makes no progress.
        needs_peer: whether only another rank can detect it.
        needs_rewards: whether it is only for recipes that train from rewards.
    """

    name: str
    strike: Callable[[RunningCommand], None]
    damage: Callable[[Trial], None] | None = None
    repair: Callable[[Trial], None] | None = None
    noticed_by: tuple[str, ...] = ("failure", "signal", "save_failed", "bad_step", "replica_lost", "process_lost")
    over_by: tuple[str, ...] = ("resume", "start", "replica_lost")
    loses_rank: bool = False
    loses_machine: bool = False
    starts: int = 2
    idle_seconds: float = 0.0
    needs_peer: bool = False
    needs_rewards: bool = False


def ask_to_stop(job: RunningCommand) -> None:
    """Send SIGTERM, as a scheduler does before it reclaims the machine."""
    job.process.send_signal(signal.SIGTERM)


def kill_a_rank(job: RunningCommand) -> None:
    """Kill a rank, as the kernel does when memory runs out."""
    _signal_a_rank(job, signal.SIGKILL)


def kill_the_agent(job: RunningCommand) -> None:
    """Kill the command; its ranks must detect that themselves."""
    ranks = job.ranks()
    job.process.kill()
    job.process.wait()
    while find_living(ranks):
        time.sleep(_LOOK_SECONDS)


def suspend_a_rank(job: RunningCommand) -> None:
    """Suspend a rank."""
    _signal_a_rank(job, signal.SIGSTOP)


def _signal_a_rank(job: RunningCommand, number: signal.Signals) -> None:
    """Send a signal to the last rank that is there: one may end by itself after it was listed."""
    for rank in reversed(job.ranks()):
        with suppress(ProcessLookupError):
            os.kill(rank, number)
            return


def suspend_a_reward(job: RunningCommand) -> None:
    """Suspend the process in which the rewards of the first rank are computed, as a function that hangs does."""
    for process in find_children(job.ranks()[0], "spawn_main"):
        os.kill(process, signal.SIGSTOP)


def fill_the_disk(job: RunningCommand) -> None:
    """Limit the size of the ranks' files until a save has failed; then lift the limit."""
    since, before = time.time(), {}
    for rank in job.ranks():
        with suppress(ProcessLookupError):  # a rank may end by itself after it was listed
            before[rank] = resource.prlimit(rank, resource.RLIMIT_FSIZE)
            # Enough for rows and logs, but not for a checkpoint.
            resource.prlimit(rank, resource.RLIMIT_FSIZE, (_smallest_part(job.trial) // 2, before[rank][1]))
    job.wait(lambda: any(event["event"] == "save_failed" for event in job.trial.events(since)))
    for rank, limits in before.items():
        with suppress(ProcessLookupError):
            resource.prlimit(rank, resource.RLIMIT_FSIZE, limits)


def flip_a_byte(trial: Trial) -> None:
    """Flip a bit in the middle of the newest checkpoint's largest file, as a bad disk or memory does."""
    path = max(trial.newest_checkpoint().path.glob("*.distcp"), key=lambda shard: shard.stat().st_size)
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def write_a_nan(trial: Trial) -> None:
    """Write NaN into every weight of the newest checkpoint, with correct checksums, as if training had diverged.

    A single NaN could be in the row of a token that never occurs.
    """
    checkpoint = trial.newest_checkpoint()
    tensors, state = read_tensors(checkpoint), checkpoint.read_state()
    for name, tensor in tensors.items():
        if name.startswith("model."):
            tensor.view(-1)[0] = torch.nan
    writing = checkpoint.path.with_name(".writing-drill")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # it is meant to be
        save(dict(tensors), storage_writer=FileSystemWriter(writing), no_dist=True)
    publish(writing, checkpoint.path, state, {})


def remove_the_newest(trial: Trial) -> None:
    """Remove the bad checkpoint, as a user would."""
    remove(trial.newest_checkpoint())


FAULTS = (
    InjectedFault("SIGTERM", ask_to_stop),
    InjectedFault("a rank killed", kill_a_rank, loses_rank=True),
    InjectedFault("the agent killed", kill_the_agent),
    InjectedFault("a rank hangs", suspend_a_rank, idle_seconds=HANG_SECONDS, needs_peer=True),
    *(
        [InjectedFault("the disk is full", fill_the_disk, over_by=("checkpoint",), starts=1)]
        if sys.platform == "linux" else []
    ),
    InjectedFault(
        "a reward hangs", suspend_a_reward, noticed_by=("reward_failed",), over_by=("reward_failed",), starts=1,
        idle_seconds=REWARD_SECONDS, needs_rewards=True,
    ),
    InjectedFault("a damaged checkpoint", kill_the_agent, damage=flip_a_byte, noticed_by=("resume",)),
    InjectedFault("NaN in the weights", kill_the_agent, damage=write_a_nan, repair=remove_the_newest, starts=3),
)  # fmt: skip


def _smallest_part(trial: Trial) -> int:
    return min(path.stat().st_size for path in trial.newest_checkpoint().path.glob("*.distcp"))
