"""Device memory: of the loss, with offloading, and the planner's estimate compared with the allocator."""

import gc

import pytest
import torch

from echelon.learn.model.parts import HeadArithmetic
from echelon.learn.objectives.loss import add_product, chunked_loss_sum
from echelon.planner.memory import estimate_memory
from echelon.planner.shape import build_shape
from tests.gpu.gpu_training import OFFLOAD, Case, model_overrides, trainer_on_gpu
from tests.parity.training import Row

pytestmark = [pytest.mark.gpu, pytest.mark.device]


def start_measuring():
    """Free memory of earlier tests; return the bytes that remain allocated."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_loss_never_holds_all_logits(gpu, dtype):
    """16384 tokens x 128k entries would need 8.4 GB in fp32; the chunked loss must need at most a half."""
    tokens, vocabulary, hidden_size = 16384, 128 * 1024, 1024
    generator = torch.Generator(gpu.device).manual_seed(0)
    weight = torch.randn(vocabulary, hidden_size, device=gpu.device, generator=generator).mul_(0.02).requires_grad_()
    hidden = torch.randn(4, tokens // 4, hidden_size, device=gpu.device, generator=generator, dtype=dtype)
    hidden.requires_grad_()
    labels = torch.randint(0, vocabulary, (4, tokens // 4), device=gpu.device, generator=generator)
    before = start_measuring()
    with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
        loss = chunked_loss_sum(hidden, labels, weight, None, HeadArithmetic())
    loss.backward()
    peak = torch.cuda.max_memory_allocated() - before
    print(f"{dtype}: peak {peak / 1e9:.2f} GB of {tokens * vocabulary * 4 / 1e9:.2f} GB of logits")
    assert peak < tokens * vocabulary * 4 / 2
    rows = torch.arange(0, tokens, 97, device=gpu.device)  # a few rows, by the plain formula
    logits = hidden.detach().flatten(0, 1)[rows].float() @ weight.detach().float().T
    expected = torch.nn.functional.cross_entropy(logits, labels.flatten()[rows])
    assert loss.item() / tokens == pytest.approx(expected.item(), rel=2e-2)
    assert torch.isfinite(weight.grad).all() and torch.isfinite(hidden.grad).all()


LLAMA = model_overrides(
    1024, hidden_size=1024, intermediate_size=2816, num_hidden_layers=16, num_attention_heads=16,
    num_key_value_heads=16, vocab_size=32000, max_position_embeddings=1024,
)  # fmt: skip
GPT2 = model_overrides(1024, n_embd=768, n_layer=12, n_head=12, vocab_size=50304, n_positions=1024)
QWEN3 = model_overrides(
    2048, hidden_size=1024, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=16,
    num_key_value_heads=8, head_dim=64, vocab_size=65536, max_position_embeddings=2048,
)  # fmt: skip
# Two microbatches, so that gradients exist when activations are largest, as the estimate assumes.
SIZED = [
    Case(Row(family="llama", micro_batch=4, precision="bf16"), overrides=LLAMA),
    Case(Row(family="llama", micro_batch=4), overrides=LLAMA),
    Case(Row(family="llama", micro_batch=4, precision="bf16"), overrides=(*LLAMA, "train.activation_offloading=true")),
    Case(Row(family="gpt2", tied=True, micro_batch=4, precision="bf16"), overrides=GPT2),
    Case(Row(family="qwen3", tied=True, micro_batch=4, precision="bf16", checkpointing="full"), overrides=QWEN3),
]
GATHERED = Case(Row(family="llama", micro_batch=4, precision="bf16"), around="fsdp", overrides=LLAMA)


def measure_steps(case, runtime, folder, text):
    """The peak of allocated bytes during three steps, the estimate, and the parts measured in the rehearsal."""
    before = start_measuring()
    with trainer_on_gpu(case, runtime, folder, text, steps=3) as trainer:
        for step in range(3):
            trainer.train_step(step)
        torch.cuda.synchronize()
        peak, reserved = torch.cuda.max_memory_allocated() - before, torch.cuda.max_memory_reserved()
        shape = build_shape(trainer.recipe.model.config)
        estimate = estimate_memory(shape, trainer.plan, "cuda")
        [event] = [row for row in trainer.run_folder.rows.read_events() if row["event"] == "memory"]
    return peak, reserved, estimate, event["measured"]


@pytest.mark.parametrize(
    ("case", "tolerance"),
    [*((case, 0.10) for case in SIZED), (GATHERED, 0.20)],  # FSDP's timing decides how many layers are gathered
    ids=str,
)
def test_the_estimate_is_close(gpu, text, tmp_path, case, tolerance):
    peak, reserved, estimate, measured = measure_steps(case, gpu, tmp_path, text)
    parts = {name: getattr(estimate, name) / 1e6 for name in (
        "parameters", "gradients", "optimizer", "activations", "logits", "buffers",
    )}  # fmt: skip
    print(f"{case}: measured {peak / 1e6:.0f} MB ({reserved / 1e6:.0f} MB reserved), estimated", end=" ")
    print(f"{estimate.total / 1e6:.0f} MB:", ", ".join(f"{name} {size:.0f}" for name, size in parts.items()))
    print("measured by part:", measured)
    assert estimate.total == pytest.approx(peak, rel=tolerance)
    assert sum(measured.values()) == pytest.approx(peak, rel=0.05)


def test_offloading_keeps_the_training_state_on_the_host(gpu, text, tmp_path):
    """Parameters (pinned), gradients and both moments are on the host; the device has a few layers and activations."""
    peaks = {}
    for name, case in {
        "offloaded": Case(Row(OFFLOAD, micro_batch=4), overrides=LLAMA),
        "kept": Case(Row(micro_batch=4), around="fsdp", overrides=LLAMA),
    }.items():
        before = start_measuring()
        with trainer_on_gpu(case, gpu, tmp_path / name, text, steps=2) as trainer:
            trainer.train_step(0)
            torch.cuda.synchronize()
            peaks[name] = torch.cuda.max_memory_allocated() - before
            where = {key: value.device.type for key, value in trainer.train_step.learner.engine.state_dict().items()}
            decoder = trainer.train_step.learner.engine.decoder
            assert set(where.values()) == {"cpu" if name == "offloaded" else "cuda"}
            assert {buffer.device.type for buffer in decoder.buffers()} == {"cuda"}
            if name == "offloaded":
                assert all(parameter.to_local().is_pinned() for parameter in decoder.parameters())
            states = sum(parameter.numel() for parameter in decoder.parameters()) * 12
    print({name: f"{peak / 1e6:.0f} MB" for name, peak in peaks.items()}, f"states {states / 1e6:.0f} MB")
    assert peaks["kept"] - peaks["offloaded"] > 0.8 * states


def test_the_product_adds_to_the_gradient_of_the_head_without_a_copy(gpu):
    """A bf16 product is added to an fp32 matrix: no temporary matrix, and no rounding of the sum to bf16."""
    generator = torch.Generator(gpu.device).manual_seed(0)
    left = torch.randn(8192, 512, device=gpu.device, dtype=torch.bfloat16, generator=generator)
    right = torch.randn(512, 2048, device=gpu.device, dtype=torch.bfloat16, generator=generator)
    total = torch.full((8192, 2048), 4096.0, device=gpu.device)  # bf16 would round it to multiples of 32
    add_product(total, left, right)  # cuBLAS allocates its workspace
    before = start_measuring()
    add_product(total, left, right)
    assert torch.cuda.max_memory_allocated() - before < total.nbytes / 2
    expected = 4096 + 2 * (left.double() @ right.double())
    assert ((total - expected).norm() / (expected - 4096).norm()).item() < 1e-5
