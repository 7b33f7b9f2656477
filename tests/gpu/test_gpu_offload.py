"""Activation offloading on a GPU: the same steps, less memory, and copies beside the computation."""

import pytest
import torch

from echelon.learn.model.parts import find_layers
from echelon.learn.parallel.kept_activations import offload_activations
from tests.families import random_batch, small_model
from tests.gpu.gpu_training import Case, model_overrides, train_on_gpu
from tests.parity.training import Row

pytestmark = [pytest.mark.gpu, pytest.mark.device]

WIDE = model_overrides(
    512, hidden_size=1024, intermediate_size=2816, num_hidden_layers=6, num_attention_heads=16, num_key_value_heads=16,
    max_position_embeddings=512,
)  # fmt: skip


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("around", ["", "fsdp"])
def test_steps_are_the_same(gpu, deterministic, text, tmp_path, checkpointing, around):
    rows = {}
    for offloads in ("false", "true"):
        row = Row(micro_batch=4, precision="bf16", checkpointing=checkpointing)
        case = Case(row, around, (*WIDE, f"train.activation_offloading={offloads}"))
        rows[offloads] = train_on_gpu(case, gpu, tmp_path / offloads, text)
    found, expected = (
        [(each["loss"], each["grad_norm"]) for each in rows[name] if each["kind"] == "train"]
        for name in ("true", "false")
    )
    assert len(found) == 4 and found == expected


def wide_model(device):
    fields = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 8, "num_attention_heads": 16}
    return small_model("llama", num_key_value_heads=16, **fields).to(device, torch.bfloat16).train()


def differentiate(model, tokens):
    model.model(tokens, use_cache=False).last_hidden_state.float().square().mean().backward()


def measure_peak(model, tokens):
    """The peak of a forward and backward pass beside weights and gradients, once gradients and buffers exist."""
    for _ in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        differentiate(model, tokens)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_two_layers_are_on_the_device_and_the_host_never_waits(gpu, deterministic):
    tokens = random_batch(4, 2048)[0].to(gpu.device)
    plain, offloaded = wide_model(gpu.device), wide_model(gpu.device)
    offload_activations(find_layers(offloaded))
    peaks = [measure_peak(model, tokens) for model in (plain, offloaded)]
    print(f"peak {peaks[0] / 2**20:.0f} MiB, offloaded {peaks[1] / 2**20:.0f} MiB")
    assert peaks[1] < 0.55 * peaks[0]
    for ours, theirs in zip(offloaded.parameters(), plain.parameters(), strict=True):
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad)
    torch.cuda.set_sync_debug_mode("error")
    try:
        differentiate(offloaded, tokens)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_copies_overlap_the_computation(gpu):
    """By the times of the profiler: copies run while kernels do. Here they take longer than the kernels."""
    tokens = random_batch(4, 2048)[0].to(gpu.device)
    model = wide_model(gpu.device)
    offload_activations(find_layers(model))
    for _ in range(2):
        differentiate(model, tokens)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        differentiate(model, tokens)
        torch.cuda.synchronize()
    events = [each for each in profile.events() if each.device_type == torch.autograd.DeviceType.CUDA]
    copies = [each.time_range for each in events if "Memcpy DtoH" in each.name or "Memcpy HtoD" in each.name]
    kernels = [each.time_range for each in events if "Memcpy" not in each.name and "Memset" not in each.name]
    beside = sum(
        max(0, min(copy.end, kernel.end) - max(copy.start, kernel.start)) for copy in copies for kernel in kernels
    )
    copying, computing = (sum(each.end - each.start for each in times) for times in (copies, kernels))
    print(f"copies {copying / 1e3:.1f} ms, kernels {computing / 1e3:.1f} ms, both at once {beside / 1e3:.1f} ms")
    assert beside > 0.5 * min(copying, computing)
