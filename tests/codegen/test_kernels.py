"""What inductor makes of a training step for an H100: on a machine without a GPU, with a CUDA build of torch."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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
    "lion": 1,
    "adamw": 1,
    "adamw, bf16 weights with a remainder": 1,
    "adamw, bf16 weights rounded at random": 1,
    "adamw, 8-bit moments": 3,
    "muon": 3,
}


def compile_program(name, folder):
    command = [sys.executable, "-m", "tests.codegen.programs", name, str(folder)]
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
    assert ("_varlen_attn_backward" in code) == name.startswith("layer")
    assert not re.search(rf"empty_strided_cuda\(\({TOKENS}, {VOCABULARY}\), [^)]*\), torch.float32", code)  # logits
