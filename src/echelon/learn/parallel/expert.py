"""Division of experts: each rank of an ep group holds some experts of every layer, and tokens are sent to them.

A layer sorts its (token, expert) pairs by expert, sends each pair's hidden state to the rank that holds the expert,
computes the expert there, and sends the result back. The router's weights are applied on the token's own rank. The
backward pass sends gradients along the same ways, so the gradient of an expert is the sum over the tokens of the whole
group, and is summed further only over the ranks that hold the same experts.

Tensor parallelism divides the experts as well: each of its ranks has some, and leaves out the pairs of the others. The
ranks have the same tokens, so that their results add up.

The experts of a layer are computed by `transformers`, as one grouped product.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from transformers.integrations.moe import grouped_mm_experts_forward
from typing_extensions import override

from echelon.ground.errors import ConfigError
from echelon.learn.distributed.mesh import Meshes
from echelon.learn.distributed.peers import keep_received, send_rows
from echelon.learn.model.sharding import local_part
from echelon.planner.plan import ParallelPlan

ContextFn = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
"""What `torch.utils.checkpoint` calls for the contexts of a first pass and of its repetitions."""

# Attributes of a module whose class `transformers` declares with `use_experts_implementation`.
_INTERFACE = ("has_gate", "has_bias", "is_transposed")


@dataclass(frozen=True)
class ExpertRoute:
    """The ways of the (token, expert) pairs of a layer, sorted by expert.

    pairs: those that are sent, [sent]; they may include some of other ranks' experts, which have no row. sent,
    received: the number of rows for and from each rank. places: the row of each pair among the rows sent, [pairs], one
    after the last for a pair without a row; None if the rows are the pairs. experts: which of this rank's experts each
    received row is for, [rows]; their number for an empty row.
    """

    pairs: Tensor
    sent: list[int]
    received: list[int]
    places: Tensor | None
    experts: Tensor

    def lay_out(self, pairs: Tensor) -> Tensor:
        """Return the rows to send, from those of the pairs."""
        if self.places is None:
            return pairs
        return pairs.new_zeros(sum(self.sent) + 1, *pairs.shape[1:]).index_copy(0, self.places, pairs)[:-1]

    def collect(self, rows: Tensor) -> Tensor:
        """Return the rows of the pairs, from those that came back; 0 for a pair without a row."""
        return rows if self.places is None else F.pad(rows, (0, 0, 0, 1))[self.places]


class ExpertGroup:
    """The ranks that share the experts, and how they exchange rows: only those that are needed.

    The host reads their numbers, once per layer, and waits for the device meanwhile.

    Attributes:
        size: the number of ranks.
        sends: whether rows are sent. If not, each rank takes its own rows for those of the others.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        """`group`: None for this rank alone."""
        self._group = group
        self.size = 1 if group is None else group.size()
        self.sends = True

    def exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send rows to each rank and return the rows received, both in the order of the ranks. Collective.

        Args:
            rows: [sum of sent, ...].
            sent: the number of rows for each rank.
            received: the number of rows from each rank.
        """
        if self._group is None or not self.sends:
            return keep_received(rows.clone())
        return send_rows(rows, self._group, sent, received)

    def find_route(self, chosen: Tensor, num_local: int, capacity: int) -> ExpertRoute:
        """Find the ways of the pairs of a layer from their experts. Collective.

        Args:
            chosen: the expert of each pair, [pairs]; size * num_local for one that no rank of this group has.
            num_local: the experts of each rank.
            capacity: the most pairs that a rank can have for another one.
        """
        by_rank, from_ranks = self._count(chosen, num_local)
        pairs = chosen.argsort(stable=True)
        sent, received = torch.stack([by_rank.sum(1), from_ranks.sum(1)]).tolist()
        numbers = torch.arange(num_local, device=chosen.device).repeat(self.size)
        experts = numbers.repeat_interleave(from_ranks.flatten(), output_size=sum(received))
        return ExpertRoute(pairs[: sum(sent)], sent, received, None, experts)

    def _count(self, chosen: Tensor, num_local: int) -> tuple[Tensor, Tensor]:
        """The pairs for each expert of each rank, [size, num_local], and those of each rank for the experts here."""
        counts = torch.zeros(self.size * num_local + 1, dtype=torch.int64, device=chosen.device)
        by_rank = counts.scatter_add_(0, chosen, torch.ones_like(chosen))[:-1].view(self.size, num_local)
        if self._group is None or not self.sends:
            return by_rank, by_rank.clone()
        from_ranks = torch.empty_like(by_rank)
        dist.all_to_all_single(from_ranks, by_rank, group=self._group)
        return by_rank, from_ranks


class FixedCapacity(ExpertGroup):
    """Each rank sends each other one as many rows as it could need at most, so that no host waits for their number.

    The rows are those of all pairs for a rank alone, and up to `size` times as many for several.
    """

    @override
    def find_route(self, chosen: Tensor, num_local: int, capacity: int) -> ExpertRoute:
        size, device = self.size, chosen.device
        by_rank, from_ranks = self._count(chosen, num_local)
        pairs = chosen.argsort(stable=True)
        num_each = by_rank.sum(1)
        shifts = torch.arange(size, device=device) * capacity - (num_each.cumsum(0) - num_each)
        sorted_experts, places = chosen[pairs], torch.arange(len(chosen), device=device)
        shifted = places + shifts[(sorted_experts // num_local).clamp(max=size - 1)]
        places = torch.where(sorted_experts < size * num_local, shifted, size * capacity)
        slots = torch.arange(capacity, device=device).expand(size, capacity).contiguous()
        experts = torch.searchsorted(from_ranks.cumsum(1), slots, right=True).flatten()
        return ExpertRoute(pairs, [capacity] * size, [capacity] * size, places, experts)


class _Exchange(torch.autograd.Function):
    """`ExpertGroup.exchange`; gradients are sent back the same way."""

    @staticmethod
    @override
    def forward(ctx: Any, rows: Tensor, group: ExpertGroup, sent: list[int], received: list[int]) -> Tensor:
        ctx.way = group, sent, received
        return group.exchange(rows, sent, received)

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        group, sent, received = ctx.way
        return group.exchange(gradients[0], received, sent), None, None, None


class _Passes:
    """A context for the first pass of a checkpointed layer, or for its repetitions; `inner` is entered in it."""

    def __init__(self, routes: list[ExpertRoute], repeats: bool, inner: AbstractContextManager[Any]) -> None:
        self._routes = routes
        self._repeats = repeats
        self._inner = inner

    def __enter__(self) -> None:
        self._token = _passes.set((self._routes, iter(self._routes) if self._repeats else None))
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)
        _passes.reset(self._token)


_passes: ContextVar[tuple[list[ExpertRoute], Iterator[ExpertRoute] | None]] = ContextVar("passes")


def keep_routes(contexts: ContextFn) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return contexts for a pass through layers and for its repetitions, which take the same routes to the experts.

    So a repetition exchanges and reads no numbers. One that chose other experts, by rounding, would fit neither the
    rows that were sent nor their gradients.

    Args:
        contexts: returns the contexts of both for other purposes, which are entered in these.
    """
    routes: list[ExpertRoute] = []
    first, again = contexts()
    return _Passes(routes, False, first), _Passes(routes, True, again)


@dataclass(frozen=True)
class Share:
    """Which of the experts of each rank of ep this rank of tensor parallelism has: the part `index` of `count`."""

    index: int = 0
    count: int = 1

    def number(self, experts: Tensor, num_each: int, num_ranks: int) -> Tensor:
        """Number the experts of all shares with this index from 0; those of other shares get the next number.

        Args:
            experts: numbers among all experts.
            num_each: the experts of each of the `num_ranks` ranks of ep, in all its shares.
        """
        if self.count == 1:
            return experts
        size = num_each // self.count
        is_ours = experts % num_each // size == self.index
        return torch.where(is_ours, experts // num_each * size + experts % size, num_ranks * size)


WHOLE = Share()


class ExpertDispatch:
    """Replaces the forward of the experts of one layer."""

    def __init__(self, experts: nn.Module, group: ExpertGroup, num_experts: int, share: Share = WHOLE) -> None:
        """`experts`: of a decoder layer, [num_experts, ...] parameters each, of which this rank has a part."""
        self._experts = experts
        self._names = [name for name, _ in experts.named_parameters(recurse=False)]
        self.group = group
        self._share = share
        self._num_each = num_experts // group.size
        self._num_local = self._num_each // share.count
        self.run = self._run
        """What a call does; checkpointing wraps it."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # the numbers of rows differ between steps
    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts, [tokens, hidden]: of those of the share. Collective.

        Args:
            hidden_states: [tokens, hidden].
            top_k_index: the experts of each token, [tokens, chosen].
            top_k_weights: their weights.
        """
        return self.run(hidden_states, top_k_index, top_k_weights)

    def _run(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        num_tokens, num_chosen = top_k_index.shape
        chosen = self._share.number(top_k_index.flatten(), self._num_each, self.group.size)
        capacity = num_tokens * min(num_chosen, self._num_local)
        routes, known = _passes.get(([], None))
        if known is None:
            routes.append(self.group.find_route(chosen, self._num_local, capacity))
        route = routes[-1] if known is None else next(known)
        rows = route.lay_out(hidden_states[route.pairs // num_chosen])
        received = _send(rows, self.group, route.sent, route.received)
        results = self._compute(received, route.experts, has_empty=route.places is not None)
        returned = route.collect(_send(results, self.group, route.received, route.sent))
        outputs = returned.new_zeros(len(chosen), returned.shape[1]).index_copy(0, route.pairs, returned)
        weighted = (outputs.view(num_tokens, num_chosen, -1) * top_k_weights.view(num_tokens, num_chosen, 1)).sum(1)
        return weighted.to(hidden_states.dtype)

    def _compute(self, rows: Tensor, experts: Tensor, has_empty: bool) -> Tensor:
        """Return this rank's experts of rows [rows, hidden]; 0 for an empty row."""
        if len(rows) == 0:  # a grouped product needs a row; the gradient of the experts is then 0
            return self._compute(F.pad(rows, (0, 0, 0, 1)), experts.new_zeros(1), False)[:0]
        empty = (experts == self._num_local)[:, None] if has_empty else None
        if empty is not None:  # the grouped product leaves their outputs and gradients uninitialised
            rows = rows.masked_fill(empty, 0)
        local = _LocalExperts(self._experts, self._names, self._num_local)
        ones = rows.new_ones(len(rows), 1)
        outputs: Tensor = grouped_mm_experts_forward(local, rows, experts[:, None], ones)
        return outputs if empty is None else outputs.masked_fill(empty, 0)


def _send(rows: Tensor, group: ExpertGroup, sent: list[int], received: list[int]) -> Tensor:
    result: Tensor = _Exchange.apply(rows, group, sent, received)  # type: ignore[no-untyped-call]
    return result


class _LocalExperts:
    """The experts of a layer as `transformers` computes them, with the parameters that this rank holds."""

    _is_expert_parallel = True  # rows of an expert beyond the last one are skipped

    def __init__(self, experts: nn.Module, names: list[str], num_experts: int) -> None:
        self._experts = experts
        self.num_experts = num_experts
        for name in names:
            setattr(self, name, local_part(getattr(experts, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._experts, name)


def find_experts(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that hold the experts of a layer, by name, in the form that `transformers` declares."""
    return {
        name: module
        for name, module in model.named_modules()
        if all(hasattr(module, attribute) for attribute in _INTERFACE)
    }


def find_dispatches(model: nn.Module) -> Iterator[ExpertDispatch]:
    """Yield the dispatches that `divide_experts` has put into a model."""
    for module in model.modules():
        if isinstance(dispatch := module.__dict__.get("forward"), ExpertDispatch):
            yield dispatch


def divide_experts(model: nn.Module, plan: ParallelPlan, meshes: Meshes) -> None:
    """Divide the experts of a model on meta over the axes ep and tp, and dispatch tokens to them. Names stay.

    The outputs of the ranks of tp then add up to those of the experts.

    Raises:
        ConfigError: the model has no experts in the form that `transformers` computes with one grouped product.
    """
    found = find_experts(model)
    if not found:
        raise ConfigError(
            f"parallel.ep={plan.ep}: {type(model).__name__} has no experts that transformers computes in one "
            "grouped product, as those of Mixtral and Qwen3-MoE are; remove parallel.ep."
        )
    axes = [name for name in ("ep", "tp") if getattr(plan, name) > 1]
    mesh = meshes.tp if plan.ep == 1 else meshes.experts
    assert mesh is not None
    mesh = mesh[tuple(axes)]
    # A rank alone needs no numbers but for the pairs of other ranks of tp, which a GPU's host leaves in as empty rows.
    is_exact = plan.ep > 1 or meshes.device_type == "cpu"
    group = (ExpertGroup if is_exact else FixedCapacity)(mesh.get_group("ep") if plan.ep > 1 else None)
    share = Share(meshes.place["tp"], plan.tp)
    for experts in found.values():
        num_experts = len(next(experts.parameters(recurse=False)))
        for name, parameter in list(experts.named_parameters(recurse=False)):
            local = parameter.detach().narrow(0, 0, num_experts // mesh.size()).clone()
            placements = [Shard(0)] * len(axes)
            part = DTensor.from_local(
                local, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
            )
            setattr(experts, name, nn.Parameter(part, requires_grad=parameter.requires_grad))
        experts.forward = ExpertDispatch(experts, group, num_experts, share)
