"""The global norm."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def global_norm(gradients: list[Tensor]) -> Tensor:
    """The 2-norm over all gradients, whole on every rank's device. Collective where gradients are sharded."""
    on_host = bool(gradients) and gradients[0].device.type == "cpu"
    norm = _norm_on_host(gradients) if on_host else torch.nn.utils.get_total_norm(gradients)
    if not isinstance(norm, DTensor):
        return norm
    if norm.device.type != norm.device_mesh.device_type:
        # Offloaded gradients are on the host; the ranks can add up on the mesh's devices alone, where this puts it.
        norm = DTensor.from_local(norm.to_local(), norm.device_mesh, norm.placements, run_check=False)
    return norm.full_tensor()


def _norm_on_host(gradients: list[Tensor]) -> Tensor:
    """The norm of norms of rows.

    PyTorch's norm of a tensor on the CPU adds up in fp32 from end to end: of 40 million, GPT-2's embedding,
    it is off by 1e-4, which is what its gradients would be clipped by. On a GPU it adds up in a tree.
    """
    norms: list[Tensor] = []
    for gradient in gradients:
        rows = torch.linalg.vector_norm(gradient, dim=-1) if gradient.dim() > 1 else gradient
        norms.append(torch.linalg.vector_norm(rows))
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total
