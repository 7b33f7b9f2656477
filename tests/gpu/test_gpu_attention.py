"""On a GPU, torch's flash kernels and flex attention keep the documents of a sequence apart."""

from importlib.util import find_spec

import pytest
import torch

from echelon.learn.model.build import load_config
from echelon.learn.model.compilation import apply_compile
from echelon.learn.model.flex_attention import FLEX, has_flex
from echelon.learn.model.varlen_attention import VARLEN, activate_flash_3, deactivate_flash_3, has_kernel
from echelon.learn.parallel.kept_activations import checkpoint_activations
from echelon.planner.choose import resolve_plan
from echelon.planner.hardware.detection import detect_cluster
from echelon.planner.rates import choose_software
from echelon.planner.shape import build_shape
from echelon.recipe.load import load_recipe
from tests.families import small_config, small_model
from tests.parity.training import Row, write_recipe
from tests.unit.learn.model.test_document_mask import FIELDS, LENGTHS, loss_alone, losses, packed
from tests.unit.learn.model.test_ring_attention import CAUSAL, DOCUMENTS, WINDOWS, check_ring
from tests.unit.learn.model.test_varlen_attention import of_one_document

pytestmark = [pytest.mark.gpu, pytest.mark.device]

CAPPED = {"attn_logit_softcapping": 0.5, "sliding_window": 4}


def check_documents(plain, kernel, device, dtype):
    """With the kernel each document has the loss that it has alone without it, and changes no other."""
    batch, changed = packed().to(device), packed(changed=(0, 1)).to(device)
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        found, after = losses(kernel, batch), losses(kernel, changed)
        for row, lengths in enumerate(LENGTHS):
            for number in range(len(lengths)):
                expected = loss_alone(plain, batch, row, number)
                torch.testing.assert_close(found[row, number], expected, rtol=0.02, atol=0.02)
    assert [place for place in found if not torch.equal(found[place], after[place])] == [(0, 1)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gemma3_text", "gpt2"])
def test_documents_have_the_loss_that_they_have_alone(gpu, family, dtype):
    assert has_kernel(gpu.device, dtype, load_config(small_config(family)))
    plain, kernel = (small_model(family, **FIELDS.get(family, {})).eval().to(gpu.device) for _ in range(2))
    kernel.set_attn_implementation(VARLEN)
    check_documents(plain, kernel, gpu.device, dtype)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_one_document_a_sequence_has_the_loss_that_it_has_alone(gpu, family):
    plain, kernel = (small_model(family, **FIELDS.get(family, {})).eval().to(gpu.device) for _ in range(2))
    kernel.set_attn_implementation(VARLEN)
    batch = of_one_document().to(gpu.device)
    with torch.autocast("cuda", torch.bfloat16):
        found = losses(kernel, batch)
        for row in (0, 1):
            torch.testing.assert_close(found[row, 0], loss_alone(plain, batch, row, 0), rtol=0.02, atol=0.02)


def test_flash_attention_3_gives_documents_the_loss_that_they_have_alone(gpu):
    if find_spec("flash_attn_interface") is None or torch.cuda.get_device_capability(gpu.device) != (9, 0):
        pytest.skip("FlashAttention-3 is not installed, or is not for this GPU")
    fields = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    assert activate_flash_3(gpu.device, torch.bfloat16, load_config(small_config("llama", **fields)))
    try:
        plain, kernel = (small_model("llama", **fields).eval().to(gpu.device) for _ in range(2))
        kernel.set_attn_implementation(VARLEN)
        check_documents(plain, kernel, gpu.device, torch.bfloat16)
    finally:
        deactivate_flash_3()


def test_a_training_step_keeps_documents_apart_without_waiting(gpu):
    """Forward and backward of packed documents, windows included, make no call that waits for the device."""
    from echelon.learn.objectives.causal_lm import CausalLM
    from echelon.learn.objectives.outputs import ObjectiveModule

    model = small_model("mistral", **FIELDS["mistral"]).to(gpu.device)
    model.set_attn_implementation(VARLEN)
    module, batch = ObjectiveModule(model), packed().to(gpu.device)
    with torch.autocast("cuda", torch.bfloat16):
        module(batch, CausalLM().loss_sum).backward()
        torch.cuda.set_sync_debug_mode("error")
        try:
            module(batch, CausalLM().loss_sum).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_soft_capped_documents_have_the_loss_that_eager_attention_gives_them_alone(gpu, dtype):
    assert has_flex(gpu.device, dtype, load_config(small_config("gemma2")))
    eager, flex = (small_model("gemma2", **CAPPED).eval().to(gpu.device) for _ in range(2))
    flex.set_attn_implementation(FLEX)
    check_documents(eager, flex, gpu.device, dtype)


@pytest.mark.parametrize(
    ("compiles", "checkpointing"),
    # Not compiled and checkpointed: `choose_attention_kernel` takes eager attention there.
    [(False, "none"), (False, "full"), (False, "selective"), (True, "none")],
)
def test_gradients_of_soft_capped_attention_are_those_of_eager_attention(gpu, compiles, checkpointing):
    from echelon.learn.objectives.causal_lm import CausalLM
    from echelon.learn.objectives.outputs import ObjectiveModule

    eager, flex = (small_model("gemma2", **CAPPED).to(gpu.device) for _ in range(2))
    flex.set_attn_implementation(FLEX)
    checkpoint_activations(flex.model.layers, checkpointing)
    if compiles:
        apply_compile(flex.model.layers, "inductor")
    for model in (eager, flex):
        ObjectiveModule(model)(packed().to(gpu.device), CausalLM().loss_sum).backward()
    errors = {
        name: float((parameter.grad - expected.grad).norm() / expected.grad.norm().clamp(min=1e-8))
        for (name, expected), parameter in zip(eager.named_parameters(), flex.parameters(), strict=True)
    }
    assert max(errors.values()) < 1e-2, errors


def test_plain_causal_attention_takes_the_kernel_that_the_planner_charges(gpu, text, tmp_path):
    """cuDNN's or FlashAttention-2, by the names of the kernels that ran."""
    recipe, _ = load_recipe(write_recipe(Row(precision="bf16"), tmp_path, text, steps=2))
    cluster = detect_cluster(1)
    shape = build_shape(recipe.model.config)
    plan = resolve_plan(recipe, shape, cluster, num_samples=1000)
    query = torch.randn(2, 16, 2048, 128, device=gpu.device, dtype=torch.bfloat16)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
        torch.cuda.synchronize()
    names = " ".join(event.name for event in profile.events())
    print(cluster.accelerator.name, names)
    assert ("cudnn" in names) == (choose_software(shape, plan, cluster).attention == "cudnn"), names


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 0.02), (torch.float16, 0.005), (torch.float32, 0.001)], ids=str
)
@pytest.mark.parametrize("bounds", [CAUSAL, DOCUMENTS, WINDOWS], ids=["causal", "documents", "windows"])
def test_a_ring_computes_the_parts_of_whole_attention(gpu, bounds, dtype, tolerance):
    """The flash kernel, or with windows and in fp32 the memory-efficient one."""
    check_ring(4, bounds, gpu.device, dtype, tolerance)
