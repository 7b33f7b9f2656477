"""Seconds of one decoder layer and of the head, for one microbatch on one rank: a roofline."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from echelon.hardware.accelerators import Cluster
from echelon.planner.model_shape import ModelShape
from echelon.planner.plan import DTYPE_BYTES, ParallelPlan
from echelon.planner.rates import Rates, Software, attention_flops, product_flops

# Passes over memory of the forward pass, at least: numbers read and written per token, times the hidden size (two norms
# and residuals, rotary embeddings) and times the intermediate size (the gate's product). Backward passes take twice.
HIDDEN_PASSES, INNER_PASSES = 14, 3
_FLOAT8_PASSES = 4  # bytes per input number of a product: read in bf16, written in float8, twice
_LOSS_PASSES = 12  # bytes per logit: written, read and its gradient written and read, in two bytes and in four
# Unfused attention: passes over the scores in a forward pass: those of its two products, one written and one read, and
# those of the fused masked softmax and of dropout with its mask, in Megatron-LM (Korthikanti et al. 2022, section 4).
_SCORE_PASSES = (2, 4.5)


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one microbatch, forward and backward together.

    Of these, `forward` are the forward pass, and `weights` the gradients of weights. In `host` a CPU launches what it
    computes afterwards.
    """

    matmul: float = 0.0
    attention: float = 0.0
    memory_bound: float = 0.0
    recompute: float = 0.0
    host: float = 0.0
    forward: float = 0.0
    weights: float = 0.0

    @property
    def total(self) -> float:
        """All parts."""
        return self.matmul + self.attention + self.memory_bound + self.recompute + self.host

    def launched_in(self, seconds: float) -> "LayerTime":
        """The same, on a CPU that launches it in so many seconds, half of them in the forward pass."""
        return replace(self, host=seconds, forward=self.forward + seconds / 2)


@dataclass(frozen=True)
class LaunchTime:
    """Seconds in which the host launches one microbatch, forward and backward.

    Attributes:
        layer: of each layer.
        head: of embedding, head and loss.
        root: of the hooks around the layers.
    """

    layer: float = 0.0
    head: float = 0.0
    root: float = 0.0


def launch_time(plan: ParallelPlan, software: Software, rates: Rates) -> LaunchTime:
    """What the host of a rank launches. Full checkpointing launches forward passes twice."""
    hook = (rates.hook if plan.num_shards > 1 else rates.wrapper) if plan.uses_fully_shard else 0.0
    layer = software.launch_seconds(rates) + (rates.dispatch if plan.divides_matrices else 0.0)
    layer *= 1.5 if plan.activation_checkpointing == "full" else 1.0
    return LaunchTime(layer + hook, rates.head_launches * rates.launch, plan.stages_per_rank * hook)


def layer_time(
    part: ModelShape,
    plan: ParallelPlan,
    sequence_len: int,
    tokens: int,
    cluster: Cluster,
    software: Software,
    rates: Rates,
) -> LayerTime:
    """Seconds of one decoder layer of a rank's part of the model, for `tokens` of sequences of this length."""
    matmul = _matmul_forward(part, plan, tokens, cluster, rates)
    attention_once, attention_back = _attention(part, plan, sequence_len, tokens, cluster, software, rates)
    memory = _memory_forward(part, plan, tokens, cluster, software, rates)
    backward = 2.0
    if plan.adapter is not None:  # frozen weights have no gradient of their own
        trained = plan.adapter.num_trained_matmul_parameters - plan.adapter.num_saved_outside
        backward = 1.0 + min(1.0, trained / max(1, plan.adapter.num_frozen_parameters))
    end = 0.0 if software.recomputes_ends else _last_product(part, plan, tokens, cluster, rates)
    repeated = _recomputed(plan, software, matmul, attention_once, memory, end)
    return LayerTime(
        matmul=matmul * (1 + backward),
        attention=attention_once + attention_back,
        memory_bound=3 * memory,
        recompute=repeated,
        forward=matmul + attention_once + memory,
        weights=matmul * (backward - 1),
    )


def head_time(
    part: ModelShape, plan: ParallelPlan, tokens: int, cluster: Cluster, software: Software, rates: Rates
) -> LayerTime:
    """Seconds of the head and the loss."""
    compute = plan.precision.compute
    flops = product_flops(cluster.accelerator, compute, False, rates)
    once = product_seconds(tokens, [(part.hidden_size, part.vocab_size, 1.0)], flops, rates.small_dim)
    passes = rates.fused if software.fused else rates.eager
    memory = tokens * part.vocab_size * _LOSS_PASSES * passes / 2 / _bandwidth(cluster, rates)
    if rates.logit_seconds is not None:  # measured with operations that are not fused
        memory = tokens * part.vocab_size * rates.logit_seconds * passes / rates.eager
    frozen = plan.adapter is not None and not plan.adapter.num_saved_outside
    matmul = once * (2 if frozen else 3)
    return LayerTime(matmul=matmul, memory_bound=memory, forward=once + memory / 3, weights=matmul - 2 * once)


def _bandwidth(cluster: Cluster, rates: Rates) -> float:
    known = cluster.accelerator.memory_bandwidth
    return (rates.memory_bandwidth if known is None else known) * rates.bandwidth_share


def product_seconds(tokens: int, products: Sequence[tuple[int, int, float]], flops: float, small_dim: float) -> float:
    """Seconds of the products of so many tokens with matrices: (inner dim, outer dim, how often).

    `flops`: FLOP/s of large products. `small_dim`: see `Rates`.
    """
    return sum(
        2.0 * tokens * times * inner * outer / flops * (1 + small_dim * (1 / tokens + 1 / inner + 1 / outer) / 2)
        for inner, outer, times in products
    )


def _matmul_forward(part: ModelShape, plan: ParallelPlan, tokens: int, cluster: Cluster, rates: Rates) -> float:
    """Seconds of the products of a forward pass."""
    policy = plan.precision
    flops = product_flops(cluster.accelerator, policy.compute, policy.float8, rates)
    hidden, query = part.hidden_size, part.num_heads * part.head_dim
    key_value = part.num_kv_heads * part.head_dim
    share, width = part.expert_widths
    inner, many = part.intermediate_size, part.parts.num_mlp_matrices
    products = [(hidden, query + 2 * key_value, 1.0), (query, hidden, 1.0)]
    if share < 1:
        products += [(hidden, (many - 1) * inner, 1 - share), (inner, hidden, 1 - share)]
    if share:
        chosen = share * part.num_chosen_experts
        products += [(hidden, 2 * width, chosen), (width, hidden, chosen)]
    counted = sum(times * rows * columns for rows, columns, times in products)
    active = part.num_layer_parameters - part.num_idle_parameters / part.num_layers
    other = max(1.0, active / counted) if not share else 1.0  # products that the widths do not tell of
    return other * product_seconds(tokens, products, flops, rates.small_dim)


def _attention(
    part: ModelShape,
    plan: ParallelPlan,
    sequence_len: int,
    tokens: int,
    cluster: Cluster,
    software: Software,
    rates: Rates,
) -> tuple[float, float]:
    """Seconds of (the forward, the backward pass) of attention; fused kernels skip the masked half of the scores."""
    device, compute = cluster.accelerator, plan.precision.compute
    scores = tokens * part.num_heads * sequence_len
    flops = 4.0 * scores * part.head_dim
    if software.attention == "unfused":
        rate = product_flops(device, compute, False, rates)
        passes = scores * DTYPE_BYTES[compute] / _bandwidth(cluster, rates)
        once = max(flops / rate, _SCORE_PASSES[0] * passes) + _SCORE_PASSES[1] * passes
        return once, 2 * once
    once = flops / 2 / attention_flops(device, compute, part.head_dim, software, rates)
    return once, 2.5 * once / rates.attention_backward


def _memory_forward(
    part: ModelShape, plan: ParallelPlan, tokens: int, cluster: Cluster, software: Software, rates: Rates
) -> float:
    """Seconds of what waits for memory in a forward pass."""
    number = DTYPE_BYTES[plan.precision.compute]
    divided = plan.sequence_ranks
    share, width = part.expert_widths
    inner = (1 - share) * part.intermediate_size + share * part.num_chosen_experts * width
    passes = HIDDEN_PASSES * part.hidden_size / divided + INNER_PASSES * inner
    num_bytes = passes * number * (rates.fused if software.fused else rates.eager)
    if plan.precision.float8:
        num_bytes += _FLOAT8_PASSES * (2 * part.hidden_size / divided + inner)
    return tokens * num_bytes / _bandwidth(cluster, rates)


def _last_product(part: ModelShape, plan: ParallelPlan, tokens: int, cluster: Cluster, rates: Rates) -> float:
    """Seconds of the forward product that ends a layer, if nothing behind it needs its result in the backward pass."""
    share, _ = part.expert_widths
    if part.parts.num_norms > 2 or part.parts.residual_dropout:
        return 0.0
    flops = product_flops(cluster.accelerator, plan.precision.compute, plan.precision.float8, rates)
    product = (part.intermediate_size, part.hidden_size, 1 - share)
    return product_seconds(tokens, [product], flops, rates.small_dim)


def _recomputed(
    plan: ParallelPlan, software: Software, matmul: float, attention: float, memory: float, end: float
) -> float:
    """Seconds of a layer's recomputation; selective checkpointing keeps what products and attention return.

    end: of the product that full checkpointing leaves out.
    """
    match plan.activation_checkpointing:
        case "full":
            return (matmul - end + attention + memory) / plan.checkpoint_every
        case "selective":
            return memory + software.recomputed_products * matmul
        case "none" if plan.activation_memory_budget is not None:
            return (1 - plan.activation_memory_budget) * (matmul + attention + memory)
    return 0.0
