"""The processes that hold a model together: one with the whole model, or several with a shard each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel
from typing_extensions import override

from echelon.learn.distributed.mesh import Meshes, build_mesh
from echelon.learn.distributed.runtime import Runtime
from echelon.learn.model.parts import find_layers
from echelon.learn.model.quantization import QuantizedLinear
from echelon.learn.parallel.data_parallel import apply_fully_shard
from echelon.planner.plan import ParallelPlan

Result = TypeVar("Result")


@dataclass(frozen=True)
class Team:
    """This process's place among those that hold a model together.

    Attributes:
        device: where this process computes.
        plan: how the model is sharded; None for a single process, which holds all of it.
        meshes: of that plan.
    """

    device: torch.device
    plan: ParallelPlan | None = None
    meshes: Meshes | None = None

    @property
    def rank(self) -> int:
        """The index of this process, 0 <= rank < size."""
        return 0 if self.meshes is None else dist.get_rank()

    @property
    def size(self) -> int:
        """The number of processes."""
        return 1 if self.meshes is None else dist.get_world_size()

    def add_up(self, sums: Tensor) -> Tensor:
        """Return the sums of all processes. Collective; changes the tensor in place."""
        if self.meshes is not None:
            dist.all_reduce(sums)
        return sums


def build_team(runtime: Runtime) -> Team:
    """Return the team of all ranks, which shard a model as `parallel: fsdp` does. Collective."""
    if runtime.world_size == 1:
        return Team(runtime.device)
    plan = ParallelPlan("fsdp", dp_shard=runtime.world_size, reshard_after_forward=True)
    return Team(runtime.device, plan, build_mesh(plan, runtime.device.type, runtime.is_one_machine))


class Host:
    """Holds a model for a team: `adopt` shards it while it is on meta, and `run` runs work that uses its weights."""

    def __init__(self, team: Team) -> None:
        self.team = team
        self._root: _Root | None = None

    def adopt(self, model: PreTrainedModel) -> None:
        """Shard a model on meta over the team, in place: each decoder layer, and the rest of the model."""
        if self.team.plan is None or self.team.meshes is None:
            return
        for module in model.modules():
            if isinstance(module, QuantizedLinear):
                module.store_as(torch.float32)
        self._root = _Root(model.requires_grad_(False))
        apply_fully_shard(self._root, find_layers(model), self.team.plan, self.team.meshes)

    @torch.no_grad()
    def run(self, work: Callable[[], Result]) -> Result:
        """Return the result of work that calls the model any number of times.

        Embedding and head are whole during the work; each layer is gathered as it runs. Collective: every process
        calls it with the same work, and calls the model equally often.
        """
        return work() if self._root is None else cast(Result, self._root(work))


class _Root(nn.Module):
    """The outermost module that `fully_shard` hooks: work on the model runs inside its forward pass."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    @override
    def forward(self, work: Callable[[], Any]) -> Any:
        """Run the work."""
        return work()
