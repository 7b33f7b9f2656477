"""Whether all replicas still hold the same weights: bad memory and missed broadcasts are silent otherwise."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.distributed.mesh import Meshes
from echelon.model.sharding import local_part
from echelon.planner.plan import ParallelPlan

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


def compare_replicas(tensors: Mapping[str, Any], meshes: Meshes) -> list[Difference]:
    """Compare the weights of all replicas: what differs, the same on every rank. One small gather. Collective.

    Args:
        tensors: what the engine keeps: those named `model.NAME` are compared.
    """
    if meshes.grid.sizes["dp_replicate"] == 1:
        return []
    weights = {name.removeprefix("model."): each for name, each in tensors.items() if name.startswith("model.")}
    device = torch.device(meshes.device_type)
    mine = torch.stack([hash_bits(local_part(each)).to(device) for each in weights.values()])
    everyone = [torch.empty_like(mine) for _ in range(meshes.num_devices)]
    dist.all_gather(everyone, mine, group=meshes.everyone)
    hashes = [tuple(each.tolist()) for each in everyone]
    replicas = [tuple(ranks) for ranks in meshes.grid.peers(("dp_replicate",))]
    return find_differences(hashes, replicas, list(weights))


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


def find_differences(
    hashes: list[tuple[int, ...]], replicas: list[tuple[int, ...]], names: list[str]
) -> list[Difference]:
    """Which ranks differ from their replicas.

    Args:
        hashes: of every rank, one number for each name.
        replicas: groups of ranks that should have the same.
    """
    found = []
    for group in replicas:
        counts = Counter(hashes[rank] for rank in group)
        if len(counts) == 1:
            continue
        usual, count = counts.most_common(1)[0]
        odd = tuple(rank for rank in group if hashes[rank] != usual) if 2 * count > len(group) else group
        places = [place for place in range(len(names)) if len({hashes[rank][place] for rank in group}) > 1]
        found.append(Difference(odd, group, names[places[0]], len(places)))
    return found


def _listed(ranks: tuple[int, ...] | list[int]) -> str:
    return ", ".join(map(str, ranks))
