"""Checkpoints of CUDA tensors are copied before `save` returns and complete when read; a resumed run is exact."""

from functools import partial

import pytest
import torch

from echelon.learn.checkpoint import store as store_module
from echelon.learn.checkpoint.snapshot import PeerMemory, SnapshotsByStep
from echelon.learn.checkpoint.store import CheckpointStore, Stager
from tests.gpu.gpu_training import OFFLOAD, Case, train_on_gpu, trainer_on_gpu
from tests.parity.training import Row, assert_same_curve, check_exact_resume, equal_tensors, tensors_of

pytestmark = pytest.mark.gpu
# Fused attention sums gradients with atomics, in varying order; eager attention is matmuls and a softmax.
EAGER = ("model.attn_implementation=eager",)


def test_saving_copies_before_it_returns(gpu, tmp_path):
    store = CheckpointStore(tmp_path, keep_last=3, asynchronous=True)
    tensors = {f"w{index}": torch.full((1024, 4096), float(index), device=gpu.device) for index in range(8)}
    expected = {name: tensor.cpu() for name, tensor in tensors.items()}
    store.save(1, tensors, {"train": {}})
    for tensor in tensors.values():
        tensor.fill_(-1.0)
    store.wait()
    store.load(store.newest(), tensors)
    store.close()
    assert all(torch.equal(tensors[name].cpu(), expected[name]) for name in expected)


@pytest.mark.device
def test_the_first_save_copies_into_memory_that_the_rehearsal_has_pinned(gpu, monkeypatch):
    tensors = {f"w{index}": torch.full((1024, 4096), float(index), device=gpu.device) for index in range(8)}
    stager = Stager()
    stager.prepare(tensors)
    monkeypatch.setattr(store_module, "allocate_buffers", lambda *_, **__: pytest.fail("it allocates"))
    copied = stager.stage(tensors)
    assert all(copied[name].is_pinned() and torch.equal(copied[name], tensors[name].cpu()) for name in tensors)


@pytest.mark.device
def test_a_held_snapshot_is_of_the_step_that_took_it(gpu):
    """`save` returns before the copy; what runs on the device afterwards comes after it."""
    tensors, held = {"weight": torch.full((4096, 4096), 1.0, device=gpu.device)}, SnapshotsByStep()
    memory = PeerMemory(held, 1, 1)
    for step in (1, 2):
        memory.save(step, tensors, {})
        tensors["weight"].add_(1.0)
    memory.close()
    assert held.whole == 2 and held.own[2].is_pinned()
    assert held.own[2].view(torch.float32).unique().tolist() == [2.0]


@pytest.mark.parametrize(
    "case",
    [
        Case(overrides=EAGER),
        Case(Row(family="gpt2", tied=True, dropout=0.1, micro_batch=4), overrides=EAGER),
        Case(Row(precision="bf16", checkpointing="full", micro_batch=4), overrides=EAGER),
        Case(around="fsdp", overrides=EAGER),
        Case(Row(precision="bf16", micro_batch=4), around="zero1", overrides=EAGER),
        Case(Row(OFFLOAD, micro_batch=4), overrides=EAGER),
        Case(Row(compile=True, micro_batch=4), overrides=EAGER),
    ],
    ids=str,
)
def test_resuming_after_five_steps_equals_ten_steps_bit_for_bit(gpu, text, tmp_path, case):
    check_exact_resume(partial(train_on_gpu, case, gpu), tmp_path, text, steps=10)


@pytest.mark.parametrize(
    ("first", "second"),
    [(Case(), Case(around="fsdp")), (Case(around="zero1"), Case(Row(OFFLOAD, micro_batch=4)))],
    ids=str,
)
def test_another_plan_resumes_with_the_same_curve(gpu, text, tmp_path, first, second):
    straight = train_on_gpu(Case(), gpu, tmp_path / "straight", text, steps=10)
    train_on_gpu(first, gpu, tmp_path / "changed", text, steps=10, stop_at=5)
    rows = train_on_gpu(second, gpu, tmp_path / "changed", text, steps=10)
    assert_same_curve(rows, straight, (1e-4, 1e-3))


def test_a_checkpoint_of_the_gpu_loads_on_the_host(gpu, text, tmp_path):
    with trainer_on_gpu(Case(), gpu, tmp_path, text, steps=4) as trainer:
        trainer.fit()
        live = {name: value.cpu() for name, value in trainer.train_step.learner.engine.state_dict().items()}
    assert equal_tensors(tensors_of(tmp_path / "run", step=4), live)
