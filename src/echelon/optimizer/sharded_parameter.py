"""How one parameter lies over the ranks, for rules that need more of it than this rank's part."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement


class Layout:
    """The placement of one parameter. Its collectives run where the mesh is, wherever the tensors are."""

    def __init__(self, parameter: Tensor) -> None:
        self.shape = parameter.shape
        self.device = parameter.device
        self._sharded = parameter if isinstance(parameter, DTensor) else None

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

    @property
    def _placements(self) -> tuple[Placement, ...]:
        return () if self._sharded is None else tuple(self._sharded.placements)


def _dim(placement: Placement) -> int | None:
    """The dim a placement splits, in whatever order its parts lie."""
    dim: int | None = getattr(placement, "dim", None)
    return dim
