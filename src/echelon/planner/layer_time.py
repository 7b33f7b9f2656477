"""Seconds of one decoder layer and of the head, for one microbatch on one rank: a roofline."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from echelon.planner.hardware.accelerators import Cluster
from echelon.planner.hardware.links import Links
from echelon.planner.model_shape import SHARED_INPUTS, ModelShape
from echelon.planner.plan import DTYPE_BYTES, ParallelPlan
from echelon.planner.rates import Rates, Software, attention_flops, product_flops

# Passes over memory of the forward pass, at least: numbers read and written per token, times the hidden size (two norms
# and residuals, rotary embeddings) and times the intermediate size (the gate's product). Backward passes take twice.
HIDDEN_PASSES, INNER_PASSES = 14, 3
# The same of the models of transformers, one operation after the other. RMSNorm, in bytes per number by those of one: a
# square (2 passes in fp32), its mean (1), products with the root (2) and with the weight (2), in fp32 in Gemma, and
# casts. Rotary embeddings, in passes: products with cosine and sine (4), the other half (3), their sum (3).
NORM_BYTES = {"rms": {2: 36, 4: 28}, "rms_fp32": {2: 40, 4: 28}}
ROTARY_PASSES = 10
_FLOAT8_PASSES = 4  # bytes per input number of a product: read in bf16, written in float8, twice
# LoRA on a GPU: passes over inputs and outputs of targets for A and B; bytes of a 4-bit weight, which is read and cast.
# An input is read for A x and for A's gradient, and its own gradient is written and added: once for all that share it.
_ADAPTER_PASSES, _DEQUANTIZED_BYTES = 4, 2.6
_LOSS_PASSES = 12  # bytes per logit: written, read and its gradient written and read, in two bytes and in four
# Unfused attention: passes over the scores in a forward pass: those of its two products, one written and one read, and
# those of the fused masked softmax and of dropout with its mask, in Megatron-LM (Korthikanti et al. 2022, section 4).
_SCORE_PASSES = (2, 4.5)


@dataclass(frozen=True)
class Step:
    """The inputs of the seconds of a step."""

    shape: ModelShape
    plan: ParallelPlan
    cluster: Cluster
    software: Software
    rates: Rates
    part: ModelShape
    """The part of the model that one rank stores and computes."""
    between: Links | None = None
    """The links between copies of the model; None for those of the cluster."""

    @property
    def tokens(self) -> int:
        """Of one microbatch on one rank."""
        return self.plan.microbatch_tokens

    @property
    def bandwidth(self) -> float:
        """Bytes/s of operations that wait for memory."""
        nominal = self.cluster.accelerator.memory_bandwidth
        return (self.rates.memory_bandwidth if nominal is None else nominal) * self.rates.bandwidth_share

    def flops(self, float8: bool = False) -> float:
        """FLOP/s of large products. Raises PlanError if the speed of the devices is unknown."""
        return product_flops(self.cluster.accelerator, self.plan.precision.compute, float8, self.rates)

    @property
    def hidden_bytes(self) -> float:
        """Of the hidden states of one microbatch."""
        return self.tokens * self.shape.hidden_size * DTYPE_BYTES[self.plan.precision.compute]

    def exposed(self, communication: float, computation: float) -> float:
        """The seconds of communication that do not run beside computation that they could overlap with."""
        return communication - self.rates.overlap * min(communication, computation)


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
    """Seconds in which the host launches a microbatch, forward and backward: each layer, embedding with head and loss,
    and the hooks around the layers (`root`)."""

    layer: float = 0.0
    head: float = 0.0
    root: float = 0.0


def launch_time(step: Step) -> LaunchTime:
    """What the host of a rank launches. Full checkpointing launches forward passes twice, without compilation both."""
    plan, rates = step.plan, step.rates
    hook = (rates.hook if plan.num_shards > 1 else rates.wrapper) if plan.uses_fully_shard else 0.0
    layer = step.software.launch_seconds(rates) + (rates.dispatch if plan.divides_matrices else 0.0)
    runs_again = plan.activation_checkpointing == "full" or not step.software.fused
    layer *= 1.5 if runs_again and plan.activation_checkpointing != "none" else 1.0
    return LaunchTime(layer + hook, rates.head_launches * rates.launch, plan.stages_per_rank * hook)


def layer_time(step: Step) -> LayerTime:
    """Seconds of one decoder layer of a rank's part of the model."""
    plan, matmul, memory = step.plan, _matmul_forward(step), _memory_forward(step)
    attention_once, attention_back = _attention(step)
    backward = 2.0
    if plan.adapter is not None:  # frozen weights have no gradient of their own
        trained = plan.adapter.num_trained_matmul_parameters - plan.adapter.num_saved_outside
        backward = 1.0 + min(1.0, trained / max(1, plan.adapter.num_frozen_parameters))
    repeated = _recomputed(step, matmul, attention_once, memory)
    return LayerTime(
        matmul=matmul * (1 + backward),
        attention=attention_once + attention_back,
        memory_bound=3 * memory,
        recompute=repeated,
        forward=matmul + attention_once + memory,
        weights=matmul * (backward - 1),
    )


def head_time(step: Step) -> LayerTime:
    """Seconds of the head and the loss."""
    part, plan, tokens, rates = step.part, step.plan, step.tokens, step.rates
    once = product_seconds(tokens, [(part.hidden_size, part.head_size, 1.0)], step.flops(), rates.small_dim)
    passes = rates.fused if step.software.fused else rates.eager
    memory = tokens * part.head_size * _LOSS_PASSES * passes / 2 / step.bandwidth
    if rates.logit_seconds is not None:  # measured with operations that are not fused
        memory = tokens * part.head_size * rates.logit_seconds * passes / rates.eager
    frozen = plan.adapter is not None and not plan.adapter.num_saved_outside
    matmul = once * (2 if frozen else 3)
    return LayerTime(matmul=matmul, memory_bound=memory, forward=once + memory / 3, weights=matmul - 2 * once)


def product_seconds(tokens: int, products: Sequence[tuple[int, int, float]], flops: float, small_dim: float) -> float:
    """Seconds of the products of so many tokens with matrices: (inner dim, outer dim, how often).

    `flops`: FLOP/s of large products. `small_dim`: see `Rates`.
    """
    return sum(
        2.0 * tokens * times * inner * outer / flops * (1 + small_dim * (1 / tokens + 1 / inner + 1 / outer) / 2)
        for inner, outer, times in products
    )


def _matmul_forward(step: Step) -> float:
    """Seconds of the products of a forward pass."""
    part = step.part
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
    return other * product_seconds(step.tokens, products, step.flops(step.plan.precision.float8), step.rates.small_dim)


def _attention(step: Step) -> tuple[float, float]:
    """Seconds of (the forward, the backward pass) of attention; fused kernels skip the masked half of the scores.

    With a window of w of s tokens, flash kernels on GPUs compute w (2 s - w) / 2 of the s s scores.
    """
    part, compute = step.part, step.plan.precision.compute
    scores = step.tokens * part.num_heads * step.plan.sequence_len
    flops = 4.0 * scores * part.head_dim
    if step.software.attention == "unfused":
        passes = scores * DTYPE_BYTES[compute] / step.bandwidth
        once = max(flops / step.flops(), _SCORE_PASSES[0] * passes) + _SCORE_PASSES[1] * passes
        return once, 2 * once
    device, head_dim, software = step.cluster.accelerator, part.head_dim, step.software
    once = flops / 2 / attention_flops(device, compute, head_dim, software, step.rates)
    windowed, bound = part.parts.windowed, min(1.0, part.parts.window / step.plan.sequence_len)
    if windowed and software.attention not in ("cpu", "cpu_blocks"):
        flash = software if software.attention == "flash3" else replace(software, attention="flash")
        bounded = bound * (2 - bound) * flops / 2 / attention_flops(device, compute, head_dim, flash, step.rates)
        once = (1 - windowed) * once + windowed * bounded
    return once, 2.5 * once / step.rates.attention_backward


def _memory_forward(step: Step) -> float:
    """Seconds of what waits for memory in a forward pass."""
    part, plan, rates = step.part, step.plan, step.rates
    number, divided = DTYPE_BYTES[plan.precision.compute], plan.sequence_ranks
    share, width = part.expert_widths
    inner = (1 - share) * part.intermediate_size + share * part.num_chosen_experts * width
    passes = HIDDEN_PASSES * part.hidden_size / divided + INNER_PASSES * inner
    num_bytes = passes * number * (rates.fused if step.software.fused else rates.eager) + _unfused_bytes(step)
    if plan.precision.float8:
        num_bytes += _FLOAT8_PASSES * (2 * part.hidden_size / divided + inner)
    adapted, dequantized = _adapter_bytes(step)  # forward and backward
    return (step.tokens * (num_bytes + adapted / 3) + dequantized / 3) / step.bandwidth


def _adapter_bytes(step: Step) -> tuple[float, float]:
    """Bytes of a layer's adapter: (per token, of weights in 4 bits). 0 on CPUs, which are measured on whole layers."""
    adapter, num_layers = step.plan.adapter, step.shape.num_layers
    if adapter is None or not step.software.moves_adapters or step.cluster.kind == "cpu":
        return 0.0, 0.0
    features = (adapter.num_trained_parameters - adapter.num_saved_inside - adapter.num_saved_outside) / adapter.r
    if adapter.method != "dora" and not adapter.dropout and not step.plan.divides_matrices:
        features -= _count_shared_inputs(step.shape, adapter.targets)
    moved = _ADAPTER_PASSES * features * DTYPE_BYTES[step.plan.precision.compute]
    return moved / num_layers, 2 * _DEQUANTIZED_BYTES * adapter.num_quantized_parameters / num_layers


def _count_shared_inputs(shape: ModelShape, targets: Collection[str]) -> int:
    """The inputs, over all layers, that an adapter reads together with those of another target."""
    groups = ([name for name in names if name in targets] for names in SHARED_INPUTS)
    others = {name for group in groups for name in group[1:]}
    linears = (linear for linear in shape.linears if linear.name in others and linear.adaptable)
    return sum(linear.count * linear.in_features for linear in linears)


def _unfused_bytes(step: Step) -> float:
    """Bytes per token of norms and rotary embeddings beyond `eager` times the fewest, which was fitted without them.

    None if the bandwidth was measured on layers of Llama, as on all CPUs, or adapters may have fused kernels.
    """
    part, plan, cluster, eager = step.part, step.plan, step.cluster, step.rates.eager
    if step.software.fused or cluster.kind == "cpu" or cluster.calibration is not None or plan.adapter is not None:
        return 0.0
    number, hidden = DTYPE_BYTES[plan.precision.compute], part.hidden_size / plan.sequence_ranks
    heads = (part.num_heads + part.num_kv_heads) * part.head_dim
    rotary = 0.0 if part.num_position_parameters else (ROTARY_PASSES - 2 * eager) * number * heads
    if part.parts.norm == "layer":
        return rotary
    norms = part.parts.num_norms * hidden + part.parts.head_norms * heads
    return rotary + NORM_BYTES[part.parts.norm][number] * norms - 2 * 2 * eager * number * hidden


def _last_product(step: Step) -> float:
    """Seconds of the forward product that ends a layer, if nothing needs its result when the layer is recomputed."""
    part, (share, _) = step.part, step.part.expert_widths
    if step.software.recomputes_ends or part.parts.num_norms > 2 or part.parts.residual_dropout:
        return 0.0
    product = (part.intermediate_size, part.hidden_size, 1 - share)
    return product_seconds(step.tokens, [product], step.flops(step.plan.precision.float8), step.rates.small_dim)


def _recomputed(step: Step, matmul: float, attention: float, memory: float) -> float:
    """Seconds of a layer's recomputation; selective checkpointing keeps what products and attention return."""
    plan = step.plan
    match plan.activation_checkpointing:
        case "full":
            return (matmul - _last_product(step) + attention + memory) / plan.checkpoint_every
        case "selective":
            return memory + step.software.recomputed_products * matmul
        case "none" if plan.activation_memory_budget is not None:
            return (1 - plan.activation_memory_budget) * (matmul + attention + memory)
    return 0.0
