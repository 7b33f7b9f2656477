"""The engine `horovod`: the native engine around whole copies of the model, whose gradients Horovod sums."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from echelon.foreign.horovod_ranks import find_group_bytes, start_horovod
from echelon.ground.sizes import render_bytes
from echelon.learn.distributed.mesh import Meshes
from echelon.learn.distributed.peers import Isolatable
from echelon.learn.distributed.traffic import CollectiveKind, count_traffic
from echelon.learn.engines.engine import EngineSpec
from echelon.learn.engines.native import NativeEngine
from echelon.learn.engines.native_build import build_native_engine
from echelon.learn.objectives.outputs import ObjectiveModule
from echelon.learn.parallel.data_parallel import Alone, Autocast, autocast_scope
from echelon.learn.parallel.step import DataParallel
from echelon.planner.plan import ParallelPlan


def build_horovod_engine(spec: EngineSpec) -> NativeEngine:
    """Start Horovod over the ranks of the job, and build the native engine around its sums. Collective.

    Raises ConfigError if Horovod is not installed, and LaunchError if its ranks are not those of the job.
    """
    variables = spec.recipe.launch.env
    hvd = start_horovod(variables)
    group_bytes, in_fp16 = find_group_bytes(variables), spec.recipe.horovod.compression == "fp16"

    def sum_by_horovod(module: ObjectiveModule, plan: ParallelPlan, meshes: Meshes, seed: int) -> DataParallel:
        return HorovodSum(module, autocast_scope(plan, meshes.device_type), hvd, group_bytes, in_fp16)

    sends = f"horovod: gradients are summed in groups of at most {render_bytes(group_bytes)}"
    lossy = ", in fp16; lossy: the losses are not those of horovod.compression: none" if in_fp16 else ""
    return build_native_engine(spec, parallelize=sum_by_horovod, description=[sends + lossy])


class _Sent(NamedTuple):
    """A group on its way: the gradients, the tensors that Horovod sums in their place, and its handle."""

    gradients: Sequence[Tensor]
    summed: Sequence[Tensor]
    handle: int


class GroupSums:
    """Sums gradients over Horovod's ranks in fixed groups; a group is sent when its last gradient is there.

    Groups have names, so they may be ready in another order on another rank. Hooks of parameters hold this object, so
    it refers to no parameter: such a cycle would never be freed.
    """

    def __init__(self, hvd: Any, groups: Sequence[Sequence[str]], in_fp16: bool) -> None:
        """`hvd`: `horovod.torch`. `groups`: names of parameters. `in_fp16`: whether gradients are sent in fp16."""
        self._hvd = hvd
        self._groups = groups
        self._group_of = {name: index for index, group in enumerate(groups) for name in group}
        self._dtype = torch.float16 if in_fp16 else torch.float32
        self._ready: dict[str, Tensor] = {}
        self._sent: dict[int, _Sent] = {}
        self._meter, self._share = count_traffic(), 2 * (1 - 1 / hvd.size())  # of what is summed, in a ring
        self.takes = False
        """Whether gradients are complete as they become ready: in the last microbatch of a step."""

    def add(self, name: str, gradient: Tensor) -> None:
        """Take the gradient of a parameter; send its group if it was the last one."""
        self._ready[name] = gradient
        index = self._group_of[name]
        if all(group in self._ready for group in self._groups[index]):
            self._send(index)

    def is_sent(self, name: str) -> bool:
        """Whether the group of a parameter is on its way."""
        return self._group_of[name] in self._sent

    @torch.no_grad()
    def _send(self, index: int) -> None:
        gradients = [self._ready.pop(name) for name in self._groups[index]]
        summed = [
            gradient.to(self._dtype).contiguous() for gradient in gradients
        ]  # the same tensor if it is so already
        self._meter.add(CollectiveKind("horovod", "all_reduce"), self._share * sum(tensor.nbytes for tensor in summed))
        handle = self._hvd.grouped_allreduce_async_(summed, name=f"gradients {index}", op=self._hvd.Sum)
        self._sent[index] = _Sent(gradients, summed, handle)

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for every group that was sent, and put the sums in place of the gradients."""
        for sent in self._sent.values():
            self._hvd.synchronize(sent.handle)
            for gradient, summed in zip(sent.gradients, sent.summed, strict=True):
                if summed is not gradient:
                    gradient.copy_(summed)
        self._sent.clear()


class HorovodSum(Isolatable, Alone):
    """A whole copy of the model on every rank; sums overlap the last backward pass of a step."""

    def __init__(self, module: nn.Module, autocast: Autocast, hvd: Any, group_bytes: int, in_fp16: bool) -> None:
        """`group_bytes`: of the gradients that are summed at once. See `GroupSums` for the others."""
        super().__init__(module, autocast)
        self._trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        # Backward passes begin with the last layer, so its gradients are ready first.
        sizes = {
            name: parameter.numel() * parameter.element_size() for name, parameter in reversed(self._trained.items())
        }
        self._sums = GroupSums(hvd, divide(sizes, group_bytes), in_fp16)
        for name, parameter in self._trained.items():
            register: Any = parameter.register_post_accumulate_grad_hook  # without annotations
            register(_Hook(self._sums, name))

    @contextmanager
    @override
    def microbatch(self, is_last: bool) -> Iterator[None]:
        """Gradients stay on this rank until the last microbatch."""
        self._sums.takes = is_last and self._sends
        with super().microbatch(is_last):
            yield

    @override
    def reduce(self) -> None:
        """Send the groups with parameters that the last microbatch did not use, and wait for all. Collective."""
        if not self._sums.takes:
            return
        self._sums.takes = False
        for name, parameter in self._trained.items():
            if not self._sums.is_sent(name):
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                self._sums.add(name, parameter.grad)
        self._sums.finish()


class _Hook:
    """Called when the gradient of a parameter has been added up."""

    def __init__(self, sums: GroupSums, name: str) -> None:
        self._sums, self._name = sums, name

    def __call__(self, parameter: Tensor) -> None:
        if self._sums.takes:
            assert parameter.grad is not None
            self._sums.add(self._name, parameter.grad)


def divide(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Return the names in groups of at most `limit` bytes, in their order; a larger one is a group of its own."""
    groups: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not groups or size > room:
            groups.append([])
            room = limit
        groups[-1].append(name)
        room -= size
    return groups
