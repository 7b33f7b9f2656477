"""Muon: the momentum of a matrix, orthogonalised whole by one rank, its owner, which sends the result to the others.

Each rank owns about the same share of the work. Matrices are sent in bf16, in rounds that bound the memory. For P
numbers in all matrices, each of n ranks sends on average

- 4 P/n (n-1)/n bytes if each has a part of every matrix: its parts to the owners, parts of its results to the others;
- 2 P (n-1)/n bytes if each has a copy of every matrix: its results to the others.

A round needs memory for about four times the matrices that a rank owns in it, or 2 n times with copies, and for what
the orthogonalisation needs. To gather every matrix on every rank in fp32, and compute it there, sends n times as much
as the first.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from echelon.learn.optimizer.rules import AdamW, Gradient, Item, PreconditioningRule, assign, build_adamw
from echelon.learn.optimizer.sharded_parameter import ParameterPlacement
from echelon.recipe.training import OptimConfig

# Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks": five quintic steps.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NUM_ITERATIONS = 5
EPS = 1e-7
# The root mean square of AdamW's updates, which Muon's are scaled to (Liu et al. 2025, arXiv:2502.16982, section 2.2).
UPDATE_RMS = 0.2


@dataclass(frozen=True)
class Muon(PreconditioningRule):
    """Muon with Nesterov momentum, its updates as large as AdamW's, so that one learning rate and decay serve both.

    Matrices are orthogonalised whole, each by one of the ranks that hold it: a part's own orthogonalisation would be
    another update.
    """

    momentum: float

    @override
    def build_state(self, parameter: Tensor, layout: ParameterPlacement) -> dict[str, Tensor]:
        """The momentum."""
        return {"momentum": torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)}

    @override
    def precondition(self, gradients: Sequence[Gradient], commit: Tensor) -> None:
        """Adds the gradients to the momentum, whose orthogonalisation replaces them."""

        def find_direction(index: int) -> Tensor:
            gradient, momentum = gradients[index].values.float(), gradients[index].state["momentum"]
            mixed = momentum.lerp(gradient, 1 - self.momentum)
            direction = gradient.lerp(mixed, self.momentum)
            assign(momentum, mixed, commit)
            return direction.bfloat16()

        def replace(index: int, update: Tensor) -> None:
            gradients[index].values.copy_(update)

        map_whole(orthogonalize, [gradient.layout for gradient in gradients], find_direction, replace)

    @override
    def update(self, items: Sequence[Item], rate: float, weight_decay: float, commit: Tensor) -> None:
        for item in items:
            scale = rate * UPDATE_RMS * math.sqrt(max(item.layout.shape))
            assign(item.weight, item.weight * (1 - rate * weight_decay) - scale * item.gradient, commit)


def build_muon(config: OptimConfig, is_layer_matrix: bool) -> Muon | AdamW:
    """The rule of the recipe's section: Muon leaves all but the matrices of the layers to AdamW."""
    return Muon(config.momentum) if is_layer_matrix else build_adamw(config, is_layer_matrix)


def orthogonalize(matrix: Tensor) -> Tensor:
    """Bring the singular values of a whole matrix near 1 by Newton-Schulz iterations in bf16, which is enough."""
    a, b, c = COEFFICIENTS
    x = matrix.bfloat16()
    is_tall = x.size(0) > x.size(1)
    if is_tall:
        x = x.T
    x = x / x.norm().clamp(min=EPS)
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


# Numbers of one owner's matrices in a round: 8 MiB in bf16, enough that sending takes longer than beginning to. A
# larger matrix has a round of its own.
ROUND = 2**22
# If each rank has a copy of a matrix, it computes the result itself where the shorter side is below this. For each byte
# of a result, Muon computes about 10 FLOPs times the shorter side. With a shorter side below FLOP/s / (10 bytes/s) a
# result is computed in less time than it is received: 10 on a core of a CPU with gloo inside a machine, 130 on an H100
# with NVLink. Parts must be sent in any case.
SMALLEST_SIDE = 128

Rounds = tuple[tuple[tuple[int, ...], ...], ...]
"""For each round, for each rank, the indices of the matrices that it owns."""


def map_whole(
    function: Callable[[Tensor], Tensor],
    layouts: Sequence[ParameterPlacement],
    read: Callable[[int], Tensor],
    write: Callable[[int, Tensor], object],
) -> None:
    """Compute `function` of each matrix. Collective: every rank calls it with the same matrices in the same order.

    Args:
        function: from a whole matrix, bf16, to one of the same shape and dtype.
        layouts: of all matrices.
        read: returns what this rank has of matrix i, bf16; called once for each.
        write: is given what this rank has of the result of matrix i.
    """
    teams: dict[tuple[dist.ProcessGroup, bool], list[int]] = {}
    for index, layout in enumerate(layouts):
        if is_divided(layout):
            assert layout.team is not None
            teams.setdefault((layout.team, layout.cut_dim is None), []).append(index)
        else:
            write(index, layout.keep_part(function(layout.gather(read(index)))))
    for (team, _), members in teams.items():
        shapes = tuple(layouts[index].shape for index in members)
        for owned in plan_rounds(shapes, team.size(), ROUND):
            exchange = _Round(team, layouts, [[members[place] for place in places] for places in owned])
            exchange.scatter([function(whole) for whole in exchange.gather(read)], write)


def is_divided(layout: ParameterPlacement) -> bool:
    """Whether the ranks divide the work on such a matrix."""
    return layout.team is not None and (layout.cut_dim is not None or min(layout.shape) >= SMALLEST_SIDE)


def assign_owners(shapes: Sequence[torch.Size], num_ranks: int) -> list[list[int]]:
    """The indices of the matrices of each rank, largest first.

    The cost of an m x n matrix is min(m, n)^2 max(m, n), that of a product with its transpose; the costliest goes first
    to the rank with the least so far (Graham 1969: at most 4/3 of the best division's time).
    """
    owned: list[list[int]] = [[] for _ in range(num_ranks)]
    work = [0] * num_ranks
    costs = [min(shape) ** 2 * max(shape) for shape in shapes]
    for index in sorted(range(len(shapes)), key=lambda index: -costs[index]):
        rank = work.index(min(work))
        owned[rank].append(index)
        work[rank] += costs[index]
    return owned


@functools.cache
def plan_rounds(shapes: tuple[torch.Size, ...], num_ranks: int, size: int) -> Rounds:
    """Divide the matrices of each rank over rounds of at most `size` numbers, or one matrix."""
    cut = [_cut(matrices, shapes, size) for matrices in assign_owners(shapes, num_ranks)]
    return tuple(zip_longest(*cut, fillvalue=()))


def _cut(matrices: Sequence[int], shapes: Sequence[torch.Size], size: int) -> list[tuple[int, ...]]:
    rounds: list[list[int]] = []
    total = 0
    for index in matrices:
        total += shapes[index].numel()
        if not rounds or total > size:
            rounds.append([])
            total = shapes[index].numel()
        rounds[-1].append(index)
    return [tuple(items) for items in rounds]


class _Round:
    """Matrices that are exchanged at once: of all, ranks have parts, or of all they have copies."""

    def __init__(
        self, team: dist.ProcessGroup, layouts: Sequence[ParameterPlacement], owned: Sequence[Sequence[int]]
    ) -> None:
        """`owned`: the matrices of each rank of the team."""
        self._team = team
        self._me = team.rank()
        self._layouts = layouts
        self._owned = owned
        self._mine = [layouts[index] for index in owned[self._me]]
        any_layout = layouts[next(index for matrices in owned for index in matrices)]
        self._device = any_layout.work_device
        self._has_copies = any_layout.cut_dim is None

    def gather(self, read: Callable[[int], Tensor]) -> list[Tensor]:
        """The matrices that this rank owns, whole. Collective unless ranks have copies."""
        parts = ([read(index).to(self._device) for index in matrices] for matrices in self._owned)
        if self._has_copies:
            [wholes] = [part for rank, part in enumerate(parts) if rank == self._me]
            return wholes
        shapes = [[layout.part_shape(rank) for layout in self._mine] for rank in range(self._team.size())]
        received = self._exchange(list(parts), shapes)
        return [layout.join(pieces) for layout, *pieces in zip(self._mine, *received, strict=True)]

    def scatter(self, results: Sequence[Tensor], write: Callable[[int, Tensor], object]) -> None:
        """Send each rank what it needs of this rank's results, and write what this rank needs. Collective."""
        pairs = list(zip(self._mine, results, strict=True))
        pieces = [[layout.part_of(result, rank) for layout, result in pairs] for rank in range(self._team.size())]
        shapes = [[self._layouts[index].part_shape(self._me) for index in matrices] for matrices in self._owned]
        for matrices, tensors in zip(self._owned, self._exchange(pieces, shapes), strict=True):
            for index, tensor in zip(matrices, tensors, strict=True):
                write(index, tensor)

    def _exchange(
        self, outgoing: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[torch.Size]]
    ) -> list[list[Tensor]]:
        """Send each rank its tensors, bf16, and return those of each rank, whose shapes are known. Collective."""
        nothing = torch.empty(0, dtype=torch.bfloat16, device=self._device)
        sent = torch.cat([nothing, *(tensor.flatten() for tensors in outgoing for tensor in tensors)])
        lengths = [sum(shape.numel() for shape in group) for group in shapes]
        received = torch.empty(sum(lengths), dtype=torch.bfloat16, device=self._device)
        counts = [sum(tensor.numel() for tensor in tensors) for tensors in outgoing]
        dist.all_to_all_single(received, sent, lengths, counts, group=self._team)
        pieces: list[list[Tensor]] = []
        start = 0
        for group in shapes:
            pieces.append([])
            for shape in group:
                pieces[-1].append(received[start : start + shape.numel()].view(shape))
                start += shape.numel()
        return pieces
