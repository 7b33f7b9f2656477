"""Gradients before the update: their global norm, clipping by it, and the loss scale of fp16."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from echelon.learn.model.sharding import local_part

# As in torch.nn.utils.clip_grad_norm_.
_EPSILON = 1e-6


@torch.no_grad()
def global_norm(gradients: Sequence[Tensor], stages: dist.ProcessGroup | None = None) -> Tensor:
    """The 2-norm over all gradients, an fp32 scalar, the same on every rank. Collective where gradients are sharded.

    Each rank squares its own parts. Their sums are added over the axes of the mesh that divide them, and over no other,
    so that what several ranks hold alike counts once. A plain tensor is one that each rank holds whole. The host waits
    for nothing where the gradients are where the mesh is.

    Args:
        stages: the ranks that hold the other layers of a pipeline.
    """
    meshes = [gradient.device_mesh for gradient in gradients if isinstance(gradient, DTensor)]
    if meshes:
        device = torch.device(meshes[0].device_type)  # offloaded gradients are on the host, where no mesh can add up
    else:
        device = gradients[0].device if gradients else torch.device("cpu")
    norms = _part_norms([local_part(gradient) for gradient in gradients])
    groups: dict[tuple[DeviceMesh | None, tuple[int, ...]], list[Tensor]] = defaultdict(list)
    for gradient, norm in zip(gradients, norms, strict=True):
        groups[_dividing_axes(gradient)].append(norm)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for (mesh, axes), members in groups.items():
        squares = torch.stack(members).double().square().sum().to(device)
        for axis in axes:
            assert mesh is not None
            dist.all_reduce(squares, group=mesh.get_group(axis))
        total += squares
    if stages is not None:
        dist.all_reduce(total, group=stages)
    return total.sqrt().float()


@torch.no_grad()
def clip_gradients(gradients: Sequence[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale gradients in place by max_norm / norm, where that is below 1. `norm`: their global norm."""
    coefficient = (max_norm / (norm + _EPSILON)).clamp(max=1.0)
    parts: dict[torch.device, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        part = local_part(gradient)
        parts[part.device].append(part)
    for device, members in parts.items():
        torch._foreach_mul_(members, coefficient.to(device))


def _dividing_axes(gradient: Tensor) -> tuple[DeviceMesh | None, tuple[int, ...]]:
    """The mesh of a gradient, and which of its axes give each rank another part."""
    if not isinstance(gradient, DTensor):
        return None, ()
    placements = gradient.placements
    assert not any(placement.is_partial() for placement in placements), "a gradient that is not summed yet has no norm"
    return gradient.device_mesh, tuple(
        axis for axis, placement in enumerate(placements) if not placement.is_replicate()
    )


def _part_norms(parts: list[Tensor]) -> Sequence[Tensor]:
    """The norm of each part, in fp32 where it is.

    On a CPU the norm of the norms of its rows. PyTorch's norm of a tensor on the CPU adds up in fp32 from end to end:
    of 40 million numbers, GPT-2's embedding, it is off by 1e-4, which is what its gradients would be clipped by. On a
    GPU it adds up in a tree.
    """
    if not parts:
        return []
    if parts[0].device.type != "cpu":
        return torch._foreach_norm(parts, 2, dtype=torch.float32)
    rows = [torch.linalg.vector_norm(part, dim=-1, dtype=torch.float32) if part.dim() > 1 else part for part in parts]
    return [torch.linalg.vector_norm(row, dtype=torch.float32) for row in rows]


INITIAL = 65536.0
GROWTH_STEPS = 2000


class LossScale:
    """The factor on the loss of an fp16 run, and how it changes, without the host.

    It doubles after GROWTH_STEPS good steps in a row, and is halved by each step whose gradients overflowed
    (Micikevicius et al. 2018, "Mixed Precision Training", section 3.2), as in `torch.amp.GradScaler`, of which these
    are the defaults.
    """

    def __init__(self, device: torch.device) -> None:
        self.value = torch.empty((), device=device)
        self._good_steps = torch.empty((), device=device)
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self.value.fill_(INITIAL)
        self._good_steps.zero_()

    def unscale(self, gradients: Iterable[Tensor]) -> None:
        """Take the factor out of gradients, in place; those that overflowed stay infinite, or become NaN.

        The gradients are on one device. With offloaded parameters it is the CPU, while the loss is on the GPU.
        """
        scaled = list(gradients)
        if scaled:
            torch._foreach_mul_(scaled, self.value.reciprocal().to(scaled[0].device))

    def update(self, is_finite: Tensor) -> None:
        """Book one step: whether its gradients were finite, on every rank the same."""
        is_finite = is_finite.to(self.value.device)
        good = torch.where(is_finite, self._good_steps + 1, 0.0)
        grows = good >= GROWTH_STEPS
        self.value.mul_(torch.where(is_finite, torch.where(grows, 2.0, 1.0), 0.5))
        self._good_steps.copy_(torch.where(grows, 0.0, good))

    def state_dict(self) -> dict[str, Tensor]:
        """The live tensors of a checkpoint."""
        return {"value": self.value, "good_steps": self._good_steps}
