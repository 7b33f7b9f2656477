"""The router beside experts that tensor parallelism divides.

Each rank has some of the experts (see expert.py), and their outputs add up to those of all. Every rank has the whole
router and computes the same with it: its logits, its loss, and the gradient of its weights.

The weights by which the router adds up experts get their gradient from the experts of a rank: it is added up over the
ranks before it reaches the router, and is the same on every rank from there on. The gradient of the hidden states is
added up too, but after the router: so the router's share of it is divided by the number of ranks.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from typing_extensions import override

from echelon.ground.errors import ConfigError
from echelon.planner.experts import find_recorded_routers

STYLE = "moe_tp_experts"
"""What transformers calls its way to divide the module that holds the experts of a layer."""


def find_router(model: Any, experts: str) -> str:
    """Return the name of the router beside some experts in the decoder. `experts`: their name there.

    Raises:
        ConfigError: there is more than the experts and a router in their block, or the router is not known.
    """
    base, kind, block = model.base_model, model.config.model_type, experts.rpartition(".")[0]
    inside = base.get_submodule(block)
    routers = [name for name in find_recorded_routers(base) if name.startswith(f"{block}.")]
    owners = {f"{block}.{name}".rpartition(".")[0] for name, _ in inside.named_parameters()}
    others = {
        name for name in owners if not f"{name}.".startswith((f"{experts}.", *(f"{router}." for router in routers)))
    }
    if len(routers) != 1 or others:
        what = f"{min(others)} beside its experts" if others else f"{len(routers)} routers in {block}"
        raise ConfigError(
            f"parallel.tp above 1: {kind} has {what}; echelon divides experts with one router and nothing else beside "
            "them, as those of Mixtral and Qwen3-MoE; use parallel.dp_shard or parallel.ep."
        )
    if getattr(inside, "jitter_noise", 0):
        raise ConfigError(
            f"parallel.tp above 1: router_jitter_noise of {kind} would be other noise on each rank; set "
            "model.config.router_jitter_noise=0, or use tp=1."
        )
    return routers[0]


def connect_router(router: nn.Module, experts: nn.Module, mesh: DeviceMesh) -> None:
    """Make the gradients between a router and experts right, which `divide_experts` divides afterwards.

    The hidden states that enter both must be whole, and their gradient a part of a sum.
    """
    experts.register_forward_pre_hook(partial(_add_up_gradient_of_weights, mesh))
    router.register_forward_pre_hook(partial(_share_gradient, mesh.size()))


def _add_up_gradient_of_weights(mesh: DeviceMesh, experts: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The inputs of experts; the gradient of the last one, the router's weights, is added up over the ranks."""
    *others, weights = inputs
    whole = DTensor.from_local(weights, mesh, [Replicate()], run_check=False)
    return (*others, whole.to_local(grad_placements=[Partial()]))


def _share_gradient(num_ranks: int, router: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The inputs of a router; each rank passes on its share of the gradient of the first one, the hidden states."""
    hidden: Tensor = _SharedGradient.apply(inputs[0], num_ranks)  # type: ignore[no-untyped-call]
    return (hidden, *inputs[1:])


class _SharedGradient(torch.autograd.Function):
    """Returns its input; the gradient is divided by the number of ranks that have the same one, and add it up."""

    @staticmethod
    @override
    def forward(ctx: Any, hidden: Tensor, num_ranks: int) -> Tensor:
        ctx.num_ranks = num_ranks
        return hidden.view_as(hidden)

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] / ctx.num_ranks, None
