"""Updates compiled with what is around them: a weight and its moments are read, updated and stored in one pass.

Without it, Lion, bf16 weights and 8-bit moments take some 10 to 60 operations, each a pass over memory.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from echelon.learn.model.sharding import local_part
from echelon.learn.optimizer.rules import ElementwiseRule, Rule, assign
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


def compile_function(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """Compile a function of tensors, none of which shares memory with another; one graph for all sizes."""
    compiled = torch.compile(function, backend=backend, dynamic=True, fullgraph=True)

    def run(*tensors: Tensor) -> Any:
        return compiled(*(tensor.data for tensor in tensors))  # a view would bring the sizes of its base into the graph

    return run


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
        self,
        rule: Rule,
        slots: Sequence[Slot],
        rate: float,
        weight_decay: float,
        commit: Tensor,
        seed: int,
        step: int,
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
