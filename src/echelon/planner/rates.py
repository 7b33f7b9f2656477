"""The constants of the time estimate: speeds of devices and programs, each with its source or its fit.

The fitted ones are those of `benchmarks/planner_accuracy.py`, over the published measurements in benchmarks/data.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Literal, TypeVar

from echelon.ground.errors import PlanError
from echelon.planner.hardware.accelerators import Accelerator, Cluster, DeviceKind
from echelon.planner.model_shape import ModelShape
from echelon.planner.plan import ParallelPlan

AttentionKernel = Literal["flash", "flash3", "cudnn", "unfused", "cpu", "cpu_blocks"]
_Value = TypeVar("_Value")

# The best matrix product measured on a device, as a share of its peak: bf16, float8 (ml-engineering, stas00, MAMF).
_BEST_PRODUCT: dict[str, tuple[float, float]] = {
    "A100": (0.87, 0.0), "H100": (0.80, 0.72), "H200": (0.80, 0.72), "B200": (0.776, 0.763), "B300": (0.776, 0.763),
    "GB200": (0.729, 0.723),
}  # fmt: skip
_USUAL_BEST = (0.80, 0.72)
# The fp16 rate of tensor cores where there is no bf16 one, NVIDIA's datasheets.
_FP16_FLOPS = {"V100": 125e12, "V100-32": 125e12, "T4": 65e12}
_FLOAT8_GAIN = 2.0  # of the peak, NVIDIA's datasheets of all devices with float8

# Forward attention as a share of the peak, head dim 128, causal. FlashAttention-2 (Dao 2023, arXiv:2307.08691, figure
# 5 and 6): 190 of 312 TFLOP/s on A100, 335 of 989 on H100. FlashAttention-3 and cuDNN (Shah et al. 2024,
# arXiv:2407.08608, figure 5): 610 of 989.
_FLASH = {"A100": 0.61, "H100": 0.34, "H200": 0.34}
_USUAL_FLASH, _FLASH3 = 0.45, 0.60
# The devices whose causal attention PyTorch computes with cuDNN: compute capability 9.0 and 10.0, if cuDNN is newer
# than 9.15, as in the builds of PyTorch 2.11 and later (check_prefer_cudnn_attention in PyTorch's sdp_utils.cpp).
_CUDNN = {"H100", "H200", "B200", "GB200"}


@dataclass(frozen=True)
class Rates:
    """Constants of the estimate; those that are fitted have no source of their own.

    Attributes:
        product: the share of the best matrix product that training sustains, under its power limit.
        small_dim: a product in which one of three dims is half of this size takes twice as long per FLOP.
        attention: the share of the published speed of the attention kernel.
        fused: passes over memory of compiled or fused layers, times the fewest possible.
        eager: the same of layers that run operation by operation.
        overlap: the part of communication that runs beside computation, if computation is long enough.
        launch: seconds in which the host launches one layer, forward and backward, operation by operation.
        head_launches: how many layers take as long to launch as the embedding, head and loss of a microbatch
            (`benchmarks/launches.py`, on a CPU).
        step_seconds: seconds of a step outside of all else: the loader, logging, clipping.
        update_bytes: bytes that clipping and AdamW in fp32 read and write per parameter: 9 numbers.
        memory_bandwidth: bytes/s, if that of the device is unknown.
        host_bandwidth: bytes/s between a GPU and host memory: PCIe 4, ml-engineering.
        bandwidth_share: the share of a device's memory bandwidth that kernels reach (BabelStream on A100 and H100).
        attention_backward: the speed of attention's backward pass, as a share of its forward pass (the same figures).
        products: FLOP/s of large matrix products by dtype, where they are measured.
        attention_rate: FLOP/s of the forward pass of attention, where it is measured.
        wrapper, hook, dispatch: seconds of the host beyond `launch`, for a layer with `fully_shard` over one rank, for
            one that is sharded over several, and for one whose matrices are divided.
        logit_seconds: of the loss per logit, forward and backward, where it is measured.
        waits_for_host: whether the device does nothing while the host launches the next operation, as a CPU.
        sharing: processes that share a core of a CPU.
        jitter: how irregularly ranks compute: see `expect_wait`, in square roots of seconds.
    """

    product: float = 0.85
    small_dim: float = 410.0
    attention: float = 0.65
    fused: float = 1.15
    eager: float = 1.74
    overlap: float = 0.57
    launch: float = 1e-3
    head_launches: float = 1.8
    step_seconds: float = 0.01
    update_bytes: float = 36.0
    memory_bandwidth: float = 10e9
    host_bandwidth: float = 24e9
    bandwidth_share: float = 0.85
    attention_backward: float = 0.85
    products: Mapping[str, float] = field(default_factory=dict)
    attention_rate: float | None = None
    logit_seconds: float | None = None
    wrapper: float = 0.0
    hook: float = 0.0
    dispatch: float = 0.0
    waits_for_host: bool = False
    sharing: float = 1.0
    jitter: float = 0.0


GPU_RATES = Rates()
CPU_RATES = Rates(product=1.0, small_dim=16.0, bandwidth_share=1.0, overlap=0.0, launch=1e-3)


def rates_of(cluster: Cluster) -> Rates:
    """The constants of this kind of device, and what a calibration measured in place of them."""
    usual, measured = GPU_RATES if cluster.kind == "cuda" else CPU_RATES, cluster.calibration
    if measured is None:
        return usual
    cores = measured.cores_of(cluster.devices_per_node) if measured.is_cpu else 1.0
    sharing = max(1.0, 1 / cores)
    bandwidth = cluster.accelerator.memory_bandwidth or measured.stream_bandwidth * cores
    return replace(
        usual,
        small_dim=measured.small_dim,
        attention=1.0,
        attention_backward=measured.attention_backward,
        products={dtype: rate * cores for dtype, rate in measured.product_flops.items()},
        attention_rate=measured.attention_flops * cores,
        logit_seconds=measured.logit_seconds / cores,
        memory_bandwidth=bandwidth,
        bandwidth_share=measured.pointwise_bandwidth * cores / bandwidth,
        launch=measured.launch_seconds * sharing,
        wrapper=measured.wrapper_seconds * sharing,
        hook=measured.hook_seconds * sharing,
        dispatch=measured.dispatch_seconds * sharing,
        step_seconds=usual.step_seconds * sharing,
        waits_for_host=measured.is_cpu,
        sharing=sharing,
        jitter=measured.jitter,
    )


@dataclass(frozen=True)
class Software:
    """The program that trains, as far as its speed depends on it.

    Attributes:
        attention: its attention kernel.
        fused: whether pointwise operations are fused, by a compiler or by kernels written for it.
        tp_overlap: the part of the communication of divided matrices that runs beside their products.
        ring_attention: whether keys and values of other ranks are sent beside attention.
        recomputed_products: the part of the products that selective checkpointing computes again.
        recomputes_ends: whether full checkpointing runs a layer again to its end, as Megatron-LM does. PyTorch stops
            once it has all that the backward pass needs, before the last product of the layer and its sum over ranks.
        divides_borders: whether stages send each other only a rank's part of hidden states that are divided,
            of a sequence.
        copies: whether weights and gradients are cast and added up by passes of their own, as in PyTorch. Megatron-LM
            and DeepSpeed keep weights in 16 bits, and Megatron-LM's products add to gradients.
        moves_adapters: whether A and B of LoRA read and write their inputs and outputs in passes of their own.
    """

    attention: AttentionKernel = "flash"
    fused: bool = True
    tp_overlap: float = 0.0
    ring_attention: bool = False
    recomputed_products: float = 0.0
    recomputes_ends: bool = False
    divides_borders: bool = False
    copies: bool = True
    moves_adapters: bool = False

    def describe(self) -> str:
        """One line for the user."""
        names = {
            "flash": "FlashAttention-2",
            "flash3": "FlashAttention-3 or cuDNN",
            "cudnn": "cuDNN's attention",
            "unfused": "unfused attention",
            "cpu": "PyTorch's attention on the CPU",
            "cpu_blocks": "attention on the CPU in blocks of queries",
        }
        return f"kernels: {names[self.attention]}, pointwise operations {'fused' if self.fused else 'not fused'}"

    def launch_seconds(self, rates: Rates) -> float:
        """Seconds in which the host launches one layer and microbatch; fused layers have about a third as many."""
        return rates.launch * (0.35 if self.fused else 1.0)


def choose_software(shape: ModelShape, plan: ParallelPlan, cluster: Cluster) -> Software:
    """What echelon runs: the attention that PyTorch chooses, and fused layers if they are compiled."""
    return Software(_choose_attention(shape, plan, cluster), plan.compile, moves_adapters=True)


def _choose_attention(shape: ModelShape, plan: ParallelPlan, cluster: Cluster) -> AttentionKernel:
    """Flex attention, which caps scores, is charged as FlashAttention-2, and so is what passes a mask or has dropout,
    for which `choose_attention_kernel` turns cuDNN's kernels off."""
    if cluster.kind == "cpu":
        return "unfused" if plan.attn_implementation == "eager" else "cpu_blocks" if attends_in_blocks(plan) else "cpu"
    if keeps_scores(shape, plan, cluster.kind):
        return "unfused"
    if plan.attn_implementation is not None:
        return "flash3" if plan.attn_implementation == "flash_attention_3" else "flash"
    is_plain = not plan.documents_apart and plan.cp_method in (None, "ulysses")
    is_usual = not shape.parts.attention_matrix and not shape.parts.attention_dropout
    has_kernel = plan.precision.compute != "float32" and cluster.accelerator.name in _CUDNN
    return "cudnn" if is_plain and is_usual and has_kernel else "flash"


def keeps_scores(shape: ModelShape, plan: ParallelPlan, kind: DeviceKind) -> bool:
    """Whether attention is eager: its scores are kept for the backward pass."""
    is_capped = shape.parts.attention_matrix and (kind == "cpu" or compiles_checkpoints(plan))
    return is_capped or plan.attn_implementation == "eager"


def compiles_checkpoints(plan: ParallelPlan) -> bool:
    """Whether layers are compiled with their recomputation. Flex attention is wrong in these, so that soft-capped
    attention is eager: with torch 2.11 on an H200, all gradients of a model were off by 4 to 7 %."""
    return plan.compile and plan.activation_checkpointing != "none"


def attends_in_blocks(plan: ParallelPlan) -> bool:
    """Whether attention on a CPU takes blocks of queries: where that is faster than PyTorch's kernel."""
    compute = plan.precision.compute
    return compute == "bfloat16" or (compute == "float32" and plan.compile)


def product_flops(device: Accelerator, compute: str, float8: bool, rates: Rates) -> float:
    """FLOP/s of large matrix products. Raises PlanError if the device's rate is unknown."""
    if compute in rates.products and not float8:
        return rates.products[compute] * rates.product
    peak = device.peak_flops(compute)
    if compute == "float16" or (compute != "float32" and peak is None):
        peak = _FP16_FLOPS.get(device.name, peak)
    if peak is None:
        raise PlanError(
            f"the speed of {device.name} is unknown, so the time of a step cannot be estimated; run echelon plan "
            "--calibrate on such a machine."
        )
    if device.name == "cpu":
        return peak * rates.product
    best = _by_device(_BEST_PRODUCT, device.name, _USUAL_BEST)
    share = best[1] * _FLOAT8_GAIN if float8 else best[0] if compute != "float32" else 0.9
    return peak * share * rates.product


def attention_flops(device: Accelerator, compute: str, head_dim: int, software: Software, rates: Rates) -> float:
    """FLOP/s of the forward pass of fused causal attention; narrow heads are slower (FlashAttention-2, figure 5)."""
    if rates.attention_rate is not None:
        return rates.attention_rate * rates.attention
    if device.name == "cpu":
        return product_flops(device, compute, False, rates) * rates.attention
    peak = product_flops(device, compute, False, rates) / rates.product
    peak /= _by_device(_BEST_PRODUCT, device.name, _USUAL_BEST)[0]
    is_new = software.attention in ("flash3", "cudnn")
    share = _FLASH3 if is_new else _by_device(_FLASH, device.name, _USUAL_FLASH)
    return peak * share * rates.attention * min(1.0, math.sqrt(math.sqrt(head_dim / 128)))


def _by_device(table: dict[str, _Value], name: str, otherwise: _Value) -> _Value:
    return table.get(name, table.get(name.split("-")[0], otherwise))


def expect_largest(count: int) -> float:
    """The expected largest of `count` independent numbers of a standard normal distribution.

    The quantile of Blom, "Statistical Estimates and Transformed Beta-Variables" (1958), at (n - 3/8) / (n + 1/4).
    """
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0


def expect_wait(count: int, jitter: float, seconds: float, times: float) -> float:
    """The expected seconds in which one of `count` ranks waits for the last, at `times` collectives in a step.

    Between two of them each rank computes for a part s of `seconds`; its time varies normally with a standard deviation
    of jitter * sqrt(s), as the sum of many short independent disturbances does.
    """
    return jitter * expect_largest(count) * math.sqrt(seconds * times)
