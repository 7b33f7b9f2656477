"""The predicted time of a step, against values worked out by hand, published collectives and a simulated pipeline."""

import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from echelon.ground.errors import PlanError
from echelon.planner.axes.axis import CommunicationGroup, find_group
from echelon.planner.axes.data import copied_bytes
from echelon.planner.forecast import describe_payoff, find_payoff
from echelon.planner.hardware.accelerators import ACCELERATORS, Cluster, parse_devices
from echelon.planner.hardware.instances import INSTANCES, cluster_of
from echelon.planner.hardware.links import LINKS, Link, Links
from echelon.planner.layer_time import NORM_BYTES, ROTARY_PASSES
from echelon.planner.memory import estimate_memory
from echelon.planner.plan import AdapterPlan, ParallelPlan, Precision, SyncPlan
from echelon.planner.rates import GPU_RATES, Rates, Software, choose_software
from echelon.planner.replica_limits import without_sync
from echelon.planner.shape import build_shape
from echelon.planner.time import estimate_time

# Llama 2 7B; a layer has 4 * 4096^2 + 3 * 4096 * 11008 weights in products, and two norms.
LAYER = 4 * 4096**2 + 3 * 4096 * 11008
LLAMA = build_shape(
    {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000, "tie_word_embeddings": False,
    }
)  # fmt: skip
BF16 = Precision(compute="bfloat16")
GEMMA2 = build_shape({"model_type": "gemma2"})
SEVEN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PLAIN = Rates(
    product=1, small_dim=0, attention=1, fused=1, eager=1, overlap=0, launch=0, step_seconds=0, bandwidth_share=1
)
FSDP = ParallelPlan(
    "fsdp", dp_shard=64, reshard_after_forward=True, reduce_gradients="each", sequence_len=4096, micro_batch_size=2,
    num_microbatches=4, precision=BF16,
)  # fmt: skip
CLUSTER = parse_devices("64xA100-80")
# Gathered weights are copied out of their buffer twice in each of four microbatches; gradients are cast to fp32, and
# added to those of the shard.
COPIES = (4 * 2 * 4 + 4 * (6 + 12 / 64)) * (32 * (LAYER + 2 * 4096) + 2 * 32000 * 4096 + 4096) / 2039e9


def step_of(plan=FSDP, devices="64xA100-80", rates=PLAIN, shape=LLAMA, length=4096):
    return estimate_time(shape, replace(plan, sequence_len=length), parse_devices(devices), rates=rates)


def test_products_take_their_flops_at_the_best_measured_rate():
    tokens, rate = 4 * 2 * 4096, 0.87 * 312e12
    assert step_of().matmul == pytest.approx(6 * (32 * LAYER + 4096 * 32000) * tokens / rate, rel=1e-4)


def test_small_dims_slow_products_down():
    # 8192 tokens, dims of 4096 to 12288 and 32000: each product takes 1 + 150 * (1/8192 + 1/inner + 1/outer) as long.
    slow = step_of(rates=replace(PLAIN, small_dim=300.0)).matmul / step_of().matmul
    assert 1 + 150 * (1 / 8192 + 1 / 4096 + 1 / 32000) < slow < 1 + 150 * (1 / 8192 + 2 / 4096)


def test_attention_computes_half_of_the_scores_once_forward_and_two_and_a_half_times_backward():
    forward = 4 * (2 * 4096) * 4096 * 4096 / 2 / 190.32e12  # 61 % of 312 TFLOP/s: FlashAttention-2 on an A100
    assert step_of().attention == pytest.approx(4 * 32 * forward * (1 + 2.5 / 0.85))


def test_memory_bound_work_reads_and_writes_its_bytes():
    tokens, bandwidth = 4 * 2 * 4096, 2039e9
    layers = 3 * 32 * tokens * 2 * (14 * 4096 + 3 * 11008) / bandwidth
    expected = layers + tokens * 32000 * 6 / bandwidth + COPIES
    assert step_of(replace(FSDP, compile=True)).memory_bound == pytest.approx(expected)


def test_an_adapter_moves_bytes_of_its_own_on_a_gpu():
    """Inputs and outputs of seven targets four times, and 4-bit weights in two passes, which also write two bytes.

    Without dropout q, k and v read one input, and gate and up: 3 of 7 inputs are not read again.
    """
    features = 4 * 2 * 4096 + 3 * (4096 + 11008)
    lora = AdapterPlan("lora", 16, 0.1, SEVEN, 32 * 16 * features, 32 * LAYER)
    qlora, none = replace(lora, num_quantized_parameters=32 * LAYER), replace(lora, num_trained_parameters=0)
    with_lora, with_qlora, without, shared = (
        step_of(replace(FSDP, compile=True, adapter=adapter)).memory_bound
        for adapter in (lora, qlora, none, replace(lora, dropout=0.0))
    )
    tokens, bandwidth = 4 * 2 * 4096, 2039e9
    inputs = 32 * 4 * features * 2 * tokens / bandwidth
    assert with_lora - without == pytest.approx(inputs, rel=2e-2)  # and shards of A, B
    assert with_lora - shared == pytest.approx(32 * 4 * 3 * 4096 * 2 * tokens / bandwidth)
    assert with_qlora - with_lora == pytest.approx(4 * 2 * 2.6 * 32 * LAYER / bandwidth, rel=0.1)


@pytest.mark.parametrize(
    ("shape", "passes"),
    [
        # two norms of 18 passes in place of 2; queries and keys of 32 heads each are read and written 10 times, not 2
        (LLAMA, 2 * (18 - 2) * 4096 + (10 - 2) * 64 * 128),
        # four norms of 20, of which two were counted; 8 heads of queries and 4 of keys
        (GEMMA2, (4 * 20 - 2 * 2) * 2304 + (10 - 2) * 12 * 256),
        (build_shape({"model_type": "gpt2"}), 0),  # LayerNorm is one kernel
    ],
    ids=["llama", "gemma2", "gpt2"],
)
def test_norms_and_rotary_embeddings_that_are_not_compiled_move_more_bytes(shape, passes):
    compiled = replace(FSDP, compile=True)
    more = 3 * shape.num_layers * (4 * 2 * 1024) * 2 * passes / 2039e9
    eager, fused = (step_of(plan, shape=shape, length=1024).memory_bound for plan in (FSDP, compiled))
    assert eager - fused == pytest.approx(more)


def test_norms_are_whole_on_every_rank_of_tensor_parallelism_unless_it_divides_the_sequence():
    more = []
    for divides in (False, True):
        plan = replace(FSDP, tp=8, dp_shard=8, sequence_parallel=divides)
        eager, fused = (step_of(replace(plan, compile=each)).memory_bound for each in (False, True))
        more.append((eager - fused) / (3 * 32 * (4 * 2 * 4096) * 2 / 2039e9))
    heads = (10 - 2) * 64 * 128 / 8
    assert more == [pytest.approx(2 * 16 * 4096 + heads), pytest.approx(2 * 16 * 4096 / 8 + heads)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("norm", "name"), [(LlamaRMSNorm, "rms"), (GemmaRMSNorm, "rms_fp32")])
def test_the_bytes_of_a_norm_are_those_that_its_operations_read_and_write(norm, name, dtype):
    layer, hidden = norm(256).to(dtype), torch.ones(512, 256, dtype=dtype)
    with _Bytes() as counted:
        layer(hidden)
    assert counted.total / (512 * 256) == pytest.approx(NORM_BYTES[name][dtype.itemsize], rel=0.02)


def test_the_passes_of_rotary_embeddings_are_those_of_their_operations():
    query, angles = torch.ones(1, 4, 512, 64), torch.ones(1, 512, 64)
    with _Bytes() as counted:
        apply_rotary_pos_emb(query, query, angles, angles)
    assert counted.total / (2 * 4 * query.numel()) == pytest.approx(ROTARY_PASSES, rel=0.15)  # and read the angles


class _Bytes(TorchDispatchMode):
    """Adds up what operations read and write; views move nothing."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            tensors = [each for each in tree_leaves((args, result)) if isinstance(each, torch.Tensor)]
            self.total += sum(each.numel() * each.element_size() for each in tensors)
        return result


@pytest.mark.parametrize(
    ("plan", "num_bytes"),
    [
        # each: bf16 gradients are cast to fp32 (6), copied once more by a single rank (8), added to the shard's (12)
        (ParallelPlan("zero2", reduce_gradients="each", num_microbatches=4), 4 * 26 + 4),
        # last: cast, then added to those of earlier microbatches (10), and reduced once from fp32 (8 + 8 + 12)
        (ParallelPlan("zero1", num_microbatches=4), 6 + 3 * 10 + 28 + 4),
        (ParallelPlan("zero1", dp_shard=8, num_microbatches=4), 6 + 3 * 10 + 8 + 12 / 8 + 4),
        # weights are cast by autocast (6), their gradients back (6), and added up (12)
        (ParallelPlan("ddp", num_microbatches=4), 4 * 24),
    ],
    ids=["zero2 of 1", "zero1 of 1", "zero1 of 8", "ddp"],
)
def test_copies_of_weights_and_gradients_by_hand(plan, num_bytes):
    """Read and written per parameter: by PyTorch's `fully_shard`, or autocast. None on CPUs, whose layers have them."""
    plan = replace(plan, precision=BF16)
    assert copied_bytes(plan) == num_bytes


def test_one_gpu_adds_gradients_up_before_it_reduces_them():
    one, every = (ParallelPlan(name, reduce_gradients=when, num_microbatches=64, micro_batch_size=4)
                  for name, when in (("zero1", "last"), ("zero2", "each")))  # fmt: skip
    first, second = (step_of(replace(plan, precision=BF16), "1xH200").total for plan in (one, every))
    assert first < second


def seconds_of(weights):
    """Of (the gather, the reduction) of so many: 8 GPUs inside a machine, 8 machines."""
    return [13e-6 + 3 * 30e-6 + number * weights * 7 / 8 / (8 * 24e9) for number in (2, 4)]


@pytest.mark.parametrize(("overlap", "is_tied"), [(0.0, False), (0.0, True), (0.76, False)])
def test_sharded_parameters_are_gathered_twice_and_reduced_once_for_each_microbatch(overlap, is_tied):
    """The table that is looked up is so once, and beside nothing; all else is shorter than what it runs beside."""
    table, seen = 32000 * 4096, 1 - overlap
    gather, reduce = seconds_of(LAYER + 2 * 4096 + (0 if is_tied else table + 4096) / 32)
    first, last = seconds_of(table + (4096 if is_tied else 0))
    shape = replace(LLAMA, tied_embeddings=is_tied, num_parameters=LLAMA.num_parameters - is_tied * table)
    step = partial(step_of, rates=replace(PLAIN, overlap=overlap), shape=shape)
    found = step().exposed_communication
    assert found["shard"] == pytest.approx(4 * (32 * seen * (2 * gather + reduce) + first + last), rel=1e-4)
    assert sum(found.values()) == pytest.approx(found["shard"])
    kept = step(replace(FSDP, reshard_after_forward=False, reduce_gradients="last")).exposed_communication
    assert kept["shard"] == pytest.approx(32 * seen * (gather + reduce) + first + last, rel=1e-4)


def test_full_checkpointing_repeats_the_forward_pass_of_layers():
    plan, once = replace(FSDP, activation_checkpointing="full"), step_of()
    tokens, rate = 4 * 2 * 4096, 0.87 * 312e12
    products = 2 * 32 * (LAYER - 4096 * 11008) * tokens / rate  # PyTorch stops before the last product of a layer
    attention = once.attention / (1 + 2.5 / 0.85)
    passes = 14 * 4096 + 3 * 11008 + 2 * (18 - 2) * 4096 + (10 - 2) * 64 * 128  # as above, not compiled
    memory = 32 * tokens * 2 * passes / 2039e9
    expected = products + attention + memory
    assert step_of(plan).recompute == pytest.approx(expected, rel=1e-4)
    assert step_of(replace(plan, checkpoint_every=2)).recompute == pytest.approx(expected / 2, rel=1e-4)
    assert once.recompute == 0
    to_the_end = estimate_time(LLAMA, plan, CLUSTER, Software(recomputes_ends=True, fused=False), PLAIN).recompute
    assert to_the_end == pytest.approx(expected + 2 * 32 * 4096 * 11008 * tokens / rate, rel=1e-4)


def test_tensor_parallelism_sends_hidden_states_eight_times_for_each_layer():
    plan = replace(FSDP, dp_shard=8, tp=8, sequence_parallel=True, micro_batch_size=1)
    once = 13e-6 + 2 * 4096 * 4096 * 7 / 8 / 232e9  # inside a machine
    assert step_of(plan).exposed_communication["tp"] == pytest.approx(4 * 32 * 8 * once)
    # an eighth of it, for half of the sequences
    assert step_of(plan).matmul == pytest.approx(step_of().matmul / 16, rel=1e-3)


@pytest.mark.parametrize(("policy", "whole", "divided"), [("none", 8, 8), ("selective", 8, 8), ("full", 10, 11)])
def test_full_recomputation_repeats_a_part_of_what_tensor_parallelism_sends(policy, whole, divided):
    """All-gathers and reduce-scatters of a layer; tests/parity/test_tensor.py counts them in real processes."""
    plan = replace(FSDP, dp_shard=8, tp=8, micro_batch_size=1, activation_checkpointing=policy)
    once = 13e-6 + 2 * 4096 * 4096 * 7 / 8 / 232e9
    for is_divided, count in ((False, whole), (True, divided)):
        found = step_of(replace(plan, sequence_parallel=is_divided)).exposed_communication["tp"]
        assert found == pytest.approx(4 * 32 * count * once)


@pytest.mark.parametrize(
    ("devices", "compute", "kernel"),
    [("8xH200", "bfloat16", "cudnn"), ("8xB200", "bfloat16", "cudnn"), ("8xH100", "float32", "flash"),
     ("8xA100-80", "bfloat16", "flash"), ("8xB300", "bfloat16", "flash"), ("8xL40S", "bfloat16", "flash")],
)  # fmt: skip
def test_attention_is_the_kernel_that_pytorch_chooses(devices, compute, kernel):
    """cuDNN's on devices of compute capability 9.0 and 10.0, with the builds of PyTorch 2.11 and later."""
    plan = replace(FSDP, precision=Precision(compute=compute))
    assert choose_software(LLAMA, plan, parse_devices(devices)).attention == kernel


@pytest.mark.parametrize(
    ("shape", "fields", "kernel"),
    [(LLAMA, {"documents_apart": True}, "flash"), (LLAMA, {"attn_implementation": "eager"}, "unfused"),
     (LLAMA, {"attn_implementation": "sdpa"}, "flash"), (LLAMA, {"attn_implementation": "flash_attention_3"}, "flash3"),
     (LLAMA, {"cp": 2, "cp_method": "ulysses"}, "cudnn"), (LLAMA, {"cp": 2, "cp_method": "ring"}, "flash"),
     (LLAMA, {"cp": 2, "cp_method": "allgather"}, "flash"),
     (replace(LLAMA, parts=replace(LLAMA.parts, attention_dropout=0.1)), {}, "flash")],
)  # fmt: skip
def test_attention_with_bounds_masks_or_dropout_is_not_that_of_cudnn(shape, fields, kernel):
    """As `choose_attention_kernel` of learn/engines/prepared_layers.py has it."""
    assert choose_software(shape, replace(FSDP, **fields), parse_devices("8xH200")).attention == kernel


def test_attention_that_keeps_documents_apart_is_charged_at_the_slower_kernel():
    """335 of 989 TFLOP/s on an H100, and 0.6 of them (Shah et al. 2024)."""
    plans, cluster = (FSDP, replace(FSDP, documents_apart=True)), parse_devices("8xH100")
    whole, apart = (estimate_time(LLAMA, plan, cluster).attention for plan in plans)
    assert apart / whole == pytest.approx(0.60 / 0.34)


def test_windows_are_computed_by_flash_attention_which_skips_what_they_hide():
    """Half of the layers with a window of a quarter: 1/4 (2 - 1/4) = 7/16 of the scores, at 0.34 of the peak."""
    cluster, parts = parse_devices("8xH100"), replace(LLAMA.parts, window=4096 // 4, windowed=0.5)
    whole = estimate_time(LLAMA, FSDP, cluster).attention
    windowed = estimate_time(replace(LLAMA, parts=parts), FSDP, cluster).attention
    assert windowed / whole == pytest.approx(0.5 + 0.5 * 7 / 16 * 0.60 / 0.34)
    wide = replace(LLAMA, parts=replace(parts, window=2 * 4096))
    assert estimate_time(wide, FSDP, cluster).attention / whole == pytest.approx(0.5 + 0.5 * 0.60 / 0.34)


@pytest.mark.parametrize(("compile", "kept", "kernel"), [
    (True, "none", "flash"), (False, "full", "flash"), (True, "full", "unfused"), (True, "selective", "unfused"),
])  # fmt: skip
def test_soft_capped_attention_is_eager_in_layers_that_are_compiled_and_checkpointed(compile, kept, kernel):
    """As `choose_attention_kernel` takes it; a Gemma 2 of 2 billion parameters."""
    plan = replace(FSDP, compile=compile, activation_checkpointing=kept)
    assert choose_software(GEMMA2, plan, parse_devices("8xH200")).attention == kernel


def test_eager_soft_capped_attention_needs_memory_for_the_scores_of_a_layer():
    plan = replace(FSDP, activation_checkpointing="full", sequence_len=8192)
    flex, eager = (estimate_memory(GEMMA2, replace(plan, compile=each), "cuda").total for each in (False, True))
    scores = 8192**2 * GEMMA2.num_heads * plan.micro_batch_size * (2 + 4 + 2)  # bf16, the fp32 softmax, and its cast
    assert eager - flex == pytest.approx(scores, rel=0.1)


def test_stages_send_each_other_whole_sequences():
    """Also under sequence parallelism: tests/parity/test_products.py counts the bytes."""
    plan = ParallelPlan("pp", pp=4, tp=2, schedule="1f1b", stages=(8, 8, 8, 8), num_microbatches=16)
    both = (replace(plan, sequence_parallel=is_divided) for is_divided in (False, True))
    whole, divided = (step_of(each, "8xA100-80").exposed_communication["pp"] for each in both)
    assert whole == pytest.approx(divided)


def test_the_optimizer_reads_and_writes_a_shard_once():
    assert step_of().optimizer == pytest.approx(LLAMA.num_parameters / 64 * 36 / 2039e9)
    offloaded = step_of(replace(FSDP, cpu_offload=True))
    assert offloaded.offload > 0 < offloaded.optimizer
    assert offloaded.total > step_of().total


def test_a_host_that_launches_slower_than_the_device_runs_sets_the_pace():
    slow = step_of(rates=replace(PLAIN, launch=1.0))
    busy = (slow.total - slow.overhead - slow.optimizer - slow.exposed_communication["shard"] - COPIES) / 4
    assert slow.overhead == pytest.approx(4 * ((32 + PLAIN.head_launches) * 1.0 - busy))
    assert slow.limit == "host"


def test_the_parts_of_a_step_add_up_and_the_largest_limits_it():
    found = step_of()
    assert sum(found.to_dict().values()) == pytest.approx(found.total)
    assert found.limit == "compute"
    assert step_of(devices="64xA100-80@pcie3,tcp25").limit == "network"


def test_replicas_that_train_apart_send_once_in_many_steps():
    apart = replace(PAIR, num_replicas=16, sync=SyncPlan(name="local_sgd", every=50))
    every = between(replace(PAIR, dp_replicate=16), devices="16xA100-80")
    assert between(apart, devices="16xA100-80") == pytest.approx(every / 50)


PAIR = ParallelPlan("ddp", sequence_len=4096, micro_batch_size=2, precision=BF16)
MACHINES = "16xA100-80@nvlink3,ib200"
ALL = 32 * (LAYER + 2 * 4096) + 2 * 32000 * 4096 + 4096


def between(plan, rates=PLAIN, devices=MACHINES):
    """The exposed communication between copies of the model."""
    return step_of(plan, devices, rates).exposed_communication["dp"]


def test_gradients_are_also_summed_inside_replicas():
    inside = between(replace(PAIR, dp_replicate=8), devices="8xA100-80")
    apart = replace(PAIR, dp_replicate=8, num_replicas=2, sync=SyncPlan(name="local_sgd", every=10**9))
    assert between(apart) == pytest.approx(inside, rel=1e-6) and inside > 0


def test_compressed_gradients_are_not_sent_beside_the_backward_pass():
    rates = replace(PLAIN, overlap=0.5)
    compressed = replace(PAIR, dp_replicate=16, sync=SyncPlan(method="topk"))
    for plan in (compressed, replace(PAIR, dp_replicate=1, num_replicas=16, sync=SyncPlan(name="quorum"))):
        assert between(plan, rates) == pytest.approx(between(plan))
    rounded = between(replace(PAIR, dp_replicate=16, sync=SyncPlan(method="bf16")))
    assert rounded == pytest.approx(between(replace(PAIR, dp_replicate=16)) / 2, rel=0.03), "half of the bytes"


@pytest.mark.parametrize(("staleness", "pushed"), [(0, 4), (0, 2), (4, 4)])
def test_the_link_of_a_parameter_server_is_what_a_step_waits_for(staleness, pushed):
    """15 workers send it half of the gradients and get half of the weights, through a link of 24 GB/s."""
    method = "none" if pushed == 4 else "bf16"
    sync = SyncPlan(name="parameter_server", servers=2, max_staleness=staleness, method=method)
    gradients, weights = (size * ALL / 2 * 15 / 24e9 for size in (pushed, 4))
    seconds = gradients + weights if staleness == 0 else max(gradients, weights)
    assert between(replace(PAIR, num_replicas=16, sync=sync)) == pytest.approx(seconds + 2 * 30e-6)


def test_a_worker_waits_for_its_own_link_if_all_processes_are_servers():
    sync = SyncPlan(name="parameter_server", servers=16, max_staleness=None)
    assert between(replace(PAIR, num_replicas=16, sync=sync)) == pytest.approx(8 * ALL / 24e9 + 2 * 30e-6)


def test_local_sgd_pays_below_the_speed_that_its_formula_gives():
    """Where C + X / 50 is 0.9 of the step with every_step; X: the all-reduce of all gradients, C: the rest."""
    cluster = parse_devices(MACHINES)
    plan = replace(PAIR, num_replicas=16, sync=SyncPlan(name="local_sgd", every=50))
    step = estimate_time(LLAMA, replace(PAIR, dp_replicate=16), cluster)
    rest = step.total - step.communication
    speed = find_payoff(LLAMA, plan, cluster)
    link = Link("", speed / 8, 30e-6, "")
    plans, links = (plan, without_sync(plan)), Links(link, link)
    ours, theirs = (estimate_time(LLAMA, each, cluster, between=links).total for each in plans)
    assert ours / theirs == pytest.approx(0.9, abs=1e-3)
    whole = 2 * 32 * (4 * 30e-6 + 4 * ALL / 32 * 15 / 16 / (speed / 8))
    assert ours == pytest.approx(rest + whole / 50)
    line = f"at least 10% where the links between replicas have less than {speed / 1e9:.3g} Gbit/s"
    assert line in describe_payoff(LLAMA, plan, cluster)


def test_a_plan_says_where_a_way_to_agree_never_pays():
    cluster = parse_devices(MACHINES)
    one_server = replace(PAIR, num_replicas=16, sync=SyncPlan(name="parameter_server"))
    assert "at no speed of the links between replicas" in describe_payoff(LLAMA, one_server, cluster)
    for plan in (PAIR, replace(PAIR, dp_replicate=16), replace(PAIR, num_replicas=16, sync=SyncPlan(name="quorum"))):
        assert describe_payoff(LLAMA, plan, cluster) is None


def test_a_pipeline_estimates_its_slowest_rank():
    plan = ParallelPlan("pp", pp=4, schedule="1f1b", stages=(8, 8, 8, 8), num_microbatches=16, precision=BF16)
    found, whole = step_of(plan, "4xA100-80"), step_of(replace(FSDP, dp_shard=1, micro_batch_size=1), "1xA100-80")
    head = 6 * 4096 * 32000 * 4096 / (0.87 * 312e12)
    assert found.matmul == pytest.approx(whole.matmul + 12 * head)
    copies = copied_bytes(plan) * (8 * (LAYER + 2 * 4096) + (2 * 32000 * 4096 + 4096) / 4) / 2039e9
    others = 3 * ((found.compute - copies) / 16 - head - 4096 * 32000 * 6 / 2039e9)
    border = found.exposed_communication["pp"] / 16
    assert found.bubble == pytest.approx(others + 3 * border, rel=1e-4)


# NVIDIA and AWS, nccl-tests: bus bandwidth of an all-reduce in GB/s by payload in MiB.
P5 = {1: 64, 16: 237, 64: 360, 256: 419, 1024: 442}
P4DE = {1: 6.4, 16: 26, 256: 70, 1024: 77}


@pytest.mark.parametrize(
    ("group", "measured", "error"),
    [
        (CommunicationGroup(8, 8, Links(LINKS["nvlink4"], LINKS["efa"])), P5, 0.2),
        (CommunicationGroup(16, 8, Links(LINKS["nvlink3"], LINKS["efa400"])), P4DE, 0.6),
    ],
)
def test_collectives_are_near_published_measurements(group, measured, error):
    for size, gigabytes in measured.items():
        payload = size * 2**20
        found = payload * 2 * (group.size - 1) / group.size / group.all_reduce(payload)
        assert found == pytest.approx(gigabytes * 1e9, rel=error), size


def test_inner_axes_are_placed_on_a_machine_first():
    plan = ParallelPlan("custom", pp=2, dp_shard=4, tp=8, schedule="1f1b", stages=(16, 16))
    cluster = parse_devices("64xH100")
    sizes = {axes: (found.size, found.local) for axes in (("tp",), ("dp_shard", "cp"), ("pp",))
             for found in (find_group(plan, cluster, axes),)}  # fmt: skip
    assert sizes == {("tp",): (8, 8), ("dp_shard", "cp"): (4, 1), ("pp",): (2, 1)}
    assert find_group(replace(plan, tp=2, dp_shard=16), cluster, ("dp_shard",)).local == 4


def test_links_of_a_text_of_a_device_and_of_an_instance():
    links = parse_devices("64xH100@nvlink,efa").known_links
    assert (links.inside, links.between, links.assumed) == (LINKS["nvlink4"], LINKS["efa"], False)
    usual = parse_devices("64xA100-80").known_links
    assert (usual.inside.name, usual.between.name, usual.assumed) == ("nvlink3", "ib200", True)
    assert "since none were given" in usual.describe()
    p5 = cluster_of(INSTANCES["ml.p5.48xlarge"], 2).known_links
    assert p5.inside == LINKS["nvlink4"]
    assert p5.between.bandwidth == pytest.approx(0.87 * 3200 / 8 / 8 * 1e9)


@pytest.mark.parametrize(
    ("text", "words"),
    [("8xH100@nvlink9", "link 'nvlink9' is not known"), ("8xT4@nvlink", "is not known for T4"),
     ("8xH100@nvlink,efa,ib", "give one link inside")],
)  # fmt: skip
def test_unknown_links_are_refused(text, words):
    with pytest.raises(PlanError, match=re.escape(words)):
        parse_devices(text)


def test_a_device_of_unknown_speed_is_refused():
    slow = replace(ACCELERATORS["H100"], name="X1", bf16_flops=None)
    with pytest.raises(PlanError, match="the speed of X1 is unknown"):
        estimate_time(LLAMA, FSDP, Cluster(slow, 64, 8, "cuda"))


def test_more_bandwidth_is_never_slower():
    fast, slow = (Links(Link("a", speed, 1e-6, ""), Link("b", speed / 10, 1e-6, "")) for speed in (300e9, 30e9))
    times = [estimate_time(LLAMA, FSDP, replace(CLUSTER, links=each), rates=GPU_RATES).total for each in (fast, slow)]
    assert times[0] < times[1]
