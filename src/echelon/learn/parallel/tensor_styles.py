"""How tensor parallelism divides what `transformers` leaves whole: packed matrices, norms of all heads, routers.

`transformers` gathers the output of several matrices in one, and of those before a norm of all heads
(`colwise_gather_output`): every rank computes all heads, or the whole width of the MLP, and cuts its part for the next
matrix (`rowwise_split_input`). Here a rank keeps what belongs to its own heads, or its own part of the width, so that
both are divided as in any other model.

Of experts, each rank has some (see expert.py), and their outputs add up to those of all. Every rank has the whole
router and computes the same with it: its logits, its loss, and the gradient of its weights.

The weights by which the router adds up experts get their gradient from the experts of a rank: it is added up over the
ranks before it reaches the router, and is the same on every rank from there on. The gradient of the hidden states is
added up too, but after the router: so the router's share of it is divided by the number of ranks.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel.style import ParallelStyle
from typing_extensions import override

from echelon.ground.errors import ConfigError
from echelon.planner.experts import find_recorded_routers
from echelon.planner.model_shape import PACKED_MATRICES

PACKED, ALL_HEADS = "packed", "norm_of_all_heads"
_GATHERED, _SPLIT = "colwise_gather_output", "rowwise_split_input"
EXPERTS = "moe_tp_experts"
"""What transformers calls its way to divide the module that holds the experts of a layer."""


def with_own_styles(base: nn.Module, declared: Mapping[str, str]) -> dict[str, str]:
    """Return the styles of divided modules, with echelon's own in place of gathered outputs where they are known.

    Args:
        base: the decoder, on meta.
        declared: the styles of `transformers`, by name in the decoder.
    """
    styles = dict(declared)
    for block in {name.rpartition(".")[0] for name, style in declared.items() if style == _GATHERED}:
        inside = {name: style for name, style in declared.items() if name.rpartition(".")[0] == block}
        styles |= _find_styles(base.get_submodule(block), block, inside)
    return styles


def _find_styles(module: nn.Module, block: str, inside: Mapping[str, str]) -> dict[str, str]:
    """Return the styles of a block with gathered outputs, by name; those of `transformers` if they are not known."""
    gathered = [name.rpartition(".")[2] for name, style in inside.items() if style == _GATHERED]
    norms = {f"{last.removesuffix('_proj')}_norm": last for last in gathered}
    norm_names = [name for name, last in norms.items() if _is_norm_of(module, name, last)]
    if not norm_names and not set(gathered) <= set(PACKED_MATRICES):
        return dict(inside)
    own = {_SPLIT: "rowwise"}
    styles = {name: own.get(style, style) for name, style in inside.items()}
    for last in gathered:
        styles[f"{block}.{last}"] = PACKED if last in PACKED_MATRICES else "colwise"
    return styles | {f"{block}.{name}": ALL_HEADS for name in norm_names}


def _is_norm_of(block: nn.Module, norm: str, matrix: str) -> bool:
    """Whether a block has a norm of this name over all outputs of a matrix."""
    weight = getattr(getattr(block, norm, None), "weight", None)
    return isinstance(weight, Tensor) and weight.shape == _weight_of(getattr(block, matrix)).shape[:1]


def _weight_of(linear: Any) -> Tensor:
    weight: Tensor = getattr(linear, "base_layer", linear).weight
    return weight


def find_sizes(base: nn.Module, name: str) -> list[int]:
    """Return the numbers of outputs of the matrices that are one, for a module of style `PACKED` on meta.

    The first has as many as the next matrix has inputs.
    """
    block, _, last = name.rpartition(".")
    following = "down_proj" if last == "gate_up_proj" else "o_proj"
    outputs, first = (
        _weight_of(base.get_submodule(name)).shape[0],
        _weight_of(base.get_submodule(f"{block}.{following}")),
    )
    others = PACKED_MATRICES[last] - 1
    return [first.shape[1], *[(outputs - first.shape[1]) // others] * others]


def keep_own(output: Tensor, mesh: DeviceMesh, sizes: list[int]) -> Tensor:
    """Return this rank's part of each of the matrices that are one, `[..., sum(sizes) / ranks]`.

    Each rank has computed the next `sum(sizes) / ranks` outputs of all. They are gathered, and their gradients, of
    which each rank has those of its own parts, are added up.
    """
    sharded = DTensor.from_local(output, mesh, [Shard(output.ndim - 1)], run_check=False)
    whole = sharded.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    rank, size = mesh.get_local_rank(), mesh.size()
    return torch.cat([matrix.chunk(size, -1)[rank] for matrix in torch.split(whole, sizes, -1)], -1)


class PartOfHeads:
    """The config of an attention module that has some of the heads; all else is read from the whole config."""

    def __init__(self, whole: Any, num_ranks: int) -> None:
        self._whole, self._num_ranks = whole, num_ranks

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._whole, name)
        return value // self._num_ranks if name in ("num_attention_heads", "num_key_value_heads") else value


def divide_heads(attention: Any, num_ranks: int) -> None:
    """Let an attention module cut the output of a packed matrix by its own heads, in place."""
    attention.config = PartOfHeads(attention.config, num_ranks)
    if hasattr(attention, "num_key_value_heads"):
        attention.num_key_value_heads //= num_ranks


class NormOfAllHeads(ParallelStyle):
    """A norm over the outputs of all ranks: they are gathered, and each rank keeps its own. All have its weight."""

    @override
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            [given] = inputs
            part = DTensor.from_local(given, mesh, [Shard(given.ndim - 1)], run_check=False)
            return part.redistribute(placements=[Replicate()])

        def leave(_: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
            return output.redistribute(placements=[Shard(output.ndim - 1)]).to_local()

        return distribute_module(module, device_mesh, None, enter, leave)


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
