"""Parameter servers: workers push gradients to the processes that own the weights, and pull the weights back.

Li et al., "Scaling Distributed Machine Learning with the Parameter Server" (OSDI 2014).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.distributed.mesh import Meshes
from echelon.optimizer import divide_names
from echelon.recipe import SyncConfig
from echelon.reduction.reducer import write_back
from echelon.sync.push_code import Pusher
from echelon.sync.pushes import Kind, Request, await_reply, post
from echelon.sync.synchronizer import DataShare, Fill, Replica
from echelon.sync.weight_server import Server

# After how many steps metrics are read if nothing limits how far workers are apart.
_FREE_LAG = 32


class ParameterServer:
    """Every process is a worker; the first `sync.servers` of them own disjoint parts of the weights, by bytes, as well.

    With `sync.max_staleness: 0` a step waits for all workers. Its gradients are added up at their servers and clipped
    by the norm of the whole sum, and each server steps its part with the optimizer of the recipe. Otherwise workers do
    not wait for each other: each takes the next share of a batch, pulls the weights, and pushes gradients, clipped by
    their own norm, that are applied alone. See `Synchronizer`.
    """

    def __init__(self, config: SyncConfig, replica: Replica, meshes: Meshes) -> None:
        assert replica.served is not None
        self._config = config
        self._replica = replica
        self._served = replica.served
        self._share = DataShare(meshes.data_rank, meshes.data_size)
        self._waits = config.max_staleness == 0
        self.lag = 1 if self._waits else _FREE_LAG if config.max_staleness is None else config.max_staleness + 1
        self._index = meshes.place["replica"]
        group = dist.new_group(backend="gloo", group_desc="parameter servers")
        assert group is not None
        self._group = group
        weights = replica.weights()
        sizes = {name: each.numel() * each.element_size() for name, each in weights.items()}
        self._parts = divide_names(sizes, config.servers)
        self._counts = [sum(weights[name].numel() for name in part) for part in self._parts]
        self.server = Server(self._served, config, group) if self._index < config.servers else None
        self._pusher = Pusher(config.compress, weights, group)
        self._is_open = False
        self._norms = (0.0, 0.0)

    def shares(self, step: int) -> Iterator[DataShare]:
        """The same at every step if it waits for all workers; else what no other worker has taken."""
        if not self._is_open:
            self._is_open = True
            if self.server is not None:
                self.server.open()
        if self._waits:
            yield self._share
            return
        while (taken := int(self._ask([Request(Kind.TAKE, step)])[0])) >= 0:
            self._share = self._share._replace(rank=taken)
            self._pull([Request(Kind.PULL, step, (taken,))] * len(self._parts))
            yield self._share

    @torch.no_grad()
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

    def should_commit(self, grad_norm: Tensor) -> Tensor:
        """Whether the norm is finite; that of the sum over all workers is so for each of them."""
        return torch.isfinite(grad_norm)

    def apply(self, step: int, learning_rate: float, commit: Tensor) -> None:
        """Have the servers apply or drop the sum, and pull the weights; or push gradients that are applied alone."""
        if self._waits:
            numbers = (learning_rate, float(commit), *self._norms)
            self._pull([Request(Kind.APPLY, step, numbers)] * len(self._parts))
        elif commit:
            self._push(Kind.UPDATE, step, (self._share.rank, learning_rate))
        self._pusher.settle(commit)
        self._replica.step(learning_rate, commit)

    def end_step(self, step: int, is_last: bool) -> bool:
        """Nothing to settle."""
        return True

    def agreed(self) -> AbstractContextManager[None]:
        """The weights of the servers, after all that was pushed."""
        self._drain()
        return nullcontext()

    def tensors(self, engine_state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What compressed pushes have not sent. The weights are the model's, and servers have the optimizer state."""
        self._drain()
        return dict(engine_state) | self._pusher.tensors()

    def load(self, engine_state: Mapping[str, Tensor], fill: Fill) -> None:
        """See Synchronizer."""
        self._drain()
        fill(self.tensors(engine_state))
        self._served.take(self._replica.weights())

    def state_dict(self) -> dict[str, Any]:
        """No state."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """No state."""
        self._drain()

    def _drain(self) -> None:
        """Have the servers finish what was pushed, and take their weights. Collective."""
        if self._is_open:
            self._pull([Request(Kind.DRAIN)] * len(self._parts))
            if self.server is not None:
                self.server.close()
            self._is_open = False

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

    @torch.no_grad()
    def _pull(self, requests: list[Request]) -> None:
        """Send requests whose replies are weights, and take them."""
        weights = self._replica.weights()
        for part, values in zip(self._parts, self._ask(requests), strict=True):
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
                work.wait()
        return [replies[server] for server in range(len(requests))]
