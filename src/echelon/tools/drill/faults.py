"""The faults of a drill: how each is injected from outside, and which events show that the run detected it."""

import os
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from echelon.learn.checkpoint.folder import publish, remove
from echelon.tools.drill.shrink import HANG_SECONDS, REWARD_SECONDS
from echelon.tools.drill.trial import RunningCommand, Trial, find_children, find_living, read_tensors

_LOOK_SECONDS = 0.02


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
