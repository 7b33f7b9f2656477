"""Bytes that a rank sends in one step, by axis: the formulas of docs/strategies.md and of the pages of each technique.

Tests count the same bytes in real processes (tests/parity/test_traffic.py, test_products.py).
"""

from collections.abc import Mapping

from echelon.hardware.accelerators import DeviceKind
from echelon.planner.model_shape import ModelShape
from echelon.planner.plan import DTYPE_BYTES, ParallelPlan
from echelon.planner.rank_shape import divide_shape
from echelon.planner.replica_costs import find_sent_share
from echelon.planner.stages import StageLoad, stage_loads


def count_step_bytes(
    shape: ModelShape, plan: ParallelPlan, sequence_len: int, kind: DeviceKind = "cuda"
) -> Mapping[str, float]:
    """Bytes by axis (dp, shard, tp, cp, ep, pp), of the rank of a pipeline that sends the most.

    Scalars, router losses, gradients of norms under `tp`, and what an optimizer sends are left out.
    """
    part = divide_shape(shape, plan)
    loads = [
        _count_rank(part, load, load.has_head + (rank == 0), plan, sequence_len, kind)
        for rank, load in enumerate(stage_loads(part, plan, 0))
    ]
    if plan.pp > 1:
        hidden = _hidden_bytes(part, plan, sequence_len)  # whole ones, also under sequence parallelism
        for rank, found in enumerate(loads):
            ends = (rank == 0) + (rank == plan.pp - 1)
            found["pp"] = (2 * len(plan.stages) // plan.pp - ends) * plan.num_microbatches * hidden
    return max(loads, key=lambda each: sum(each.values()))


def _hidden_bytes(shape: ModelShape, plan: ParallelPlan, sequence_len: int) -> float:
    """Of the hidden states of one microbatch on one rank."""
    tokens = plan.micro_batch_size * plan.rows_per_sequence * -(-sequence_len // plan.cp)
    return float(tokens * shape.hidden_size * DTYPE_BYTES[plan.precision.compute])


def _part(size: int) -> float:
    """What each of `size` ranks sends in a ring, of a tensor that they have parts of."""
    return (size - 1) / size


def _count_rank(
    part: ModelShape, load: StageLoad, num_ends: int, plan: ParallelPlan, sequence_len: int, kind: DeviceKind
) -> dict[str, float]:
    """num_ends: whether the rank has the embedding, and whether it has the head."""
    shard, replicas = _count_parameters(load, plan)
    layers, steps = load.shape.num_layers, plan.num_microbatches
    hidden = _hidden_bytes(part, plan, sequence_len)
    again = 1 / plan.checkpoint_every if plan.activation_checkpointing == "full" else 0.0
    number = DTYPE_BYTES[plan.precision.compute]
    tokens = hidden / part.hidden_size / number
    heads = 2 * part.num_kv_heads * plan.cp
    if plan.cp_method == "ulysses":
        heads = 2 * part.num_heads + 2 * max(part.num_kv_heads, plan.cp)
    experts, _ = part.expert_widths
    rows = part.num_chosen_experts * _part(plan.ep)
    passes = 1.5 if plan.sequence_parallel and kind == "cpu" else 1.0  # gloo's reduce-scatter is an all-reduce
    if plan.ep > 1 and kind == "cuda":  # as many rows as each other rank could need
        rows = (plan.ep - 1) * min(part.num_chosen_experts, part.experts[0].num_experts // plan.ep)
    return {
        "dp": replicas,
        "shard": shard,
        "tp": passes * steps * (layers * (8 + count_repeated(plan)) + 2 * num_ends) * _part(plan.tp) * hidden,
        "cp": steps * layers * (2 + again) * _part(plan.cp) * tokens * heads * part.head_dim * number,
        "ep": steps * layers * experts * (4 + 2 * again) * rows * tokens * part.hidden_size * number,
    }


def count_repeated(plan: ParallelPlan) -> float:
    """Tensor-parallel all-gathers and reduce-scatters that the recomputation of a layer repeats, of the four of its
    forward pass; an all-reduce is two. Selective checkpointing keeps none of their results.

    PyTorch stops before the last one, which sums what the layer returns.
    """
    if plan.activation_checkpointing == "none":
        return 0.0
    return (3 if plan.sequence_parallel else 2) / plan.checkpoint_every


def count_reductions(plan: ParallelPlan) -> int:
    """How often gradients are summed over ranks in a step."""
    return plan.num_microbatches if plan.reduce_gradients == "each" else 1


def _count_parameters(load: StageLoad, plan: ParallelPlan) -> tuple[float, float]:
    """(weights and gradients of a shard group, gradients between replicas) of one rank."""
    shape, policy, adapter = load.shape, plan.precision, load.adapter
    compute, reduce, steps = DTYPE_BYTES[policy.compute], DTYPE_BYTES[policy.reduce], plan.num_microbatches
    trained = 1.0 if adapter is None else adapter.num_trained_parameters / shape.num_parameters
    reductions = count_reductions(plan)
    shared = plan.dp_shard * plan.cp
    experts = shape.num_layers * shape.num_layer_experts
    layers = shape.num_layers * shape.num_layer_parameters - experts
    outside = shape.num_parameters - layers - experts
    # An expert is on one rank of `ep`, and sharded over the ranks that have the same experts.
    groups = [(layers, shared, 2), (outside, shared, 1), (experts / plan.ep, shared // plan.ep, 2)]
    sent = held = 0.0
    for size, ranks, passes in groups:
        gathers = steps * passes if plan.reshard_after_forward else 1
        sent += _part(ranks) * size * (gathers * compute + reductions * trained * reduce)
        held += size * trained / ranks
    if not plan.uses_fully_shard:
        sent, held = 0.0, trained * shape.num_parameters
    apart = plan.num_replicas > 1
    size = plan.num_replicas if apart else plan.dp_replicate
    if size == 1:
        return sent, 0.0
    all_reduce = 2 * _part(size) * held * reduce * find_sent_share(shape, plan, size)
    if apart:
        return sent, all_reduce / plan.sync.every
    return sent, all_reduce * (1 if plan.uses_fully_shard else reductions)  # shards are summed at the last microbatch
