"""Pipeline parallelism: stages of layers on the ranks of the axis pp, run by PyTorch's schedules.

Each stage is sharded or replicated by `fully_shard` over its own ranks. Gradients of all microbatches are added up
before they are reduced, as PyTorch's schedules do it. Hidden states are sent to the next stage and their gradients
back, each [batch, seq, hidden] in the compute dtype; tied embeddings are on the first and on the last stage, which
exchange their gradients once in a step.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from typing_extensions import override

from echelon.learn.data.loader import Microbatch
from echelon.learn.distributed.mesh import wait_for
from echelon.learn.distributed.objects import broadcast_object
from echelon.learn.distributed.stamp import Stamp
from echelon.learn.model.seeds import derive_seed, seed_generators
from echelon.learn.model.sharding import local_part
from echelon.learn.model.stage import Absent, StageRange
from echelon.learn.objectives.objective import Objective, StepSums, count_measures, training_sums
from echelon.learn.objectives.outputs import DecoderOutputs, ObjectiveModule, OutputsFn
from echelon.learn.parallel.step import DataParallel, ForwardBackward, SendsWhole, loss_factors, poison_if_not_finite
from echelon.planner.axes.pipeline_schedule import microbatches_kept, passes_deferred
from echelon.planner.plan import ParallelPlan

_SINGLE: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_SEVERAL: dict[str, Any] = {"interleaved": ScheduleInterleaved1F1B, "zero_bubble": ScheduleInterleavedZeroBubble}


@dataclass(frozen=True)
class StagePart:
    """A stage on this rank: its place in the pipeline, its module, and the data parallelism around it."""

    place: StageRange
    module: ObjectiveModule
    parallel: DataParallel


@dataclass(frozen=True)
class _Work:
    """A step: its microbatches, what their losses are divided by, and the objective."""

    step: int
    microbatches: Sequence[Microbatch]
    num_targets: Tensor
    objective: Objective


@dataclass(frozen=True)
class _Pass:
    """A microbatch that has passed a stage: what was received, None on the first, and what came out."""

    part: StagePart
    received: Tensor | None
    output: Tensor


class _Clock:
    """Measures how long its scopes take on the device, and how long the step around them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spans: list[tuple[Stamp, Stamp]] = []
        self._step: tuple[Stamp, Stamp] | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Scope of a step, which replaces the one before."""
        self._spans.clear()
        start = Stamp(self._device)
        yield
        self._step = (start, Stamp(self._device))

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Scope of a pass of a stage."""
        start = Stamp(self._device)
        yield
        self._spans.append((start, Stamp(self._device)))

    def waiting_share(self) -> float | None:
        """Return the share of the last step outside passes; None before the first. Waits for the device."""
        if self._step is None:
            return None
        start, end = self._step
        busy = sum(stop.seconds_since(begin) for begin, stop in self._spans)
        return 1 - busy / end.seconds_since(start)


class _ScheduledStage(PipelineStage):
    """A stage as a schedule of PyTorch drives it. The schedule sends hidden states alone; all else is on each rank."""

    def __init__(self, run: Callable[[int, Tensor], Tensor], clock: _Clock, part: StagePart, **options: Any) -> None:
        """`run`: the forward pass of a microbatch, by its number, on what was received."""
        super().__init__(part.parallel.module, part.place.index, part.place.count, **options)
        self._run = run
        self._clock = clock
        self._number = 0

    @override
    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """The number of the microbatch finds its tokens and labels, which this rank has."""
        self._number = fwd_chunk_id
        with self._clock.busy():
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    @override
    def forward_maybe_with_nosync(self, received: Tensor, **kwargs: Any) -> Tensor:
        return self._run(self._number, received)

    @override
    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        with self._clock.busy():
            super().backward_one_chunk(*args, **kwargs)

    @override
    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        with self._clock.busy():
            super().backward_weight_one_chunk(*args, **kwargs)


class _WithLoss(torch.autograd.Function):
    """Hidden states unchanged, with a loss of the stage: its backward pass begins where their gradient arrives."""

    @staticmethod
    @override
    def forward(ctx: Any, hidden: Tensor, loss: Tensor) -> Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.ones((), device=gradient.device)


class Pipeline(SendsWhole, ForwardBackward):
    """The stages of this rank, in a pipeline with those of the other ranks of its axis pp.

    It is the ForwardBackward and the parallelism of an engine.
    """

    num_rehearsals = 1

    def __init__(
        self,
        parts: Sequence[StagePart],
        plan: ParallelPlan,
        group: dist.ProcessGroup,
        hidden_size: int,
        device: torch.device,
        seed: int,
        router_strength: float | None = None,
        shared: Sequence[str] = (),
    ) -> None:
        """Needs a plan with a schedule.

        Args:
            parts: the stages of this rank, first to last: every plan.pp-th one.
            group: the ranks of the pipeline.
            router_strength: the factor on the router loss; None where none is trained.
            shared: names of the weights that both the first and the last stage have.
        """
        assert plan.schedule is not None, "a plan with pp has a schedule"
        self._parts = parts
        self._schedule_name = plan.schedule
        self._group = group
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._hidden_size = hidden_size
        self._dtype: torch.dtype = getattr(torch, plan.precision.compute)
        self._device = device
        self._seed = seed
        self._router_strength = router_strength
        self._shared = tuple(shared) if self._rank in (0, self._size - 1) else ()
        self._schedules: dict[tuple[int, ...], Any] = {}
        self._clock = _Clock(device)
        self._sends = True
        self._work: _Work | None = None
        self._totals = torch.zeros(2, dtype=torch.float64, device=device)
        self._num_kept = microbatches_kept(plan.schedule, plan.pp, self._rank, len(parts), plan.num_microbatches)
        self._num_deferred = passes_deferred(plan.schedule, self._rank, len(parts), plan.num_microbatches)
        self.num_rehearsed = self._num_kept + 1
        self.counted_elsewhere = frozenset(shared if self._rank == self._size - 1 else ())
        self.stage_of: Mapping[str, int] = {
            name: part.place.index
            for part in reversed(parts)
            for name, module in part.module.model.named_modules()
            if not isinstance(module, Absent)
        }

    @override
    def __call__(
        self, step: int, microbatches: Sequence[Microbatch], num_targets: Tensor, objective: Objective
    ) -> StepSums:
        """The loss is on the last stage alone."""
        self._work = _Work(step, microbatches, num_targets, objective)
        self._totals = self._totals.new_zeros(2 + count_measures(objective))
        try:
            if not self._sends:
                self._run_alone(microbatches)
            elif len(microbatches) == 1:
                self._run_chained(microbatches[0])
            else:
                self._run_scheduled(microbatches)
        finally:
            self._work = None
        loss, router, measures = self._totals[0], self._totals[1], self._totals[2:]
        if self._sends:
            self._sum_shared()
        if self._router_strength is None:
            return StepSums(loss, measures=measures)
        if self._sends:
            dist.all_reduce(router, group=self._group)
        taps = [part.module.tap for part in self._parts]
        counts = torch.stack([tap.take_expert_tokens(self._device) for tap in taps if tap is not None])
        return StepSums(loss, router, counts.sum(0), measures)

    @override
    def clear_gradients(self) -> None:
        for part in self._parts:
            part.parallel.clear_gradients()

    @contextmanager
    @override
    def isolated(self) -> Iterator[None]:
        """Each stage runs on hidden states of its own, as many microbatches at once as in a step."""
        with ExitStack() as stack:
            for part in self._parts:
                stack.enter_context(part.parallel.isolated())
            self._sends = False
            try:
                yield
            finally:
                self._sends = True

    @contextmanager
    @override
    def evaluation(self) -> Iterator[Callable[[Microbatch, OutputsFn], Tensor]]:
        """Microbatches pass the stages one after the other; every rank gets the result of the last."""
        with ExitStack() as stack:
            for part in self._parts:
                stack.enter_context(part.parallel.evaluation())
            yield self._evaluate

    @override
    def waiting(self) -> float | None:
        """None before the first step that a schedule ran."""
        return self._clock.waiting_share()

    def _run_scheduled(self, microbatches: Sequence[Microbatch]) -> None:
        count, shape = len(microbatches), _shape_of(microbatches)
        if (count, *shape) not in self._schedules:
            self._schedules[(count, *shape)] = self._build_schedule(count, shape)
        placeholder = torch.zeros(count, device=self._device)
        inputs = (placeholder,) if self._parts[0].place.is_first else ()
        target = placeholder if self._parts[-1].place.is_last else None
        with ExitStack() as stack:
            for part in self._parts:
                stack.enter_context(part.parallel.microbatch(is_last=True))
            with self._clock.step():
                self._schedules[(count, *shape)].step(*inputs, target=target, return_outputs=False)

    def _build_schedule(self, count: int, shape: tuple[int, ...]) -> Any:
        """Build a schedule with its stages, which are bound to the number of microbatches and their shape.

        All shapes are given, so that PyTorch does not run the stages to find them.
        """
        stages = [self._build_stage(part, shape) for part in self._parts]
        options: dict[str, Any] = {"n_microbatches": count, "loss_fn": self._weigh, "scale_grads": False}
        if self._schedule_name in _SINGLE:
            return _SINGLE[self._schedule_name](*stages, **options)
        return _SEVERAL[self._schedule_name](stages, **options)

    def _build_stage(self, part: StagePart, shape: tuple[int, ...]) -> _ScheduledStage:
        hidden = torch.empty(*shape, self._hidden_size, dtype=self._dtype, device="meta", requires_grad=True)
        return _ScheduledStage(
            partial(self._run_numbered, part),
            self._clock,
            part,
            device=self._device,
            group=self._group,
            input_args=torch.empty(1, device="meta") if part.place.is_first else hidden,
            output_args=torch.empty(2, device="meta", requires_grad=True) if part.place.is_last else hidden,
        )

    def _run_numbered(self, part: StagePart, number: int, received: Tensor) -> Tensor:
        assert self._work is not None
        return self._run(part, self._work.microbatches[number], None if part.place.is_first else received)

    def _run_chained(self, microbatch: Microbatch) -> None:
        """Run one microbatch, which no schedule could overlap with another: all stages forward, then all backward."""
        for passed in self._pass_through(microbatch, self._run)[::-1]:
            with passed.part.parallel.microbatch(is_last=True):
                self._go_back(passed, self._receive(passed.part.place.index + 1, passed.output.shape))
            if passed.received is not None:
                assert passed.received.grad is not None
                dist.send(passed.received.grad, group=self._group, group_dst=(passed.part.place.index - 1) % self._size)

    def _run_alone(self, microbatches: Sequence[Microbatch]) -> None:
        """Run microbatches through the stages of this rank on zeros: as many at once as in a step, after one alone.

        That one leaves gradients, which the others find.
        """
        groups = [*([microbatch] for microbatch in microbatches[: -self._num_kept]), microbatches[-self._num_kept :]]
        for group in groups:
            passes = [self._pass_alone(part, microbatch) for part in self._parts for microbatch in group]
            if self._num_deferred and group is groups[-1]:
                self._go_back_in_halves(passes)
                for part in self._parts:
                    self._build_stage(part, _shape_of(group)).perform_reduce_grad(1)
                continue
            final = {passed.part.place.index: passed for passed in passes[::-1]} if group is groups[-1] else {}
            for passed in passes[::-1]:
                with passed.part.parallel.microbatch(is_last=final.get(passed.part.place.index) is passed):
                    self._go_back(passed, torch.zeros_like(passed.output))

    def _pass_alone(self, part: StagePart, microbatch: Microbatch) -> _Pass:
        received = None
        if not part.place.is_first:
            shape = (*microbatch.input_ids.shape, self._hidden_size)
            received = torch.zeros(*shape, dtype=self._dtype, device=self._device, requires_grad=True)
        with part.parallel.microbatch(is_last=False):
            return _Pass(part, received, self._run(part, microbatch, received))

    def _go_back(self, passed: _Pass, gradient: Tensor | None) -> None:
        """Run the backward pass of a stage. `gradient`: of its output, unless it is the last."""
        if passed.part.place.is_last:
            self._weigh(passed.output).backward()  # type: ignore[no-untyped-call]
        elif passed.output.requires_grad:
            passed.output.backward(gradient)  # type: ignore[no-untyped-call]

    def _go_back_in_halves(self, passes: Sequence[_Pass]) -> None:
        """Run backward passes as `zero_bubble` does: gradients of activations, and later those of the weights."""
        waiting: deque[Callable[[], object]] = deque()
        for passed in passes[::-1]:
            parameters = passed.part.module.parameters
            with passed.part.parallel.microbatch(is_last=False):
                if passed.received is None:  # its gradient is sent nowhere: both halves are computed at once
                    waiting.append(partial(self._go_back, passed, torch.zeros_like(passed.output)))
                else:
                    outputs = [self._weigh(passed.output) if passed.part.place.is_last else passed.output]
                    gradients = [torch.zeros_like(output) for output in outputs]
                    _, groups = stage_backward_input(outputs, gradients, [passed.received], parameters())
                    waiting.append(partial(stage_backward_weight, parameters(), groups))
                if len(waiting) >= self._num_deferred:
                    waiting.popleft()()
        for finish in waiting:
            finish()

    def _pass_through(
        self, microbatch: Microbatch, run: Callable[[StagePart, Microbatch, Tensor | None], Tensor]
    ) -> list[_Pass]:
        """Run a microbatch through all stages, one after the other; return the passes of this rank."""
        passes = []
        for part in self._parts:
            received = self._receive(part.place.index - 1, (*microbatch.input_ids.shape, self._hidden_size))
            if received is not None:
                received.requires_grad_(torch.is_grad_enabled())
            with part.parallel.microbatch(is_last=True):
                output = run(part, microbatch, received)
            if not part.place.is_last:
                dist.send(output.detach(), group=self._group, group_dst=(part.place.index + 1) % self._size)
            passes.append(_Pass(part, received, output))
        return passes

    def _receive(self, index: int, shape: Sequence[int]) -> Tensor | None:
        """Receive hidden states, or their gradient, from the stage of this index; None if there is no such stage."""
        if not 0 <= index < self._parts[0].place.count:
            return None
        received = torch.empty(*shape, dtype=self._dtype, device=self._device)
        dist.recv(received, group=self._group, group_src=index % self._size)
        return received

    def _run(self, part: StagePart, microbatch: Microbatch, received: Tensor | None) -> Tensor:
        """Run the forward pass of a stage in a step: the sums of the last one, hidden states of any other."""
        assert self._work is not None
        # Random state is not saved but derived, so that dropout is the same after a resume.
        first = int(microbatch.batch_indices[0])
        share = () if microbatch.part is None else (microbatch.part.rank,)
        seed_generators(derive_seed(self._seed, self._work.step, first, part.place.index, *share), self._device)
        if part.place.is_last:
            sums: Tensor = part.parallel.module(microbatch, training_sums(self._work.objective), received)
            self._totals += sums.detach()
            return sums
        hidden: Tensor = part.parallel.module(microbatch, self._pass_hidden, received)
        return hidden.to(self._dtype).contiguous()

    def _pass_hidden(self, outputs: DecoderOutputs, batch: Microbatch) -> Tensor:
        """What any stage but the last returns: hidden states, to whose gradient the router loss adds its own."""
        hidden = outputs.hidden
        if self._router_strength is None:
            return hidden
        assert self._work is not None
        router = outputs.router_loss_sum(self._work.objective.token_weights(batch))
        self._totals[1] += router.detach()
        factor = poison_if_not_finite(self._router_strength, router) / self._work.num_targets
        with_loss: Tensor = _WithLoss.apply(hidden, router * factor)  # type: ignore[no-untyped-call]
        return with_loss

    def _weigh(self, sums: Tensor, target: Tensor | None = None) -> Tensor:
        """Return what the last stage begins its backward pass from. `target`: PyTorch's schedules give one."""
        assert self._work is not None
        factors = loss_factors(self._work.objective, self._router_strength, sums.device)
        return (sums * (poison_if_not_finite(factors, sums) / self._work.num_targets)).sum()

    def _evaluate(self, microbatch: Microbatch, compute: OutputsFn) -> Tensor:
        def run(part: StagePart, microbatch: Microbatch, received: Tensor | None) -> Tensor:
            if part.place.is_last:
                result: Tensor = part.parallel.module(microbatch, compute, received)
                return result.contiguous()
            hidden: Tensor = part.parallel.module(microbatch, lambda outputs, _: outputs.hidden, received)
            return hidden.to(self._dtype).contiguous()

        passes = self._pass_through(microbatch, run)
        last = self._size - 1
        output = passes[-1].output if self._rank == last else torch.empty(0)
        shape = broadcast_object(tuple(output.shape), self._group, last)
        result = output if self._rank == last else torch.empty(shape, device=self._device)
        dist.broadcast(result, group=self._group, group_src=last)
        return result

    @torch.no_grad()
    def _sum_shared(self) -> None:
        """On the first and the last stage, add up the gradients of the weights that both have."""
        peer = self._size - 1 - self._rank
        model = (self._parts[0] if self._rank == 0 else self._parts[-1]).module.model
        for name in self._shared:
            parameter: nn.Parameter = model.get_parameter(name)
            if parameter.grad is None or not local_part(parameter.grad).numel():
                continue
            part = local_part(parameter.grad)
            on_device = part.to(self._device)  # offloaded gradients are on the host
            other = torch.empty_like(on_device)
            exchange = [
                dist.P2POp(dist.isend, on_device, group=self._group, group_peer=peer),
                dist.P2POp(dist.irecv, other, group=self._group, group_peer=peer),
            ]
            wait_for(dist.batch_isend_irecv(exchange))
            part.copy_(on_device + other)


def _shape_of(microbatches: Sequence[Microbatch]) -> tuple[int, ...]:
    """Return the shape of the token ids of microbatches, [batch, seq]."""
    shapes = {tuple(microbatch.input_ids.shape) for microbatch in microbatches}
    assert len(shapes) == 1, "the microbatches of a pipeline have one shape"
    return shapes.pop()
