"""Seconds of one training step on the slowest rank, by part.

Each decoder layer is a roofline: matrix products by FLOPs, the rest by bytes. Collectives cost latency and bytes
(`collectives.py`); what runs beside computation counts only as far as it is longer. `rates.py` has the constants.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from echelon.hardware.accelerators import Cluster
from echelon.hardware.links import Links
from echelon.planner.collectives import Group, find_group
from echelon.planner.layer_time import LaunchTime, LayerTime, head_time, launch_time, layer_time
from echelon.planner.memory import estimate_memory
from echelon.planner.model_shape import ModelShape
from echelon.planner.pipeline_time import StageTime, bubble_seconds, shared_seconds
from echelon.planner.plan import DTYPE_BYTES, ParallelPlan, SyncPlan
from echelon.planner.rank_shape import divide_shape
from echelon.planner.rates import Rates, Software, choose_software, rates_of
from echelon.planner.replica_costs import count_served_bytes, find_sent_share
from echelon.planner.sent_bytes import count_reductions, count_repeated
from echelon.planner.waits import expect_waits
from echelon.recipe.synchronization import PARAMETER_SERVER, QUORUM

_PARTS = ("matmul", "attention", "memory_bound", "recompute", "bubble", "optimizer", "offload", "overhead")


@dataclass(frozen=True)
class TimeEstimate:
    """Seconds of one optimizer step on the slowest rank, by part; their sum is the step.

    Attributes:
        matmul: matrix products of the forward and backward pass.
        attention: scores, softmax and their product with the values.
        memory_bound: norms, activations, residuals and the loss, which wait for memory.
        recompute: forward passes that activation checkpointing repeats.
        exposed_communication: by axis, what does not run beside computation.
        bubble: waiting of the slowest pipeline rank for the others.
        optimizer: the update.
        offload: copies to host memory that do not run beside computation.
        overhead: the host, where it cannot launch kernels as fast as the device runs them.
        assumptions: what the estimate takes for granted.
    """

    matmul: float
    attention: float
    memory_bound: float
    recompute: float
    exposed_communication: Mapping[str, float]
    bubble: float
    optimizer: float
    offload: float
    overhead: float
    assumptions: tuple[str, ...] = ()

    @property
    def communication(self) -> float:
        """The exposed communication of all axes."""
        return sum(self.exposed_communication.values())

    @property
    def compute(self) -> float:
        """Computation of the forward and backward pass, with what is recomputed."""
        return self.matmul + self.attention + self.memory_bound + self.recompute

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.compute + self.communication + self.bubble + self.optimizer + self.offload + self.overhead

    @property
    def limit(self) -> str:
        """What takes the largest part: compute, memory bandwidth, network, bubble, offload or host."""
        parts = {
            "compute": self.matmul + self.attention + self.recompute,
            "memory bandwidth": self.memory_bound + self.optimizer,
            "network": self.communication,
            "bubble": self.bubble,
            "offload": self.offload,
            "host": self.overhead,
        }
        return max(parts, key=lambda name: parts[name])

    def scaled(self, factor: float, reason: str | None = None) -> "TimeEstimate":
        """The estimate with every part this many times as long; the reason is one more assumption."""
        if factor == 1.0 and reason is None:
            return self
        parts = {name: factor * getattr(self, name) for name in _PARTS}
        exposed = {axis: factor * each for axis, each in self.exposed_communication.items()}
        assumptions = self.assumptions if reason is None else (*self.assumptions, reason)
        return replace(self, exposed_communication=exposed, assumptions=assumptions, **parts)

    def to_dict(self) -> dict[str, float]:
        """Seconds by part, as in estimate.json."""
        parts = {name: float(getattr(self, name)) for name in _PARTS}
        return parts | {f"communication_{axis}": each for axis, each in self.exposed_communication.items()}


def name_part(name: str) -> str:
    """A name of `TimeEstimate.to_dict` as users read it; a report of profiled steps has the same words."""
    return "matrix products" if name == "matmul" else name.replace("_", " ")


@dataclass(frozen=True)
class _Step:
    """The inputs of all parts of an estimate. between: see `estimate_time`."""

    shape: ModelShape
    plan: ParallelPlan
    sequence_len: int
    cluster: Cluster
    software: Software
    rates: Rates
    between: Links | None = None
    part: ModelShape = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "part", divide_shape(self.shape, self.plan))

    @property
    def tokens(self) -> int:
        """Of one microbatch on one rank."""
        plan = self.plan
        return plan.micro_batch_size * plan.rows_per_sequence * -(-self.sequence_len // plan.cp)

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer that a rank holds before sharding: its part of experts and of matrices."""
        experts = self.part.num_layer_experts
        return self.part.num_layer_parameters - experts + experts // self.plan.ep

    @property
    def hidden_bytes(self) -> float:
        """Of the hidden states of one microbatch."""
        return self.tokens * self.shape.hidden_size * DTYPE_BYTES[self.plan.precision.compute]

    def exposed(self, communication: float, computation: float) -> float:
        """The seconds of communication that do not run beside computation that they could overlap with."""
        return communication - self.rates.overlap * min(communication, computation)


def estimate_time(
    shape: ModelShape,
    plan: ParallelPlan,
    sequence_len: int,
    cluster: Cluster,
    software: Software | None = None,
    rates: Rates | None = None,
    between: Links | None = None,
) -> TimeEstimate:
    """Estimate of one optimizer step. `software`: of another program than echelon; `rates`: measured or fitted ones.

    `between`: the links between copies of the model, instead of those of the cluster; each copy has a link of its own.

    Raises PlanError if the speed of the devices is unknown.
    """
    software = software or choose_software(plan, cluster)
    rates = rates or rates_of(cluster)
    step = _Step(shape, plan, sequence_len, cluster, software, rates, between)
    launch = launch_time(plan, software, rates)
    waited = launch if rates.waits_for_host else LaunchTime()
    layer = layer_time(step.part, plan, sequence_len, step.tokens, cluster, software, rates).launched_in(waited.layer)
    head = head_time(step.part, plan, step.tokens, cluster, software, rates).launched_in(waited.head)
    tensor, context, experts = _tensor_seconds(step), _context_seconds(step, layer), _expert_seconds(step)
    border, steps = _border_seconds(step), plan.num_microbatches
    ends = border + waited.root
    layers = [sum(plan.stages[rank :: plan.pp]) for rank in range(plan.pp)] if plan.stages else [shape.num_layers]
    loads = [count * (layer.total + tensor + context + experts) + ends for count in layers]
    loads[-1] += head.total
    slowest = loads.index(max(loads))
    count, heads = layers[slowest], int(slowest == plan.pp - 1)
    shard, replicas = _data_seconds(step, layer, count, head)
    optimizer, offload = _update_seconds(step, count / shape.num_layers, loads[slowest] * steps)
    host = count * launch.layer + heads * launch.head + launch.root
    bubble, waiting = _pipeline_seconds(step, _time_stages(step, layer, head, tensor + context + experts, ends))
    estimate = TimeEstimate(
        matmul=steps * (count * layer.matmul + heads * head.matmul),
        attention=steps * count * layer.attention,
        memory_bound=steps * (count * layer.memory_bound + heads * head.memory_bound),
        recompute=steps * count * layer.recompute,
        exposed_communication={
            "dp": replicas,
            "shard": shard,
            "tp": steps * count * tensor,
            "cp": steps * count * context,
            "ep": steps * count * experts,
            "pp": steps * border,
        },
        bubble=bubble,
        optimizer=optimizer,
        offload=offload,
        overhead=steps * (host if rates.waits_for_host else max(0.0, host - loads[slowest])) + rates.step_seconds,
        assumptions=tuple(_list_assumptions(cluster, software)),
    )
    scaled = estimate.scaled(waiting)
    waits = expect_waits(plan, count, scaled.compute + scaled.overhead, rates.jitter)
    exposed = {axis: each + waits.get(axis, 0.0) for axis, each in scaled.exposed_communication.items()}
    return replace(scaled, exposed_communication=exposed)


def _list_assumptions(cluster: Cluster, software: Software) -> Iterator[str]:
    if cluster.num_devices > 1:
        yield cluster.known_links.describe()
    yield software.describe()
    if cluster.calibration is not None:
        yield cluster.calibration.describe()
    elif cluster.kind == "cpu":
        yield "on CPUs only matrix products are measured: this time may be several times too short or too long"


def _tensor_seconds(step: _Step) -> float:
    """Exposed tensor-parallel communication of one layer and microbatch, forward and backward.

    Two all-gathers and two reduce-scatters in each direction under sequence parallelism, else two all-reduces, which
    move as much (Korthikanti et al. 2022, section 4.2); checkpointing repeats a part of those of the forward pass.
    """
    plan = step.plan
    if plan.tp == 1:
        return 0.0
    group = find_group(plan, step.cluster, ("tp",))
    repeated = count_repeated(plan)
    if step.software.recomputes_ends:
        repeated = 4.0 if plan.activation_checkpointing == "full" else 0.0
    return (8 + repeated) * group.all_gather(step.hidden_bytes) * (1 - step.software.tp_overlap)


def _context_seconds(step: _Step, layer: LayerTime) -> float:
    """Exposed communication of keys and values of one layer and microbatch, beside its attention."""
    plan = step.plan
    if plan.cp == 1:
        return 0.0
    group, shape = find_group(plan, step.cluster, ("cp",)), step.part
    width = DTYPE_BYTES[plan.precision.compute] * shape.head_dim * step.tokens
    if plan.cp_method == "ulysses":
        heads = 2 * shape.num_heads + 2 * shape.num_kv_heads
        return 3 * group.all_to_all(width * heads)
    gather = group.all_gather(2 * width * shape.num_kv_heads * plan.cp)
    return step.exposed(3 * gather, layer.attention) if step.software.ring_attention else 3 * gather


def _expert_seconds(step: _Step) -> float:
    """Seconds in which one layer sends the rows of a microbatch to their experts and back, forward and backward."""
    plan, shape = step.plan, step.shape
    share, _ = shape.expert_widths
    if plan.ep == 1 or not share:
        return 0.0
    group = find_group(plan, step.cluster, ("dp_shard", "cp"))
    group = replace(group, size=plan.ep, local=min(plan.ep, group.local))
    return share * 4 * group.all_to_all(step.hidden_bytes * shape.num_chosen_experts)


def _border_seconds(step: _Step) -> float:
    """Exposed sending of hidden states and their gradients, of one rank of a pipeline and one microbatch."""
    plan = step.plan
    if plan.pp == 1:
        return 0.0
    group = find_group(plan, step.cluster, ("pp",))
    share = plan.tp if plan.sequence_parallel and step.software.divides_borders else 1
    return 2 * len(plan.stages) // plan.pp * group.send(step.hidden_bytes / share) * (1 - step.rates.overlap)


def _time_stages(step: _Step, layer: LayerTime, head: LayerTime, sent: float, border: float) -> Iterator[StageTime]:
    """The times of a microbatch in each stage of a pipeline.

    Args:
        sent: seconds in which a layer sends, both ways.
        border: seconds that the stages of a rank take beyond their layers, forward and backward.
    """
    stages = step.plan.stages
    ends, last = border * step.plan.pp / max(1, len(stages)), len(stages) - 1
    for number, count in enumerate(stages):
        behind = head if number == last else LayerTime()
        forward = count * (layer.forward + sent / 2) + behind.forward + ends / 2
        weights = count * layer.weights + behind.weights
        total = count * (layer.total + sent) + behind.total + ends
        yield StageTime(forward, total - forward - weights, weights)


def _pipeline_seconds(step: _Step, stages: Iterator[StageTime]) -> tuple[float, float]:
    """(seconds that the busiest rank of a pipeline waits, the share of the step that is left where ranks share cores).

    A rank that waits leaves its part of a core to others.
    """
    plan, sharing = step.plan, step.rates.sharing
    if plan.schedule is None:
        return 0.0, 1.0
    pipeline = (plan.schedule, plan.pp, list(stages), plan.num_microbatches)
    bubble = bubble_seconds(*pipeline)
    if sharing == 1:
        return bubble, 1.0
    return bubble, shared_seconds(*pipeline, sharing) / shared_seconds(*pipeline, 1.0)


def _data_seconds(step: _Step, layer: LayerTime, count: int, head: LayerTime) -> tuple[float, float]:
    """Exposed communication in a step: (of parameters that are sharded and their gradients, between replicas)."""
    plan, adapter = step.plan, step.plan.adapter
    steps = plan.num_microbatches
    trained = 1.0 if adapter is None else adapter.num_trained_parameters / step.shape.num_parameters
    outside = (step.part.num_parameters - step.shape.num_layers * step.part.num_layer_parameters) / plan.pp
    weights = step.layer_parameters + outside / max(1, count)  # as many as each layer's share of all
    forward = layer.forward + head.forward / count
    backward = layer.total - layer.forward + (head.total - head.forward) / count
    shard = find_group(plan, step.cluster, ("dp_shard", "cp"))
    gather = shard.gather_layer(weights * DTYPE_BYTES[plan.precision.compute])
    reduce = shard.scatter_layer(weights * trained * DTYPE_BYTES[plan.precision.reduce])
    reductions = count_reductions(plan)
    if plan.reshard_after_forward:  # gathered for the forward and again for the backward pass
        exposed = steps * (step.exposed(gather, forward) + step.exposed(gather, backward))
        both = step.exposed(gather + reduce, backward) - step.exposed(gather, backward)
        exposed += reductions * both
    else:
        exposed = step.exposed(gather, forward) + reductions * step.exposed(reduce, backward)
    return count * exposed, _replica_seconds(step, count, weights * trained / shard.size, reductions, backward)


def _replica_seconds(step: _Step, count: int, held: float, reductions: int, backward: float) -> float:
    """Exposed communication between copies of the weights in a step. held: trained parameters of a layer on this rank.

    Gradients of copies inside a replica are summed by `every_step`, those of the replicas by `sync`.
    """
    plan, sync = step.plan, step.plan.sync
    inner = find_group(plan, step.cluster, ("dp_replicate",))
    times = 1 if plan.uses_fully_shard else reductions  # shards are summed between replicas at the last microbatch
    if plan.num_replicas == 1:
        group = inner if step.between is None else Group(inner.size, 1, step.between)
        if sync.name == PARAMETER_SERVER or group.size == 1:
            return 0.0
        sent = _sent_bytes(step, held, group.size)
        # What a quorum sums is not sent beside the backward pass, nor what is compressed on GPUs.
        is_compressed = sync.method != "none" and not plan.uses_fully_shard
        waits = sync.name == QUORUM or (is_compressed and step.cluster.kind == "cuda")
        seconds = group.all_reduce(sent)
        return count * times * (seconds if waits else step.exposed(seconds, backward))
    inside = inner.all_reduce(held * DTYPE_BYTES[plan.precision.reduce])
    seconds = count * times * step.exposed(inside, backward)
    # Replicas are outermost, so on different machines if there are several.
    spread = min(plan.num_replicas, step.cluster.num_nodes)
    group = Group(plan.num_replicas, -(-plan.num_replicas // spread), step.cluster.known_links)
    if step.between is not None:
        group = Group(plan.num_replicas, 1, step.between)
    if sync.name == PARAMETER_SERVER:
        return seconds + _server_seconds(sync, group, count * held)
    return seconds + (
        0.0 if sync.overlap else count * group.all_reduce(_sent_bytes(step, held, group.size)) / sync.every
    )


def _sent_bytes(step: _Step, held: float, size: int) -> float:
    """The bytes of a layer of which an all-reduce takes as long as `size` ranks need to agree on it once."""
    plan = step.plan
    if plan.num_replicas == 1 and (plan.sync.method == "none" or plan.uses_fully_shard):
        return held * DTYPE_BYTES[plan.precision.reduce]
    return held * DTYPE_BYTES["float32"] * find_sent_share(step.shape, plan, size)


def _server_seconds(sync: SyncPlan, group: Group, num_trained: float) -> float:
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
    at_server = [each / sync.servers * others / link.bandwidth for each in (pushed, pulled)]
    if sync.max_staleness == 0:
        return 2 * link.latency + sum(at_server)
    return 2 * link.latency + max((pushed + pulled) / link.bandwidth, *at_server)


def _update_seconds(step: _Step, share: float, computation: float) -> tuple[float, float]:
    """Seconds of (the optimizer, copies to and from host memory), for a rank with this share of the layers."""
    plan, rates = step.plan, step.rates
    trained = step.shape.num_parameters if plan.adapter is None else plan.adapter.num_trained_parameters
    held = trained * share / plan.tp / (plan.dp_shard * plan.cp)
    if not plan.uses_fully_shard:
        held = trained * share / plan.tp
    seconds = held * rates.update_bytes / (step.cluster.accelerator.memory_bandwidth or rates.memory_bandwidth)
    if not (plan.cpu_offload or plan.activation_offloading):
        return seconds, 0.0
    moved = 0.0
    if plan.activation_offloading:
        resident = replace(plan, cpu_offload=False)
        kept = estimate_memory(step.shape, resident, step.sequence_len, step.cluster.kind).host
        copies = 2 * kept * plan.num_microbatches / rates.host_bandwidth
        moved = step.exposed(copies, computation)
    if plan.cpu_offload:
        seconds = held * rates.update_bytes / rates.host_bandwidth
        passes = plan.num_microbatches * (2 if plan.reshard_after_forward else 1)
        moved += held * 4 * (passes + 1) / rates.host_bandwidth
    return seconds, moved
