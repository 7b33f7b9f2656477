"""What part of a tensor this rank holds."""

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local_slices(tensor: Tensor) -> tuple[slice, ...]:
    """Which part of the whole tensor this rank holds."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))


def local_part(tensor: Tensor) -> Tensor:
    """This rank's own memory of a tensor, sharded or not."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def write_part(tensor: Tensor, content: Tensor) -> None:
    """Fill this rank's part of a tensor from the whole of what it is to hold."""
    local_part(tensor).copy_(content[local_slices(tensor)])


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor on every rank, where the mesh is. Collective where it is sharded."""
    if not isinstance(tensor, DTensor):
        return tensor
    mesh = tensor.device_mesh
    local = tensor.to_local().to(mesh.device_type)  # offloaded parameters are on the host, where no mesh can gather
    return DTensor.from_local(
        local, mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    ).full_tensor()
