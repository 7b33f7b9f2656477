"""The engine that trains with DeepSpeed: its ZeRO stages divide, reduce and step what the native engine would."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from typing_extensions import override

from echelon.foreign.deepspeed.partitions import (
    GradientPartitions,
    ParameterPartitions,
    Partitions,
    WholeCopies,
    build_flat_optimizer,
    build_state,
    count_steps,
    set_steps,
)
from echelon.ground.errors import ConfigError
from echelon.ground.launch_environment import find_place
from echelon.ground.variables import set_default_variables
from echelon.learn.checkpoint.adapter_folder import AdapterContent, describe_adapter
from echelon.learn.checkpoint.first_weights import open_weights
from echelon.learn.data.loader import Microbatch
from echelon.learn.engines.engine import EngineSpec, Rehearsal
from echelon.learn.engines.native import NativeEngine, NativeParts
from echelon.learn.engines.prepared_layers import choose_attention_kernel, choose_liger, place_buffers, prepare_layers
from echelon.learn.model.adapters import initialize_adapter, plain_name
from echelon.learn.model.build import build_on_meta, materialize, persistent_buffers
from echelon.learn.model.router import choose_router_loss
from echelon.learn.objectives.loss import IGNORE
from echelon.learn.objectives.objective import Objective, StepSums
from echelon.learn.objectives.outputs import ObjectiveModule
from echelon.learn.optimizer import LossScale
from echelon.learn.optimizer.stepper import choose_rule
from echelon.learn.parallel import shard_model
from echelon.learn.parallel.data_parallel import evaluation_mode
from echelon.learn.parallel.step import SingleStage, Undivided
from echelon.learn.sync.synchronizer import StateFill
from echelon.planner.deepspeed_settings import build_settings, find_stage
from echelon.planner.plan import ParallelPlan
from echelon.recipe.document import Recipe


class ZeroParallel(Undivided):
    """A module under DeepSpeed, which reduces gradients in its backward passes."""

    def __init__(self, deepspeed: Any, world_size: int) -> None:
        """`deepspeed`: a DeepSpeedEngine."""
        self.module: nn.Module = deepspeed
        self._deepspeed = deepspeed
        self._world_size = world_size

    @contextmanager
    @override
    def microbatch(self, is_last: bool) -> Iterator[None]:
        """DeepSpeed must know before the forward pass whether it is the last one."""
        self._deepspeed.set_gradient_accumulation_boundary(is_last)
        yield

    @override
    def backward(self, sums: Tensor, weights: Tensor) -> None:
        """DeepSpeed averages gradients over the ranks, so they are multiplied by their number."""
        self._deepspeed.backward((sums * weights).sum() * self._world_size, scale_wrt_gas=False)

    @override
    def clear_gradients(self) -> None:
        """The engine drops them: DeepSpeed can only do so in a step."""

    @override
    def isolated(self) -> nullcontext[None]:
        """DeepSpeed always sends."""
        return nullcontext()

    @contextmanager
    @override
    def evaluation(self) -> Iterator[nn.Module]:
        with evaluation_mode(self._deepspeed.module):
            yield self._deepspeed.module


class DeepspeedEngine(NativeEngine):
    """Forward passes and losses are those of the native engine; DeepSpeed owns gradients, weights and the step.

    The host waits for every step: DeepSpeed decides there.
    """

    def __init__(self, deepspeed: Any, partitions: Partitions, keys: Sequence[str], parts: NativeParts) -> None:
        """`deepspeed`: a DeepSpeedEngine. `keys`: of the optimizer's state."""
        super().__init__(parts)
        self.zero = deepspeed
        """DeepSpeed's engine."""
        self.partitions = partitions
        """What this rank holds of weights and optimizer state."""
        self._keys = keys
        self._mesh = init_device_mesh("cpu", (dist.get_world_size(parts.everyone),))
        self._norm = torch.ones(())
        partitions.answer_norm(lambda: self._norm)

    @override
    def forward_backward(
        self, step: int, microbatches: Sequence[Microbatch], num_targets: Tensor, objective: Objective
    ) -> StepSums:
        """DeepSpeed multiplies the loss by the scale, and takes it out of the gradients in its step.

        Raises ConfigError for an objective with `batch_means`.
        """
        if objective.batch_means:
            raise ConfigError(
                f"the loss {type(objective).__name__} needs means over the batch ({', '.join(objective.batch_means)}), "
                "and engine=deepspeed has no pass for them; use engine=native."
            )
        self._step = step
        if self.loss_scale is not None:
            self.zero.optimizer.loss_scaler.cur_scale = float(self.loss_scale)
        return self._parts.forward_backward(step, microbatches, num_targets, objective)

    @override
    def clip(self, max_norm: float | None) -> Tensor:
        """The norm is echelon's own: DeepSpeed's is -1 where a gradient is not finite."""
        parts = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in self.partitions.gradients()]
        squares = torch.stack(parts).square().sum().to(self._device) if parts else torch.zeros(()).double()
        dist.all_reduce(squares, group=self._everyone)
        scaled = squares.sqrt().float()
        self._norm, self.zero.optimizer.clip_grad = scaled, max_norm or 0.0
        norm = scaled if self.loss_scale is None else scaled / self.loss_scale
        self._is_finite = torch.isfinite(norm)
        return norm

    @override
    def step(self, learning_rate: float, commit: Tensor) -> None:
        """The host waits for `commit`."""
        for group in self.zero.optimizer.param_groups:
            group["lr"] = learning_rate * group["rate_factor"]
        if not bool(commit):
            self._norm = torch.full_like(self._norm, -1.0)
        self.zero.step()
        if self._loss_scale is not None:
            self._loss_scale.update(self._is_finite)

    @override
    def discard(self) -> None:
        self._norm = torch.full_like(self._norm, -1.0)
        self.zero.step()

    @override
    def rehearse(self, microbatch: Microbatch, num_microbatches: int, objective: Objective) -> Rehearsal:
        """A rank that runs out of memory ends the run: its peers wait for it inside DeepSpeed."""
        masked = replace(microbatch, labels=torch.full_like(microbatch.labels, IGNORE))
        one = torch.ones((), device=masked.labels.device)
        self.forward_backward(0, [masked] * min(num_microbatches, 2), one, objective)
        self.clip(None)
        self.step(0.0, torch.zeros((), dtype=torch.bool))
        if self._loss_scale is not None:
            self._loss_scale.reset()
        return Rehearsal()

    @override
    def describe_adapter(self) -> AdapterContent:
        tensors = {name: self.partitions.read(parameter, None).cpu() for name, parameter in self.trained.items()}
        return describe_adapter(self.decoder, tensors, self._parts.principal or {})

    @override
    def state_dict(self) -> dict[str, Tensor]:
        """Copies in host memory, of which each rank has some rows: names and shapes are the native ones."""
        state: dict[str, Tensor] = {}
        steps = count_steps(self.zero.optimizer.state[self.partitions.flats[0]])
        for name, parameter in self.trained.items():
            state[f"model.{name}"] = self._divide(self.partitions.read(parameter, None))
            for key in self._keys:
                state[f"optimizer.{name}.{key}"] = self._divide(self.partitions.read(parameter, key))
            if steps is not None:
                state[f"optimizer.{name}.step"] = torch.tensor(steps)
        if self._loss_scale is not None:
            state |= {f"loss_scale.{key}": tensor for key, tensor in self._loss_scale.state_dict().items()}
        if all(plain_name(name) is not None for name in self.trained):
            state |= {f"model.{name}": buffer for name, buffer in persistent_buffers(self.decoder).items()}
        return state

    @override
    def load(self, fill: StateFill) -> None:
        """One parameter at a time is whole."""
        state = self.state_dict()
        fill(state)
        for name, parameter in self.trained.items():
            for key, stored in self._stored(name):
                value = state[stored]
                assert isinstance(value, DTensor)
                self.partitions.write(parameter, key, value.full_tensor().to(self._device))
            if (steps := state.get(f"optimizer.{name}.step")) is not None:
                for flat in self.partitions.flats:
                    set_steps(self.zero.optimizer.state[flat], float(steps))
        self.partitions.settle()

    def _stored(self, name: str) -> Iterator[tuple[str | None, str]]:
        yield None, f"model.{name}"
        yield from ((key, f"optimizer.{name}.{key}") for key in self._keys)

    def _divide(self, whole: Tensor) -> DTensor:
        """The rows of a tensor that this rank keeps of it, in host memory."""
        return distribute_tensor(whole.detach().float().cpu(), self._mesh, [Shard(0)], src_data_rank=None)


def build_deepspeed_engine(spec: EngineSpec) -> DeepspeedEngine:
    """Build a model with its initial weights on every rank, and have DeepSpeed divide it. Collective.

    Until it is divided, every rank has the whole model in memory: with ZeRO-3, that of the host.

    Raises:
        ConfigError: DeepSpeed cannot train this model or use this machine.
    """
    recipe, plan, meshes, device = spec.recipe, spec.plan, spec.meshes, spec.device
    if spec.needs_reference:
        raise ConfigError(
            f"objective.name={recipe.objective.name}: engine=deepspeed has no reference model, which this objective "
            "needs; use engine=native."
        )
    deepspeed = _import_deepspeed(device)
    stage = find_stage(plan)
    skeleton = build_on_meta(spec.config, recipe.model.attn_implementation, recipe.model.trust_remote_code)
    traits, attention = choose_attention_kernel(skeleton, recipe, plan, meshes, device)
    uses_liger, kernels = choose_liger(skeleton, recipe, plan, meshes, device)
    model = prepare_layers(skeleton, recipe, plan, device.type, uses_liger, spec.new_token_ids)
    router = choose_router_loss(skeleton, model, recipe.objective.router_loss)
    whole = replace(plan, strategy="ddp", dp_replicate=plan.world_size, dp_shard=1, cpu_offload=False)
    routers = () if router.loss is None else router.loss.routers
    module = shard_model(model, whole, meshes, spec.compile_backend, traits, routers)
    materialize(module, "cpu" if stage == 3 else device)
    place_buffers(model, device)
    open_weights(skeleton, recipe)(model)
    principal = initialize_adapter(model, recipe.adapter, recipe.run.seed) if recipe.adapter.is_adapter else None
    _check_trained(model, recipe)
    module.train()
    zero, partitions = _initialize(deepspeed, module, model, recipe, plan)
    lines = [f"engine: DeepSpeed {deepspeed.__version__}, ZeRO stage {stage}{_describe_offload(recipe)}"]
    parallel = ZeroParallel(zero, plan.world_size)
    strength = None if router.loss is None else router.loss.strength
    state = zero.optimizer.state[partitions.flats[0]]
    parts = NativeParts(
        parallel,
        model,
        zero.optimizer,
        SingleStage(parallel, recipe.run.seed, strength, module.tap),
        traits,
        meshes.everyone,
        loss_scale=LossScale(device) if plan.precision.compute == "float16" else None,
        principal=principal,
        lines=[*lines, *(line for line in (attention, kernels, router.line) if line is not None)],
    )
    return DeepspeedEngine(zero, partitions, [key for key in state if key != "step"], parts)


def _import_deepspeed(device: torch.device) -> Any:
    """The package, set up for a device. It must not compile its operation for sums in shared memory, for half a minute.

    Raises:
        ConfigError: it would use another device.
    """
    local_rank = find_place().local_rank if device.index is None else device.index
    set_default_variables({"DS_ACCELERATOR": device.type, "LOCAL_RANK": str(local_rank)})
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops import __compatible_ops__

    __compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)  # echelon tells what matters
    name = get_accelerator().device_name()
    if name != device.type:
        raise ConfigError(
            f"engine=deepspeed would use {name}, and this process trains on {device.type}; the environment variable "
            "DS_ACCELERATOR names another device: unset it."
        )
    return deepspeed


def _check_trained(model: nn.Module, recipe: Recipe) -> None:
    frozen = next((name for name, parameter in model.named_parameters() if not parameter.requires_grad), None)
    if frozen is not None and not recipe.adapter.is_adapter:
        raise ConfigError(
            f"engine=deepspeed: the model has {frozen}, which its architecture does not train, and DeepSpeed keeps "
            "such values out of reach; use engine=native."
        )


def _describe_offload(recipe: Recipe) -> str:
    if not recipe.deepspeed.offload_optimizer:
        return ""
    return f"; in host memory: optimizer{' and parameters' if recipe.deepspeed.offload_parameters else ''}"


def _initialize(
    deepspeed: Any, module: ObjectiveModule, model: nn.Module, recipe: Recipe, plan: ParallelPlan
) -> tuple[Any, Partitions]:
    """Have DeepSpeed take over a module; return its engine, and what it has divided. Collective."""
    stage = find_stage(plan)
    optimizer = build_flat_optimizer(model, recipe.optim, recipe.deepspeed.offload_optimizer)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    if stage == 3:
        _register_outside(deepspeed, module)
    zero, *_ = deepspeed.initialize(
        model=module, optimizer=optimizer, config=build_settings(recipe, plan), dist_init_required=False
    )
    _restore(model, buffers)
    kinds = (WholeCopies, GradientPartitions, GradientPartitions, ParameterPartitions)
    partitions: Partitions = kinds[stage](zero.optimizer)
    rule = choose_rule(recipe.optim, is_layer_matrix=False)
    for flat in partitions.flats:
        build_state(optimizer, flat, rule)
    partitions.link_state()
    return zero, partitions


def _register_outside(deepspeed: Any, module: ObjectiveModule) -> None:
    """Tell ZeRO-3 that the module itself reads the parameters of the head, without calling the head."""
    head = module.model.get_output_embeddings()
    for parameter in () if head is None else head.parameters():
        deepspeed.zero.register_external_parameter(module, parameter)


def _restore(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Give buffers their dtype again: DeepSpeed casts them with the weights, and rotary tables need fp32."""
    for name, buffer in model.named_buffers():
        if buffer.dtype != buffers[name].dtype:
            path, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(path), leaf, buffers[name])
