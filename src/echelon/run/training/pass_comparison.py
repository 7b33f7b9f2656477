"""Checks that all ranks compute the same from the same tokens, to detect silent faults of a processor or its memory."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from echelon.learn.data.own_batches import build_step_batch
from echelon.learn.distributed.mesh import Grid
from echelon.learn.distributed.objects import gather_objects
from echelon.planner.plan import ParallelPlan
from echelon.recipe.synchronization import QUORUM
from echelon.run.training.replicas import find_odd_ranks, hash_bits

if TYPE_CHECKING:
    from echelon.learn.learner import Learner

# Ranks that differ only along these compute the same from the same tokens. Replicas have the same weights in a quorum.
_DATA_AXES = ("dp_replicate", "dp_shard")


@dataclass(frozen=True)
class OddPass:
    """Ranks that compute other log-probabilities than others.

    Attributes:
        ranks: those that differ from the majority; all of them if there is no majority.
        peers: the ranks that should compute the same.
    """

    ranks: tuple[int, ...]
    peers: tuple[int, ...]

    def describe(self) -> str:
        """Return a clause for a message."""
        odd, others = (", ".join(map(str, ranks)) for ranks in (self.ranks, sorted({*self.peers} - {*self.ranks})))
        return f"rank {odd} computed something else than rank {others}" if others else f"ranks {odd} do not agree"


def describe_compared(plan: ParallelPlan) -> str:
    """Return a line for the start of a run: how many ranks `fault.verify_passes_every` compares under a plan."""
    num_ranks = plan.dp_replicate * plan.dp_shard * (plan.num_replicas if plan.sync.name == QUORUM else 1)
    if num_ranks == 1:
        return "passes: under this plan no two ranks train on different sequences, so there is nothing to compare"
    return f"passes: {num_ranks} ranks compute the same tokens now and then, and are compared"


def compare_passes(learner: "Learner", step: int) -> list[OddPass]:
    """Let all ranks that read different sequences compute the log-probabilities of the same tokens, and compare them.

    The tokens are random, from the recipe's seed and the step: a microbatch of full sequences. Returns the ranks that
    differ in any bit, the same on every rank. Collective.
    """
    place = replace(learner.place, rank=0, size=1)
    size, length = learner.plan.micro_batch_size, learner.plan.sequence_len
    chance = np.random.default_rng((learner.recipe.run.seed, step))
    tokens = chance.integers(learner.shape.vocab_size, size=(size, length + 1)).tolist()
    batch = build_step_batch(step, [row[:-1] for row in tokens], [row[1:] for row in tokens], place)
    digests = [hash_bits(part) for part in learner.log_probabilities(batch)]
    hashes = gather_objects(tuple(torch.stack(digests).tolist()), learner.meshes.everyone)
    return list(find_odd_passes(hashes, learner.meshes.grid, learner.meshes.is_one_model))


def find_odd_passes(hashes: list[tuple[int, ...]], grid: Grid, is_one_model: bool) -> list[OddPass]:
    """The ranks whose results differ. `hashes`: of each rank; `is_one_model`: whether replicas have equal weights."""
    axes = (*(("replica",) if is_one_model else ()), *_DATA_AXES)
    groups = [tuple(peers) for peers in grid.peers(axes)]
    odd = [find_odd_ranks({rank: hashes[rank] for rank in peers}) for peers in groups]
    return [OddPass(ranks, peers) for ranks, peers in zip(odd, groups, strict=True) if ranks]


def describe_passes(found: list[OddPass], step: int) -> str:
    """Return the message for a run that ends after this step because ranks compute different results."""
    return (
        f"after step {step}: {'; '.join(odd.describe() for odd in found)} from the same weights and tokens "
        "(fault.verify_passes_every). Nothing was saved since all last agreed. Check that machine for a faulty "
        "processor or bad memory; run the same command again to resume from the newest checkpoint."
    )
