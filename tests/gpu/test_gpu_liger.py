"""Liger's own kernels on a GPU pass the test at the start, and a step with them computes the same."""

import pytest
import torch

from echelon.learn.model.build import build_on_meta, load_config
from echelon.learn.model.liger import apply_liger, compare_layers, is_installed
from tests.families import random_batch, small_config, small_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.device,
    pytest.mark.skipif(not is_installed(), reason="liger-kernel is not installed"),
]

WIDE = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 8}


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3"])
def test_the_kernels_agree(gpu, family):
    fields = WIDE | ({"head_dim": 64} if "head_dim" in small_config(family) else {})
    obstacle = compare_layers(
        build_on_meta(load_config(small_config(family, **fields))), gpu.device, torch.bfloat16, 4096
    )
    print(family, obstacle)
    assert obstacle is None or obstacle.startswith("a layer takes")


def test_gradients_are_as_close_to_those_in_fp32_as_without_the_kernels(gpu):
    tokens = random_batch(4, 128)[0].to(gpu.device)
    exact, plain, fused = (small_model("llama", **WIDE).to(gpu.device) for _ in range(3))
    for model in (plain, fused):
        model.to(torch.bfloat16)
    undo = apply_liger(fused, "cuda")
    try:
        for model in (exact, plain, fused):
            model.model(tokens, use_cache=False).last_hidden_state.float().square().mean().backward()
    finally:
        undo()
    for (name, true), *both in zip(exact.named_parameters(), plain.parameters(), fused.parameters(), strict=True):
        if true.grad is not None:
            without, with_kernels = ((each.grad.float() - true.grad).norm() / true.grad.norm() for each in both)
            print(f"{name}: error {without:.4f}, with Liger's kernels {with_kernels:.4f}")
            assert with_kernels < 1.5 * without, name
