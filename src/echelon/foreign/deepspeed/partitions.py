"""What DeepSpeed's ZeRO optimizers divide: the rules that update flat partitions, and reads and writes of the
partitions: master weights, moments, gradients.

This is the one file that depends on the inside of those optimizers, so pyproject.toml admits only the versions that the
tests of this engine have run with.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from echelon.ground.errors import ConfigError, first_line
from echelon.learn.optimizer import clip_gradients
from echelon.learn.optimizer.rules import Item, Rule
from echelon.learn.optimizer.sharded_parameter import ParameterPlacement
from echelon.learn.optimizer.stepper import choose_rule, find_members
from echelon.recipe.training import OptimConfig


class FlatOptimizer(torch.optim.Optimizer):
    """Applies an elementwise rule to whatever parameters its groups hold: DeepSpeed replaces them by flat partitions.

    Each group has `rule`, `weight_decay` and `rate_factor`; `lr` is set before every step. Where DeepSpeed partitions
    nothing, it leaves to this optimizer what its own do around the step: `clip_grad`, and `find_norm` as in
    `Partitions.answer_norm`.
    """

    clip_grad = 0.0
    find_norm: Callable[[], Tensor] | None = None

    @override
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient, in place."""
        if self.find_norm is not None:
            norm = self.find_norm()
            if norm < 0:
                return
            if self.clip_grad:
                gradients = [parameter.grad for group in self.param_groups for parameter in group["params"]]
                clip_gradients([gradient for gradient in gradients if gradient is not None], self.clip_grad, norm)
        for group in self.param_groups:
            items = [
                _open(parameter, group["rule"], self.state[parameter])
                for parameter in group["params"]
                if parameter.grad is not None
            ]
            if items:
                commit = torch.ones((), dtype=torch.bool, device=items[0].weight.device)
                group["rule"].update(items, group["lr"], group["weight_decay"], commit)


def _open(parameter: Tensor, rule: Rule, state: dict[str, Tensor]) -> Item:
    layout = ParameterPlacement(parameter)
    if not state:
        state.update(rule.build_state(parameter.detach(), layout))
    assert parameter.grad is not None
    return Item(parameter.detach(), parameter.grad, state, layout)


def build_flat_optimizer(model: nn.Module, config: OptimConfig, offloads: bool) -> torch.optim.Optimizer:
    """The optimizer of a model that DeepSpeed will partition.

    Offloaded AdamW is DeepSpeed's own, whose kernel steps partitions in host memory.

    Raises:
        ConfigError: that kernel cannot be compiled here.
    """
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for member in find_members(model, config):
        groups.setdefault((member.weight_decay, member.rate_factor), []).append(member.parameter)
    rule = choose_rule(config, is_layer_matrix=False)
    described: Sequence[dict[str, Any]] = [
        {"params": members, "rule": rule, "weight_decay": decay, "rate_factor": factor, "lr": config.learning_rate}
        for (decay, factor), members in groups.items()
    ]
    if offloads and config.name == "adamw":
        return _build_cpu_adam(described, config)
    return FlatOptimizer(described, {"lr": config.learning_rate})


def _build_cpu_adam(groups: Sequence[dict[str, Any]], config: OptimConfig) -> torch.optim.Optimizer:
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    try:
        made: torch.optim.Optimizer = DeepSpeedCPUAdam(groups, betas=config.betas, eps=config.eps, adamw_mode=True)
    except (RuntimeError, ImportError, OSError) as error:
        raise ConfigError(
            "deepspeed.offload_optimizer=true: DeepSpeed's CPUAdam cannot be compiled on this machine "
            f"({first_line(error)}); install a C++ compiler and ninja (both on PATH), or use "
            "deepspeed.offload_optimizer=false."
        ) from error
    return made


def build_state(optimizer: torch.optim.Optimizer, flat: Tensor, rule: Rule) -> None:
    """Give a flat partition the state that the optimizer would give it in its first step."""
    state: dict[str, Any] = dict(rule.build_state(flat.detach(), ParameterPlacement(flat)))
    if not isinstance(optimizer, FlatOptimizer):
        state["step"] = 0  # CPUAdam counts on the host
    optimizer.state[flat].update(state)


def count_steps(state: dict[str, Any]) -> float | None:
    """The number of steps that a partition's state was updated in; None for a rule that does not count them."""
    return None if "step" not in state else float(state["step"])


def set_steps(state: dict[str, Any], count: float) -> None:
    """Set the number of steps of a partition's state."""
    if isinstance(state["step"], Tensor):
        state["step"].fill_(count)
    else:
        state["step"] = int(count)


class Partitions(Protocol):
    """What a ZeRO optimizer has divided among all ranks. Methods with a parameter are collective, except `write`."""

    @property
    def flats(self) -> Sequence[Tensor]:
        """The partitions of this rank that the optimizer steps, fp32."""

    def gradients(self) -> Iterator[Tensor]:
        """Yield this rank's parts of the summed gradients, after the last microbatch."""

    def answer_norm(self, find_norm: Callable[[], Tensor]) -> None:
        """Have `find_norm` asked for the norm in every step. If it is -1, DeepSpeed drops the gradients."""

    def link_state(self) -> None:
        """Make the optimizer's state of each parameter known, once the partitions have it."""

    def read(self, parameter: nn.Parameter, key: str | None) -> Tensor:
        """The whole master weight of a trained parameter, or its state of this key: fp32, on every rank."""

    def write(self, parameter: nn.Parameter, key: str | None, value: Tensor) -> None:
        """Write this rank's part of a value as `read` returns it."""

    def settle(self) -> None:
        """Copy the master weights to the weights of the model, after the last `write`. Collective."""


class WholeCopies(Partitions):
    """Stage 0: nothing is divided, and each parameter is its own partition."""

    def __init__(self, optimizer: FlatOptimizer) -> None:
        """`optimizer`: of the parameters themselves."""
        self._optimizer = optimizer

    @property
    @override
    def flats(self) -> Sequence[Tensor]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]

    @override
    def gradients(self) -> Iterator[Tensor]:
        """Every rank has all of them, and only the first one counts them in the norm."""
        if dist.get_rank() == 0:
            yield from (flat.grad for flat in self.flats if flat.grad is not None)

    @override
    def answer_norm(self, find_norm: Callable[[], Tensor]) -> None:
        self._optimizer.find_norm = find_norm

    @override
    def link_state(self) -> None:
        """The optimizer has it by parameter."""

    @override
    def read(self, parameter: nn.Parameter, key: str | None) -> Tensor:
        whole: Tensor = parameter.detach() if key is None else self._optimizer.state[parameter][key]
        return whole

    @override
    def write(self, parameter: nn.Parameter, key: str | None, value: Tensor) -> None:
        self.read(parameter, key).copy_(value)

    @override
    def settle(self) -> None:
        """There is one copy of each weight."""


class GradientPartitions(Partitions):
    """ZeRO-1 and ZeRO-2: the optimizer's state is divided, with `zero2` also gradients."""

    def __init__(self, optimizer: Any) -> None:
        """`optimizer`: a DeepSpeedZeroOptimizer."""
        self._optimizer = optimizer
        # It would otherwise ignore an answer of -1 in bf16.
        optimizer.check_grad_overflow = True

    @property
    @override
    def flats(self) -> Sequence[Tensor]:
        flats: Sequence[Tensor] = self._optimizer.single_partition_of_fp32_groups
        return flats

    @override
    def gradients(self) -> Iterator[Tensor]:
        if self._optimizer.cpu_offload:
            yield from (flat.grad for flat in self.flats if flat.grad is not None)
        else:
            for parts in self._optimizer.averaged_gradients.values():
                yield from parts

    @override
    def answer_norm(self, find_norm: Callable[[], Tensor]) -> None:
        self._optimizer.scaled_global_norm = lambda norm_type=2: find_norm()

    @override
    def link_state(self) -> None:
        self._optimizer._lazy_init_hp_params_optimizer_state()

    @override
    def read(self, parameter: nn.Parameter, key: str | None) -> Tensor:
        linked: Any = parameter
        whole: Tensor = linked.get_full_hp_param(key)
        return whole

    @override
    def write(self, parameter: nn.Parameter, key: str | None, value: Tensor) -> None:
        linked: Any = parameter
        linked.set_full_hp_param(value, key)

    @override
    def settle(self) -> None:
        self._optimizer.update_lp_params()


class ParameterPartitions(Partitions):
    """ZeRO-3: parameters are divided too, each by itself."""

    def __init__(self, optimizer: Any) -> None:
        """`optimizer`: a DeepSpeedZeroOptimizer_Stage3."""
        self._optimizer = optimizer

    @property
    @override
    def flats(self) -> Sequence[Tensor]:
        flats: Sequence[Tensor] = self._optimizer.fp32_partitioned_groups_flat
        return flats

    @override
    def gradients(self) -> Iterator[Tensor]:
        if self._optimizer.offload_optimizer:
            yield from (flat.grad for flat in self.flats if flat.grad is not None)
        else:
            for parts in self._optimizer.averaged_gradients.values():
                yield from parts

    @override
    def answer_norm(self, find_norm: Callable[[], Tensor]) -> None:
        self._optimizer._get_norm_groups = lambda: [find_norm()]

    @override
    def link_state(self) -> None:
        """The state of a parameter is found through its partition."""

    @override
    def read(self, parameter: nn.Parameter, key: str | None) -> Tensor:
        whole: Tensor = self._optimizer.get_full_hp_param(parameter, key)
        return whole

    @override
    def write(self, parameter: nn.Parameter, key: str | None, value: Tensor) -> None:
        # DeepSpeed's own way to write a whole value fails where the ranks' parts are not equal.
        divided: Any = parameter
        size = divided.ds_tensor.numel()
        start = self._optimizer._get_param_partition_rank(parameter) * size
        part = value.flatten()[start : start + size]
        part = torch.nn.functional.pad(part, (0, size - part.numel()))
        self._optimizer.set_local_hp_param(part, parameter, key)

    @override
    def settle(self) -> None:
        for index in range(len(self.flats)):
            self._optimizer._reassign_or_swap_out_partitioned_parameters(index)
        kept = self._optimizer.persistent_parameters
        if kept:  # small parameters are whole on every rank
            kept[0].partition(kept, has_been_updated=False)
            kept[0].all_gather(kept)
