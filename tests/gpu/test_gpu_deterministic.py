"""`train.deterministic` on a GPU: two runs are equal bit for bit, with otherwise nondeterministic operations."""

import pytest
import torch

from tests.gpu.gpu_training import Case, train_on_gpu
from tests.parity.training import Row, equal_tensors, tensors_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "case",
    [
        Case(Row(micro_batch=4, precision="bf16")),
        Case(Row(micro_batch=4, precision="fp16", family="gpt2", tied=True, dropout=0.1), around="fsdp"),
        Case(Row(micro_batch=4, family="gemma2", tied=True, compile=True)),
        Case(Row(micro_batch=4, optimizer="adamw_8bit", family="qwen3"), around="ddp"),
    ],
    ids=str,
)
def test_two_runs_are_equal(gpu, deterministic, text, tmp_path, case):
    for name in ("first", "second"):
        train_on_gpu(case, gpu, tmp_path / name, text)
    assert equal_tensors(*(tensors_of(tmp_path / name / "run", step=4) for name in ("first", "second")))


@pytest.mark.device
def test_a_nondeterministic_operation_raises(gpu, deterministic):
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        torch.histc(torch.ones(4, device=gpu.device, requires_grad=False), bins=2)
