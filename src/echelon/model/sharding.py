"""What part of a tensor this rank holds."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement

Places = tuple[slice | Tensor, ...]
"""Places of a whole tensor, dim by dim: a slice of those that follow each other, else their numbers, int64 `[n]`."""


def local_places(tensor: Tensor) -> Places:
    """Which places of the whole tensor this rank holds. Sends nothing."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    if all(type(placement) in (Shard, Replicate) for placement in tensor.placements):
        shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
    return tuple(_places_of_dim(tensor, dim) for dim in range(tensor.ndim))


def _places_of_dim(tensor: DTensor, dim: int) -> slice | Tensor:
    """The places along one dim, by dividing their numbers as the tensor is: parts may be dealt out in strides."""
    mesh = tensor.device_mesh
    shape = [-1 if other == dim else 1 for other in range(tensor.ndim)]
    numbers = torch.arange(tensor.shape[dim], device=mesh.device_type).view(shape)
    placements: list[Placement] = [
        placement if getattr(placement, "dim", None) == dim else Replicate() for placement in tensor.placements
    ]
    replicated = DTensor.from_local(numbers, mesh, [Replicate()] * mesh.ndim, run_check=False)
    places = replicated.redistribute(placements=placements).to_local().flatten().cpu()
    if len(places) and torch.equal(places, torch.arange(int(places[0]), int(places[0]) + len(places))):
        return slice(int(places[0]), int(places[0]) + len(places))
    return places


def take(whole: Tensor, places: Places) -> Tensor:
    """The part of a whole tensor that lies at these places."""
    for dim, each in enumerate(places):
        whole = whole[(slice(None),) * dim + (each,)]
    return whole


def local_part(tensor: Tensor) -> Tensor:
    """This rank's own memory of a tensor, sharded or not."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def write_part(tensor: Tensor, content: Tensor) -> None:
    """Fill this rank's part of a tensor from the whole of what it is to hold."""
    local_part(tensor).copy_(take(content, local_places(tensor)))


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor on every rank, where the mesh is. Collective where it is sharded."""
    if not isinstance(tensor, DTensor):
        return tensor
    mesh = tensor.device_mesh
    local = tensor.to_local().to(mesh.device_type)  # offloaded parameters are on the host, where no mesh can gather
    return DTensor.from_local(
        local, mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    ).full_tensor()
