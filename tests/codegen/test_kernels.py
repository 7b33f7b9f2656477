"""What inductor makes of a training step for an H100: on a machine without a GPU, with a CUDA build of torch."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.codegen.layers import HEADS, LENGTH, ROWS
from tests.codegen.programs import PROGRAMS, TOKENS, VOCABULARY

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.version.cuda is None, reason="needs a CUDA build of torch: make oldest"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="pretends to be a GPU, and here is one"),
]
ROOT = Path(__file__).parents[2]
# As counted with torch 2.11: of the forward pass and, for a layer, the backward pass, beside products and attention.
KERNELS = {
    "loss": 2,
    "capped loss": 2,
    "layer": 10,
    "layer with repeated heads": 13,
    "layer, plain causal": 11,
    "layer, selective": 13,
    "layer, full": 17,
    "layer, plain causal, full": 15,
    "layer on two ranks, selective": 26,
    "layer of experts, selective": 17,
    "layer with LoRA": 17,
    "layer with LoRA, selective": 19,
    "layer with LoRA, full": 22,
    "layer with QLoRA": 19,
    "layer in float8": 33,
    "layer with Liger's kernels": 8,
    "layer with soft-capped attention": 18,
    "lion": 1,
    "sgd, bf16 weights with a remainder": 1,
    "adamw": 1,
    "adamw, bf16 weights with a remainder": 1,
    "adamw, bf16 weights rounded at random": 1,
    "adamw, 8-bit moments": 2,
    "adafactor": 8,
    "muon": 3,
}
COMPILED_LAYERS = [name for name in KERNELS if name.startswith("layer") and "Liger" not in name]
# The operation that attention is in each of them. Without documents, torch prefers cuDNN's on this device.
ATTENTION = dict.fromkeys(COMPILED_LAYERS, "_varlen_attn") | {
    "layer, plain causal": "_scaled_dot_product_cudnn_attention",
    "layer, plain causal, full": "_scaled_dot_product_cudnn_attention",
    "layer on two ranks, selective": "_scaled_dot_product_cudnn_attention",
    "layer with soft-capped attention": "flex_attention",
}
# Calls in the forward and the backward pass. A layer has seven linear layers; each adds its adapter by one product.
# With QLoRA, the compiler keeps the dequantised weights: the reason why `train.compile: auto` is off. A full checkpoint
# repeats all products but the last; a selective one none, nor an exchange of two: before and after attention.
CALLS = {
    "layer": ("extern_kernels.mm", 7, 14),
    "layer, selective": ("extern_kernels.mm", 7, 14),
    "layer, full": ("extern_kernels.mm", 7, 20),
    "layer, plain causal, full": ("extern_kernels.mm", 7, 20),
    "layer of experts, selective": ("extern_kernels.mm", 5, 10),
    "layer on two ranks, selective": ("echelon.swap.default", 2, 2),
    "layer with LoRA": ("extern_kernels.addmm", 7, None),
    "layer with QLoRA": ("bitsandbytes.dequantize_4bit.default", 7, 0),
    "layer in float8": ("extern_kernels._scaled_mm", 7, 14),
}


def compile_program(name, folder):
    command = [sys.executable, "-m", "tests.codegen", name, str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_kernel_compiles(name, tmp_path):
    found = compile_program(name, tmp_path)
    assert found["failures"] == []
    code = "\n".join(found["code"])
    assert 0 < found["kernels"] <= KERNELS[name]
    assert "bmm" not in code  # attention, also with repeated heads, is one operation
    assert not re.search(rf"empty_strided_cuda\(\({TOKENS}, {VOCABULARY}\), [^)]*\), torch.float32", code)  # logits
    assert f"({ROWS}, {HEADS}, {LENGTH}, {LENGTH})" not in code  # scores
    if name in ATTENTION:
        num_graphs = 3 if "experts" in name else 1  # the router's, and one that returns the experts' results
        assert len(found["code"]) == 2 * num_graphs
        forward, backward = "\n".join(found["code"][:num_graphs]), "\n".join(found["code"][num_graphs:])
        assert ATTENTION[name] in forward
        assert f"{ATTENTION[name]}_backward" in backward
    if name in CALLS:
        call, *counts = CALLS[name]
        for text, count in zip((forward, backward), counts, strict=True):
            assert count is None or text.count(f"{call}(") == count
