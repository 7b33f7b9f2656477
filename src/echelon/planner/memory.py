"""Bytes of device memory one rank needs under a plan, by part, and how many sampled answers fit beside them.

States are exact arithmetic. Activations are counted in activations.py.
"""

from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from echelon.ground.sizes import count_noun, render_bytes
from echelon.planner.activations import FP32_BYTES, activation_bytes, answer_bytes, deferred_bytes, knows_compiled
from echelon.planner.adapter_plan import frozen_bytes, trains_head, whole_weight_bytes
from echelon.planner.axes.axis import RankLoad
from echelon.planner.axes.data import count_apart
from echelon.planner.axes.table import AXES, count_absent, keep_heaviest, rank_loads
from echelon.planner.hardware.accelerators import Cluster, DeviceKind
from echelon.planner.memory_parts import MemoryParts, StoredBytes
from echelon.planner.model_shape import FUNCTION_LOGITS, TEACHER_LOGITS, ModelShape, logits_chunk_tokens
from echelon.planner.plan import DTYPE_BYTES, LossKind, ParallelPlan, RolloutPlan
from echelon.planner.rates import keeps_scores
from echelon.planner.replica_costs import agreement_bytes, saved_bytes
from echelon.recipe.names import NATIVE, OPTIMIZER_FROM_OUTSIDE, OPTIMIZERS
from echelon.recipe.synchronization import QUORUM

if TYPE_CHECKING:
    from echelon.recipe.document import Recipe

_CAPPED = (
    "soft-capped attention is flex attention, which keeps no scores; eager attention needs more",
    "soft-capped attention is eager in layers that are compiled and checkpointed, and computes all scores of a layer",
)
_COMPILED = "compiled layers keep what was measured on a CPU: their input, results of products and attention"
_EAGER = "activations are those of eager execution; a compiled model needs less"
_COPIED = "a quorum sends copies of gradients, which count as optimizer"
_HELD = "four parts of the state, of two snapshots each of this process and of another one, count as {}"
# fp32 tensors of the size of a chunk's logits that a loss function holds at once, eagerly and compiled, as measured on
# a CPU (test_objective_memory.py).
_LOSS_TENSORS: dict[LossKind, tuple[float, float]] = {
    "function": (5, 3), "likeliest": (6, 4), "divergence": (7, 3), "divergence_and_labels": (7, 4),
    "mixture": (11, 5.5),
}  # fmt: skip
# Optimizers with state that the estimate simplifies.
_UNCOUNTED = {
    "adafactor": "its row and column statistics are not counted",
    "adamw_8bit": "the scales of its 8-bit moments are not counted",
    "muon": "layers are taken for matrices only; what the ranks exchange, after activations are freed, is not counted",
}


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on the device of one rank at the peak, by part.

    The peak is at the loss, or with checkpointing at the first recomputed layer, when most of `logits` is freed.
    `answers` are sampled before the loss, when there are no gradients and activations yet; the larger of both counts.
    `buffers` covers communication, rotary tables, and a frozen weight that is dequantized for a product. `host` and
    `saves` are not part of the total. `host`: what `parallel.cpu_offload` and `train.activation_offloading` keep in
    host memory. `saves`: of a GPU, the copies there that checkpoints are written from, and snapshots.
    `assumptions`: what the plan uses and the estimate simplifies.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    buffers: int
    host: int = 0
    answers: int = 0
    assumptions: tuple[str, ...] = ()
    saves: int = 0

    @property
    def states(self) -> int:
        """Bytes that do not depend on the size of the microbatch."""
        return self.parameters + self.gradients + self.optimizer + self.buffers

    @property
    def total(self) -> int:
        """All parts that are there at once."""
        return self.states + max(self.activations + self.logits, self.answers - self.gradients)

    def fits(self, usable: float | None, cluster: Cluster) -> bool:
        """Whether it fits in the usable bytes of a device, and in the memory of a machine; None: unknown, fits all."""
        there, needed = cluster.host_memory_bytes, (self.host + self.saves) * cluster.devices_per_node
        return (there is None or needed <= there) and (usable is None or self.total <= usable)


def describe_peak_memory(is_gpu: bool) -> str:
    """What the peak memory of a process counts, beside the tensors whose bytes are planned."""
    if is_gpu:
        return "memory that PyTorch has reserved on a GPU, with what its allocator keeps free for later"
    return "memory resident in a process, with Python and its libraries"


def estimate_memory(shape: ModelShape, plan: ParallelPlan, kind: DeviceKind = "cuda") -> MemoryEstimate:
    """Estimate of one rank's peak bytes, on a device of this kind.

    It is of the rank that needs the most.
    """
    loads = _count_loads(shape, plan, kind)
    return max((load.estimate() for load in loads), key=lambda estimate: estimate.total)


def estimate_parts(shape: ModelShape, plan: ParallelPlan, kind: DeviceKind = "cuda") -> MemoryParts:
    """The total of `estimate_memory`, divided into parts that can be measured.

    Each part is that of the rank with the most of it.
    """
    parts = [astuple(load.parts()) for load in _count_loads(shape, plan, kind)]
    return MemoryParts(*(max(sizes) for sizes in zip(*parts, strict=True)))


def estimate_stored(shape: ModelShape, plan: ParallelPlan) -> list[StoredBytes]:
    """The part of `estimate_memory` that does not depend on the data, for each rank with other layers."""
    stored = []
    for load in rank_loads(shape, plan):
        rank_plan = replace(plan, adapter=load.adapter)
        states = _states(load.shape, rank_plan)
        device = StoredBytes(states.parameters, states.gradients, states.optimizer)
        stored.append(StoredBytes(*_shard_states(load.shape, rank_plan)) if plan.cpu_offload else device)
    return stored


def add_rollout(
    plan: ParallelPlan, recipe: "Recipe", shape: ModelShape, kind: DeviceKind, usable: float | None
) -> ParallelPlan:
    """Return the plan with the rollout of the recipe, if it has one.

    As many answers are sampled at once as fit beside the weights and the optimizer's state: at least one, and at most
    `rollout.max_num_seqs`. Sharded weights are gathered once, instead of for each token, if that leaves room for half
    of them.

    Args:
        usable: bytes of a device; None if unknown.
    """
    if not recipe.samples_answers:
        return replace(plan, rollout=None)
    config, most = recipe.rollout, plan.num_read
    rows = most if config.max_num_seqs == "auto" else min(most, config.max_num_seqs)
    group_size = config.group_size if recipe.draws_answers else 1
    turns = 1 if config.environment is None else config.environment.max_turns
    tokens = min(turns * config.max_new_tokens, plan.sequence_len - 1)
    rollout = RolloutPlan(group_size, tokens, config.updates, 1)
    if usable is not None:
        needs = estimate_memory(shape, replace(plan, rollout=rollout), kind)
        room, size = usable - (needs.states - needs.gradients), max(1, needs.answers)
        fitting = max(1, min(rows, int(room / size)))
        beside_whole = min(rows, int((room - _freed_bytes(shape, plan)) / size))
        gathers_once = plan.reshard_after_forward and plan.engine == NATIVE and not plan.stages
        gathers_once = gathers_once and 2 * beside_whole >= fitting
        rollout = replace(rollout, gathers_once=gathers_once)
        rows = beside_whole if gathers_once else fitting
    return replace(plan, rollout=replace(rollout, max_num_seqs=rows))


def describe_rollout(plan: ParallelPlan, shape: ModelShape, kind: DeviceKind) -> list[str]:
    """Return the line about the answers that a rank samples at once."""
    if plan.rollout is None:
        return []
    rollout = plan.rollout
    needs = estimate_memory(shape, plan, kind)
    rest = "without a cache, because of parallel.pp" if plan.stages else "with their keys and values"
    return [
        f"rollout: {rollout.max_num_seqs} of the {count_noun(plan.num_read, 'answer')} of each rank are sampled at "
        f"once, {rest} in {render_bytes(needs.answers)}, before there are gradients and activations"
    ]


@dataclass(frozen=True)
class _LoadBytes:
    """What one rank needs, counted once: `estimate` and `parts` are two divisions of the same sum.

    Attributes:
        states: what does not depend on the microbatch.
        activations: what the forward pass keeps on the device.
        deferred: gradients of earlier microbatches that wait for those of the weights (`zero_bubble`).
        redone: what the backward pass of a layer needs in addition: what it recomputes, or the gradients that wait.
        chunk: the logits of one chunk of the loss; 0 without the head.
        head: hidden states with their gradient, and the head's gradient; 0 without the head.
        beside: rotary tables, rows sent to experts, and what is received from another stage.
        agreement: what replicas, compressed gradients and, on CPUs, held snapshots need. Not in `parts`, which are
            measured before it is there.
        reference: the frozen copy of the initial weights, the teacher, and reward models.
        host: what is kept in host memory.
        saves: copies there of what is saved, of a GPU.
        answers: of answers that are sampled at once, instead of gradients and activations.
        assumptions: what the count simplifies.
    """

    states: "_States"
    activations: int
    deferred: int
    redone: int
    chunk: int
    head: int
    beside: int
    agreement: int
    reference: int
    host: int
    saves: int
    answers: int
    assumptions: tuple[str, ...]

    def estimate(self) -> MemoryEstimate:
        """The bytes at the peak: either a backward pass or a chunk of logits, whichever is larger."""
        at_redone = self.redone > self.chunk
        activations = self.activations + self.deferred
        return MemoryEstimate(
            parameters=self.states.parameters + self.states.cast + self.states.gathered + self.reference,
            gradients=self.states.gradients + self.states.unreduced,
            optimizer=self.states.optimizer + self.agreement,
            activations=activations + self.redone if at_redone else activations,
            logits=self.head if at_redone else self.chunk + self.head,
            buffers=self.states.buffers + self.beside,
            host=self.host,
            answers=self.answers,
            assumptions=self.assumptions,
            saves=self.saves,
        )

    def parts(self) -> MemoryParts:
        """The bytes by what can be measured."""
        more = self.states.gathered + self.states.unreduced + self.states.buffers + self.beside
        return MemoryParts(
            weights=self.states.parameters,
            gradients=self.states.gradients,
            optimizer=self.states.optimizer,
            activations=self.activations + self.states.cast,
            loss=self.chunk + self.head,
            other=more + self.deferred + max(0, self.redone - self.chunk),
            frozen_models=self.reference,
        )


@lru_cache(maxsize=4096)  # many instance types have the same plans
def _count_loads(shape: ModelShape, plan: ParallelPlan, kind: DeviceKind) -> tuple[_LoadBytes, ...]:
    """The bytes of each rank with other layers, without those that need less than another one with equal layers."""
    hidden = plan.micro_batch_size * plan.part_len * shape.hidden_size * DTYPE_BYTES[plan.precision.compute]
    loads = keep_heaviest(rank_loads(shape, plan, hidden))
    written = -(-estimate_checkpoint(shape, plan) // plan.world_size)
    return tuple(_count_load(load, plan, kind, shape.head_size, written) for load in loads)


def _count_load(load: RankLoad, plan: ParallelPlan, kind: DeviceKind, head_size: int, written: int) -> _LoadBytes:
    """`head_size`: of the whole head; that of `load` may be a part. `written`: bytes of a checkpoint, by this rank."""
    shape, is_gpu = load.shape, kind == "cuda"
    plan = plan if load.adapter is plan.adapter else replace(plan, adapter=load.adapter)
    held = _held_bytes(shape, plan) if plan.holds_snapshots else 0
    answers = 0
    if plan.rollout is not None:
        answers = plan.rollout.max_num_seqs * answer_bytes(shape, plan)
        answers += _freed_bytes(shape, plan) if plan.rollout.gathers_once else 0
    length, tokens = plan.part_len, plan.microbatch_tokens
    kept, redone, moved = activation_bytes(shape, plan, kind)
    rows = plan.micro_batch_size * length
    chunk, head = _logits(shape, plan, rows, kind, head_size) if load.has_head else (0, 0)
    waits = deferred_bytes(shape, plan) // load.num_stages if load.num_deferred else 0
    rotary = 2 * length * shape.head_dim * FP32_BYTES
    reward_models = plan.num_reward_parameters * DTYPE_BYTES[plan.precision.compute]
    sending = sum(axis.buffer_bytes(shape, plan, tokens, kind) for axis in AXES)
    return _LoadBytes(
        states=_states(shape, plan),
        activations=kept * load.num_kept,
        deferred=max(0, load.num_deferred - 1) * waits,
        redone=redone + waits,
        chunk=chunk,
        head=head * load.num_kept,
        agreement=agreement_bytes(plan, _num_held(shape, plan)) + (0 if is_gpu else held),
        beside=rotary + sending + load.received_bytes,
        reference=(0 if plan.cpu_offload else reference_bytes(shape, plan)) + reward_models,
        host=moved + (sum(_shard_states(shape, plan)) + reference_bytes(shape, plan) if plan.cpu_offload else 0),
        saves=held + written if is_gpu else 0,
        answers=answers,
        assumptions=tuple(_list_assumptions(shape, plan, kind)),
    )


def reference_bytes(shape: ModelShape, plan: ParallelPlan) -> int:
    """Bytes of one rank's part of the frozen copy of the initial weights, or of the teacher; 0 for a plan without one.

    With `fully_shard` it is in the compute dtype and sharded between forward passes, else as the trained weights are.
    A teacher counts as if only `fully_shard` divided it.
    """
    number = DTYPE_BYTES[plan.precision.compute if plan.uses_fully_shard else plan.precision.param]
    parameters = plan.num_teacher_parameters + (shape.num_parameters if plan.keeps_reference else 0)
    return -(-parameters // plan.num_shards) * number


def _list_assumptions(shape: ModelShape, plan: ParallelPlan, kind: DeviceKind) -> Iterator[str]:
    if shape.parts.attention_matrix and kind == "cuda":
        yield _CAPPED[keeps_scores(shape, plan, kind)]
    if plan.engine != NATIVE:
        yield f"the engine {plan.engine} is counted as the native one; what it copies beside that is not counted"
    if plan.compile:
        yield _COMPILED if knows_compiled(shape, plan) else _EAGER
    yield from _list_copies(plan, kind)
    if not plan.uses_fully_shard and plan.dp_size > 1:
        yield "DDP's gradients are views into its buckets"
    row = OPTIMIZERS.get(plan.optimizer)
    if row is None:
        yield f"{plan.optimizer} keeps two numbers per parameter, like AdamW"
    elif plan.optimizer in _UNCOUNTED:
        yield f"{plan.optimizer}: {_UNCOUNTED[plan.optimizer]}"
    if plan.loss == "function":
        tensors = _LOSS_TENSORS["function"][plan.compile]
        yield f"your own loss is taken to hold {tensors:g} tensors of the size of a chunk's logits"
    if plan.adapter is not None:
        yield "adapters: copies of weights for DoRA with dropout and for new tokens are not counted"
    if plan.activation_checkpointing == "selective":
        yield "selective checkpointing keeps the outputs of matrix products and attention; this is a rough estimate"
    if plan.activation_memory_budget is not None:
        yield "the memory budget is taken for that share of what the compiler keeps of a Llama's layer"
    if plan.activation_offloading:
        yield "activation offloading: small tensors, which stay on the device, are counted as if they moved"
    yield "the bytes of a document mask, if the data has one, are not counted"
    yield "temporary workspace, allocator fragmentation and gradients of activations use the headroom"


def _list_copies(plan: ParallelPlan, kind: DeviceKind) -> Iterator[str]:
    if plan.sync.name == QUORUM:
        yield _COPIED
    if plan.holds_snapshots:
        yield _HELD.format("host memory" if kind == "cuda" else "optimizer")


@dataclass(frozen=True)
class _Part:
    """A part of the full model: the number of trained parameters, and the bytes of frozen ones."""

    trained: int
    frozen_bytes: int = 0

    def gathered(self, compute: int) -> int:
        """Bytes while it is used in computation."""
        return self.trained * compute + self.frozen_bytes

    def without(self, experts: int, compute: int) -> "_Part":
        """The part of a rank that does not have these parameters of experts, which an adapter freezes."""
        if self.frozen_bytes:
            return replace(self, frozen_bytes=self.frozen_bytes - experts * compute)
        return replace(self, trained=self.trained - experts)


def _parts(shape: ModelShape, plan: ParallelPlan) -> tuple[_Part, _Part]:
    """(one decoder layer, everything outside the layers)."""
    layers = shape.num_layers * shape.num_layer_parameters
    if plan.adapter is None:
        return _Part(shape.num_layer_parameters), _Part(shape.num_parameters - layers)
    inside, outside = frozen_bytes(shape, plan.adapter, DTYPE_BYTES[plan.precision.compute])
    saved = plan.adapter.num_saved_outside
    per_layer = -(-(plan.adapter.num_trained_parameters - saved) // shape.num_layers)
    return _Part(per_layer, -(-inside // shape.num_layers)), _Part(saved, outside)


def _num_trained(shape: ModelShape, plan: ParallelPlan) -> int:
    return shape.num_parameters if plan.adapter is None else plan.adapter.num_trained_parameters


@dataclass(frozen=True)
class _States:
    """Bytes that do not depend on the microbatch: stored between steps, and in addition during one.

    cast: copies of weights by autocast. gathered: whole weights of layers that are sharded. unreduced: whole gradients
    that are added up before they are reduced. buffers: of communication, and for dequantized weights.
    """

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    cast: int = 0
    gathered: int = 0
    unreduced: int = 0


def _states(shape: ModelShape, plan: ParallelPlan) -> _States:
    policy, trained = plan.precision, _num_trained(shape, plan)
    layer, outside = _parts(shape, plan)
    frozen = shape.num_layers * layer.frozen_bytes + outside.frozen_bytes
    compute, number = DTYPE_BYTES[policy.compute], DTYPE_BYTES[policy.param]
    reduced, moments = DTYPE_BYTES[policy.reduce], _optimizer_bytes(shape, plan)
    whole = 0 if plan.adapter is None else whole_weight_bytes(shape, plan.adapter, compute)
    if not plan.uses_fully_shard:
        # autocast keeps a cast copy of every trained matrix until its backward is done
        matrices = trained - plan.adapter.num_looked_up if plan.adapter else shape.num_matmul_parameters
        copies = matrices * compute if plan.uses_autocast else 0
        moments = -(-moments // plan.sync.servers)  # of a parameter server; others have none
        return _States(frozen + trained * number, trained * number, moments, whole, cast=copies)

    # Experts of other ranks are never gathered here.
    absent = count_absent(shape, plan)
    layer = layer.without(absent, compute)
    gathered = outside.gathered(compute) + _count_gathered(shape, plan) * layer.gathered(compute)
    unreduced = trained - (shape.num_layers * absent if plan.adapter is None else 0)
    whole_gradients = unreduced * reduced if plan.reduce_gradients == "last" and plan.num_microbatches > 1 else 0
    shards = (0, 0, 0) if plan.cpu_offload else _shard_states(shape, plan)
    # all-gather input, reduce-scatter input; embedding and head are apart
    apart = count_apart(shape, plan)
    less = apart * (compute + (reduced if outside.trained >= 2 * apart else 0))
    sizes = [part.gathered(compute) + part.trained * reduced for part in (layer, outside)]
    buffers = whole + max(sizes[0], sizes[1] - less)
    return _States(*shards, buffers, gathered=gathered, unreduced=whole_gradients)


def _count_gathered(shape: ModelShape, plan: ParallelPlan) -> int:
    """Layers whose weights are whole: with resharding the one that runs and those fetched ahead, by default one."""
    return min(1 + (plan.prefetch or 1), shape.num_layers) if plan.reshard_after_forward else shape.num_layers


def _freed_bytes(shape: ModelShape, plan: ParallelPlan) -> int:
    """Bytes of the whole weights of all layers, less those that are whole at a time in a training step."""
    compute = DTYPE_BYTES[plan.precision.compute]
    layer = _parts(shape, plan)[0].without(count_absent(shape, plan), compute)
    return (shape.num_layers - _count_gathered(shape, plan)) * layer.gathered(compute)


def _shard_states(shape: ModelShape, plan: ParallelPlan) -> tuple[int, int, int]:
    """Bytes of one rank's shard of (parameters, gradients, optimizer); under CPU offload they are in host memory."""
    layer, outside = _parts(shape, plan)
    frozen = shape.num_layers * layer.frozen_bytes + outside.frozen_bytes
    ranks = plan.num_shards
    shard = -(-_num_trained(shape, plan) // ranks) * DTYPE_BYTES[plan.precision.param]
    return shard - (-frozen // ranks), shard, -(-_optimizer_bytes(shape, plan) // ranks)


def estimate_checkpoint(shape: ModelShape, plan: ParallelPlan) -> int:
    """Bytes of the tensors of a checkpoint: trained parameters and optimizer state, those of each replica."""
    trained = _num_trained(shape, plan)
    return saved_bytes(plan, trained, trained * DTYPE_BYTES[plan.precision.master], _optimizer_bytes(shape, plan))


def count_held(shape: ModelShape, plan: ParallelPlan) -> int:
    """Trained parameters that the rank with the most has."""
    return max(_num_held(load.shape, replace(plan, adapter=load.adapter)) for load in rank_loads(shape, plan))


def _held_bytes(shape: ModelShape, plan: ParallelPlan) -> int:
    """Bytes of the snapshots that one rank holds: two of its own part of a checkpoint, and two of another rank's."""
    held = _num_held(shape, plan)
    optimizer = -(-_optimizer_bytes(shape, plan) // plan.num_shards)
    one_replica = replace(plan, num_replicas=1)
    return 4 * saved_bytes(one_replica, held, held * DTYPE_BYTES[plan.precision.master], optimizer)


def _num_held(shape: ModelShape, plan: ParallelPlan) -> int:
    return -(-_num_trained(shape, plan) // plan.num_shards)


def describe_checkpoint(shape: ModelShape, plan: ParallelPlan) -> str:
    """The message about the size of a checkpoint."""
    what = "the adapter" if plan.adapter is not None else "the weights"
    return f"checkpoint: about {render_bytes(estimate_checkpoint(shape, plan))}, {what} and optimizer state"


def _optimizer_bytes(shape: ModelShape, plan: ParallelPlan) -> int:
    """Bytes of optimizer state for one full replica of the model."""
    total, number = _num_trained(shape, plan), DTYPE_BYTES[plan.precision.optimizer]
    row = OPTIMIZERS.get(plan.optimizer, OPTIMIZER_FROM_OUTSIDE)
    layers = shape.num_layers * shape.num_layer_parameters if plan.adapter is None else total
    elsewhere = row.moments if row.moments_elsewhere is None else row.moments_elsewhere
    moments = (1 if row.packed else number) * (row.moments * layers + elsewhere * (total - layers))
    remainders = DTYPE_BYTES[plan.precision.master] * total if plan.precision.rounding == "kahan" else 0
    return moments + remainders


def _logits(shape: ModelShape, plan: ParallelPlan, tokens: int, kind: DeviceKind, whole: int) -> tuple[int, int]:
    """Bytes of the chunked loss: (logits of one chunk, and the teacher's head; the hidden states with their gradient,
    and the head's gradient, which is summed over the chunks in fp32 before the parameter gets it; a frozen one has
    none)."""
    compute = DTYPE_BYTES[plan.precision.compute]
    trained = plan.adapter is None or trains_head(shape, plan.adapter)
    # A loss function gets the logits of the whole vocabulary.
    size, units = shape.head_size, 1
    if plan.loss != "cross_entropy":
        size, units = whole, FUNCTION_LOGITS if plan.loss in ("function", "likeliest") else TEACHER_LOGITS
    chunk = min(tokens, logits_chunk_tokens(units * size, kind, trained))
    hidden = 2 * tokens * shape.hidden_size * compute
    # GPUs add a chunk's gradient in place; CPUs only in fp32: otherwise it exists in addition to the sum.
    chunk_head = 0 if kind == "cuda" or compute == FP32_BYTES else compute
    head = shape.head_size * shape.hidden_size * (FP32_BYTES + chunk_head) if trained else 0
    return int(chunk * size * _logit_bytes(shape, plan)) + _teacher_bytes(shape, plan, tokens), hidden + head


def _teacher_bytes(shape: ModelShape, plan: ParallelPlan, tokens: int) -> int:
    """Bytes of a teacher while the loss is computed: its last hidden states, and its head if that is cast or gathered.

    With `fully_shard` its embedding is gathered with its head; the vocabulary is taken to be the model's.
    """
    number = DTYPE_BYTES[plan.precision.compute]
    copies = 2 if plan.uses_fully_shard else int(plan.uses_autocast)
    return plan.teacher_hidden_size * number * (tokens + copies * shape.vocab_size)


def _logit_bytes(shape: ModelShape, plan: ParallelPlan) -> float:
    """Bytes for each number of a chunk of logits. Compiled, the logits and their gradient, in the compute dtype.

    Otherwise two tensors in fp32: the logits, and their softmax, which becomes the gradient. Beside them the head's
    output, if it is cast to fp32 before the softmax, or the soft-capped values. A loss function has its own tensors.
    """
    compute = DTYPE_BYTES[plan.precision.compute]
    has_more = compute != FP32_BYTES or shape.parts.logits_softcap
    if plan.loss != "cross_entropy":
        return _LOSS_TENSORS[plan.loss][plan.compile] * FP32_BYTES + (compute if has_more else 0)
    if plan.compile:
        return 2 * compute
    return 2 * FP32_BYTES + (compute if has_more else 0)
