"""The optimizer: rules over groups of parameters, of a model or of the part that a parameter server owns.

Updates may be compiled with what is around them: a weight and its moments are read, updated and stored in one pass.
Without it, Lion, bf16 weights and 8-bit moments take some 10 to 60 operations, each a pass over memory.
"""

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.ground.errors import ConfigError
from echelon.ground.extensions import build_named
from echelon.learn.model.parts import find_layers
from echelon.learn.model.sharding import local_part
from echelon.learn.optimizer.rules import CompilableRule, ElementwiseRule, PreconditioningRule, Rule, assign
from echelon.learn.optimizer.slot import (
    BLOCK,
    PACKED_MOMENTS,
    Lines,
    Slot,
    code_table,
    read_moments,
    read_weight,
    store_moments,
    store_weight,
)
from echelon.recipe.names import OPTIMIZER_FROM_OUTSIDE, OPTIMIZERS
from echelon.recipe.training import OptimConfig


@dataclass(frozen=True)
class Member:
    """One trained parameter. `is_layer_matrix`: a 2-D weight inside a decoder layer, what Muon is for."""

    name: str
    parameter: nn.Parameter
    weight_decay: float
    rate_factor: float
    is_layer_matrix: bool


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters with one rule, one weight decay and one factor on the learning rate."""

    rule: Rule
    weight_decay: float
    rate_factor: float
    slots: list[Slot]


class Optimizer:
    """Steps every parameter that has a gradient. Its state is there from the start, under names no plan changes."""

    def __init__(self, groups: list[ParameterGroup], seed: int, compiled: "CompiledUpdate | None" = None) -> None:
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
                slots = self._compiled.step(group.rule, slots, rate, group.weight_decay, commit, self._seed, step)
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


class CompiledUpdate:
    """Steps parameters by elementwise rules, each with one call of a compiled function.

    Sizes are symbols in its graphs, and coefficients are tensors, so that there is one graph for all parameters of a
    kind, and for all steps. Vectors and matrices are of one kind, except where rows matter: in random rounding, and in
    packed rows that are no multiple of a block.
    """

    def __init__(self, backend: str) -> None:
        """`backend`: of `torch.compile`."""
        self._update: Callable[..., None] = torch.compile(update_stored, backend=backend, dynamic=True, fullgraph=True)

    def step(
        self, rule: Rule, slots: Sequence[Slot], rate: float, weight_decay: float, commit: Tensor, seed: int, step: int
    ) -> list[Slot]:
        """Step what gains by it, in place, where `commit` is true; return the other slots."""
        if not isinstance(rule, ElementwiseRule):
            return list(slots)
        chosen: list[Slot] = []
        others: list[Slot] = []
        for slot in slots:
            gains = slot.is_contiguous and not (slot.is_direct and rule.has_kernel)
            (chosen if gains else others).append(slot)
        if chosen:
            coefficients = rule.begin([slot.gradient().state for slot in chosen], rate, weight_decay, commit)
            for slot, row in zip(chosen, coefficients.unbind(), strict=True):
                if local_part(slot.parameter).numel():
                    self._step_one(rule, slot, row, commit, seed, step)
        return others

    def _step_one(
        self, rule: ElementwiseRule, slot: Slot, coefficients: Tensor, commit: Tensor, seed: int, step: int
    ) -> None:
        gradient, weight = slot.gradient(), local_part(slot.parameter.detach())
        lines = None
        if weight.dtype != torch.float32 and "remainder" not in gradient.state:
            bits, line = slot.random_lines(weight.device, seed, step)
            lines = (bits.reshape(-1, 1), line.reshape(1, -1))
        width = weight.shape[-1] if weight.ndim else 1
        has_rows = lines is not None or (slot.packed and width % BLOCK != 0)

        def flatten(tensor: Tensor) -> Tensor:
            shape = (-1, tensor.shape[-1] if tensor.ndim else 1) if has_rows else (-1,)
            return tensor.view(shape).data  # a view would bring the sizes of what it is a view of into the graph

        state = {key: flatten(value) for key, value in gradient.state.items() if key != "step"}
        tables = {signed: code_table(signed, weight.device) for signed in (True, False)} if slot.packed else {}
        for table in tables.values():
            torch._dynamo.mark_static(table)  # else its size counts as equal to any that happens to be the same
        self._update(rule, flatten(weight), flatten(gradient.values), state, tables, lines, coefficients, commit)


def update_stored(
    rule: ElementwiseRule,
    weight: Tensor,
    gradient: Tensor,
    state: Mapping[str, Tensor],
    tables: Mapping[bool, Tensor],
    lines: Lines | None,
    coefficients: Tensor,
    commit: Tensor,
) -> None:
    """Read, update and store one parameter, in place, where `commit` is true.

    Args:
        weight: as stored, [rows, width], or [numbers]; and so `gradient` and the tensors of `state`.
        tables: the codes of packed moments, with a sign and without; empty if they are not packed.
        lines: for a weight that is rounded at random.
        coefficients: of this parameter.
    """
    if tables and weight.ndim == 1:  # rows are multiples of a block
        weight, gradient = weight.view(-1, BLOCK), gradient.view(-1, BLOCK)
        state = {key: value.view(-1, 1 if key.endswith("scales") else BLOCK) for key, value in state.items()}
    packed = PACKED_MOMENTS if tables else {}
    moments = read_moments(state, packed, tables)
    moved, after = rule.move(read_weight(weight, state), gradient.float(), moments, coefficients)
    for key, value in after.items():
        if key not in packed:
            assign(state[key], value, commit)
    store_moments(state, packed, after, commit, tables)
    store_weight(weight, state, moved, commit, lines)


def compile_function(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """Compile a function of tensors, none of which shares memory with another; one graph for all sizes."""
    compiled = torch.compile(function, backend=backend, dynamic=True, fullgraph=True)

    def run(*tensors: Tensor) -> Any:
        return compiled(*(tensor.data for tensor in tensors))  # a view would bring the sizes of its base into the graph

    return run


def find_members(model: nn.Module, config: OptimConfig) -> list[Member]:
    """Every trained parameter once, under the name it has first, with what `optim` says about it."""
    inside = {id(parameter) for layer in find_layers(model) for parameter in layer.parameters()}
    roles = find_roles(model)
    return [
        Member(
            name,
            parameter,
            weight_decay=0.0 if roles[name] & set(config.no_decay) else config.weight_decay,
            rate_factor=find_factor(name, config.learning_rate_multipliers),
            is_layer_matrix=id(parameter) in inside and parameter.ndim == 2 and not roles[name],
        )
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]


def find_roles(model: nn.Module) -> dict[str, frozenset[str]]:
    """The words of `optim.no_decay` that fit each parameter, by its name; none for an ordinary weight.

    A tied head is the input embedding. Vectors of other modules count as norms: gains are what they are.
    """
    roles: dict[int, frozenset[str]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            roles.setdefault(id(parameter), _roles_of(module, name, parameter))
    return {name: roles[id(parameter)] for name, parameter in model.named_parameters()}


def _roles_of(module: nn.Module, name: str, parameter: nn.Parameter) -> frozenset[str]:
    if isinstance(module, nn.Embedding):
        return frozenset({"embeddings"})
    is_bias = name == "bias" or name.endswith("_bias")
    is_norm = "norm" in type(module).__name__.lower() or (parameter.ndim < 2 and not is_bias)
    return frozenset(role for role, fits in (("norms", is_norm), ("biases", is_bias)) if fits)


def find_factor(name: str, multipliers: dict[str, float]) -> float:
    """The factor of the first glob that matches a parameter's name; 1 where none does."""
    return next((factor for glob, factor in multipliers.items() if fnmatchcase(name, glob)), 1.0)


def check_groups(names: Iterable[str], config: OptimConfig) -> None:
    """Raise ConfigError for a glob of `optim.learning_rate_multipliers` that no parameter's name matches."""
    all_names = list(names)
    for glob, factor in config.learning_rate_multipliers.items():
        if not any(fnmatchcase(name, glob) for name in all_names):
            near = difflib.get_close_matches(glob.strip("*"), all_names, n=3, cutoff=0.3) or all_names[:3]
            raise ConfigError(
                f"optim.learning_rate_multipliers: {glob!r} (factor {factor:g}) matches no parameter of the model; "
                f"names near it: {', '.join(near)}; a glob such as '*embed_tokens*' matches anywhere in a name."
            )


def divide_names(sizes: Mapping[str, int], num_servers: int) -> list[list[str]]:
    """Return the names that each server owns: the largest first, each to the server with the fewest bytes.

    The names of a server keep their order. The result depends on nothing but the arguments.

    Args:
        sizes: bytes by name.
    """
    totals, owners = [0] * num_servers, {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owners[name] = totals.index(min(totals))
        totals[owners[name]] += sizes[name]
    return [[name for name in sizes if owners[name] == server] for server in range(num_servers)]


@dataclass(frozen=True)
class Served:
    """What a server owns. Its parameters are copies: a worker in the same process computes with its own weights.

    Attributes:
        applied: the shares of steps, by step and share, that were applied alone since workers last waited for all.
    """

    parameters: dict[str, nn.Parameter]
    optimizer: Optimizer
    applied: set[tuple[int, int]] = field(default_factory=set)

    @torch.no_grad()
    def take(self, weights: Mapping[str, Tensor]) -> None:
        """Set the parameters to these weights, by name, of a checkpoint: nothing was applied to them."""
        self.applied.clear()
        for name, parameter in self.parameters.items():
            parameter.copy_(weights[name])


def build_served(
    model: nn.Module,
    config: OptimConfig,
    master_weights: str,
    seed: int,
    num_servers: int,
    server: int,
    compile_backend: str | None = None,
) -> Served:
    """Copy what server number `server` owns of a materialised model. From `num_servers` on it owns nothing."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    sizes = {name: parameter.numel() * parameter.element_size() for name, parameter in trained.items()}
    names = divide_names(sizes, num_servers)[server] if server < num_servers else []
    copies = {name: nn.Parameter(trained[name].detach().clone()) for name in names}
    optimizer = build_optimizer(model, config, master_weights, seed, compile_backend=compile_backend, stepped=copies)
    return Served(copies, optimizer)
