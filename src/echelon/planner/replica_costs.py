"""What replicas cost: the bytes that they send to agree, the tensors on which these depend, and the memory for it."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod

from echelon.ground.sizes import render_bytes
from echelon.planner.adapter_plan import TABLES
from echelon.planner.model_shape import LinearShape, ModelShape
from echelon.planner.plan import DTYPE_BYTES, AdapterPlan, ParallelPlan, SyncPlan
from echelon.recipe.synchronization import APART, PARAMETER_SERVER, QUORUM

Shape = tuple[int, ...]

SENT_AT_ONCE = 2**24
"""About how many numbers are sent at once: few enough to copy, and enough for links with a long latency."""

_FP32 = 4
_BYTES = {"none": 4, "bf16": 2, "fp16": 2, "int8": 1 + 4 / 256}
_WITH_REST = ("powersgd", "topk", "randomk", "sign")
# Bits per second of links between data centres and machines, by name.
_LINKS = {"100 Mbit/s": 1e8, "1 Gbit/s": 1e9, "10 Gbit/s": 1e10}


def agreement_bytes(plan: ParallelPlan, num_trained: int) -> int:
    """Bytes of one rank for agreeing on `num_trained` numbers of its own, besides weights, gradients and optimizer.

    Replicas that train apart keep the agreed weights, the outer momentum, and outer gradients in fp32 while they send
    them. Compressed gradients have a rest on each rank, and a new one during a step. A quorum copies what it sends. A
    worker of parameter servers copies what it pushes; a server has copies of its weights and gradients, their sum, and
    what the other workers push; to compensate staleness also the weights that each worker has pulled.
    """
    sync = plan.sync
    if sync.name == PARAMETER_SERVER:
        owned = -(-num_trained // sync.servers)
        rest = 2 * _FP32 * num_trained if sync.method in _WITH_REST else 0
        weight = DTYPE_BYTES[plan.precision.param]
        pulled = weight * plan.num_replicas if sync.staleness_compensation else 0
        return _FP32 * num_trained + owned * (2 * weight + _FP32 * plan.num_replicas + pulled) + rest
    if sync.name == QUORUM:
        return _FP32 * min(num_trained, SENT_AT_ONCE)
    if sync.name in APART:
        states = (sync.outer_momentum > 0) + sync.overlap + 1
        return num_trained * (DTYPE_BYTES[plan.precision.param] + states * _FP32)
    return 2 * _FP32 * num_trained if plan.num_copies > 1 and sync.method in _WITH_REST else 0


def saved_bytes(plan: ParallelPlan, num_trained: int, weights: int, optimizer: int) -> int:
    """Bytes of the tensors of a checkpoint, given those of a replica's weights and optimizer."""
    sync = plan.sync
    if sync.name in APART:
        states = (sync.outer_momentum > 0) + sync.overlap
        return weights + states * _FP32 * num_trained + plan.num_replicas * (weights + optimizer)
    size = plan.num_whole_copies
    has_rest = size > 1 and sync.method in _WITH_REST
    return weights + optimizer + (size * _FP32 * num_trained if has_rest else 0)


def describe_traffic(model: ModelShape, plan: ParallelPlan, num_trained: int) -> list[str]:
    """The message about what each process sends for `sync`, beside sync.name: every_step without compression.

    `num_trained`: the trained numbers that one process has.
    """
    sync, size = plan.sync, plan.num_copies
    if sync.name == PARAMETER_SERVER and size > 1:
        return [_describe_server(sync, num_trained, size)]
    if (sync.name not in APART and sync.method == "none") or size == 1:
        return []
    whole = count_sent_bytes(SyncPlan(), [(num_trained,)], size)
    sent = whole * find_sent_share(model, plan, size) / sync.every
    times = [f"{8 * sent / rate:.3g} s instead of {8 * whole / rate:.3g} s at {name}" for name, rate in _LINKS.items()]
    every = "on average " if sync.every > 1 else ""
    return [
        f"sync {sync.name}: each process {every}sends {render_bytes(round(sent))} per step, and "
        f"{render_bytes(round(whole))} with every_step and no compression: {', '.join(times)}"
    ]


def _describe_server(sync: SyncPlan, num_trained: int, num_workers: int) -> str:
    pushed, pulled = count_served_bytes(sync, num_trained / sync.servers * (num_workers - 1))
    times = ", ".join(f"{8 * (pushed + pulled) / rate:.3g} s at {name}" for name, rate in _LINKS.items())
    return (
        f"sync {sync.name}: each server gets {render_bytes(round(pushed))} of gradients from other processes "
        f"per step, and sends {render_bytes(round(pulled))} of weights: together {times}"
    )


def count_served_bytes(sync: SyncPlan, num_trained: float) -> tuple[float, float]:
    """Bytes that one worker (pushes, pulls) for `num_trained` numbers of parameter servers in a step."""
    pushed = 2 * _FP32 * sync.fraction if sync.method == "topk" else _BYTES[sync.method]
    return pushed * num_trained, _FP32 * num_trained


def count_sent_bytes(sync: SyncPlan, shapes: Sequence[Sequence[int]], size: int) -> float:
    """Bytes that each of `size` ranks sends to agree once on tensors of these shapes: docs/gradient-compression.md."""
    ring, others, count = 2 * (1 - 1 / size), size - 1, sum(prod(shape) for shape in shapes)
    match sync.method:
        case "topk":
            return others * 2 * _FP32 * sync.fraction * count
        case "randomk":
            return ring * _FP32 * sync.fraction * count
        case "sign":
            return others * (count / 8 + _FP32 * sum(prod(shape[:-1]) for shape in shapes))
        case "powersgd":
            return ring * _FP32 * sum(_count_thin(shape, sync.rank) for shape in shapes)
    return ring * _BYTES[sync.method] * count


def find_sent_share(model: ModelShape, plan: ParallelPlan, size: int) -> float:
    """The bytes that each of `size` ranks sends to agree once, divided by those of gradients in fp32."""
    if plan.sync.method == "none":
        return 1.0
    shapes = trained_shapes(model, plan.adapter)
    return count_sent_bytes(plan.sync, shapes, size) / count_sent_bytes(SyncPlan(), shapes, size)


def _count_thin(shape: Sequence[int], rank: int) -> int:
    """The numbers that PowerSGD sends of a tensor."""
    thin = rank * (shape[0] + prod(shape[1:])) if len(shape) > 1 else prod(shape)
    return min(thin, prod(shape))


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
    yield from [_table_shape(model)] * model.num_tables
    if model.num_scores is not None:
        yield model.num_scores, model.hidden_size
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
    yield from [_table_shape(model)] * min(num_tables, model.num_tables)
    if model.num_scores is not None:
        yield model.num_scores, model.hidden_size
    if "wpe" in adapter.saved:
        yield _positions_shape(model)


def _table_shape(model: ModelShape) -> Shape:
    return model.num_embedding_parameters // model.hidden_size, model.hidden_size


def _positions_shape(model: ModelShape) -> Shape:
    return model.num_position_parameters // model.hidden_size, model.hidden_size
