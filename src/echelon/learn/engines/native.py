"""The native Engine, built on PyTorch's DDP, `fully_shard` and fused optimizers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from echelon.ground.errors import is_out_of_memory
from echelon.learn.checkpoint.adapter_folder import AdapterContent, describe_adapter, join_adapters
from echelon.learn.data.loader import LONGEST, Microbatch, Padding
from echelon.learn.distributed.joint_group import together
from echelon.learn.distributed.mesh import Meshes
from echelon.learn.distributed.objects import gather_objects
from echelon.learn.engines.engine import Engine, NonFinite, Rehearsal
from echelon.learn.engines.footprint import Footprint
from echelon.learn.engines.module_evaluation import ModuleEvaluation
from echelon.learn.model.adapters import PrincipalParts, plain_name
from echelon.learn.model.attention import describe_document_mask
from echelon.learn.model.build import persistent_buffers
from echelon.learn.model.context_attention import find_attention
from echelon.learn.model.parts import find_parts, scores_texts
from echelon.learn.model.sharding import local_part, whole
from echelon.learn.model.traits import Traits
from echelon.learn.objectives.loss import IGNORE
from echelon.learn.objectives.objective import Objective, StepSums, put_means, with_batch_means
from echelon.learn.objectives.outputs import OutputsFn
from echelon.learn.optimizer import LossScale, Optimizer, Served, clip_gradients, global_norm
from echelon.learn.parallel.step import ForwardBackward, Parallel
from echelon.learn.reduction.reducer import divide, flatten, write_back
from echelon.learn.sync.synchronizer import StateFill
from echelon.planner.memory_parts import MemoryParts

_MAX_VALUES = 2**32  # more than a stage has values


class NonFiniteProbe:
    """A scope that checks every module's output, and its gradient, for non-finite values, on the device.

    The hooks do not change any value, so the passes inside are those of training, except that compilation is off: hooks
    inside a compiled layer would not be called. Submodules finish before their parent, so the innermost one is found.
    """

    def __init__(self, decoder: Any, stage_of: Mapping[str, int] | None = None) -> None:
        """`stage_of`: the index of the pipeline stage of each module, by name; None or empty without a pipeline."""
        self._decoder = decoder
        self._stage_of = stage_of or {}
        self._outputs: list[tuple[str, Tensor]] = []
        self._gradients: list[tuple[str, Tensor]] = []
        self._scope = ExitStack()

    def __enter__(self) -> "NonFiniteProbe":
        self._scope.enter_context(torch.compiler.set_stance("force_eager"))
        for name, module in self._decoder.named_modules():
            if name:
                hook = module.register_forward_hook(partial(self._look, name))
                self._scope.callback(hook.remove)
        return self

    def __exit__(self, *_: Any) -> None:
        self._scope.close()

    def find(self, loss: Tensor) -> NonFinite | None:
        """Return the first non-finite value in the passes of the scope. `loss`: their loss."""
        for place, name in _not_finite(self._outputs):
            return NonFinite(0, self._number(name, place), name)
        if not bool(torch.isfinite(loss)):
            # The head may have no hook call: the chunked loss uses its weight directly.
            head = self._decoder.get_output_embeddings()
            names = (name for name, module in self._decoder.named_modules() if module is head)
            return NonFinite(1, 0, next(names, "the model's head"))
        for place, name in _not_finite(self._gradients):
            return NonFinite(2, self._number(name, place, is_backward=True), name)
        gradients = {
            name: parameter.grad for name, parameter in self._decoder.named_parameters() if parameter.grad is not None
        }
        flags = [(name, _is_finite(local_part(gradient))) for name, gradient in gradients.items()]
        for place, name in _not_finite(flags):
            return NonFinite(3, self._number(name.rpartition(".")[0], place), name)
        return None

    def _number(self, module: str, place: int, is_backward: bool = False) -> int:
        """Return the place of a value in the passes of all stages, given that on this rank."""
        stage = self._stage_of.get(module, 0)
        return (-stage if is_backward else stage) * _MAX_VALUES + place

    def _look(self, name: str, module: nn.Module, arguments: Any, output: Any) -> None:
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                self._outputs.append((name, _is_finite(tensor.detach())))
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._look_back, name))  # type: ignore[no-untyped-call]

    def _look_back(self, name: str, gradient: Tensor) -> None:
        self._gradients.append((name, _is_finite(gradient)))


def _is_finite(tensor: Tensor) -> Tensor:
    return torch.isfinite(local_part(tensor)).all()


def _not_finite(flags: list[tuple[str, Tensor]]) -> Iterator[tuple[int, str]]:
    if flags:
        finite = torch.stack([flag for _, flag in flags]).tolist()
        yield from ((place, name) for place, (name, _) in enumerate(flags) if not finite[place])


@torch.no_grad()
def sum_gradients(trained: Mapping[str, nn.Parameter], group: dist.ProcessGroup) -> None:
    """Replace gradients by their sums over a group, in fp32: this rank's part of each. Collective.

    Args:
        trained: the parameters that train, the same parts of the same ones on each rank of the group.
    """
    for parameter in trained.values():  # a replica may not have used a parameter that another one has
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    gradients = {name: local_part(parameter.grad) for name, parameter in trained.items() if parameter.grad is not None}
    with together(group):  # stages of a pipeline have gradients of different sizes
        for bucket in divide(gradients):
            flat = flatten(bucket)
            dist.all_reduce(flat, group=group)
            write_back(flat, bucket)


@dataclass(frozen=True)
class NativeParts:
    """What a native engine is made of."""

    parallel: Parallel
    """The model as its ranks divide it."""
    decoder: Any
    """The transformers model whose parameters train, sharded in place."""
    optimizer: Optimizer
    forward_backward: ForwardBackward
    """Runs the microbatches of a step, in one stage or as a pipeline."""
    traits: Traits
    everyone: dist.ProcessGroup
    """All ranks."""
    meshes: Meshes | None = None
    """Those over whose ranks targets are counted, and gradients of replicas that are one model summed; None: all."""
    stages: dist.ProcessGroup | None = None
    """The ranks of this rank's pipeline; None without one."""
    loss_scale: LossScale | None = None
    """That of fp16; None in other precisions."""
    served: Served | None = None
    """What this rank owns as a parameter server, with `optimizer` as its optimizer; None without servers."""
    principal: PrincipalParts | None = None
    """The parts of weights that PiSSA moved into the adapter; None without it."""
    padding: Padding = LONGEST
    """The width that forward passes need."""
    lines: Sequence[str] = ()
    """The lines of `Engine.describe`."""
    share_scales: Callable[[], None] = lambda: None
    """Called after each change of the weights; collective."""
    waiting: float = 0.0
    """The predicted share of a step in which pipeline stages wait."""
    reference: nn.Module | None = None
    """The frozen model with which the objective compares."""


class NativeEngine(Engine):
    """One model with its data parallelism and optimizer."""

    def __init__(self, parts: NativeParts) -> None:
        self._parts = parts
        self.decoder = parts.decoder
        """The transformers model that trains: this rank's layers of it, sharded in place."""
        self.parallel, self.optimizer = parts.parallel, parts.optimizer
        self._everyone, self._stages, self._loss_scale = parts.everyone, parts.stages, parts.loss_scale
        self._meshes = parts.meshes
        self._sends = True
        self.served = parts.served
        self._device = next(parts.decoder.parameters()).device  # the device of the optimizer step
        self.trained: dict[str, nn.Parameter] = {
            name: parameter for name, parameter in parts.decoder.named_parameters() if parameter.requires_grad
        }
        """The parameters that train, by name."""
        self._step = 0
        self._is_finite = torch.ones((), dtype=torch.bool)

    @property
    @override
    def loss_scale(self) -> Tensor | None:
        return None if self._loss_scale is None else self._loss_scale.value

    @override
    def forward_backward(
        self, step: int, microbatches: Sequence[Microbatch], num_targets: Tensor, objective: Objective
    ) -> StepSums:
        """The loss scale divides the number of targets; it is a power of two, so this is exact."""
        self._step = step
        microbatches = self._with_means(microbatches, num_targets, objective)
        self.parallel.begin_step(step)
        divisor = num_targets if self.loss_scale is None else num_targets / self.loss_scale
        sums = self._parts.forward_backward(step, microbatches, divisor, objective)
        self.parallel.reduce()
        if self._sends and self._meshes is not None and self._meshes.is_one_model and self._meshes.outer is not None:
            sum_gradients(self.trained, self._meshes.outer)
        return sums

    def _with_means(
        self, microbatches: Sequence[Microbatch], num_targets: Tensor, objective: Objective
    ) -> Sequence[Microbatch]:
        """Add what the objective must know of the whole batch; weights are gathered only if it runs the model."""
        with ExitStack() as scope:
            module: list[Callable[[Microbatch, OutputsFn], Tensor]] = []

            def run(microbatch: Microbatch, compute: OutputsFn) -> Tensor:
                if not module:
                    module.append(scope.enter_context(self.parallel.evaluation()))
                return module[0](microbatch, compute)

            return with_batch_means(objective, microbatches, num_targets, run, self._sum_over_readers)

    def _sum_over_readers(self, sums: Tensor) -> None:
        assert self._meshes is not None, "engines of others have no such means"
        self._meshes.sum_over_readers(sums)

    @override
    def clip(self, max_norm: float | None) -> Tensor:
        gradients = {name: parameter.grad for name, parameter in self.trained.items() if parameter.grad is not None}
        if self._loss_scale is not None:
            self._loss_scale.unscale(local_part(gradient) for gradient in gradients.values())
        elsewhere = self.parallel.counted_elsewhere
        norm = global_norm([gradient for name, gradient in gradients.items() if name not in elsewhere], self._stages)
        self._is_finite = torch.isfinite(norm)
        if max_norm is not None:
            clip_gradients(list(gradients.values()), max_norm, norm)
        return norm

    @override
    def step(self, learning_rate: float, commit: Tensor) -> None:
        if self.served is None:  # else the server steps, when it has the gradients of others
            # With offloaded parameters the step runs on the host, which must wait for `commit`.
            self.optimizer.step(self._step, learning_rate, commit.to(self._device))
        self._parts.share_scales()
        self.parallel.settle(commit)
        self.parallel.clear_gradients()
        if self._loss_scale is not None:
            self._loss_scale.update(self._is_finite)

    @override
    def regroup(self, meshes: Meshes) -> None:
        self._meshes, self._everyone = meshes, meshes.everyone

    @override
    def discard(self) -> None:
        self.parallel.clear_gradients()

    @override
    def find_nonfinite(
        self, step: int, microbatch: Microbatch, num_targets: Tensor, objective: Objective
    ) -> NonFinite | None:
        with NonFiniteProbe(self.decoder, self.parallel.stage_of) as probe:
            sums = self.forward_backward(step, [microbatch], num_targets, objective)
        finding = probe.find(sums.loss)
        self.parallel.clear_gradients()
        return finding

    @contextmanager
    @override
    def evaluation(self, objective: Objective) -> Iterator["ModuleEvaluation"]:
        with self.parallel.evaluation() as module:
            decoder = self.decoder if self._stages is None else None
            yield ModuleEvaluation(module, objective, self._parts.padding, decoder)

    @override
    def describe_end(self) -> Sequence[str]:
        waiting = self.parallel.waiting()
        if waiting is None:
            return ()
        measured = [line for line in gather_objects(waiting, self._everyone) if line is not None]
        return (
            f"pipeline: the processes waited for other stages in {sum(measured) / len(measured):.1%} of the last step "
            f"({self._parts.waiting:.1%} predicted)",
        )

    @override
    def describe(self, has_documents: bool) -> Sequence[str]:
        if not has_documents:
            return self._parts.lines
        return [describe_document_mask(find_attention(self.decoder), self._parts.traits.mask), *self._parts.lines]

    @override
    def rehearse(self, microbatch: Microbatch, num_microbatches: int, objective: Objective) -> Rehearsal:
        """Of a step of many microbatches, as many are run as need the most memory.

        The passes send nothing, so that a rank that runs out of memory leaves no peer waiting in a collective. DDP
        rebuilds its buckets after the first backward pass, and sums depend on the bucket layout. After a rehearsal, a
        fresh start and a resumed one add up in the same order. A step of several microbatches is rehearsed again with
        the new buckets: with the old ones, its first gradients would be allocated beside them.
        """
        masked = replace(microbatch, labels=torch.full_like(microbatch.labels, IGNORE))
        [masked] = put_means(objective, [masked], torch.zeros(len(objective.batch_means), device=masked.labels.device))
        one = torch.ones((), device=masked.labels.device)
        num_rehearsals = self.parallel.num_rehearsals if num_microbatches > 1 else 1
        has_buckets = self.parallel.num_rehearsals > 1  # DDP's, which are the gradients
        footprint = self._build_footprint(one.device)
        num_tried = min(num_microbatches, self.parallel.num_rehearsed)
        suffices = self._try_memory([masked] * num_tried, one, objective, footprint)
        everyone = gather_objects(suffices, self._everyone)
        if not all(everyone):
            return Rehearsal(short=[rank for rank, fits in enumerate(everyone) if not fits])
        for parameter in self.trained.values():
            if parameter.grad is None:  # HSDP has none before its all-reduce
                parameter.grad = torch.zeros_like(parameter)
        state = (tensor for _, tensor in self.optimizer.tensors())
        memory = self._find_largest(footprint.parts(state, has_buckets, self._parts.reference))
        self._rehearse_update(one.device)
        for _ in range(1, num_rehearsals):
            self.forward_backward(0, [masked], one, objective)
            self._rehearse_update(one.device)
        if self._loss_scale is not None:
            self._loss_scale.reset()
        return Rehearsal(memory=memory)

    def _find_largest(self, parts: MemoryParts | None) -> MemoryParts | None:
        """The largest parts of all ranks; None if any rank has none."""
        known = [measured for measured in gather_objects(parts, self._everyone) if measured is not None]
        if len(known) < dist.get_world_size(self._everyone):
            return None
        sizes = zip(*(astuple(parts) for parts in known), strict=True)
        return MemoryParts(*(max(sizes_of_part) for sizes_of_part in sizes))

    def _build_footprint(self, device: torch.device) -> Footprint:
        parts = find_parts(self.decoder, self._parts.traits.arithmetic)
        whole = self.decoder.base_model if scores_texts(self.decoder.config) else self.decoder
        return Footprint(self.decoder, whole if parts is None else parts.backbone, device)

    def _rehearse_update(self, device: torch.device) -> None:
        self.clip(None)
        self.step(0.0, commit=torch.zeros((), dtype=torch.bool, device=device))

    def _try_memory(
        self, microbatches: Sequence[Microbatch], num_targets: Tensor, objective: Objective, footprint: Footprint
    ) -> bool:
        """Run microbatches without communication, and measure them; return whether the memory of this rank sufficed."""
        self._sends = False
        try:
            with self.parallel.isolated(), footprint:
                self.forward_backward(0, microbatches, num_targets, objective)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return False
        finally:
            self._sends = True
        return True

    @override
    def weights(self) -> dict[str, Tensor]:
        return {name: local_part(parameter.detach()) for name, parameter in self.trained.items()}

    @override
    def gradients(self) -> dict[str, Tensor]:
        gradients = {name: parameter.grad for name, parameter in self.trained.items()}
        return {name: local_part(gradient) for name, gradient in gradients.items() if gradient is not None}

    @override
    def describe_adapter(self) -> AdapterContent:
        tensors = {name: whole(parameter.detach()).cpu() for name, parameter in self.trained.items()}
        content = describe_adapter(self.decoder, tensors, self._parts.principal or {})
        return content if self._stages is None else join_adapters(gather_objects(content, self._stages))

    @override
    def load(self, fill: StateFill) -> None:
        fill(self.state_dict())
        self._parts.share_scales()

    @override
    def state_dict(self) -> dict[str, Tensor]:
        """Names are `model.NAME`, `optimizer.NAME.KEY` for a parameter's state, `loss_scale.KEY`, and those
        of `Parallel.tensors`.

        Weights that an adapter freezes are not included: they are loaded from their source again. Parameters that an
        architecture itself does not train, such as a router's expert bias, are.
        """
        parameters = dict(self.decoder.named_parameters())
        has_adapter = any(plain_name(name) is None for name in parameters)
        stored = self.trained if has_adapter else parameters
        state = {f"model.{name}": parameter.detach() for name, parameter in stored.items()}
        state |= {f"optimizer.{name}": tensor for name, tensor in self.optimizer.tensors()}
        if self._loss_scale is not None:
            state |= {f"loss_scale.{key}": tensor for key, tensor in self._loss_scale.state_dict().items()}
        state |= self.parallel.tensors()
        if not has_adapter:
            state |= {f"model.{name}": buffer for name, buffer in persistent_buffers(self.decoder).items()}
        return state
