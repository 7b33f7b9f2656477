"""The activations that layers keep for the backward pass: the keys of the recipe, checked together, and their bytes.

The bytes are those of the tensors that a Hugging Face decoder layer keeps, run eagerly with fused attention: the form
of Korthikanti et al. 2022 ("Reducing Activation Recomputation in Large Transformer Models", section 4), its terms
replaced by what these layers were measured to save (test_memory.py).
"""

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, get_args

from echelon.ground.errors import ConfigError, PlanError
from echelon.planner.adapter_plan import adapter_bytes_per_token, targeted_linears
from echelon.planner.axes.table import AXES
from echelon.planner.hardware.accelerators import Cluster, DeviceKind
from echelon.planner.model_shape import ModelShape
from echelon.planner.plan import DTYPE_BYTES, ActivationCheckpointing, ParallelPlan
from echelon.planner.rates import attends_in_blocks, keeps_scores
from echelon.recipe.names import ENGINES

if TYPE_CHECKING:
    from echelon.recipe.document import Recipe
    from echelon.recipe.training import TrainConfig

_KEY = "train.activation_checkpointing"
_BUDGET = f"{_KEY}.memory_budget"
FP32_BYTES = 4

# Attention in blocks on a CPU: the queries of a block, at most, and the blocks of scores that are held at once. In
# compiled layers up to a length: the queries of a block, whose probabilities are kept.
_BLOCK_QUERIES, _BLOCKS_HELD = 256, 3
_KEPT_LENGTH, _KEPT_QUERIES = 1024, 128

# Of a sampled answer: numbers per token of the prompt that are held at once, as multiples of the hidden and of the
# intermediate size; bytes per entry of the vocabulary: fp32 logits, and copies of them in fp32 and fp64.
_SAMPLED_HIDDEN, _SAMPLED_INNER, _SCORE_BYTES = 6, 3, 40

# With activation offloading, in the forward pass: the layer that runs, and the one whose activations leave.
_LAYERS_LEAVING = 2


@dataclass(frozen=True)
class KeptActivations:
    """`train.activation_checkpointing` as fields of a plan. See ParallelPlan."""

    policy: ActivationCheckpointing
    every: int = 1
    memory_budget: float | None = None
    mlp_tiles: int = 1

    @property
    def is_input_alone(self) -> bool:
        """Whether every layer keeps its input alone."""
        return self.policy == "full" and self.every == 1

    def apply(self, plan: ParallelPlan) -> ParallelPlan:
        """Return the plan with this policy."""
        return replace(
            plan,
            activation_checkpointing=self.policy,
            checkpoint_every=self.every,
            activation_memory_budget=self.memory_budget,
            mlp_tiles=self.mlp_tiles,
        )


NONE, SELECTIVE, FULL = (KeptActivations(name) for name in get_args(ActivationCheckpointing))


def list_activations(recipe: "Recipe") -> tuple[KeptActivations, ...]:
    """Return the policies that a plan may have, the one that keeps the most first.

    It is the one that the recipe names or maps; for `auto` those that its other keys and its engine allow.
    """
    setting = recipe.train.activation_checkpointing
    if not isinstance(setting, str):
        policy: ActivationCheckpointing = "full" if setting.memory_budget is None else "none"
        return (KeptActivations(policy, setting.every or 1, setting.memory_budget, setting.mlp_tiles or 1),)
    if setting != "auto":
        return (KeptActivations(setting),)
    limits = [limit.values for limit in ENGINES[recipe.engine].limits if limit.key == _KEY]
    allowed = [kept for kept in (NONE, SELECTIVE, FULL) if all(kept.policy in values for values in limits)]
    if getattr(recipe.parallel, "schedule", None) == "zero_bubble":
        allowed = [NONE]
    if recipe.train.activation_offloading:
        allowed = [kept for kept in allowed if _explain_offloading(recipe.train, kept) is None]
    return tuple(allowed)


def check_activations(recipe: "Recipe", kept: KeptActivations, shape: ModelShape, cluster: Cluster) -> None:
    """Refuse what this model, these devices or PyTorch cannot do. Raises ConfigError or PlanError."""
    if kept.every > shape.num_layers:
        raise ConfigError(
            f"train.activation_checkpointing.every={kept.every} is more than the {shape.num_layers} layers of the "
            f"model, and none would be recomputed; use {shape.num_layers} or less, or "
            "train.activation_checkpointing=none."
        )
    if getattr(recipe.parallel, "schedule", None) == "zero_bubble":
        _check_zero_bubble(recipe.train)
    if kept.mlp_tiles > 1:
        _check_tiles(recipe, kept.mlp_tiles)
    if kept.memory_budget is not None:
        _check_budget(recipe, kept.memory_budget, cluster)
    if recipe.train.activation_offloading:
        if cluster.kind == "cpu":
            raise PlanError("train.activation_offloading=true: on CPUs everything is in host memory already; omit it.")
        if (obstacle := _explain_offloading(recipe.train, kept)) is not None:
            raise ConfigError(f"train.activation_offloading=true does not work with {obstacle}")


def _check_zero_bubble(train: "TrainConfig") -> None:
    """Refuse what a split backward pass would recompute many times, measured by test_zero_bubble.py."""
    setting = train.activation_checkpointing
    if setting in ("auto", "none"):
        return
    shown = setting if isinstance(setting, str) else json.dumps(setting.model_dump(exclude_none=True))
    raise ConfigError(
        f"train.activation_checkpointing={shown} does not work with parallel.schedule=zero_bubble: PyTorch computes "
        "the gradient of each weight in a backward pass of its own; each would recompute the layer, and all of it "
        "would be kept. Use another schedule, or train.activation_checkpointing=none."
    )


def _check_tiles(recipe: "Recipe", num_tiles: int) -> None:
    """Refuse tiles in layers that are compiled, and more of them than tokens."""
    length = recipe.data.sequence_len
    ways = (
        (recipe.train.compile is True, "train.compile=true", "the tiles are not compiled; set train.compile=auto"),
        ("fp8" in recipe.train.precision, "train.precision=fp8", "the tiles are not compiled; use bf16"),
        (num_tiles > length, f"data.sequence_len={length}", "a tile has at least one token; use fewer tiles"),
    )
    for is_given, key, why in ways:
        if is_given:
            raise ConfigError(f"{_KEY}.mlp_tiles={num_tiles} does not go with {key}: {why}.")


def _check_budget(recipe: "Recipe", budget: float, cluster: Cluster) -> None:
    """Refuse a memory budget where layers are not compiled: the compiler is what keeps it."""
    adapter, shown = recipe.adapter, f"{_BUDGET}={budget:g}"
    if recipe.train.compile is False:
        raise ConfigError(
            f"{shown} needs compiled layers, but train.compile is false; use train.compile=true, or "
            "train.activation_checkpointing=selective or full."
        )
    if adapter.target_parameters or adapter.quantize_experts:
        raise ConfigError(
            f"{shown} needs compiled layers, and layers whose expert weights an adapter replaces are not compiled; "
            "use train.activation_checkpointing=selective or full."
        )
    if not cluster.can_compile:
        raise PlanError(
            f"{shown} needs compiled layers, and {cluster.accelerator.name} has no C++ compiler or no Python "
            "headers; install them, or use train.activation_checkpointing=selective or full."
        )


def _explain_offloading(train: "TrainConfig", kept: KeptActivations) -> str | None:
    """What rules activation offloading out, because PyTorch does not hand out the tensors that a layer keeps."""
    if kept.policy == "selective":
        return f"{_KEY}=selective, which keeps its tensors where no other code can move them; use full or none."
    if kept.is_input_alone:
        return None
    compiles = "train.compile=true" if train.compile is True else "train.precision=fp8, which is compiled"
    if kept.memory_budget is not None:
        compiles = f"{_BUDGET}, which is compiled"
    if train.compile is not True and "fp8" not in train.precision and kept.memory_budget is None:
        return None
    return (
        f"{compiles}: a compiled layer keeps its tensors where no other code can move them; set {_KEY}=full, whose "
        "layer inputs can be moved, or do not compile."
    )


@dataclass(frozen=True)
class _Kept:
    """Inputs of the activation estimate: bytes per number, and whether the layer's own weights are frozen.

    scores: whether soft-capped attention is eager, and keeps its scores: GPUs have flex attention.
    residual: of the residual stream. mask: of a dropout mask. power: of a power. adapter: bytes per token of PEFT's
    adapter layers. sequence_ranks: the ranks that divide norms and residuals along the sequence.
    """

    compute: int
    residual: int
    mask: int
    power: int
    scores: bool
    frozen: bool
    adapter: float = 0.0
    sequence_ranks: int = 1


def _what_is_kept(shape: ModelShape, plan: ParallelPlan, kind: DeviceKind) -> _Kept:
    compute = DTYPE_BYTES[plan.precision.compute]
    mask = 1 if kind == "cuda" else compute
    ranks = plan.sequence_ranks
    # Autocast computes powers in fp32 on a GPU, but not on a CPU.
    power = FP32_BYTES if kind == "cuda" and plan.uses_autocast else compute
    scores = keeps_scores(shape, plan, kind)
    if plan.adapter is None:
        # autocast leaves the residual stream in fp32
        residual = FP32_BYTES if plan.uses_autocast else compute
        return _Kept(compute, residual, mask, power, scores, frozen=False, sequence_ranks=ranks)
    # Frozen embeddings are in the compute dtype, and so is the stream. DoRA casts its inputs to its own dtype, and
    # autocast those that a LayerNorm outputs in fp32.
    casts = plan.uses_autocast and (plan.adapter.method == "dora" or shape.parts.norm == "layer")
    own_mask = 1 if kind == "cuda" else DTYPE_BYTES[plan.precision.param] if casts else compute
    beside = adapter_bytes_per_token(shape, plan.adapter, compute, casts, own_mask)
    return _Kept(compute, compute, mask, power, scores, frozen=True, adapter=beside, sequence_ranks=ranks)


def answer_bytes(shape: ModelShape, plan: ParallelPlan) -> int:
    """Bytes of one answer of `plan.rollout` while it is sampled, at its greatest length, with its prompt.

    Keys and values of every layer, those of one layer twice while they move to a larger buffer; the hidden states of
    one layer when the prompt is read; and the scores of the next token, with the random numbers to draw it.
    """
    if plan.rollout is None:
        return 0
    read = plan.sequence_len if plan.stages else max(1, plan.sequence_len - plan.rollout.max_new_tokens)
    number = DTYPE_BYTES[plan.precision.compute]
    pair = 2 * shape.num_kv_heads * shape.head_dim * number
    kept = 0 if plan.stages else (shape.num_layers + 1) * pair
    hidden = (_SAMPLED_HIDDEN * shape.hidden_size + _SAMPLED_INNER * shape.intermediate_size) * number
    return plan.sequence_len * kept + read * hidden + _SCORE_BYTES * shape.vocab_size


def activation_bytes(shape: ModelShape, plan: ParallelPlan, kind: DeviceKind) -> tuple[int, int, int]:
    """(bytes that are kept on the device for backward, additional bytes of a layer that backward recomputes, bytes
    that are kept in host memory)."""
    by = _what_is_kept(shape, plan, kind)
    tokens = plan.microbatch_tokens
    mlp = _mlp_half_bytes(shape, by, plan.mlp_tiles)
    layer = mlp + _attention_half_bytes(shape, by, plan.sequence_len, kind) + by.adapter
    layer += _beside_bytes(shape, plan, by.compute)
    probabilities = _probability_bytes(shape, plan, kind)
    layer += probabilities
    # The first layer's input needs no gradient if the embedding is frozen: its norm keeps nothing.
    num_redone = 0 if plan.activation_checkpointing == "none" else shape.num_layers // plan.checkpoint_every
    norms = 0 if by.frozen and num_redone < shape.num_layers else _norm_bytes(shape, by)
    outside = norms + by.residual * shape.hidden_size * (shape.parts.residual_dropout > 0)
    kept, redone = _kept_by_layer(shape, plan, by, layer, probabilities)
    rotary = 2 * plan.part_len * shape.head_dim * by.residual if shape.num_position_parameters == 0 else 0
    # Expert weights with an adapter are added up before they are used, those in 4 bits are dequantized; it is kept.
    adapter = plan.adapter
    made = by.compute * (adapter.num_adapted_experts + adapter.num_quantized_experts) if adapter is not None else 0
    fixed = made * (shape.num_layers - num_redone) // shape.num_layers
    masks, largest = (0, 0) if by.scores else _count_masks(plan)
    fixed += 0 if num_redone else by.compute * masks * shape.num_layers
    again = made // shape.num_layers if num_redone else 0
    on_device, moved = sum(kept), 0.0
    if plan.activation_offloading:
        window = max(_LAYERS_LEAVING, 1 + plan.activation_loading_horizon)
        on_device, moved = max(sum(kept[first : first + window]) for first in range(len(kept))), sum(kept[:-1])
    # When the backward pass of a layer comes to its attention, that of its MLP is done, and what the MLP kept is free.
    beside = sum(axis.attention_bytes(shape, plan, by.compute) for axis in AXES)
    at_attention = tokens * (redone - mlp - outside + beside) + _blocks_bytes(shape, plan, kind)
    at_attention += (by.compute * masks if num_redone else 0) + largest
    redone = max(tokens * redone + _tile_sums(shape, plan), at_attention) + again
    # 8: token ids
    return int(tokens * (on_device + outside + 8)) + rotary + fixed, int(redone), int(tokens * moved)


def _count_masks(plan: ParallelPlan) -> tuple[int, int]:
    """The numbers in the masks that attention makes for each layer, without documents; see Axis.mask_numbers."""
    counts = [axis.mask_numbers(plan) for axis in AXES]
    return sum(masks for masks, _ in counts), max(largest for _, largest in counts)


def _tile_sums(shape: ModelShape, plan: ParallelPlan) -> int:
    """Bytes of the fp32 sums of an MLP's gradients over its tiles (learn/model/mlp_tiles.py)."""
    if plan.mlp_tiles == 1 or plan.adapter is not None:
        return 0
    return FP32_BYTES * shape.parts.num_mlp_matrices * shape.hidden_size * shape.intermediate_size


def deferred_bytes(shape: ModelShape, plan: ParallelPlan) -> int:
    """Bytes that a microbatch keeps from the gradients of its activations until those of the weights are computed.

    Only the schedule `zero_bubble` computes them apart. PyTorch keeps the gradient of the output of each operation that
    has a trained weight: of products and norms. The activations are kept as well, and are counted as such.
    """
    by = _what_is_kept(shape, plan, "cpu")
    tokens = plan.microbatch_tokens
    if plan.adapter is not None:
        linears = targeted_linears(shape, plan.adapter)
        return tokens * by.compute * sum(linear.count * (plan.adapter.r + linear.out_features) for linear in linears)
    parts, hidden = shape.parts, shape.hidden_size
    heads = (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    share, width = shape.expert_widths
    products = heads + shape.num_kv_heads * shape.head_dim + hidden
    products += int((1 - share) * ((parts.num_mlp_matrices - 1) * shape.intermediate_size + hidden))
    experts = by.residual * int(share * shape.num_chosen_experts * (2 * width + hidden))
    norms = (parts.num_norms * hidden + parts.head_norms * heads) // by.sequence_ranks
    number = FP32_BYTES if parts.norm == "rms_fp32" else by.residual
    return tokens * shape.num_layers * (by.compute * products + experts + number * norms)


def _kept_by_layer(
    shape: ModelShape, plan: ParallelPlan, by: _Kept, layer: float, probabilities: float
) -> tuple[list[float], float]:
    """Per token: (bytes that each layer keeps, additional bytes when the last of those that do not keep all is redone).

    `layer`: the bytes that the backward pass of one layer needs, `probabilities`: of these, those of attention.
    """
    layer_input = by.residual * shape.hidden_size / by.sequence_ranks
    outputs = _matmul_output_bytes(shape, by)
    match plan.activation_checkpointing:
        case "none" if plan.activation_memory_budget is not None or knows_compiled(shape, plan):
            most = layer
            if not (shape.parts.attention_matrix or by.scores):
                most = outputs + _compiled_bytes(shape, by.compute) + _beside_bytes(shape, plan, by.compute)
                most += probabilities
            budget = 1.0 if plan.activation_memory_budget is None else plan.activation_memory_budget
            kept = layer_input + budget * most
            redone = max(0.0, layer - kept)
        case "none":
            kept, redone = layer, 0.0
        case "full":
            kept, redone = layer_input, layer
        case "selective":
            sent = sum(axis.result_bytes(shape, plan, by.compute) for axis in AXES)
            # A graph for the experts keeps its input too; the recomputation reuses outputs.
            inputs = layer_input * (1 + (plan.compile and plan.divides_graphs(bool(shape.experts))))
            kept, redone = inputs + outputs + sent, max(0, layer - outputs)
    every = plan.checkpoint_every
    by_layer = [kept if number % every == 0 else layer for number in range(1, shape.num_layers + 1)]
    # If layers follow that keep all, they are done and free when a layer is recomputed.
    return by_layer, redone if shape.num_layers % every == 0 else 0.0


def knows_compiled(shape: ModelShape, plan: ParallelPlan) -> bool:
    """Whether what compiled layers keep was measured: those of dense models without dropout and without an adapter."""
    parts = shape.parts
    is_plain = not (shape.experts or parts.attention_matrix or parts.residual_dropout or parts.attention_dropout)
    return plan.compile and plan.adapter is None and is_plain and plan.attn_implementation != "eager"


def _compiled_bytes(shape: ModelShape, compute: int) -> int:
    """Per token: what compiled layers keep beside a layer's input and the outputs of its matrix products.

    That is the input of the MLP and of its last product, the hyperbolic tangent of a GELU that is written out, and the
    inputs of norms of queries and keys with their statistics, as was measured (test_activation.py).
    """
    parts, heads = shape.parts, shape.num_heads + shape.num_kv_heads
    tensors = 2 if _writes_out_gelu(shape) else 1
    head_norms = heads * (shape.head_dim * compute + FP32_BYTES) if parts.head_norms else 0
    return compute * (tensors * shape.intermediate_size + shape.hidden_size) + head_norms


def _expert_row_bytes(shape: ModelShape, by: _Kept) -> int:
    """Bytes that the backward pass needs of a token in one expert: the inputs and outputs of its two products, and of
    the activation between them. A frozen expert needs no inputs. Autocast does not cast a grouped product."""
    _, width = shape.expert_widths
    inputs = 0 if by.frozen else shape.hidden_size + width
    return by.residual * (inputs + shape.hidden_size + 3 * width)


def _attention_half_bytes(shape: ModelShape, by: _Kept, sequence_len: int, kind: DeviceKind) -> float:
    """Bytes per token that the backward pass of a layer needs of its attention, norms and residuals included."""
    # If autocast casts, each projection keeps a copy of its input: q, k and v; otherwise one is shared.
    inputs = 3 if _keeps_copies(shape, by) else 1
    num_norms = shape.parts.num_norms - shape.parts.num_norms // 2
    return _half_bytes(shape, by, inputs, num_norms) + _attention_bytes(shape, by, sequence_len, kind)


def _mlp_half_bytes(shape: ModelShape, by: _Kept, tiles: int) -> float:
    """The same of its MLP in so many tiles, or of its experts."""
    parts = shape.parts
    inputs = 2 if _keeps_copies(shape, by) else 1  # gate and up
    share, _ = shape.expert_widths
    # A frozen projection keeps no input: one tensor less of the intermediate width, for the last one.
    number = (parts.mlp_saved - by.frozen) * by.compute
    # The input of a written-out GELU's power, its tangent, and that plus 1.
    number += 3 * (by.power - by.compute) if _writes_out_gelu(shape) else 0
    mlp = (1 - share) * number * shape.intermediate_size / tiles
    mlp += share * shape.num_chosen_experts * _expert_row_bytes(shape, by)
    return _half_bytes(shape, by, inputs, parts.num_norms // 2) + mlp


def _writes_out_gelu(shape: ModelShape) -> bool:
    """Whether the GELU of the MLP is `gelu_new`, written out in Python."""
    return shape.parts.num_mlp_matrices == 2 and shape.parts.mlp_saved == 5


def _keeps_copies(shape: ModelShape, by: _Kept) -> bool:
    return shape.parts.separate_projections and by.residual != by.compute


def _half_bytes(shape: ModelShape, by: _Kept, inputs: int, num_norms: int) -> float:
    """Per token: what either half of a layer keeps beside its own part. `inputs`: copies of the projections' input."""
    # The inputs of the post-norms of Gemma 2 and 3 are not the residual stream, yet cost the same fp32 copy.
    norms = num_norms * _norm_bytes(shape, by)
    dropout = by.mask * shape.hidden_size if shape.parts.residual_dropout else 0
    return norms + dropout + (0 if by.frozen else inputs * by.compute * shape.hidden_size)


def _probability_bytes(shape: ModelShape, plan: ParallelPlan, kind: DeviceKind) -> float:
    """Per token: the probabilities that learn/model/blocked_attention.py keeps in compiled layers."""
    length = plan.sequence_len
    if not plan.compile or length > _KEPT_LENGTH or not _has_blocks(shape, plan, kind):
        return 0.0
    blocks = -(-length // _KEPT_QUERIES)
    keys = (length + min(length, length / blocks)) / 2  # on average; a block sees none behind its end
    return DTYPE_BYTES[plan.precision.compute] * shape.num_heads * keys


def _has_blocks(shape: ModelShape, plan: ParallelPlan, kind: DeviceKind) -> bool:
    """Whether attention takes blocks of queries."""
    is_fused = not keeps_scores(shape, plan, kind) and not shape.parts.attention_dropout
    return kind == "cpu" and attends_in_blocks(plan) and not plan.divides_sequences and is_fused


def _blocks_bytes(shape: ModelShape, plan: ParallelPlan, kind: DeviceKind) -> int:
    """Scores that the backward pass of learn/model/blocked_attention.py holds at once."""
    if not _has_blocks(shape, plan, kind):
        return 0
    sequences, length = plan.micro_batch_size * plan.rows_per_sequence, plan.sequence_len
    block = min(_BLOCK_QUERIES, length) * length * DTYPE_BYTES[plan.precision.compute]
    return _BLOCKS_HELD * sequences * shape.num_heads * block


def _attention_bytes(shape: ModelShape, by: _Kept, sequence_len: int, kind: DeviceKind) -> int:
    """Per token: query, key, value, output, and the fp32 log-sum-exp; also the scores if attention is not fused."""
    parts, compute = shape.parts, by.compute
    query, key_value = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    scores = shape.num_heads * sequence_len
    head_norms = 0
    if parts.head_norms:
        kept = FP32_BYTES if by.frozen else 2 * FP32_BYTES if parts.norm == "rms_fp32" else FP32_BYTES + compute
        head_norms = (query + key_value) * kept + FP32_BYTES * (shape.num_heads + shape.num_kv_heads)
    if by.scores:
        # scores if they are capped, fp32 softmax, its cast copy; key and value are repeated for every query head
        cast = compute if compute != FP32_BYTES else 0
        capped = compute if parts.attention_matrix else 0
        return head_norms + 4 * compute * query + scores * (capped + FP32_BYTES + cast)
    if parts.attention_dropout and kind == "cpu":
        # CPUs have no fused attention with dropout: softmax, mask and product are kept, all in fp32
        return head_norms + FP32_BYTES * 3 * query + compute * query + 3 * FP32_BYTES * scores
    return head_norms + compute * 2 * (query + key_value) + FP32_BYTES * shape.num_heads


def _beside_bytes(shape: ModelShape, plan: ParallelPlan, compute: int) -> int:
    """Per token of this rank: what a layer keeps of other ranks' keys and values."""
    return sum(axis.kept_bytes(shape, plan, compute) for axis in AXES)


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


def _matmul_output_bytes(shape: ModelShape, by: _Kept) -> float:
    """Per token: what selective checkpointing keeps of a layer, the outputs of its matrix products and attention."""
    share, width = shape.expert_widths
    attention = 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim + shape.hidden_size
    mlp = (1 - share) * ((shape.parts.num_mlp_matrices - 1) * shape.intermediate_size + shape.hidden_size)
    experts = share * shape.num_chosen_experts * (2 * width + shape.hidden_size)
    return by.compute * (attention + mlp) + by.residual * experts + FP32_BYTES * shape.num_heads
