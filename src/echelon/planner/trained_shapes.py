"""The shapes of the tensors that a plan trains: how much less compressed gradients send depends on them."""

from collections.abc import Iterator
from functools import lru_cache
from math import prod

from echelon.planner.adapter_plan import TABLES
from echelon.planner.model_shape import LinearShape, ModelShape
from echelon.planner.plan import AdapterPlan

Shape = tuple[int, ...]


@lru_cache(maxsize=16)
def trained_shapes(model: ModelShape, adapter: AdapterPlan | None) -> tuple[Shape, ...]:
    """The shapes of all trained tensors of the whole model.

    What ModelShape does not name is taken to be vectors of the hidden size, as norms are.
    """
    if adapter is None:
        matrices, total = tuple(_model_matrices(model)), model.num_parameters
    else:
        matrices, total = tuple(_adapter_matrices(model, adapter)), adapter.num_trained_parameters
    vectors, rest = divmod(max(0, total - sum(map(prod, matrices))), model.hidden_size)
    return (*matrices, *[(model.hidden_size,)] * vectors, *([(rest,)] if rest else []))


def _model_matrices(model: ModelShape) -> Iterator[Shape]:
    for linear in model.linears:
        yield from [(linear.out_features, linear.in_features)] * linear.count
    for weight in model.experts:
        yield from [(weight.num_experts, weight.rows, weight.columns)] * weight.count
    yield from [_table_shape(model)] * (1 if model.tied_embeddings else 2)
    if model.num_position_parameters:
        yield _positions_shape(model)


def _adapter_matrices(model: ModelShape, adapter: AdapterPlan) -> Iterator[Shape]:
    """A and B of LoRA at each target, experts of a layer in one tensor, and the modules trained in full."""
    head = LinearShape("lm_head", model.hidden_size, model.vocab_size, 1)
    for linear in (*model.linears, head):
        if linear.name in adapter.targets and linear.adaptable:
            yield from [(adapter.r, linear.in_features), (linear.out_features, adapter.r)] * linear.count
    for weight in model.experts:
        if weight.name in adapter.experts:
            rank = adapter.r * weight.num_experts
            yield from [(rank, weight.columns), (weight.rows, rank)] * weight.count
    for linear in model.linears:
        if linear.name in adapter.saved:
            yield from [(linear.out_features, linear.in_features)] * linear.count
    num_tables = sum(not names.isdisjoint(adapter.saved) for names in TABLES)
    yield from [_table_shape(model)] * min(num_tables, 1 if model.tied_embeddings else 2)
    if "wpe" in adapter.saved:
        yield _positions_shape(model)


def _table_shape(model: ModelShape) -> Shape:
    return model.num_embedding_parameters // model.hidden_size, model.hidden_size


def _positions_shape(model: ModelShape) -> Shape:
    return model.num_position_parameters // model.hidden_size, model.hidden_size
