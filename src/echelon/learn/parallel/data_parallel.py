"""Data parallelism: DDP, and `fully_shard` for ZeRO-1, ZeRO-2, FSDP, HSDP and offloading.

This is the one file where the averaging of gradients is switched off: every rank's gradient is that of
sum(loss) / (global number of targets), so ranks are summed and the loss rule is written once, in the step.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from echelon.ground.errors import ConfigError
from echelon.learn.distributed.mesh import Meshes, sends_by_nccl
from echelon.learn.model.parts import find_end
from echelon.learn.model.sharding import free_gradients
from echelon.learn.model.stage import own_layers
from echelon.learn.objectives.outputs import ObjectiveModule
from echelon.learn.parallel.expert import find_dispatches, find_experts
from echelon.learn.parallel.step import DataParallel, Undivided
from echelon.learn.reduction import Buckets, build_reducer
from echelon.planner.plan import ParallelPlan

Autocast = Callable[[], AbstractContextManager[Any]]
"""Begins a forward pass under autocast in the plan's compute dtype; fp32 plans run as they are."""


class ExchangeReduceScatter(DefaultReduceScatter):
    """Sends each rank its part of the gradient, and sums the parts received: (n-1)/n of the bytes over n ranks.

    Gloo's own reduce-scatter is an all-reduce of the whole tensor, of which each rank keeps its part: twice the bytes.
    """

    @override
    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        """Write this rank's part of the sum over ranks to `output_tensor` [part]; `input_tensor` is [ranks * part]."""
        assert op == dist.ReduceOp.SUM and not async_op, "FSDP sums, and waits for reductions on a CPU"
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        torch.sum(received.view(group.size(), -1), dim=0, out=output_tensor.view(-1))


# Rotary tables are equal on every rank; sending them before every forward would only cost. Renamed in torch 2.13.
_RENAMED = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
BUFFERS_STAY_LOCAL: dict[str, Any] = {"forward_sync_buffers" if _RENAMED else "broadcast_buffers": False}

# On a GPU, megabytes that are sent at once by DDP: its default of 25 takes little longer to send than to start.
GPU_BUCKET_MB = 128


def build_data_parallel(module: ObjectiveModule, plan: ParallelPlan, meshes: Meshes, seed: int) -> DataParallel:
    """Wrap a materialised module. Collective where the plan replicates. `seed`: of the random values of `randomk`."""
    autocast = autocast_scope(plan, meshes.device_type)
    if plan.uses_fully_shard:
        return FullyShard(module, plan, meshes.device_type)
    if plan.dp_replicate > 1:
        return Replicated(module, plan, meshes, autocast, seed)
    return Alone(module, autocast)


def autocast_scope(plan: ParallelPlan, device_type: str) -> Autocast:
    """Autocast for modules that keep fp32 parameters; `fully_shard` casts its gathered parameters instead."""
    dtype = getattr(torch, plan.precision.compute)
    return partial(torch.autocast, device_type, dtype=dtype) if plan.uses_autocast else nullcontext


class Alone(Undivided):
    """One process with the whole model."""

    def __init__(self, module: nn.Module, autocast: Autocast) -> None:
        self.module = module
        self._parameters = list(module.parameters())
        self._autocast = autocast

    @contextmanager
    @override
    def microbatch(self, is_last: bool) -> Iterator[None]:
        """Gradients add up in place; nothing is sent."""
        with self._autocast():
            yield

    @override
    def isolated(self) -> AbstractContextManager[None]:
        """Nothing is sent in any case."""
        return nullcontext()

    @contextmanager
    @override
    def evaluation(self) -> Iterator[nn.Module]:
        """The module in evaluation mode."""
        with evaluation_mode(self.module), self._autocast():
            yield self.module


@dataclass
class Reduction:
    """How DDP's hook reduces: over a group, or not at all. `names`: those of the parameters, by their ids.

    DDP's reducer holds it, and nothing that refers to DDP: such a cycle through C++ would never be freed.
    """

    group: dist.ProcessGroup
    buckets: Buckets | None
    names: Mapping[int, str]
    step: int = 0
    sends: bool = True


def reduce_bucket(reduction: Reduction, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Reduce a bucket of gradients: the hook of DDP. Collective."""
    if reduction.sends and reduction.buckets is None:
        return sum_gradients(reduction.group, bucket)
    if reduction.sends and reduction.buckets is not None:
        names = [reduction.names[id(parameter)] for parameter in bucket.parameters()]
        gradients = dict(zip(names, bucket.gradients(), strict=True))
        return reduction.buckets.sum(reduction.step, gradients, bucket.buffer())
    unchanged: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    unchanged.set_result(bucket.buffer())
    return unchanged


class Replicated(Undivided):
    """DistributedDataParallel: a whole copy on every rank, gradients summed in buckets that overlap the backward.

    Gradients are views of the buckets, also those of microbatches that are not sent, so there is no second copy.
    """

    num_rehearsals = 2  # DDP allocates its final buckets at the second one
    num_rehearsed = 1  # the buckets, which are the gradients, are there before the first

    def __init__(self, module: nn.Module, plan: ParallelPlan, meshes: Meshes, autocast: Autocast, seed: int) -> None:
        self._inner = module
        self._ddp = DistributedDataParallel(
            module,
            process_group=meshes.loss,
            gradient_as_bucket_view=True,
            bucket_cap_mb=GPU_BUCKET_MB if sends_by_nccl(meshes.device_type) else None,
            **BUFFERS_STAY_LOCAL,
        )
        trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        reducer = build_reducer(plan.sync, trained, meshes.loss, seed) if plan.num_replicas == 1 else None
        self._parameters = list(trained.values())
        buckets = None if reducer is None else Buckets(reducer, not sends_by_nccl(meshes.device_type))
        self._reduction = Reduction(meshes.loss, buckets, {id(parameter): name for name, parameter in trained.items()})
        self._ddp.register_comm_hook(self._reduction, reduce_bucket)
        self.module: nn.Module = self._ddp
        self._autocast = autocast
        self._num_reduced = 0
        self._forgets = False

    @contextmanager
    @override
    def microbatch(self, is_last: bool) -> Iterator[None]:
        """Gradients stay local until the last microbatch.

        The first one of several finds zeros in the buckets: autograd would allocate new tensors for None, and keep them
        until the last one. Those of an only one DDP copies to its buckets as they come, which takes less time than to
        clear the buckets and to add. The first buckets are freed in any case: as long as a gradient is a view of them,
        they take memory.
        """
        if self._forgets:
            if is_last or self._num_reduced < self.num_rehearsals:
                free_gradients(self._parameters)
            else:
                torch._foreach_zero_([parameter.grad for parameter in self._parameters if parameter.grad is not None])
            self._forgets = False
        with nullcontext() if is_last else self._ddp.no_sync(), self._autocast():
            yield
        self._num_reduced += is_last

    @override
    def clear_gradients(self) -> None:
        """When the next microbatch begins: how it is done depends on how many follow."""
        self._forgets = True

    @contextmanager
    @override
    def isolated(self) -> Iterator[None]:
        """Buckets keep the gradients of this rank."""
        self._reduction.sends = False
        try:
            yield
        finally:
            self._reduction.sends = True

    @override
    def begin_step(self, step: int) -> None:
        self._reduction.step = step

    @override
    def reduce(self) -> None:
        """DDP has waited for the sums, and does not know of their errors."""
        if self._reduction.buckets is not None:
            self._reduction.buckets.finish()

    @override
    def settle(self, commit: Tensor) -> None:
        if self._reduction.buckets is not None:
            self._reduction.buckets.reducer.settle(commit)

    @override
    def tensors(self) -> Mapping[str, Tensor]:
        return {} if self._reduction.buckets is None else self._reduction.buckets.reducer.tensors()

    @contextmanager
    @override
    def evaluation(self) -> Iterator[nn.Module]:
        """The copy of this rank, without DDP's hooks."""
        with evaluation_mode(self._inner), self._autocast():
            yield self._inner


def sum_gradients(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP communication hook: the sum over ranks, in fp32, where DDP's own default would average."""
    buffer = bucket.buffer()
    work = dist.all_reduce(buffer.float(), group=group, async_op=True)
    assert work is not None
    future: torch.futures.Future[list[torch.Tensor]] = work.get_future()
    return future.then(lambda done: buffer.copy_(done.value()[0]))


class _OwnShard(DefaultAllGather):
    """Fills the result of an all-gather with copies of this rank's shard. The arguments are torch's."""

    @override
    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> None:
        for part in output_tensor.split(input_tensor.numel()):
            if part.data_ptr() != input_tensor.data_ptr():  # the input may be a part of the output
                part.copy_(input_tensor)


class _NoSum(DefaultReduceScatter):
    """Fills the result of a reduce-scatter with zeros, which HSDP may add to the sum of a later step."""

    @override
    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> Any:
        output_tensor.zero_()


class FullyShard(Undivided):
    """`fully_shard` (FSDP2): parameters, gradients and optimizer state are shards; layers are gathered as they run."""

    def __init__(self, module: ObjectiveModule, plan: ParallelPlan, device_type: str) -> None:
        assert isinstance(module, FSDPModule)
        self.module: nn.Module = module
        self._reference = module.reference
        self._context = module.context
        self._root: FSDPModule = module
        self._units = find_units(module)
        self._layers = [unit for layer in own_layers(module.model) for unit in find_units(layer)]
        self._plan = plan
        self._device_type = device_type
        self._sends = True
        self._parameters = list(module.parameters())

    @contextmanager
    @override
    def microbatch(self, is_last: bool) -> Iterator[None]:
        """ZeRO-1 keeps whole gradients until the last microbatch; the others reduce-scatter each one.

        Copies of a shard (HSDP) are summed once, after the last microbatch: that axis has the slow links.
        """
        reduce = is_last or self._plan.reduce_gradients == "each"
        self._root.set_is_last_backward(is_last)
        for unit in self._units:  # with `recurse`, each setting would search the model for its units
            unit.set_requires_gradient_sync(reduce, recurse=False)
            unit.set_requires_all_reduce(is_last and self._sends, recurse=False)
            # Weights may stay whole between microbatches; the optimizer and the checkpoint must see shards.
            unit.set_reshard_after_backward(is_last or self._plan.reshard_after_forward, recurse=False)
        yield

    @contextmanager
    @override
    def isolated(self) -> Iterator[None]:
        """Gathered parameters are copies of this rank's shard, and reduced gradients are 0.

        Attention exchanges nothing with the ranks that share sequences.
        """
        self._communicate_by(_OwnShard(), _NoSum(), sends=False)
        try:
            with nullcontext() if self._context is None else self._context.peers.isolated():
                yield
        finally:
            self._communicate_by(DefaultAllGather(), _build_reduce_scatter(self._device_type), sends=True)

    def _communicate_by(self, gather: DefaultAllGather, reduce: Any, sends: bool) -> None:
        self._sends = sends
        for root in filter(None, (self.module, self._reference)):
            for dispatch in find_dispatches(root):
                dispatch.group.sends = sends
            for unit in find_units(root):
                unit.set_custom_all_gather(gather)
                unit.set_custom_reduce_scatter(reduce)

    @contextmanager
    @override
    def evaluation(self) -> Iterator[nn.Module]:
        """The module in evaluation mode; whatever stayed gathered is sharded again at the end, also after an error."""
        rollout = self._plan.rollout
        kept = self._layers if rollout is not None and rollout.gathers_once else ()
        for unit in kept:
            unit.set_reshard_after_forward(False, recurse=False)
        try:
            with evaluation_mode(self.module):
                yield self.module
        finally:
            for unit in kept:
                unit.set_reshard_after_forward(self._plan.reshard_after_forward, recurse=False)
            for unit in self._units:
                unit.reshard()


def find_units(module: nn.Module) -> list[FSDPModule]:
    """Return the units that `fully_shard` has made of a module and of those inside it."""
    return [unit for unit in module.modules() if isinstance(unit, FSDPModule)]


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """No gradients, no dropout; training mode afterwards."""
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        module.train()


def _refuse_shared_weights(layers: Iterable[nn.Module]) -> None:
    """Raise ConfigError if a parameter belongs to two decoder layers."""
    owners: dict[int, int] = {}
    for number, layer in enumerate(layers):
        for name, parameter in layer.named_parameters():
            owner = owners.setdefault(id(parameter), number)
            if owner != number:
                raise ConfigError(
                    f"model: layers {owner} and {number} share the weight {name}, and `fully_shard` shards each layer "
                    "on its own; train with parallel: ddp, and evaluate or sample in one process (--nproc 1)."
                )


def _build_reduce_scatter(device_type: str) -> Any:
    return DefaultReduceScatter() if sends_by_nccl(device_type) else ExchangeReduceScatter()


def _set_prefetch(root: nn.Module, units: list[Any], count: int) -> None:
    """Make each sharded layer, and the norm with the head, gather the next `count` ones before it runs, both ways.

    The root runs before the first one of either direction, so it gathers the first ones.
    """
    for index, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + count])
        unit.set_modules_to_backward_prefetch(units[max(0, index - count) : index][::-1])
    assert isinstance(root, FSDPModule)
    root.set_modules_to_forward_prefetch(units[:count])
    root.set_modules_to_backward_prefetch(units[::-1][:count])


def _shard_end(model: Any, options: dict[str, Any]) -> list[nn.Module]:
    """Shard the norm after the layers and the head as one unit, with hooks of the norm alone; return both, if there.

    Losses read the head's weight outside of its forward pass: it is whole from when the norm runs until the backward
    pass has reached the norm's input, which all gradients of the head precede.
    """
    if end := find_end(model):
        norm, head = end
        norm.add_module("head", head)  # while `fully_shard` looks for the weights of the unit
        uncast = replace(options["mp_policy"], cast_forward_inputs=False)  # the norm gets what the layers return
        fully_shard(norm, reshard_after_forward=False, **options | {"mp_policy": uncast})
        del norm.head
    return end


def apply_fully_shard(module: nn.Module, layers: Iterable[nn.Module], plan: ParallelPlan, meshes: Meshes) -> None:
    """Shard each decoder layer as a unit, the norm after them with the head as one, and the rest as one more.

    So the head's gradients are reduced beside the backward pass of the layers, and only the embedding's after it. A
    head that is tied to the embedding, and the ends of a frozen model, are a part of the rest. Works on meta. One
    process with offloading is sharded over a mesh of one.

    Raises:
        ConfigError: two layers share a weight, which would become a weight of each.
    """
    layers = list(layers)
    _refuse_shared_weights(layers)
    compute = getattr(torch, plan.precision.compute)
    policy = MixedPrecisionPolicy(
        param_dtype=None if plan.precision.compute == plan.precision.param else compute,
        reduce_dtype=getattr(torch, plan.precision.reduce),
    )
    options: dict[str, Any] = {
        "mesh": meshes.shard,
        "mp_policy": policy,
        "offload_policy": CPUOffloadPolicy() if plan.cpu_offload else OffloadPolicy(),
        # Experts that are divided along the first dim are sharded along the second one.
        "shard_placement_fn": lambda weight: Shard(1) if isinstance(weight, DTensor) and weight.ndim == 3 else None,
    }
    if meshes.experts is not None:
        data = tuple(name for name in meshes.experts.mesh_dim_names or () if name not in ("ep", "tp"))
        for experts in find_experts(module).values():
            fully_shard(
                experts, reshard_after_forward=plan.reshard_after_forward, **options | {"mesh": meshes.experts[data]}
            )
    for layer in layers:
        fully_shard(layer, reshard_after_forward=plan.reshard_after_forward, **options)
    # What is never trained has no backward pass to free it again.
    is_trained = any(parameter.requires_grad for parameter in module.parameters())
    end = _shard_end(module.model, options) if is_trained else []
    apart = set(nn.ModuleList(end).parameters())
    fully_shard(module, reshard_after_forward=not is_trained, ignored_params=apart, **options)
    if plan.prefetch is not None:
        _set_prefetch(module, [*layers, *end[:1]], plan.prefetch)
    for unit in find_units(module):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        unit.set_custom_reduce_scatter(_build_reduce_scatter(meshes.device_type))
