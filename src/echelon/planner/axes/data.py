"""Data parallelism: ranks read different sequences, and shard or copy the parameters (`dp_shard`, `dp_replicate`)."""

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any

from typing_extensions import override

from echelon.ground.errors import ConfigError, PlanError
from echelon.ground.sizes import join_words
from echelon.planner.axes.axis import Axis, Choices, CommunicationGroup, Sender, find_group, nearest, ring_share
from echelon.planner.hardware.accelerators import Cluster
from echelon.planner.layer_time import LayerTime, Step
from echelon.planner.model_shape import ModelShape, divisors
from echelon.planner.plan import AXIS_ORDER, DTYPE_BYTES, SHARDING, ParallelPlan, ReduceGradients, SyncPlan
from echelon.planner.replica_costs import count_served_bytes, find_sent_share
from echelon.recipe.synchronization import PARAMETER_SERVER
from echelon.recipe.training import ParallelConfig

STRATEGIES = ("ddp", "zero1", "zero2", "fsdp", "hsdp")
_OTHERS: tuple[str, ...] = tuple(axis for axis in AXIS_ORDER if not axis.startswith("dp_"))
_INSIDE = AXIS_ORDER[AXIS_ORDER.index("dp_shard") + 1 :]  # the axes whose ranks are closer to each other
# What a layout may do with gathered parameters and with gradients: as FSDP, ZeRO-2 and ZeRO-1 do.
_SWITCHES: tuple[dict[str, object], ...] = (
    {},
    {"reshard_after_forward": False},
    {"reshard_after_forward": False, "reduce_gradients": "last"},
)


class _Data(Axis):
    name = "dp"

    @override
    def settings(self, parallel: ParallelConfig, world: int, shape: ModelShape, sequence_len: int) -> dict[str, Any]:
        # Without any dp_* key dp_replicate takes the processes that the other degrees leave; `dp_shard: auto` takes
        # them by sharding.
        replicate, shard = _resolve_degrees(parallel, world)
        return {"dp_replicate": replicate, "dp_shard": shard}

    @override
    def sent_bytes(self, sender: Sender) -> dict[str, float]:
        shard, replicas = _count_parameters(sender)
        return {"dp": replicas, "shard": shard}

    @override
    def meetings(self, plan: ParallelPlan, num_layers: int) -> dict[str, tuple[int, int]]:
        gathers = 2 * plan.num_microbatches if plan.reshard_after_forward else 1
        return {
            "dp": (plan.dp_replicate, plan.num_reductions),
            "shard": (plan.num_shards, num_layers * (gathers + plan.num_reductions)),
        }

    @override
    def variants(self, base: ParallelConfig, choices: Choices) -> Iterator[ParallelConfig]:
        # All ranks that are left replicate, or all shard, or those of a machine shard.
        replica = choices.replica
        rest = replica.num_devices // prod(getattr(base, axis) for axis in _OTHERS)
        inside = max(1, replica.devices_per_node // prod(getattr(base, axis) for axis in _INSIDE))
        shares = {(1, rest), (rest, 1)} | ({(rest // inside, inside)} if rest % inside == 0 else set())
        for replicate, shard in sorted(shares):
            yield base.model_copy(update={"dp_replicate": replicate, "dp_shard": shard})


DATA = _Data()


def name_layout(name: str, cluster: Cluster) -> ParallelPlan:
    """Return the layout of a strategy's name. Raises PlanError if it does not fit the processes."""
    world = cluster.num_devices
    match name:
        case "ddp":
            return ParallelPlan("ddp", dp_replicate=world)
        case "zero1":
            return ParallelPlan("zero1", dp_shard=world)
        case "zero2":
            return ParallelPlan("zero2", dp_shard=world, reduce_gradients="each")
        case "fsdp":
            return ParallelPlan("fsdp", dp_shard=world, reshard_after_forward=True, reduce_gradients="each")
        case "hsdp":
            replicate = _hsdp_replicas(cluster)
            sharded = ParallelPlan("hsdp", dp_replicate=replicate, dp_shard=world // replicate)
            return replace(sharded, reshard_after_forward=True, reduce_gradients="each")
    raise ConfigError(
        f"parallel={name!r} is not a strategy; use auto, {', '.join(STRATEGIES)} or a mapping of degrees."
    )


def _hsdp_replicas(cluster: Cluster) -> int:
    """One replica per machine; on one machine two, so that both axes exist."""
    if cluster.num_nodes > 1 or cluster.num_devices == 1:
        return cluster.num_nodes
    if cluster.num_devices % 2:
        raise PlanError(
            "parallel=hsdp on one machine needs an even number of processes for 2 replicas, not "
            f"{cluster.num_devices}; use {cluster.num_devices - 1} or {cluster.num_devices + 1} processes, or "
            "parallel=fsdp."
        )
    return 2


def name_strategy(plan: ParallelPlan, divided: list[str]) -> str:
    """Canonical name of degrees and switches: `hsdp`, `fsdp+tp`, or `custom` if only the data axes have any.

    Args:
        divided: the other axes above 1, outermost first.
    """
    replicates, shards = plan.dp_replicate > 1, plan.dp_shard > 1
    if divided:
        data = ["hsdp" if replicates else "fsdp"] if shards else ["ddp"] if replicates else []
        index = 1 if plan.stages else 0
        return "+".join([*divided[:index], *data, *divided[index:]])
    switches = (plan.reshard_after_forward, plan.reduce_gradients)
    if not shards:
        return "ddp" if switches == (False, "last") else "custom"
    if replicates:
        return "hsdp" if switches == (True, "each") else "custom"
    names = {(True, "each"): "fsdp", (False, "each"): "zero2", (False, "last"): "zero1"}
    return names.get(switches, "custom")


def choose_switches(parallel: ParallelConfig, plan: ParallelPlan) -> tuple[bool, ReduceGradients]:
    """Whether gathered parameters are freed after use, and when gradients are reduced, for a plan's degrees."""
    if parallel.prefetch is not None and not (plan.num_shards > 1 or parallel.cpu_offload):
        raise ConfigError(
            f"parallel.prefetch={parallel.prefetch}: every process has all parameters here, so no layer is gathered; "
            "remove the key, or shard the parameters with dp_shard."
        )
    # fully_shard also holds what is divided and not sharded: it frees copies after use, at no traffic. Stages run a
    # layer again and again in a step, so gathering it each time would cost too much.
    frees = plan.uses_fully_shard and not plan.stages
    reshard = frees if parallel.reshard_after_forward is None else parallel.reshard_after_forward
    return reshard, parallel.reduce_gradients or ("each" if frees else "last")


def _resolve_degrees(parallel: ParallelConfig, world: int) -> tuple[int, int]:
    """(dp_replicate, dp_shard): the processes that the other axes leave, by default all as replicas."""
    inner = {axis: degree for axis in _OTHERS if (degree := getattr(parallel, axis)) > 1}
    rest = _divide_world(world, inner)
    if parallel.dp_replicate is None and parallel.dp_shard is None:
        return rest, 1
    replicate, shard = parallel.dp_replicate or 1, parallel.dp_shard or 1
    if replicate == "auto":
        if shard == "auto":
            raise ConfigError(
                "parallel.dp_replicate=auto and parallel.dp_shard=auto would both take all remaining processes; give "
                "one of them a number."
            )
        return _divide_rest("dp_shard", shard, rest, inner, world), shard
    if shard == "auto":
        return replicate, _divide_rest("dp_replicate", replicate, rest, inner, world)
    if replicate * shard != rest:
        degrees = {"dp_replicate": replicate, "dp_shard": shard, **inner}
        needed = prod(degrees.values())
        fits = join_words([f"{rest // n} x {n}" for n in nearest(divisors(rest), shard)])
        raise PlanError(
            f"parallel: {_show(degrees)} needs {needed} processes, but {_count(world)}; run {needed} processes, or use "
            f"dp_replicate x dp_shard = {fits}, or dp_shard: auto."
        )
    return replicate, shard


def _divide_rest(key: str, degree: int, rest: int, inner: dict[str, int], world: int) -> int:
    """What this degree leaves of the processes that the degrees in `inner` leave."""
    if rest % degree:
        fits = join_words([str(n) for n in nearest(divisors(rest), degree)])
        left = f" that {_show(inner)} leaves of {world}" if inner else ""
        raise PlanError(f"parallel.{key}={degree} does not divide the {rest} processes{left}; use {fits}.")
    return rest // degree


def _divide_world(world: int, inner: dict[str, int]) -> int:
    """The number of processes of each place along the axes in `inner`."""
    shared = prod(inner.values())
    if world % shared:
        counts = [str(n) for n in (world // shared * shared, (world // shared + 1) * shared) if n]
        products = join_words([str(n) for n in nearest(divisors(world), shared)])
        what = f"{next(iter(inner))} =" if len(inner) == 1 else "degrees whose product is"
        raise PlanError(
            f"parallel: {_show(inner)} needs a multiple of {shared} processes, but {_count(world)}; run "
            f"{join_words(counts)} processes, or use {what} {products}."
        )
    return world // shared


def _count(world: int) -> str:
    return f"there {'is' if world == 1 else 'are'} {world}"


def _show(degrees: dict[str, int]) -> str:
    return " x ".join(f"{name} {degree}" for name, degree in degrees.items())


def count_apart(shape: ModelShape, plan: ParallelPlan) -> int:
    """The weights of the head that are gathered, and their gradients reduced, apart from those of the embedding."""
    return shape.num_embedding_parameters if plan.uses_fully_shard and shape.num_tables == 2 and not plan.stages else 0


def data_seconds(step: Step, layer: LayerTime, count: int, head: LayerTime, weights: float) -> dict[str, float]:
    """Exposed communication in a step of a rank with `count` layers: between copies of the weights (`dp`), and of
    parameters that are sharded and their gradients (`shard`).

    Nothing runs beside the gather and the reduction of what is outside of the layers, but for a head that is apart.
    `weights`: of a rank before sharding, for each of its layers.
    """
    plan, adapter, part = step.plan, step.plan.adapter, step.part
    steps, outside = plan.num_microbatches, part.num_parameters - step.shape.num_layers * part.num_layer_parameters
    alone = 0 if plan.stages else outside - count_apart(part, plan)
    layers = weights - alone / count
    trained = 1.0 if adapter is None else adapter.num_trained_parameters / step.shape.num_parameters
    forward = layer.forward + head.forward / count
    backward = layer.total - layer.forward + (head.total - head.forward) / count
    shard = find_group(plan, step.cluster, SHARDING)
    links, gradients = shard.links.inside, layers * trained * DTYPE_BYTES[plan.precision.reduce]
    gather = shard.all_gather(layers * plan.gathered_bytes, links.gather)
    reduce = shard.all_gather(gradients, links.scatter)
    if plan.reshard_after_forward:  # gathered for the forward and again for the backward pass
        exposed = steps * (step.exposed(gather, forward) + step.exposed(gather, backward))
        both = step.exposed(gather + reduce, backward) - step.exposed(gather, backward)
        exposed += plan.num_reductions * both
    else:
        exposed = step.exposed(gather, forward) + plan.num_reductions * step.exposed(reduce, backward)
    first = shard.all_gather(alone * DTYPE_BYTES[plan.precision.compute], links.gather)
    last = shard.all_gather(alone * trained * DTYPE_BYTES[plan.precision.reduce], links.scatter)
    ends = steps * first + plan.num_reductions * last if plan.reshard_after_forward else first + last
    replicas = _replica_seconds(step, count, weights * trained / shard.size, backward)
    return {"dp": replicas, "shard": count * exposed + ends}


def copied_bytes(plan: ParallelPlan) -> float:
    """Bytes per trained parameter that copies on a GPU read and write in a step, beside the layers and collectives.

    With `fully_shard`: gathered weights are copied out of their buffer; gradients are cast into that of the reduction,
    or added up in fp32 before it; what it returns is added to the shard's gradient. A single rank copies it once more
    (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py). Otherwise autocast casts weights and their gradients,
    and gradients are added up.
    """
    policy, steps = plan.precision, plan.num_microbatches
    compute, param, reduce = (DTYPE_BYTES[dtype] for dtype in (policy.compute, policy.param, policy.reduce))
    if not plan.uses_fully_shard:
        casts = 2 * (param + compute) if plan.uses_autocast else 0
        return steps * (casts + 3 * param)
    gathers = 2 * steps if plan.reshard_after_forward else 1
    reduction = 3 * reduce / plan.num_shards + (2 * reduce if plan.num_shards == 1 else 0)
    if plan.num_reductions == steps:
        return gathers * 2 * compute + steps * (compute + reduce + reduction)
    sums = compute + reduce + (steps - 1) * (compute + 2 * reduce)
    return gathers * 2 * compute + sums + 2 * reduce + reduction


def _replica_seconds(step: Step, count: int, held: float, backward: float) -> float:
    """Exposed communication between copies of the weights in a step. held: trained parameters of a layer on this rank.

    Gradients of copies inside a replica are summed by `every_step`, those of the replicas by `sync`.
    """
    plan, sync = step.plan, step.plan.sync
    inner = find_group(plan, step.cluster, ("dp_replicate",))
    # shards are summed between replicas at the last microbatch
    times = 1 if plan.uses_fully_shard else plan.num_reductions
    if plan.num_replicas == 1:
        group = inner if step.between is None else CommunicationGroup(inner.size, 1, step.between)
        if sync.name == PARAMETER_SERVER or group.size == 1:
            return 0.0
        sent = _sent_bytes(step, held, group.size)
        # What is compressed on GPUs is not sent beside the backward pass.
        is_compressed = sync.method != "none" and not plan.uses_fully_shard
        waits = is_compressed and step.cluster.kind == "cuda"
        seconds = group.all_reduce(sent)
        return count * times * (seconds if waits else step.exposed(seconds, backward))
    inside = inner.all_reduce(held * DTYPE_BYTES[plan.precision.reduce])
    seconds = count * times * step.exposed(inside, backward)
    # Replicas are outermost, so on different machines if there are several.
    spread = min(plan.num_replicas, step.cluster.num_nodes)
    group = CommunicationGroup(plan.num_replicas, -(-plan.num_replicas // spread), step.cluster.known_links)
    if step.between is not None:
        group = CommunicationGroup(plan.num_replicas, 1, step.between)
    if sync.name == PARAMETER_SERVER:
        return seconds + _server_seconds(sync, group, count * held)
    return seconds + (
        0.0 if sync.overlap else count * group.all_reduce(_sent_bytes(step, held, group.size)) / sync.every
    )


def count_updated(step: Step, share: float) -> float:
    """The parameters that a rank with this share of the layers updates."""
    plan = step.plan
    trained = step.shape.num_parameters if plan.adapter is None else plan.adapter.num_trained_parameters
    held = trained * share / plan.tp
    return held / plan.num_shards if plan.uses_fully_shard else held


def _sent_bytes(step: Step, held: float, size: int) -> float:
    """The bytes of a layer of which an all-reduce takes as long as `size` ranks need to agree on it once."""
    plan = step.plan
    if plan.num_replicas == 1 and (plan.sync.method == "none" or plan.uses_fully_shard):
        return held * DTYPE_BYTES[plan.precision.reduce]
    return held * DTYPE_BYTES["float32"] * find_sent_share(step.shape, plan, size)


def _server_seconds(sync: SyncPlan, group: CommunicationGroup, num_trained: float) -> float:
    """Exposed communication of a step with parameter servers, none of it beside computation.

    A server gets what the other workers push through its own link, and sends them the weights. If a step waits for all
    workers, one comes after the other. Otherwise both go on at once; a worker waits for its own push and pull, or for
    the server if that takes longer.
    """
    if group.size == 1:
        return 0.0
    link = group.links.inside if group.num_machines == 1 else group.links.between
    pushed, pulled = count_served_bytes(sync, num_trained)
    others = group.size - 1
    at_server = [num_bytes / sync.servers * others / link.bandwidth for num_bytes in (pushed, pulled)]
    if sync.max_staleness == 0:
        return 2 * link.latency + sum(at_server)
    return 2 * link.latency + max((pushed + pulled) / link.bandwidth, *at_server)


def _count_parameters(sender: Sender) -> tuple[float, float]:
    """Bytes that a rank sends in a step: (weights and gradients of a shard group, gradients between copies)."""
    plan, shape, adapter = sender.plan, sender.load.shape, sender.load.adapter
    reduce, steps, shared = DTYPE_BYTES[plan.precision.reduce], plan.num_microbatches, plan.num_shards
    trained = 1.0 if adapter is None else adapter.num_trained_parameters / shape.num_parameters
    experts = shape.num_layers * shape.num_layer_experts
    layers = shape.num_layers * shape.num_layer_parameters - experts
    outside = shape.num_parameters - layers - experts
    # An expert is on one rank of `ep`, and sharded over the ranks that have the same experts.
    groups = [
        (layers, shared, 2, plan.gathered_bytes),
        (outside, shared, 1, sender.number),
        (experts / plan.ep, shared // plan.ep, 2, sender.number),
    ]
    sent = held = 0.0
    for size, ranks, passes, number in groups:
        gathers = steps * passes if plan.reshard_after_forward else 1
        sent += ring_share(ranks) * size * (gathers * number + plan.num_reductions * trained * reduce)
        held += size * trained / ranks
    if not plan.uses_fully_shard:
        sent, held = 0.0, trained * shape.num_parameters
    size = plan.num_copies
    if size == 1:
        return sent, 0.0
    share = 1.0 if plan.uses_fully_shard and plan.num_replicas == 1 else find_sent_share(shape, plan, size)
    all_reduce = 2 * ring_share(size) * held * reduce * share
    times = 1 if plan.uses_fully_shard else plan.num_reductions  # shards are summed at the last microbatch
    return sent, all_reduce / plan.sync.every if plan.num_replicas > 1 else all_reduce * times


def list_switches(base: ParallelConfig, replica: Cluster, is_named: bool) -> Iterator[ParallelConfig]:
    """The mapping as FSDP, ZeRO-2 and ZeRO-1, and offloaded. `is_named`: without those that a strategy's name gives."""
    shards = prod(getattr(base, axis) for axis in SHARDING) > 1
    if not is_named:
        yield from (base.model_copy(update=switch) for switch in (_SWITCHES if shards else _SWITCHES[:1]))
    if replica.kind == "cuda" and (shards or replica.num_devices == 1):
        yield base.model_copy(update={"cpu_offload": True})
