"""The global norm."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def global_norm(gradients: list[Tensor]) -> Tensor:
    """The 2-norm over all gradients, whole on every rank's device. Collective where gradients are sharded."""
    norm = torch.nn.utils.get_total_norm(gradients)
    if not isinstance(norm, DTensor):
        return norm
    if norm.device.type != norm.device_mesh.device_type:
        # Offloaded gradients are on the host; the ranks can add up on the mesh's devices alone, where this puts it.
        norm = DTensor.from_local(norm.to_local(), norm.device_mesh, norm.placements, run_check=False)
    return norm.full_tensor()
