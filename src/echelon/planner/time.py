"""Seconds of one training step on the slowest rank, by part.

Each decoder layer is a roofline: matrix products by FLOPs, the rest by bytes. Collectives cost latency and bytes
(`axes/axis.py`); what runs beside computation counts only as far as it is longer. `rates.py` has the constants.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from operator import add

from echelon.ground.sizes import count_noun
from echelon.planner.axes.axis import find_group
from echelon.planner.axes.data import copied_bytes, count_updated, data_seconds
from echelon.planner.axes.pipeline import (
    PIPELINE,
    border_seconds,
    rank_layers,
    share_outside,
    time_stages,
    waiting_seconds,
)
from echelon.planner.axes.table import AXES, LAYER_AXES, count_absent, divide_shape
from echelon.planner.hardware.accelerators import Cluster
from echelon.planner.hardware.links import Links
from echelon.planner.layer_time import LaunchTime, LayerTime, Step, head_time, launch_time, layer_time
from echelon.planner.memory import estimate_memory
from echelon.planner.model_shape import ModelShape
from echelon.planner.plan import DTYPE_BYTES, SHARDING, ParallelPlan, RolloutPlan
from echelon.planner.rates import Rates, Software, choose_software, expect_wait, rates_of

_PARTS = ("matmul", "attention", "memory_bound", "recompute", "bubble", "optimizer", "offload", "overhead", "sampling")
# Passes over the keys and values for each token: they are copied when it is added, and read by attention.
_CACHE_PASSES = 3


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
        sampling: of the answers of the step, and a forward pass over them, if the model is trained on its own answers.
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
    sampling: float = 0.0
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
        waits = self.communication + self.bubble + self.offload + self.overhead
        return self.compute + waits + self.optimizer + self.sampling

    @property
    def limit(self) -> str:
        """What takes the largest part: compute, memory bandwidth, network, bubble, offload, host or sampling."""
        parts = {
            "compute": self.matmul + self.attention + self.recompute,
            "memory bandwidth": self.memory_bound + self.optimizer,
            "network": self.communication,
            "bubble": self.bubble,
            "offload": self.offload,
            "host": self.overhead,
            "sampling": self.sampling,
        }
        return max(parts, key=lambda name: parts[name])

    def scaled(self, factor: float, reason: str | None = None) -> "TimeEstimate":
        """The estimate with every part this many times as long; the reason is one more assumption."""
        if factor == 1.0 and reason is None:
            return self
        parts = {name: factor * getattr(self, name) for name in _PARTS}
        exposed = {axis: factor * seconds for axis, seconds in self.exposed_communication.items()}
        assumptions = self.assumptions if reason is None else (*self.assumptions, reason)
        return replace(self, exposed_communication=exposed, assumptions=assumptions, **parts)

    def to_dict(self) -> dict[str, float]:
        """Seconds by part, as in estimate.json."""
        parts = {name: float(getattr(self, name)) for name in _PARTS}
        return parts | {f"communication_{axis}": seconds for axis, seconds in self.exposed_communication.items()}


def name_part(name: str) -> str:
    """A name of `TimeEstimate.to_dict` as users read it; a report of profiled steps has the same words."""
    return "matrix products" if name == "matmul" else name.replace("_", " ")


def estimate_time(
    shape: ModelShape,
    plan: ParallelPlan,
    cluster: Cluster,
    software: Software | None = None,
    rates: Rates | None = None,
    between: Links | None = None,
) -> TimeEstimate:
    """Estimate of one optimizer step. `software`: of another program than echelon; `rates`: measured or fitted ones.

    `between`: the links between copies of the model, instead of those of the cluster; each copy has a link of its own.

    Raises PlanError if the speed of the devices is unknown.
    """
    software = software or choose_software(shape, plan, cluster)
    rates = rates or rates_of(cluster)
    step = Step(shape, plan, cluster, software, rates, divide_shape(shape, plan), between)
    launch = launch_time(step)
    waited = launch if rates.waits_for_host else LaunchTime()
    layer = layer_time(step).launched_in(waited.layer)
    head = head_time(step).launched_in(waited.head)
    sent = {axis.name: axis.layer_seconds(step, layer) for axis in LAYER_AXES}
    border, steps = border_seconds(step), plan.num_microbatches
    ends = border + waited.root
    layers = rank_layers(plan, shape.num_layers)
    loads = [count * reduce(add, sent.values(), layer.total) + ends for count in layers]
    loads[-1] += head.total
    slowest = loads.index(max(loads))
    count, heads = layers[slowest], int(slowest == len(layers) - 1)
    weights = step.part.num_layer_parameters - count_absent(step.part, plan) + share_outside(step, count)
    optimizer, offload = _update_seconds(step, count / shape.num_layers, loads[slowest] * steps)
    host = count * launch.layer + heads * launch.head + launch.root
    stages = time_stages(step, layer, head, reduce(add, sent.values()), ends)
    bubble, waiting = waiting_seconds(step, stages)
    estimate = TimeEstimate(
        matmul=steps * (count * layer.matmul + heads * head.matmul),
        attention=steps * count * layer.attention,
        memory_bound=steps * (count * layer.memory_bound + heads * head.memory_bound)
        + _copy_seconds(step, count * weights),
        recompute=steps * count * layer.recompute,
        exposed_communication={
            **data_seconds(step, layer, count, head, weights),
            **{name: steps * count * seconds for name, seconds in sent.items()},
            PIPELINE.name: steps * border,
        },
        bubble=bubble,
        optimizer=optimizer,
        offload=offload,
        overhead=steps * (host if rates.waits_for_host else max(0.0, host - loads[slowest])) + rates.step_seconds,
        assumptions=tuple(_list_assumptions(cluster, software)),
    )
    scaled = estimate.scaled(waiting)
    waits = _expect_waits(plan, count, scaled.compute + scaled.overhead, rates.jitter)
    exposed = {axis: seconds + waits.get(axis, 0.0) for axis, seconds in scaled.exposed_communication.items()}
    trained = replace(scaled, exposed_communication=exposed)
    if plan.rollout is None:
        return trained
    scored = steps * (count * layer.forward + heads * head.forward)
    assumptions = (*trained.assumptions, _describe_sampling(step))
    repeated = trained.scaled(plan.rollout.updates)
    return replace(repeated, sampling=_sampling_seconds(step) + scored, assumptions=assumptions)


def _expect_waits(plan: ParallelPlan, num_layers: int, seconds: float, jitter: float) -> dict[str, float]:
    """The expected seconds in a step of a rank with so many layers, at the collectives of each axis that has several.

    `seconds`: of a step, in which it computes. Empty without jitter.
    """
    if not jitter:
        return {}
    meetings = {name: meeting for axis in AXES for name, meeting in axis.meetings(plan, num_layers).items()}
    several = {name: (ranks, times) for name, (ranks, times) in meetings.items() if ranks > 1}
    total = sum(times for _, times in several.values())
    return {
        name: expect_wait(ranks, jitter, seconds * times / total, times) for name, (ranks, times) in several.items()
    }


def _copy_seconds(step: Step, num_parameters: float) -> float:
    """Seconds of the copies of weights and gradients on GPUs; on CPUs they are a part of the measured layers."""
    if step.cluster.kind != "cuda" or not step.software.copies:
        return 0.0
    adapter = step.plan.adapter
    trained = 1.0 if adapter is None else adapter.num_trained_parameters / step.shape.num_parameters
    return num_parameters * trained * copied_bytes(step.plan) / step.bandwidth


def _list_assumptions(cluster: Cluster, software: Software) -> Iterator[str]:
    if cluster.num_devices > 1:
        yield cluster.known_links.describe()
    yield software.describe()
    if cluster.calibration is not None:
        yield cluster.calibration.describe()
    elif cluster.kind == "cpu":
        yield "on CPUs only matrix products are measured: this time may be several times too short or too long"


def _update_seconds(step: Step, share: float, computation: float) -> tuple[float, float]:
    """Seconds of (the optimizer, copies to and from host memory), for a rank with this share of the layers."""
    plan, rates = step.plan, step.rates
    held = count_updated(step, share)
    seconds = held * rates.update_bytes / (step.cluster.accelerator.memory_bandwidth or rates.memory_bandwidth)
    if not (plan.cpu_offload or plan.activation_offloading):
        return seconds, 0.0
    moved = 0.0
    if plan.activation_offloading:
        resident = replace(plan, cpu_offload=False)
        kept = estimate_memory(step.shape, resident, step.cluster.kind).host
        copies = 2 * kept * plan.num_microbatches / rates.host_bandwidth
        moved = step.exposed(copies, computation)
    if plan.cpu_offload:
        seconds = held * rates.update_bytes / rates.host_bandwidth
        passes = plan.num_microbatches * (2 if plan.reshard_after_forward else 1)
        moved += held * 4 * (passes + 1) / rates.host_bandwidth
    return seconds, moved


@dataclass(frozen=True)
class _TokenTime:
    """Seconds of a pass that adds one token to each answer that is sampled at once.

    Attributes:
        products: matrix products, norms and activations.
        weights: reading the weights, beside the products.
        cache: reading and copying keys and values.
        sent: communication: parts of layers, and gathered weights.
        host: launching the operations of the layers, which are not compiled.
        ends: the embedding, the head, and drawing from the scores.
        waits: whether the device waits while the host launches, as a CPU does.
    """

    products: float
    weights: float
    cache: float
    sent: float
    host: float
    ends: float
    waits: bool

    @property
    def total(self) -> float:
        """Seconds of the pass."""
        computed = max(self.products, self.weights) + self.cache
        return (computed + self.host if self.waits else max(computed, self.host)) + self.sent + self.ends

    @property
    def limit(self) -> str:
        """What takes the longest, in a few words."""
        parts = {
            "matrix products": self.products,
            "reading the weights": self.weights,
            "keys and values": self.cache,
            "the network": self.sent,
            "launching operations": self.host,
            "the head": self.ends,
        }
        return max(parts, key=lambda name: parts[name])


def _sampling_seconds(step: Step) -> float:
    """Return the seconds of a step's answers, if each has `max_new_tokens` and each prompt the rest of the sequence.

    The layers run uncompiled, and one pass continues `max_num_seqs` answers. A plan without a cache (`pp`) computes
    whole sequences again for each token.
    """
    plan, rollout = step.plan, _rollout_of(step)
    num_turns, rows = _divide_answers(step)
    num_passes = num_turns * rollout.max_new_tokens
    if plan.stages:
        return num_passes * _forward_seconds(step, rows, plan.sequence_len)
    num_prompts = -(-plan.num_read // rollout.group_size)
    prompt_len = max(1, plan.sequence_len - rollout.max_new_tokens)
    return num_passes * _time_token(step).total + _forward_seconds(step, num_prompts, prompt_len)


def _describe_sampling(step: Step) -> str:
    """Return what the seconds of the answers take for granted."""
    lengths = f"answers have {_rollout_of(step).max_new_tokens} tokens each, the most, and rewards take no time"
    if step.plan.stages:
        return lengths
    token, rows = _time_token(step), count_noun(_divide_answers(step)[1], "answer")
    return f"{lengths}; a token of {rows} takes {1000 * token.total:.3g} ms, most of it for {token.limit}"


def _time_token(step: Step) -> _TokenTime:
    """Return the seconds of a pass that adds one token to each row of the cache."""
    rollout, part, count = _rollout_of(step), step.part, step.shape.num_layers
    plan = replace(step.plan, reshard_after_forward=step.plan.reshard_after_forward and not rollout.gathers_once)
    step, policy = replace(step, plan=plan), plan.precision
    rows, number = _divide_answers(step)[1], DTYPE_BYTES[policy.compute]
    sized = _resize(step, rows, 1)
    layer, head, launch = layer_time(sized), head_time(sized), launch_time(sized)
    read = DTYPE_BYTES[policy.param] + 2 * number if plan.uses_autocast else number  # autocast casts them again
    mean_len = plan.sequence_len - rollout.max_new_tokens / 2
    cached = _CACHE_PASSES * rows * mean_len * 2 * part.num_kv_heads * part.head_dim * number
    head_read = part.hidden_size * part.vocab_size * number / step.bandwidth
    return _TokenTime(
        products=count * layer.forward,
        weights=count * part.num_layer_parameters * read / step.bandwidth,
        cache=count * cached / step.bandwidth,
        sent=count * _sent_seconds(sized, layer),
        host=count * launch.layer / 2,
        ends=max(head.forward, head_read) + launch.head / 2,
        waits=step.rates.waits_for_host,
    )


def _divide_answers(step: Step) -> tuple[int, int]:
    """Return how often answers are sampled at once, and how many each time."""
    num_turns = -(-step.plan.num_read // _rollout_of(step).max_num_seqs)
    return num_turns, -(-step.plan.num_read // num_turns)


def _rollout_of(step: Step) -> RolloutPlan:
    assert step.plan.rollout is not None, "the plan samples answers"
    return step.plan.rollout


def _forward_seconds(step: Step, rows: int, length: int) -> float:
    """Seconds of an uncompiled forward pass through all layers."""
    sized = _resize(step, rows, length)
    layer = layer_time(sized)
    return step.shape.num_layers * (layer.forward + _sent_seconds(sized, layer)) + head_time(sized).forward


def _sent_seconds(step: Step, layer: LayerTime) -> float:
    """Exposed communication of one layer of a forward pass: half of that of both passes, and its gathered weights."""
    plan = step.plan
    inside = sum(axis.layer_seconds(step, layer) for axis in LAYER_AXES) / 2
    if not plan.reshard_after_forward:
        return inside
    gathered = step.part.num_layer_parameters * plan.gathered_bytes
    measured = step.cluster.known_links.inside.gather
    gather = find_group(plan, step.cluster, SHARDING).all_gather(gathered, measured)
    return inside + step.exposed(gather, layer.forward)


def _resize(step: Step, rows: int, length: int) -> Step:
    """The step with one uncompiled microbatch of this size."""
    uncompiled = replace(step.plan, compile=False, activation_checkpointing="none")
    plan = replace(uncompiled, sequence_len=length, micro_batch_size=rows, num_microbatches=1, rows_per_sequence=1)
    return replace(step, plan=plan, software=replace(step.software, fused=False))
