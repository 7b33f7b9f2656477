"""Checks that all ranks have the same weights, and compute the same from the same tokens.

That detects silent faults of a processor or its memory.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from typing_extensions import override

from echelon.ground.errors import TrainingError
from echelon.learn.data.own_batches import build_step_batch
from echelon.learn.distributed.mesh import EXPERT_AXES, Grid, Meshes
from echelon.learn.distributed.objects import gather_objects
from echelon.learn.model.sharding import local_part
from echelon.planner.plan import ParallelPlan
from echelon.recipe.synchronization import QUORUM
from echelon.run.training.callbacks import Monitor

if TYPE_CHECKING:
    from echelon.learn.learner import Learner
    from echelon.run.training.run_log import Accounting
    from echelon.run.training.saver import Saver

# Ranks that differ only along these axes belong to the same pipeline stage. Replicas have copies in a quorum alone.
_COPYING_AXES = ("replica", "dp_replicate", "dp_shard", "cp", "tp")
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 2**22  # numbers hashed at once: a 64-bit copy of a full parameter would need much memory
# The constants and shifts of SplitMix64 (Steele, Lea & Flood 2014), as signed words.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
# Ranks that differ only along these compute the same from the same tokens. Replicas have the same weights in a quorum.
_DATA_AXES = ("dp_replicate", "dp_shard")


@dataclass(frozen=True)
class ReplicaDifference:
    """Ranks whose weights differ from their replicas.

    Attributes:
        ranks: the ranks that differ from the majority; all of them if there is no majority.
        replicas: the ranks that should have equal weights.
        parameter: the first parameter that differs.
        num_parameters: the number of parameters that differ.
    """

    ranks: tuple[int, ...]
    replicas: tuple[int, ...]
    parameter: str
    num_parameters: int

    def describe(self) -> str:
        """Return a clause for a message."""
        others = [rank for rank in self.replicas if rank not in self.ranks]
        who = f"rank {_listed(self.ranks)} {'has' if len(self.ranks) == 1 else 'have'}"
        than = f"other weights than rank {_listed(others)}" if others else "different weights"
        return (
            f"{who} {than}, and all must be equal: {self.num_parameters} tensors differ, the first is {self.parameter}"
        )


def describe_replicas(plan: ParallelPlan) -> str:
    """Return a line for the start of a run: what `fault.verify_replicas_every` compares under a plan."""
    copies = plan.num_whole_copies if plan.sync.name == QUORUM else plan.dp_replicate
    if copies == 1:
        if plan.tp > 1:
            return f"replicas: the {plan.tp} copies of weights that tensor parallelism does not divide are compared"
        return "replicas: under this plan each weight is on one rank only, so there is nothing to compare"
    return f"replicas: {copies} copies of each weight are compared"


def compare_replicas(tensors: Mapping[str, Tensor], meshes: Meshes) -> list[ReplicaDifference]:
    """Compare all copies of each weight; return the differences, the same on every rank. Collective.

    Copies are along dp_replicate, and along every other axis that does not shard the tensor. Each rank sends two
    numbers per tensor.

    Args:
        tensors: the engine's tensors, of which those named `model.NAME` are compared.
    """
    weights = {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name.startswith("model.")}
    names = list(weights)
    differences = list(_find_differing(_gather_digests(list(weights.values()), meshes), meshes.grid))
    if not differences:
        return []
    all_names = gather_objects(names, meshes.everyone)  # other pipeline stages have other names
    return [
        ReplicaDifference(odd, copies, all_names[copies[0]][differing[0]], len(differing))
        for odd, copies, differing in differences
    ]


def _find_differing(
    digests: list[list[tuple[int, int]]], grid: Grid
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], list[int]]]:
    """Yield (ranks that differ, ranks that should be equal, indices of the differing tensors).

    Args:
        digests: for each rank, the result of `_gather_digests`.
    """
    for code in sorted({code for digest in digests for code, _ in digest} - {0}):
        for copies in grid.peers(_decode(code)):
            places = [index for index, (start, _) in enumerate(digests[copies[0]]) if start == code]
            hashes = {rank: tuple(digests[rank][index][1] for index in places) for rank in copies}
            odd = find_odd_ranks(hashes)
            if odd:
                columns = zip(places, zip(*hashes.values(), strict=True), strict=True)
                yield odd, tuple(copies), [index for index, column in columns if len(set(column)) > 1]


def _gather_digests(weights: list[Tensor], meshes: Meshes) -> list[list[tuple[int, int]]]:
    """Return, for each rank and tensor, the axes along which it has copies, encoded as a number, and its hash.

    Code 0 means no copies; it also pads pipeline stages with fewer tensors than others.
    """
    device = torch.device("cpu" if dist.get_backend(meshes.everyone) == "gloo" else meshes.device_type)
    count = torch.tensor(len(weights), device=device)
    dist.all_reduce(count, dist.ReduceOp.MAX, group=meshes.everyone)
    mine = torch.zeros(int(count), 2, dtype=torch.int64, device=device)
    for index, weight in enumerate(weights):
        code = _encode(copied_axes(weight, meshes))
        if code:
            mine[index, 0] = code
            mine[index, 1] = hash_bits(local_part(weight))
    everyone = [torch.empty_like(mine) for _ in range(meshes.num_devices)]
    dist.all_gather(everyone, mine, group=meshes.everyone)
    return [[(code, digest) for code, digest in row.tolist()] for row in everyone]


def copied_axes(weight: Tensor, meshes: Meshes) -> tuple[str, ...]:
    """Return the axes of size above 1 along which the ranks of a model and stage have the same part of a tensor."""
    divided: set[str] = set() if meshes.is_one_model else {"replica"}
    if isinstance(weight, DTensor):
        for name, placement in zip(weight.device_mesh.mesh_dim_names or (), weight.placements, strict=True):
            if not placement.is_replicate():
                divided.update(EXPERT_AXES[name])
    return tuple(axis for axis in _COPYING_AXES if meshes.grid.sizes[axis] > 1 and axis not in divided)


def _encode(axes: tuple[str, ...]) -> int:
    """Encode axes as a number, one bit per axis."""
    return sum(1 << _COPYING_AXES.index(axis) for axis in axes)


def _decode(code: int) -> tuple[str, ...]:
    return tuple(axis for bit, axis in enumerate(_COPYING_AXES) if code >> bit & 1)


def describe_differences(differences: list[ReplicaDifference], step: int) -> str:
    """Return the message for a run that ends after this step because replicas differ."""
    return (
        f"after step {step}: {'; '.join(difference.describe() for difference in differences)}. Nothing was saved "
        "since the replicas were last equal. Check that machine for bad memory or another hardware fault; run the same "
        "command again to resume from the newest checkpoint."
    )


@torch.no_grad()
def hash_bits(tensor: Tensor) -> Tensor:
    """Hash a tensor's bits and their positions to 64 bits: an int64 scalar on its device. No synchronization.

    The sum, modulo 2^64, of SplitMix64's finalizer of each element's bits and position. For a fixed position the
    finalizer is a bijection, so a change of a single element is always detected; for other changes the probability of
    an equal hash is about 2^-64. It detects mistakes and broken memory, not attacks.
    """
    words = tensor.detach().contiguous().flatten().view(_WORDS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for first in range(0, len(words), _CHUNK):
        chunk = words[first : first + _CHUNK].to(torch.int64)
        mixed = chunk ^ (torch.arange(first + 1, first + 1 + len(chunk), device=tensor.device) * _GOLDEN)
        mixed = (mixed ^ _shifted(mixed, 30)) * _FIRST
        mixed = (mixed ^ _shifted(mixed, 27)) * _SECOND
        total += (mixed ^ _shifted(mixed, 31)).sum()
    return total


def _shifted(words: Tensor, places: int) -> Tensor:
    """Logical right shift: torch's shift of signed integers is arithmetic."""
    return torch.bitwise_and(words >> places, 2 ** (64 - places) - 1)


def find_odd_ranks(hashes: Mapping[int, tuple[int, ...]]) -> tuple[int, ...]:
    """Return the ranks whose hashes differ from the majority; all if there is no majority, none if all are equal.

    Args:
        hashes: by rank, for ranks that should have equal hashes.
    """
    counts = Counter(hashes.values())
    if len(counts) == 1:
        return ()
    usual, count = counts.most_common(1)[0]
    return tuple(rank for rank, digest in hashes.items() if digest != usual or 2 * count <= len(hashes))


def _listed(ranks: tuple[int, ...] | list[int]) -> str:
    return ", ".join(map(str, ranks))


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
    with torch.compiler.set_stance("force_eager"):  # each process may choose other kernels for what it compiles
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


@dataclass(frozen=True)
class RankComparison(Monitor):
    """What ranks compare at an interval, and before each save, since a checkpoint has the weights of one replica.

    `every`: the interval in steps. `event`: the name of an event for each difference, a dataclass. `find`: returns the
    differences after a step, the same on every rank. Collective. `describe`: the message of a run that ends for them.
    """

    every: int
    event: str
    find: Callable[[int], list[Any]]
    describe: Callable[[list[Any], int], str]
    saver: "Saver"
    accounting: "Accounting"

    @override
    def needs_pause(self, done: int) -> bool:
        return done % self.every == 0

    @override
    def on_pause(self, step: int) -> None:
        """Raise TrainingError if ranks differ, after an event for each difference. Collective."""
        if differences := self.find(step):
            self.saver.store.wait()  # the pending save was compared before it began
            for difference in differences:
                self.accounting.event(self.event, step=step, **asdict(difference))
            raise TrainingError(self.describe(differences, step))


def build_comparisons(learner: "Learner", saver: "Saver", accounting: "Accounting") -> list[RankComparison]:
    """Return what the recipe's `fault` has ranks compare: the weights of replicas, and results from the same tokens."""
    fault = learner.recipe.fault

    def compare_weights(step: int) -> list[Any]:
        return compare_replicas(learner.engine.state_dict(), learner.meshes)

    rows = (
        (fault.verify_replicas_every, "replicas_differ", compare_weights, describe_differences),
        (fault.verify_passes_every, "passes_differ", partial(compare_passes, learner), describe_passes),
    )
    return [
        RankComparison(every, event, find, describe, saver, accounting)
        for every, event, find, describe in rows
        if every is not None
    ]
