"""How one parameter lies over the ranks, for rules that need more of it than this rank's part."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement


class ParameterPlacement:
    """The placement of one parameter. Its collectives run where the mesh is, wherever the tensors are.

    Attributes:
        team: the ranks that can divide work on the whole tensor: each has a part of it, or each has all of it. None if
            there is one rank, or if several axes of the mesh divide the tensor.
        cut_dim: the dim along which the ranks of `team` have parts; None if each has all of it.
        work_device: where collectives of `team` run.
    """

    def __init__(self, parameter: Tensor, copies: dist.ProcessGroup | None = None) -> None:
        """`copies`: the ranks that hold the same parameter, if it is not sharded and they may divide work on it."""
        self.shape = parameter.shape
        self.device = parameter.device
        self._sharded = parameter if isinstance(parameter, DTensor) else None
        self.work_device = (
            parameter.device if self._sharded is None else torch.device(self._sharded.device_mesh.device_type)
        )
        self.cut_dim: int | None = None
        self.team = copies if self._sharded is None else self._find_owners_of_parts()
        if self.team is not None and self.team.size() == 1:
            self.team = None

    def part_shape(self, rank: int) -> torch.Size:
        """The shape of what a rank of `team` has."""
        shape = list(self.shape)
        if self.cut_dim is not None:
            shape[self.cut_dim] = self._find_extent(rank)[1]
        return torch.Size(shape)

    def part_of(self, whole: Tensor, rank: int) -> Tensor:
        """What a rank of `team` has of the whole tensor: a view."""
        return whole if self.cut_dim is None else whole.narrow(self.cut_dim, *self._find_extent(rank))

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole tensor from the parts of all ranks of `team`, in their order."""
        assert self.cut_dim is not None
        return torch.cat(tuple(parts), self.cut_dim)

    def splits(self, dim: int) -> bool:
        """Whether different ranks hold different parts along a dim."""
        return any(_dim(placement) == dim % len(self.shape) for placement in self._placements)

    def add_up(self, partial: Tensor, dim: int | None = None) -> Tensor:
        """Sum what each rank computed from its own part, over the ranks that split `dim` (None: any). Collective."""
        if self._sharded is None:
            return partial
        mesh = self._sharded.device_mesh
        total = partial.to(mesh.device_type, copy=True)
        for axis, placement in enumerate(self._placements):
            split = _dim(placement)
            if split is not None and (dim is None or split == dim % len(self.shape)):
                dist.all_reduce(total, group=mesh.get_group(axis))
        return total.to(partial.device)

    def gather(self, part: Tensor) -> Tensor:
        """The whole tensor on every rank, on the mesh's device, from each rank's part. Collective."""
        if self._sharded is None:
            return part
        mesh = self._sharded.device_mesh
        return DTensor.from_local(
            part.to(mesh.device_type),
            mesh,
            self._placements,
            run_check=False,
            shape=self._sharded.shape,
            stride=self._sharded.stride(),
        ).full_tensor()

    def keep_part(self, whole: Tensor) -> Tensor:
        """This rank's part of a tensor that every rank holds whole, on the device of the parameter."""
        if self._sharded is None:
            return whole
        mesh = self._sharded.device_mesh
        replicated = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return replicated.redistribute(placements=self._placements).to_local().to(self.device)

    def zeros(self, dim: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Zeros of the parameter's shape but for `dim`, which has `size`; sharded as it is in the other dims.

        A size of 1 means one value for the whole dim, held by every rank.
        """
        dim %= len(self.shape)
        shape = [*self.shape[:dim], size, *self.shape[dim + 1 :]]
        if self._sharded is None:
            return torch.zeros(shape, dtype=dtype, device=self.device)
        placements = [Replicate() if _dim(placement) == dim else placement for placement in self._placements]
        zeros = torch.distributed.tensor.zeros(
            *shape, dtype=dtype, device_mesh=self._sharded.device_mesh, placements=placements
        )
        return zeros.to(self.device)

    def _find_owners_of_parts(self) -> dist.ProcessGroup | None:
        """The group of the only axis that divides the tensor, whose dim becomes `cut_dim`."""
        assert self._sharded is not None
        cuts = [axis for axis, placement in enumerate(self._placements) if not placement.is_replicate()]
        if len(cuts) != 1 or type(placement := self._placements[cuts[0]]) is not Shard:
            return None
        self.cut_dim = placement.dim
        return self._sharded.device_mesh.get_group(cuts[0])

    def _find_extent(self, rank: int) -> tuple[int, int]:
        """(start, length) of a rank's part along `cut_dim`: as `torch.chunk` divides it, which `Shard` follows."""
        assert self.team is not None and self.cut_dim is not None
        size = self.shape[self.cut_dim]
        length = -(-size // self.team.size())
        start = min(rank * length, size)
        return start, min(length, size - start)

    @property
    def _placements(self) -> tuple[Placement, ...]:
        return () if self._sharded is None else tuple(self._sharded.placements)


def _dim(placement: Placement) -> int | None:
    """The dim a placement splits, in whatever order its parts lie."""
    dim: int | None = getattr(placement, "dim", None)
    return dim
