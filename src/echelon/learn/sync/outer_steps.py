"""Local SGD and DiLoCo: replicas train apart for some steps, then an outer optimizer takes a step with the mean change.

Stich, "Local SGD Converges Fast and Communicates Little" (arXiv:1805.09767); Douillard et al., "DiLoCo"
(arXiv:2311.08105), algorithm 1.
"""

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from typing_extensions import override

from echelon.ground.errors import CheckpointError
from echelon.learn.distributed.mesh import Meshes
from echelon.learn.distributed.replica_names import replica_name
from echelon.learn.reduction import build_reducer
from echelon.learn.reduction.reducer import divide, flatten, write_back
from echelon.learn.sync.every_step import EveryStep
from echelon.learn.sync.synchronizer import Replica, StateFill
from echelon.planner.plan import build_sync_plan
from echelon.recipe.synchronization import SyncConfig

# The share of its own weights that a replica keeps when it takes agreed weights that are one step old: Streaming
# DiLoCo (Douillard et al. 2025, arXiv:2501.18512), section 2.3.
_KEPT = 0.5


class OuterSteps(EveryStep):
    """Replicas have the same weights after every `sync.every`-th step; a checkpoint has those weights as the model.

    The outer gradient is the agreed weights minus those of a replica, and its mean over the replicas is applied with
    SGD or Nesterov momentum, as `torch.optim.SGD` does it. With `sync.overlap` it is sent during the next step, and
    replicas then take half of the agreed weights. Each rank handles its part of the weights, so the replicas may be
    divided in any way.
    """

    def __init__(self, config: SyncConfig, replica: Replica, meshes: Meshes) -> None:
        super().__init__(config, replica, meshes)
        assert meshes.outer is not None
        self._config = config
        self._index = meshes.place["replica"]
        self._agreed = {name: weight.clone() for name, weight in replica.weights().items()}
        self._momentum = _zeros(self._agreed) if config.outer_momentum else {}
        # The sum of the outer gradients that will be applied after the next step.
        self._late = _zeros(self._agreed) if config.overlap else {}
        self._is_late = False
        self._sending: Future[None] | None = None
        self._group = _build_host_group(meshes) if config.overlap else meshes.outer
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="outer-gradients") if config.overlap else None
        self._device = torch.device("cpu" if config.overlap else meshes.device_type)
        self._reducer = build_reducer(build_sync_plan(config), self._agreed, self._group)

    @torch.no_grad()
    @override
    def end_step(self, step: int, is_last: bool) -> bool:
        """Agree after every `sync.every` steps, and after the last one."""
        if self._is_late:
            self._wait()
            self._apply_outer(self._late)
            self._is_late = False
            for name, weight in self._replica.weights().items():
                weight.lerp_(self._agreed[name], 1 - _KEPT)
        if is_last or (step + 1) % self._config.every == 0:
            gradients = self._find_outer_gradients()
            if self._sender is not None and not is_last:
                self._is_late = True
                self._sending = self._sender.submit(self._send_late, step, gradients)
                return True
            self._sum(step, gradients)
            self._apply_outer(gradients)
            _copy(self._replica.weights(), self._agreed)
        return True

    def _find_outer_gradients(self) -> dict[str, Tensor]:
        """The change of this replica since the last agreement, in fp32, where it is sent from."""
        weights = self._replica.weights()
        return {
            name: (agreed.float() - weights[name].float()).to(self._device) for name, agreed in self._agreed.items()
        }

    def _sum(self, step: int, gradients: Mapping[str, Tensor]) -> None:
        """Replace outer gradients by their sum over the replicas. Collective."""
        for bucket in divide(gradients):
            if self._reducer is not None:
                self._reducer.reduce(step, bucket)
                continue
            flat = flatten(bucket)
            dist.all_reduce(flat, group=self._group)
            write_back(flat, bucket)

    @torch.no_grad()
    def _send_late(self, step: int, gradients: Mapping[str, Tensor]) -> None:
        self._sum(step, gradients)
        _copy(self._late, gradients)

    def _wait(self) -> None:
        """Wait until the sum of outer gradients is there, if it is on its way."""
        if self._sending is not None:
            self._sending.result()
            self._sending = None

    def _apply_outer(self, sums: Mapping[str, Tensor]) -> None:
        """Take a step of the outer optimizer."""
        rate, momentum = self._config.outer_learning_rate, self._config.outer_momentum
        for name, agreed in self._agreed.items():
            gradient = sums[name].to(agreed.device) / self._group.size()
            if momentum:
                velocity = self._momentum[name].mul_(momentum).add_(gradient)
                gradient = gradient + momentum * velocity
            agreed.copy_(agreed.float() - rate * gradient)

    @contextmanager
    @override
    def agreed(self) -> Iterator[None]:
        """Needs the memory of another copy of this rank's weights."""
        self._wait()
        weights = self._replica.weights()
        copies = {name: weight.clone() for name, weight in weights.items()}
        _copy(weights, self._agreed)
        try:
            yield
        finally:
            _copy(weights, copies)

    @override
    def tensors(self, engine_state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The agreed weights under the names of the model's, and all of each replica under its index."""
        self._wait()
        shared = {}
        for name, agreed in self._agreed.items():
            weight = engine_state[f"model.{name}"]
            shared[f"model.{name}"] = _arrange(agreed, weight)
            for key, state in (("momentum", self._momentum), ("late", self._late)):
                if state:
                    shared[f"outer.{name}.{key}"] = _arrange(state[name], weight)
        fixed = {
            name: tensor for name, tensor in engine_state.items() if name.startswith("model.") and name not in shared
        }
        states = {replica_name(self._index, name): tensor for name, tensor in engine_state.items() if name not in fixed}
        return shared | fixed | states

    @override
    def load(self, engine_state: Mapping[str, Tensor], fill: StateFill) -> None:
        fill(self.tensors(engine_state))

    @override
    def state_dict(self) -> dict[str, Any]:
        """Whether outer gradients are still to be applied."""
        self._wait()
        return {"is_late": self._is_late}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._wait()
        is_late = state.get("is_late", False)
        if state.keys() - {"is_late"} or not isinstance(is_late, bool):
            raise CheckpointError(
                f"state.json has no valid state of sync.name={self._config.name}: {str(state)[:200]}."
            )
        self._is_late = is_late


def _zeros(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor, dtype=torch.float32) for name, tensor in tensors.items()}


@torch.no_grad()
def _copy(targets: Mapping[str, Tensor], sources: Mapping[str, Tensor]) -> None:
    for name, target in targets.items():
        target.copy_(sources[name])


def _arrange(local: Tensor, like: Tensor) -> Tensor:
    """Return a rank's part as a tensor that is sharded like another: it shares the memory of `local`."""
    if not isinstance(like, DTensor):
        return local
    mesh, placements = like.device_mesh, like.placements
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())


def _build_host_group(meshes: Meshes) -> dist.ProcessGroup:
    """Return a group of its own for a thread: collectives of two threads in one group could be mixed up. Collective."""
    peers = meshes.grid.peers(("replica",))
    mine, _ = dist.new_subgroups_by_enumeration(peers, backend="gloo")  # type: ignore[no-untyped-call]
    return mine  # type: ignore[no-any-return]
