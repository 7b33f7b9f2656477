"""Objectives other than the next token, and weights that are stored quantized, train on one GPU as on one CPU."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.families import small_model
from tests.gpu.gpu_training import Case, train_on_gpu
from tests.gpu.test_gpu_parity import BF16_LOSS, BF16_NORM, LOSS, NORM
from tests.parity.packed import PackedPool
from tests.parity.test_documents import DPO, KTO
from tests.parity.training import Row, difference, hashes, train
from tests.stored_models import quantize_folder

pytestmark = pytest.mark.gpu

# The samples, and the row; `{folder}` is that of the teacher or base below.
CASES = {
    "grpo": ("", Row(micro_batch=4, changes={
        "data": {"source": "tests.parity.answered:Answers"},
        "objective": {"name": "tests.parity.answered:AnsweredGRPO", "options": {"clip_high": 0.28}},
    })),
    "grpo, bf16": ("", Row(micro_batch=4, precision="bf16", changes={
        "data": {"source": "tests.parity.answered:Answers"},
        "objective": {"name": "tests.parity.answered:AnsweredGRPO",
                      "options": {"kl_weight": 0.3, "needs_reference": True, "temperature": 0.8}},
    })),
    "dpo": ("pairs", Row(micro_batch=4, changes=DPO)),
    "dpo of an adapter, bf16": ("pairs", Row(micro_batch=4, adapter="lora", precision="bf16", changes=DPO)),
    "kto": ("judged", Row(micro_batch=4, changes=KTO)),
    "distillation": ("", Row(micro_batch=4, changes={
        "objective": {"name": "distill", "teacher": "{folder}", "loss": "jsd", "beta": 0.3, "sft_weight": 0.1},
    })),
    "stored in fp8": ("", Row(micro_batch=4, adapter="lora", precision="bf16", changes={
        "model": {"checkpoint": "{folder}", "config": None},
    })),
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A teacher of another family, and a base whose weights are stored in fp8."""
    paths = {name: str(tmp_path_factory.mktemp("model")) for name in ("distillation", "stored in fp8")}
    for (name, path), family in zip(paths.items(), ("qwen3", "llama"), strict=True):
        small_model(family, seed=5).save_pretrained(path)
        if name == "stored in fp8":
            quantize_folder(Path(path), "fp8")
    return paths


@pytest.mark.parametrize("name", CASES)
def test_equals_the_cpu(gpu, workers, folders, text, tmp_path, name):
    samples, row = CASES[name]
    row = replace(row, changes=json.loads(json.dumps(row.changes).replace("{folder}", folders.get(name, ""))))
    expected = train(PackedPool(workers, samples), row, tmp_path / "cpu", text, steps=3)
    rows = train_on_gpu(Case(row, samples=samples), gpu, tmp_path / "gpu", text, steps=3)
    losses, norms = difference(rows, expected)
    is_fp32 = row.precision == "fp32"
    assert losses <= (LOSS if is_fp32 else BF16_LOSS) and norms <= (NORM if is_fp32 else BF16_NORM), (losses, norms)
    assert hashes(rows) == hashes(expected) and len(hashes(rows)) == 3
    assert all(each["grad_norm"] > 1e-3 for each in expected if each["kind"] == "train")
