"""Whether all replicas still hold the same weights: bad memory and missed broadcasts are silent otherwise."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from echelon.distributed.mesh import MESH_AXES, Grid, Meshes
from echelon.model.sharding import local_part
from echelon.planner.plan import ParallelPlan

# Ranks with other places on these belong to one replica and one stage of a pipeline.
_COPYING_AXES = ("dp_replicate", "dp_shard", "cp", "tp")
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 2**22  # numbers hashed at once: 64-bit copies of a whole parameter would need much memory
# The constants and shifts of SplitMix64 (Steele, Lea & Flood 2014), as signed words.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


@dataclass(frozen=True)
class Difference:
    """Ranks whose weights are not those of their replicas.

    Attributes:
        ranks: those that differ from most of their replicas; all of them where most do not agree.
        replicas: the ranks that should hold the same.
        parameter: the first one that differs.
        num_parameters: how many do.
    """

    ranks: tuple[int, ...]
    replicas: tuple[int, ...]
    parameter: str
    num_parameters: int

    def describe(self) -> str:
        """One sentence without its end."""
        others = [rank for rank in self.replicas if rank not in self.ranks]
        who = f"rank {_listed(self.ranks)} {'holds' if len(self.ranks) == 1 else 'hold'}"
        than = f"other weights than rank {_listed(others)}" if others else "different weights"
        return f"{who} {than}, where all should be equal: {self.num_parameters} tensors, the first {self.parameter}"


def describe_replicas(plan: ParallelPlan) -> str:
    """What `fault.verify_replicas_every` compares under a plan; for the start of a run."""
    if plan.dp_replicate == 1:
        return "replicas: each weight is on one rank alone under this plan, so there is nothing to compare"
    return f"replicas: {plan.dp_replicate} of each weight are compared"


def compare_replicas(tensors: Mapping[str, Tensor], meshes: Meshes) -> list[Difference]:
    """Compare all copies of the weights inside each replica: what differs, the same on every rank. Collective.

    Copies lie along dp_replicate, and along every other axis that does not divide the tensor. Each rank sends two
    numbers for each of its tensors.

    Args:
        tensors: what the engine keeps: those named `model.NAME` are compared.
    """
    weights = {name.removeprefix("model."): each for name, each in tensors.items() if name.startswith("model.")}
    names = list(weights)
    found = list(_find_differing(_gather_digests(list(weights.values()), meshes), meshes.grid))
    if not found:
        return []
    all_names = [names] * meshes.num_devices  # ranks with other layers have other names
    dist.all_gather_object(all_names, names, group=meshes.everyone)
    return [
        Difference(odd, copies, all_names[copies[0]][differing[0]], len(differing)) for odd, copies, differing in found
    ]


def _find_differing(
    digests: list[list[tuple[int, int]]], grid: Grid
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], list[int]]]:
    """The ranks that differ, the ranks that should be equal, and the places of the tensors that are not.

    Args:
        digests: for each rank, as `_gather_digests` has them.
    """
    for code in sorted({code for each in digests for code, _ in each} - {0}):
        for copies in grid.peers(_decode(code)):
            places = [place for place, (each, _) in enumerate(digests[copies[0]]) if each == code]
            hashes = {rank: tuple(digests[rank][place][1] for place in places) for rank in copies}
            odd = find_odd_ranks(hashes)
            if odd:
                columns = zip(places, zip(*hashes.values(), strict=True), strict=True)
                yield odd, tuple(copies), [place for place, column in columns if len(set(column)) > 1]


def _gather_digests(weights: list[Tensor], meshes: Meshes) -> list[list[tuple[int, int]]]:
    """For each rank and each of its tensors: the axes along which there are copies of it, as a code, and its hash.

    The code 0 means that there are none; stages of a pipeline with fewer tensors than others are filled up with it.
    """
    device = torch.device("cpu" if dist.get_backend(meshes.everyone) == "gloo" else meshes.device_type)
    count = torch.tensor(len(weights), device=device)
    dist.all_reduce(count, dist.ReduceOp.MAX, group=meshes.everyone)
    mine = torch.zeros(int(count), 2, dtype=torch.int64, device=device)
    for place, weight in enumerate(weights):
        code = _encode(copied_axes(weight, meshes.grid))
        if code:
            mine[place, 0] = code
            mine[place, 1] = hash_bits(local_part(weight))
    everyone = [torch.empty_like(mine) for _ in range(meshes.num_devices)]
    dist.all_gather(everyone, mine, group=meshes.everyone)
    return [[(code, digest) for code, digest in each.tolist()] for each in everyone]


def copied_axes(weight: Tensor, grid: Grid) -> tuple[str, ...]:
    """The axes with several places along which the ranks of one replica and one stage hold the same of a tensor."""
    divided: set[str] = set()
    if isinstance(weight, DTensor):
        for name, placement in zip(weight.device_mesh.mesh_dim_names or (), weight.placements, strict=True):
            if not placement.is_replicate():
                divided.update(MESH_AXES[name])
    return tuple(axis for axis in _COPYING_AXES if grid.sizes[axis] > 1 and axis not in divided)


def _encode(axes: tuple[str, ...]) -> int:
    """Axes as a number, one bit for each."""
    return sum(1 << _COPYING_AXES.index(axis) for axis in axes)


def _decode(code: int) -> tuple[str, ...]:
    return tuple(axis for place, axis in enumerate(_COPYING_AXES) if code >> place & 1)


def describe_differences(differences: list[Difference], step: int) -> str:
    """The message with which a run ends after this many steps."""
    return (
        f"after step {step}: {'; '.join(each.describe() for each in differences)}. Nothing was saved since the "
        "replicas were last equal. Look for bad memory or another fault of that machine; the same command goes on from "
        "the newest checkpoint."
    )


@torch.no_grad()
def hash_bits(tensor: Tensor) -> Tensor:
    """A 64-bit hash of a tensor's bits and their places: an int64 scalar on its device. The host waits for nothing.

    The sum, modulo 2^64, of SplitMix64's finalizer of each number's bits and place. For one place the finalizer is a
    bijection, so a change of a single number is always seen; for two tensors that differ otherwise the odds of an
    equal hash are about 2^-64. It guards against mistakes and broken memory, not against an adversary.
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
    """Shift to the right as unsigned words are: torch repeats the sign."""
    return torch.bitwise_and(words >> places, 2 ** (64 - places) - 1)


def find_odd_ranks(hashes: Mapping[int, tuple[int, ...]]) -> tuple[int, ...]:
    """The ranks whose hashes are not those of most; all of them where most do not agree, none where all do.

    Args:
        hashes: by rank, of ranks that should have the same.
    """
    counts = Counter(hashes.values())
    if len(counts) == 1:
        return ()
    usual, count = counts.most_common(1)[0]
    return tuple(rank for rank, each in hashes.items() if each != usual or 2 * count <= len(hashes))


def _listed(ranks: tuple[int, ...] | list[int]) -> str:
    return ", ".join(map(str, ranks))
