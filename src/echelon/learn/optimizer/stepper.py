"""The optimizer: rules over groups of parameters."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.ground.extensions import build_named
from echelon.learn.optimizer.compiled_update import CompiledUpdate, compile_function
from echelon.learn.optimizer.groups import find_members
from echelon.learn.optimizer.rules import CompilableRule, PreconditioningRule, Rule
from echelon.learn.optimizer.slot import Slot
from echelon.recipe.names import OPTIMIZER_FROM_OUTSIDE, OPTIMIZERS
from echelon.recipe.training import OptimConfig


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters with one rule, one weight decay and one factor on the learning rate."""

    rule: Rule
    weight_decay: float
    rate_factor: float
    slots: list[Slot]


class Optimizer:
    """Steps every parameter that has a gradient. Its state is there from the start, under names no plan changes."""

    def __init__(self, groups: list[ParameterGroup], seed: int, compiled: CompiledUpdate | None = None) -> None:
        """`compiled`: steps what it can."""
        self.groups = groups
        self._preconditioners = [
            group.rule if isinstance(group.rule, PreconditioningRule) else None for group in groups
        ]
        self._seed = seed
        self._compiled = compiled

    @torch.no_grad()
    def step(self, step: int, learning_rate: float, commit: Tensor) -> None:
        """Apply the gradients where `commit` (a boolean scalar) is true. The host waits for nothing.

        Gradients may hold something else afterwards.

        Args:
            step: counted from 0; random rounding depends on it.
        """
        for group, preconditioner in zip(self.groups, self._preconditioners, strict=True):
            rate = learning_rate * group.rate_factor
            slots = [slot for slot in group.slots if slot.parameter.grad is not None]
            if preconditioner is not None:
                preconditioner.precondition([slot.gradient() for slot in slots], commit)
            if self._compiled is not None:
                arguments = (rate, group.weight_decay, commit, self._seed, step)
                slots = self._compiled.step(group.rule, slots, *arguments)
            direct = [slot.open() for slot in slots if slot.is_direct]
            group.rule.update(direct, rate, group.weight_decay, commit)
            for slot in slots:  # one at a time, so that the copies of one parameter are there at once
                if not slot.is_direct:
                    item = slot.open()
                    group.rule.update([item], rate, group.weight_decay, commit)
                    slot.store(item, commit, self._seed, step)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """`NAME.KEY` and the live tensor, for everything kept for a parameter."""
        for group in self.groups:
            for slot in group.slots:
                for key, tensor in slot.state.items():
                    yield f"{slot.name}.{key}", tensor


def build_optimizer(
    model: nn.Module,
    config: OptimConfig,
    master_weights: str,
    seed: int,
    copies: dist.ProcessGroup | None = None,
    compile_backend: str | None = None,
    stepped: Mapping[str, nn.Parameter] | None = None,
) -> Optimizer:
    """The optimizer of a materialised, sharded model. Collective where it is sharded.

    Args:
        master_weights: `train.master_weights`; the parameters' dtype says whether they are bf16.
        copies: the ranks with a copy of the model, if it is not sharded and they may divide the work of a step.
        compile_backend: compiles the updates that are many passes over memory; None: none.
        stepped: what is stepped instead of the parameters of the model, by name; those without one are left out.
    """
    groups: dict[tuple[Rule, float, float], list[Slot]] = {}
    packed = OPTIMIZERS.get(config.name, OPTIMIZER_FROM_OUTSIDE).packed
    rules = {is_layer_matrix: choose_rule(config, is_layer_matrix) for is_layer_matrix in (True, False)}
    if compile_backend is not None:
        rules = {key: compile_rule(rule, compile_backend) for key, rule in rules.items()}
    for member in find_members(model, config):
        parameter = member.parameter if stepped is None else stepped.get(member.name)
        if parameter is None:
            continue
        rule = rules[member.is_layer_matrix]
        slot = Slot(member.name, parameter, rule, packed, master_weights == "bf16_kahan", copies)
        groups.setdefault((rule, member.weight_decay, member.rate_factor), []).append(slot)
    compiled = None if compile_backend is None else CompiledUpdate(compile_backend)
    return Optimizer([ParameterGroup(*key, slots) for key, slots in groups.items()], seed, compiled)


def choose_rule(config: OptimConfig, is_layer_matrix: bool) -> Rule:
    """The rule of the recipe for the matrices of the layers, or for the other parameters."""
    places = {name: row.place for name, row in OPTIMIZERS.items()}
    rule: Rule = build_named("optim.name", config.name, places, Rule, config, is_layer_matrix, options=config.options)
    return rule


def compile_rule(rule: Rule, backend: str) -> Rule:
    """The rule with its own functions compiled, if it has any."""
    return rule.compiled(partial(compile_function, backend=backend)) if isinstance(rule, CompilableRule) else rule
