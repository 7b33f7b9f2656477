"""Bytes of device memory one rank needs under a plan, by part.

States are exact arithmetic. Activations count the tensors that backward keeps for a Hugging Face decoder layer run
eagerly with fused attention: the form of Korthikanti et al. 2022 ("Reducing Activation Recomputation in Large
Transformer Models", section 4), its terms replaced by what these layers were measured to save (test_memory.py).
"""

import math
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace

from echelon.hardware.accelerators import DeviceKind
from echelon.planner.adapter_plan import adapter_bytes_per_token, frozen_bytes, trains_head, whole_weight_bytes
from echelon.planner.model_shape import ModelShape, logits_chunk_tokens
from echelon.planner.plan import DTYPE_BYTES, ParallelPlan
from echelon.planner.rank_shape import divide_shape
from echelon.planner.stages import StageLoad, stage_loads
from echelon.recipe.names import OPTIMIZER_FROM_OUTSIDE, OPTIMIZERS
from echelon.sizes import render_bytes

FP32_BYTES = 4

# With activation offloading, in the forward pass: the layer that runs, and the one whose activations leave.
_LAYERS_LEAVING = 2

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
    `buffers` covers communication, rotary tables, and a frozen weight that is dequantized for a product. `host` is not
    part of the total: it is what `parallel.cpu_offload` and `train.activation_offloading` keep in host memory.
    `assumptions`: what the plan uses and the estimate simplifies.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    buffers: int
    host: int = 0
    assumptions: tuple[str, ...] = ()

    @property
    def states(self) -> int:
        """Bytes that do not depend on the size of the microbatch."""
        return self.parameters + self.gradients + self.optimizer + self.buffers

    @property
    def total(self) -> int:
        """All parts together."""
        return self.states + self.activations + self.logits


@dataclass(frozen=True)
class MemoryParts:
    """Bytes on the device of one rank, by part: planned, or measured with each part at its largest.

    Attributes:
        weights: parameters and buffers, as they are stored between steps.
        gradients: as they are stored before the update.
        optimizer: the state of the optimizer.
        activations: what the forward pass of a microbatch keeps, including weights that autocast casts.
        loss: what the head and the loss need in addition.
        other: what the peak of a step needs in addition: gathered weights, gradients before their reduction, buffers
            of communication, recomputed layers, workspace.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    loss: int
    other: int


def estimate_memory(
    shape: ModelShape, plan: ParallelPlan, sequence_len: int, kind: DeviceKind = "cuda"
) -> MemoryEstimate:
    """Estimate of one rank's peak bytes, for sequences of `sequence_len` tokens on a device of this kind.

    In a pipeline it is the rank that needs the most.
    """
    loads = stage_loads(divide_shape(shape, plan), plan, _hidden_bytes(shape, plan, sequence_len))
    return max((_estimate_load(each, plan, sequence_len, kind) for each in loads), key=lambda each: each.total)


def _hidden_bytes(shape: ModelShape, plan: ParallelPlan, sequence_len: int) -> int:
    return plan.micro_batch_size * -(-sequence_len // plan.cp) * shape.hidden_size * DTYPE_BYTES[plan.precision.compute]


def _estimate_load(load: StageLoad, plan: ParallelPlan, sequence_len: int, kind: DeviceKind) -> MemoryEstimate:
    shape, plan = load.shape, replace(plan, adapter=load.adapter)
    states = _states(shape, plan)
    kept, redone, moved = _activations(shape, plan, sequence_len, kind)
    length = -(-sequence_len // plan.cp)
    chunk, head = _logits(shape, plan, plan.micro_batch_size * length) if load.has_head else (0, 0)
    kept, head = kept * load.num_kept, head * load.num_kept
    beside = _rotary_bytes(shape, length) + _dispatch_bytes(shape, plan, length, kind)
    return MemoryEstimate(
        parameters=states.parameters + states.cast + states.gathered,
        gradients=states.gradients + states.unreduced,
        optimizer=states.optimizer,
        activations=kept + redone if redone > chunk else kept,
        logits=head if redone > chunk else chunk + head,
        buffers=states.buffers + beside + load.received_bytes,
        host=moved + (sum(_shard_states(shape, plan)) if plan.cpu_offload else 0),
        assumptions=tuple(_list_assumptions(shape, plan, kind)),
    )


def estimate_parts(shape: ModelShape, plan: ParallelPlan, sequence_len: int, kind: DeviceKind = "cuda") -> MemoryParts:
    """The total of `estimate_memory`, divided into parts that can be measured.

    In a pipeline each part is that of the rank with the most of it.
    """
    loads = stage_loads(divide_shape(shape, plan), plan, _hidden_bytes(shape, plan, sequence_len))
    parts = [astuple(_divide_load(each, plan, sequence_len, kind)) for each in loads]
    return MemoryParts(*(max(each) for each in zip(*parts, strict=True)))


def _divide_load(load: StageLoad, plan: ParallelPlan, sequence_len: int, kind: DeviceKind) -> MemoryParts:
    shape, plan = load.shape, replace(plan, adapter=load.adapter)
    states = _states(shape, plan)
    kept, redone, _ = _activations(shape, plan, sequence_len, kind)
    length = -(-sequence_len // plan.cp)
    chunk, head = _logits(shape, plan, plan.micro_batch_size * length) if load.has_head else (0, 0)
    kept, head = kept * load.num_kept, head * load.num_kept
    beside = _rotary_bytes(shape, length) + _dispatch_bytes(shape, plan, length, kind)
    return MemoryParts(
        weights=states.parameters,
        gradients=states.gradients,
        optimizer=states.optimizer,
        activations=kept + states.cast,
        loss=chunk + head,
        other=(
            states.gathered + states.unreduced + states.buffers + beside + load.received_bytes + max(0, redone - chunk)
        ),
    )


def _rotary_bytes(shape: ModelShape, sequence_len: int) -> int:
    return 2 * sequence_len * shape.head_dim * FP32_BYTES


def _list_assumptions(shape: ModelShape, plan: ParallelPlan, kind: DeviceKind) -> Iterator[str]:
    if shape.parts.attention_matrix and kind == "cuda":
        yield "soft-capped attention is flex attention, which keeps no scores; eager attention needs more"
    if plan.compile:
        yield "activations are those of eager execution; a compiled model needs less"
    if not plan.uses_fully_shard and plan.dp_replicate > 1:
        yield "DDP's gradients are views into its buckets"
    row = OPTIMIZERS.get(plan.optimizer)
    if row is None:
        yield f"{plan.optimizer} keeps two numbers per parameter, like AdamW"
    elif plan.optimizer in _UNCOUNTED:
        yield f"{plan.optimizer}: {_UNCOUNTED[plan.optimizer]}"
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
        return _States(frozen + trained * number, trained * number, moments, whole, cast=copies)

    # Experts of other ranks are never gathered here.
    absent = shape.num_layer_experts - shape.num_layer_experts // plan.ep
    layer = layer.without(absent, compute)
    # With resharding the running layer and those fetched ahead, by default one, are gathered; the rest stays gathered.
    num_gathered = min(1 + (plan.prefetch or 1), shape.num_layers) if plan.reshard_after_forward else shape.num_layers
    gathered = outside.gathered(compute) + num_gathered * layer.gathered(compute)
    unreduced = trained - (shape.num_layers * absent if plan.adapter is None else 0)
    whole_gradients = unreduced * reduced if plan.reduce_gradients == "last" and plan.num_microbatches > 1 else 0
    shards = (0, 0, 0) if plan.cpu_offload else _shard_states(shape, plan)
    # all-gather input, reduce-scatter input
    buffers = whole + max(part.gathered(compute) + part.trained * reduced for part in (layer, outside))
    return _States(*shards, buffers, gathered=gathered, unreduced=whole_gradients)


def _shard_states(shape: ModelShape, plan: ParallelPlan) -> tuple[int, int, int]:
    """Bytes of one rank's shard of (parameters, gradients, optimizer); under CPU offload they are in host memory."""
    layer, outside = _parts(shape, plan)
    frozen = shape.num_layers * layer.frozen_bytes + outside.frozen_bytes
    ranks = plan.dp_shard * plan.cp
    shard = -(-_num_trained(shape, plan) // ranks) * DTYPE_BYTES[plan.precision.param]
    return shard - (-frozen // ranks), shard, -(-_optimizer_bytes(shape, plan) // ranks)


def estimate_checkpoint(shape: ModelShape, plan: ParallelPlan) -> int:
    """Bytes of the tensors of a checkpoint: trained parameters and optimizer state."""
    return _num_trained(shape, plan) * DTYPE_BYTES[plan.precision.master] + _optimizer_bytes(shape, plan)


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


def _logits(shape: ModelShape, plan: ParallelPlan, tokens: int) -> tuple[int, int]:
    """Bytes of the chunked loss: (logits of one chunk; the hidden states with their gradient, and the head's
    gradient, which is summed over the chunks in fp32 before the parameter gets it; a frozen one has none)."""
    compute = DTYPE_BYTES[plan.precision.compute]
    chunk = min(tokens, logits_chunk_tokens(shape.vocab_size))
    hidden = 2 * tokens * shape.hidden_size * compute
    # A chunk's gradient is added in place if the dtypes agree; otherwise it exists in addition to the sum.
    head = shape.vocab_size * shape.hidden_size * (FP32_BYTES + (compute if compute != FP32_BYTES else 0))
    head = head if plan.adapter is None or trains_head(shape, plan.adapter) else 0
    return chunk * shape.vocab_size * _logit_bytes(shape, plan), hidden + head


def _logit_bytes(shape: ModelShape, plan: ParallelPlan) -> int:
    """Bytes for each number of a chunk of logits. Compiled, the logits and their gradient, in the compute dtype.

    Otherwise two tensors in fp32: the logits, and their softmax, which becomes the gradient. Beside them the head's
    output, if it is cast to fp32 before the softmax, or the soft-capped values.
    """
    compute = DTYPE_BYTES[plan.precision.compute]
    if plan.compile:
        return 2 * compute
    has_more = compute != FP32_BYTES or shape.parts.logits_softcap
    return 2 * FP32_BYTES + (compute if has_more else 0)


@dataclass(frozen=True)
class _Kept:
    """Inputs of the activation estimate: bytes per number, and whether the layer's own weights are frozen.

    residual: of the residual stream. mask: of a dropout mask. adapter: bytes per token of PEFT's adapter layers.
    sequence_ranks: the ranks that divide norms and residuals along the sequence.
    """

    compute: int
    residual: int
    mask: int
    frozen: bool
    adapter: float = 0.0
    sequence_ranks: int = 1


def _what_is_kept(shape: ModelShape, plan: ParallelPlan, kind: DeviceKind) -> _Kept:
    compute = DTYPE_BYTES[plan.precision.compute]
    mask = 1 if kind == "cuda" else compute
    ranks = plan.tp if plan.sequence_parallel else 1
    if plan.adapter is None:
        # autocast leaves the residual stream in fp32
        return _Kept(compute, FP32_BYTES if plan.uses_autocast else compute, mask, frozen=False, sequence_ranks=ranks)
    # Frozen embeddings are in the compute dtype, and so is the stream. DoRA casts its inputs to its own dtype, and
    # autocast those that a LayerNorm outputs in fp32.
    casts = plan.uses_autocast and (plan.adapter.method == "dora" or shape.parts.norm == "layer")
    own_mask = 1 if kind == "cuda" else DTYPE_BYTES[plan.precision.param] if casts else compute
    beside = adapter_bytes_per_token(shape, plan.adapter, compute, casts, own_mask)
    return _Kept(compute, compute, mask, frozen=True, adapter=beside, sequence_ranks=ranks)


def _activations(shape: ModelShape, plan: ParallelPlan, sequence_len: int, kind: DeviceKind) -> tuple[int, int, int]:
    """(bytes that are kept on the device for backward, additional bytes of a layer that backward recomputes, bytes
    that are kept in host memory)."""
    by = _what_is_kept(shape, plan, kind)
    length = -(-sequence_len // plan.cp)  # of this rank's part
    tokens = plan.micro_batch_size * plan.rows_per_sequence * length
    layer = _layer_bytes_per_token(shape, by, sequence_len, kind, _rows_per_token(shape, plan, kind))
    layer += _context_bytes(shape, plan, by.compute)
    # The first layer's input needs no gradient if the embedding is frozen: its norm keeps nothing.
    num_redone = 0 if plan.activation_checkpointing == "none" else shape.num_layers // plan.checkpoint_every
    norms = 0 if by.frozen and num_redone < shape.num_layers else _norm_bytes(shape, by)
    outside = norms + by.residual * shape.hidden_size * (shape.parts.residual_dropout > 0)
    kept, redone = _kept_by_layer(shape, plan, by, layer)
    rotary = 2 * length * shape.head_dim * by.residual if shape.num_position_parameters == 0 else 0
    # Expert weights with an adapter are added up before they are used, those in 4 bits are dequantized; it is kept.
    adapter = plan.adapter
    made = by.compute * (adapter.num_adapted_experts + adapter.num_quantized_experts) if adapter is not None else 0
    fixed = made * (shape.num_layers - num_redone) // shape.num_layers
    again = made // shape.num_layers if num_redone else 0
    here, moved = sum(kept), 0.0
    if plan.activation_offloading:
        window = max(_LAYERS_LEAVING, 1 + plan.activation_loading_horizon)
        here, moved = max(sum(kept[first : first + window]) for first in range(len(kept))), sum(kept[:-1])
    # 8: token ids
    return int(tokens * (here + outside + 8)) + rotary + fixed, int(tokens * redone) + again, int(tokens * moved)


def _kept_by_layer(shape: ModelShape, plan: ParallelPlan, by: _Kept, layer: float) -> tuple[list[float], float]:
    """Per token: (bytes that each layer keeps, additional bytes when the last of those that do not keep all is redone).

    `layer`: the bytes that the backward pass of one layer needs.
    """
    layer_input = by.residual * shape.hidden_size / by.sequence_ranks
    outputs = _matmul_output_bytes(shape, by.compute)
    match plan.activation_checkpointing:
        case "none" if plan.activation_memory_budget is not None:
            most = layer if shape.parts.attention_matrix else outputs + _compiled_bytes(shape, by.compute)
            kept = layer_input + plan.activation_memory_budget * most
            redone = max(0.0, layer - kept)
        case "none":
            kept, redone = layer, 0.0
        case "full":
            kept, redone = layer_input, layer
        case "selective":
            kept, redone = layer_input + outputs, max(0, layer - outputs)  # the recomputation reuses them
    every = plan.checkpoint_every
    by_layer = [kept if number % every == 0 else layer for number in range(1, shape.num_layers + 1)]
    # If layers follow that keep all, they are done and free when a layer is recomputed.
    return by_layer, redone if shape.num_layers % every == 0 else 0.0


def _compiled_bytes(shape: ModelShape, compute: int) -> int:
    """Per token: what compiled layers keep beside a layer's input and the outputs of its matrix products.

    That is the input of the MLP and of its last product, as was measured (test_activation.py).
    """
    return compute * (shape.intermediate_size + shape.hidden_size)


def _expert_row_bytes(shape: ModelShape, by: _Kept) -> int:
    """Bytes that the backward pass needs of a token in one expert: the inputs and outputs of its two products, and of
    the activation between them. A frozen expert needs no inputs. Autocast does not cast a grouped product."""
    _, width = shape.expert_widths
    inputs = 0 if by.frozen else shape.hidden_size + width
    return by.residual * (inputs + shape.hidden_size + 3 * width)


def _rows_per_token(shape: ModelShape, plan: ParallelPlan, kind: DeviceKind) -> int:
    """Rows of experts that a rank computes, per token of its own: as many as a token has experts, or with expert
    parallelism on GPUs, whose hosts do not wait for the numbers, as many as it might receive."""
    chosen = shape.num_chosen_experts
    if plan.ep == 1 or kind == "cpu":
        return chosen
    return plan.ep * min(chosen, shape.experts[0].num_experts // plan.ep)


def _dispatch_bytes(shape: ModelShape, plan: ParallelPlan, sequence_len: int, kind: DeviceKind) -> int:
    """Bytes of the rows that a layer sends to experts and of those it receives, while it does."""
    if plan.ep == 1:
        return 0
    rows = plan.micro_batch_size * plan.rows_per_sequence * sequence_len * _rows_per_token(shape, plan, kind)
    return 2 * rows * shape.hidden_size * DTYPE_BYTES[plan.precision.compute]


def _layer_bytes_per_token(
    shape: ModelShape, by: _Kept, sequence_len: int, kind: DeviceKind, rows_per_token: int
) -> float:
    """Bytes per token that the backward pass of one decoder layer needs; of experts, for `rows_per_token` of them."""
    parts = shape.parts
    # If autocast casts, each projection keeps a copy of its input: q, k, v, gate and up; otherwise two are shared. A
    # frozen projection keeps none, and one tensor less of the intermediate width for the last one of the MLP.
    inputs = 5 if parts.separate_projections and by.residual != by.compute else 2
    projections = 0 if by.frozen else inputs * by.compute * shape.hidden_size
    share, _ = shape.expert_widths
    mlp = (1 - share) * (parts.mlp_saved - by.frozen) * by.compute * shape.intermediate_size
    mlp += share * rows_per_token * _expert_row_bytes(shape, by)
    # The inputs of the post-norms of Gemma 2 and 3 are not the residual stream, yet cost the same fp32 copy.
    norms = parts.num_norms * _norm_bytes(shape, by)
    dropout = 2 * by.mask * shape.hidden_size if parts.residual_dropout else 0
    return projections + mlp + norms + dropout + by.adapter + _attention_bytes(shape, by, sequence_len, kind)


def _attention_bytes(shape: ModelShape, by: _Kept, sequence_len: int, kind: DeviceKind) -> int:
    """Per token: query, key, value, output, and the fp32 log-sum-exp; also the scores if attention is not fused."""
    parts, compute = shape.parts, by.compute
    query, key_value = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    scores = shape.num_heads * sequence_len
    head_norms = 0
    if parts.head_norms:
        kept = FP32_BYTES if by.frozen else 2 * FP32_BYTES if parts.norm == "rms_fp32" else FP32_BYTES + compute
        head_norms = (query + key_value) * kept + FP32_BYTES * (shape.num_heads + shape.num_kv_heads)
    if parts.attention_matrix and kind == "cpu":  # GPUs have flex attention
        # soft-capped scores, fp32 softmax, its cast copy; key and value are repeated for every query head
        cast = compute if compute != FP32_BYTES else 0
        return head_norms + 4 * compute * query + scores * (compute + FP32_BYTES + cast)
    if parts.attention_dropout and kind == "cpu":
        # CPUs have no fused attention with dropout: softmax, mask and product are kept, all in fp32
        return head_norms + FP32_BYTES * 3 * query + compute * query + 3 * FP32_BYTES * scores
    return head_norms + compute * 2 * (query + key_value) + FP32_BYTES * shape.num_heads


def _context_bytes(shape: ModelShape, plan: ParallelPlan, compute: int) -> int:
    """Per token of this rank: keys and values in addition to its own, under context parallelism.

    `allgather` keeps those of whole sequences. `ulysses` keeps as many as before, unless their heads are repeated.
    """
    key_value = 2 * shape.num_kv_heads * shape.head_dim * compute
    if plan.cp_method == "ulysses":
        return key_value * (math.lcm(shape.num_kv_heads, plan.cp) // shape.num_kv_heads - 1)
    return key_value * (plan.cp - 1)


def _norm_bytes(shape: ModelShape, by: _Kept) -> float:
    """Per token: a norm's input and its normalised values, in the dtypes of its kind, and its statistics.

    The normalised values are for the gradient of its weight, so a frozen norm keeps none.
    """
    match shape.parts.norm:
        case "rms":
            numbers = shape.hidden_size * (FP32_BYTES + (0 if by.frozen else by.residual)) + FP32_BYTES
        case "rms_fp32":
            numbers = shape.hidden_size * (1 if by.frozen else 2) * FP32_BYTES + FP32_BYTES
        case "layer":
            numbers = shape.hidden_size * by.residual + 2 * FP32_BYTES
    return numbers / by.sequence_ranks


def _matmul_output_bytes(shape: ModelShape, compute: int) -> int:
    """Per token: what selective checkpointing keeps of a layer, the outputs of its matrix products and attention."""
    attention = 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim + shape.hidden_size
    mlp = (shape.parts.num_mlp_matrices - 1) * shape.intermediate_size + shape.hidden_size
    return compute * (attention + mlp) + FP32_BYTES * shape.num_heads
