"""Parameter servers: workers push gradients to the processes that own the weights, and pull the weights back.

Li et al., "Scaling Distributed Machine Learning with the Parameter Server" (OSDI 2014).
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from echelon.learn.distributed.mesh import Membership, Meshes, ViewChanged
from echelon.learn.distributed.torch_internals import close_connections
from echelon.learn.optimizer import divide_names
from echelon.learn.reduction.reducer import write_back
from echelon.learn.sync.every_step import EveryStep
from echelon.learn.sync.pushes import Kind, Pusher, Request, Taken, await_message, await_reply, post
from echelon.learn.sync.synchronizer import DataShare, Replica, StateFill
from echelon.learn.sync.weight_server import Server
from echelon.recipe.synchronization import SyncConfig

logger = logging.getLogger(__name__)

# After how many steps metrics are read if nothing limits how far workers are apart.
_FREE_LAG = 32


class ParameterServer(EveryStep):
    """Every process is a worker; the first `sync.servers` of them own disjoint parts of the weights, by bytes, as well.

    With `sync.max_staleness: 0` a step waits for all workers. Its gradients are added up at their servers and clipped
    by the norm of the whole sum, and each server steps its part with the optimizer of the recipe. Otherwise workers do
    not wait for each other: each takes the next share of a batch, pulls the weights, and pushes gradients, clipped by
    their own norm, that are applied alone.

    Where workers may be lost, a step that waits for all is applied after a vote. So either all servers have applied it
    or none has, and it is repeated. Shares that are applied alone are computed again, and servers drop those that they
    have applied. In either case the workers of the next view pull the weights.
    """

    def __init__(self, config: SyncConfig, replica: Replica, meshes: Meshes) -> None:
        super().__init__(config, replica, meshes)
        assert replica.served is not None
        self._membership = membership = meshes.membership
        self._config = config
        self._served = replica.served
        self._waits = config.max_staleness == 0
        num_shares = meshes.data_size if self._waits or membership is None else membership.num_replicas
        self._share = DataShare(meshes.data_rank, num_shares)
        self.lag = 0 if self._waits else _FREE_LAG if config.max_staleness is None else config.max_staleness + 1
        self._index = meshes.place["replica"]
        self._group = group = _form_group(membership)
        weights = replica.weights()
        sizes = {name: weight.numel() * weight.element_size() for name, weight in weights.items()}
        self._parts = divide_names(sizes, config.servers)
        self._counts = [sum(weights[name].numel() for name in part) for part in self._parts]
        self.server: Server | None = None
        if self._index < config.servers:
            is_ending = (lambda: False) if membership is None else membership.is_ending
            self.server = Server(self._served, config, group, num_shares, is_ending)
        self._pusher = Pusher(config.compress, weights, group)
        self._is_open = self._is_fresh = False
        self._norms = (0.0, 0.0)
        if membership is not None:
            membership.at_end(self._leave)
            if membership.number and config.compress.method == "topk" and self._index == 0:
                logger.warning(
                    "sync.compress.method=topk: what workers had not sent of their gradients is dropped, because their "
                    "group has changed"
                )

    @override
    def shares(self, step: int) -> Iterator[DataShare]:
        """The same at every step if it waits for all workers; else what no other worker has taken.

        The weights are pulled before each share. Raises ViewChanged if a worker was lost, or waits to join.
        """
        if self._membership is not None:
            self._membership.check()
        self._open(step)
        if self._waits:
            yield self._pull(step)
            return
        while (taken := int(self._ask([Request(Kind.TAKE, step)])[0])) >= 0:
            self._share = self._share._replace(rank=taken)
            yield self._pull(step)
        if taken == Taken.VIEW_ENDS:
            raise ViewChanged

    @torch.no_grad()
    @override
    def clip(self, step: int, num_targets: Tensor, max_norm: float | None) -> Tensor:
        """Push the gradients; return the norm of the sum over all workers. The servers clip when they apply it.

        If workers do not wait for each other, clip the gradients of this one, and return their norm.
        """
        if not self._waits:
            return self._replica.clip(max_norm)
        squares = self._push(Kind.PUSH, step, (float(num_targets),))
        norm = torch.cat(squares).double().sum().sqrt().float()
        self._norms = (float(norm), float("inf") if max_norm is None else max_norm)
        return norm

    @override
    def apply(self, step: int, learning_rate: float, commit: Tensor) -> None:
        """Apply or drop the sum, if this process is a server; or push gradients that are applied alone.

        Raises ViewChanged if a worker was lost before all had voted for the step.
        """
        if self._waits:
            if self._membership is not None:
                self._membership.vote()
            if self.server is not None:
                self.server.apply(step, learning_rate, commit, *self._norms)
        elif commit:
            self._push(Kind.UPDATE, step, (self._share.rank, learning_rate))
        self._pusher.settle(commit)
        self._replica.step(learning_rate, commit)

    @override
    def agreed(self) -> AbstractContextManager[None]:
        """The weights of the servers, after all that was pushed."""
        self._drain()
        return nullcontext()

    @override
    def tensors(self, engine_state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What compressed pushes have not sent. The weights are the model's, and servers have the optimizer state."""
        self._drain()
        return dict(engine_state) | self._pusher.tensors()

    @override
    def load(self, engine_state: Mapping[str, Tensor], fill: StateFill) -> None:
        self._drain()
        fill(self.tensors(engine_state))
        self._served.take(self._replica.weights())

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """No state."""
        self._drain()

    def _open(self, step: int) -> None:
        """Have the servers answer, from this step on."""
        if not self._is_open:
            self._is_open, self._is_fresh = True, False
            if self.server is not None:
                self.server.open(step)

    def _drain(self) -> None:
        """Have the servers finish what was pushed, and take their weights. Collective."""
        if not self._is_fresh:
            self._open(0)
            self._fetch(Request(Kind.DRAIN))
            if self.server is not None:
                self.server.close()
            self._is_open, self._is_fresh = False, True

    def _leave(self) -> None:
        """End the messages of the group, also those of the others."""
        if self.server is None:
            close_connections(self._group)
        else:
            self.server.abandon()

    @torch.no_grad()
    def _push(self, kind: Kind, step: int, numbers: Sequence[float]) -> list[Tensor]:
        """Send each server the gradients of its part; return the replies."""
        gradients = self._replica.gradients()
        pushed = {
            name: gradients[name] if name in gradients else torch.zeros_like(weight)
            for name, weight in self._replica.weights().items()
        }
        parts = [{name: pushed[name] for name in part} for part in self._parts]
        return self._ask([Request(kind, step, numbers, self._pusher.encode(part)) for part in parts])

    def _pull(self, step: int) -> DataShare:
        """Take the weights for the share of this worker; return the share."""
        self._fetch(Request(Kind.PULL, step, (self._share.rank,)))
        return self._share

    @torch.no_grad()
    def _fetch(self, request: Request) -> None:
        """Send every server a request whose reply is weights, and take them."""
        weights = self._replica.weights()
        for part, values in zip(self._parts, self._ask([request] * len(self._parts)), strict=True):
            write_back(values, {name: weights[name] for name in part})

    def _ask(self, requests: list[Request]) -> list[Tensor]:
        """Send requests to the first servers, one to each; return the replies, of which the own one may be the last."""
        remote = [server for server in range(len(requests)) if server != self._index]
        posted = {server: post(requests[server], server, self._group) for server in remote}
        replies: dict[int, Tensor] = {}
        if self.server is not None and self._index < len(requests):
            replies[self._index] = self.server.answer(self._index, requests[self._index])
        for server in remote:
            replies[server] = await_reply(requests[server], server, self._counts[server], self._group)
            for work in posted[server]:
                await_message(work)
        return [replies[server] for server in range(len(requests))]


def _form_group(membership: Membership | None) -> dist.ProcessGroup:
    """The group of the messages. Collective."""
    if membership is not None:
        return membership.new_group("parameter servers")
    group: dist.ProcessGroup | None = dist.new_group(backend="gloo", group_desc="parameter servers")
    assert group is not None
    return group
