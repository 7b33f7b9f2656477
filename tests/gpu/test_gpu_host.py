"""The host runs ahead of the GPU: a step never waits, and the host reads its metrics one step later.

Two cases may synchronize: an offloaded plan, whose optimizer runs on the host, and attention that needs a mask (a
window shorter than the sequence, soft-capped scores), for which `transformers` reads the positions.
"""

import time

import pytest
import torch

from echelon.run.training.metrics import Measured
from tests.gpu.gpu_training import Case, model_overrides, trainer_on_gpu
from tests.parity.training import Row

pytestmark = [pytest.mark.gpu, pytest.mark.device]

CASES = [
    Case(Row(micro_batch=4)),
    Case(Row(micro_batch=4, precision="bf16", family="gpt2", tied=True, dropout=0.1)),
    Case(Row(micro_batch=4, precision="bf16", checkpointing="full")),
    Case(Row(micro_batch=4, checkpointing="selective", family="mistral")),
    Case(Row(micro_batch=4, precision="bf16"), around="ddp"),
    Case(Row(micro_batch=4, precision="bf16"), around="fsdp"),
    Case(Row(micro_batch=4, family="gemma3_text"), around="zero1"),
    Case(Row(micro_batch=4, precision="bf16", compile=True)),
    Case(Row(micro_batch=4, compile=True), around="fsdp"),
    Case(Row(micro_batch=4, optimizer="muon", precision="fp16"), around="fsdp"),
    Case(Row(micro_batch=4, optimizer="adafactor"), around="zero1"),
    Case(Row(micro_batch=4, optimizer="adamw_8bit", precision="bf16", master_weights="bf16_stochastic")),
    Case(Row(micro_batch=4, optimizer="lion", precision="bf16", master_weights="bf16_kahan"), around="fsdp"),
    Case(Row(micro_batch=4, optimizer="sgd")),
]


@pytest.fixture
def forbidden():
    """A function that forbids synchronizing calls, or allows them again."""
    yield lambda on: torch.cuda.set_sync_debug_mode("error" if on else "default")
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_never_synchronizes(gpu, text, tmp_path, forbidden, case):
    with trainer_on_gpu(case, gpu, tmp_path, text, steps=8) as trainer:
        for step in range(3):  # compilation, caches and the optimizer's state
            trainer.train_step(step, measure=lambda: Measured(peak_bytes=1)).read()
        forbidden(True)
        pending = trainer.train_step(3, measure=lambda: Measured(peak_bytes=1))
        # The next step is running when the metrics of the first are read, as in `Trainer.fit`.
        running = trainer.train_step(4)
        metrics = pending.read()
        forbidden(False)
        assert metrics.committed and metrics.step == 3 and running.read().step == 4


def test_synchronization_is_detected(gpu, forbidden):
    forbidden(True)
    with pytest.raises(RuntimeError, match="synchroniz"):
        torch.ones((), device=gpu.device).item()


def test_a_bad_step_is_skipped_on_the_device(gpu, text, tmp_path, forbidden):
    """With a non-finite gradient, weights, moments and step counts are unchanged, without host synchronization."""
    with trainer_on_gpu(Case(), gpu, tmp_path, text, steps=8) as trainer:
        trainer.train_step(0)
        before = {name: value.clone() for name, value in trainer.train_step.learner.engine.state_dict().items()}
        forward_backward = trainer.train_step.learner.engine.forward_backward

        def poisoned(*arguments):
            loss = forward_backward(*arguments)
            next(trainer.train_step.learner.engine.decoder.parameters()).grad.fill_(float("inf"))
            return loss

        trainer.train_step.learner.engine.forward_backward = poisoned
        forbidden(True)
        pending = trainer.train_step(1)
        forbidden(False)
        assert not pending.record.verdict.commit.item()
        after = trainer.train_step.learner.engine.state_dict()
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_host_returns_before_the_device_is_done(gpu, text, tmp_path):
    """Launching a heavy step takes a fraction of its time on the device."""
    heavy = model_overrides(  # few long kernels, because the launch queue is limited
        1024, hidden_size=4096, intermediate_size=11008, num_hidden_layers=2, num_attention_heads=32,
        num_key_value_heads=32, vocab_size=4096,
    )  # fmt: skip
    with trainer_on_gpu(Case(Row(micro_batch=4), overrides=heavy), gpu, tmp_path, text, steps=8) as trainer:
        for step in range(2):
            trainer.train_step(step)
        torch.cuda.synchronize()
        started = time.perf_counter()
        trainer.train_step(2)
        launched = time.perf_counter() - started
        torch.cuda.synchronize()
        done = time.perf_counter() - started
    print(f"launched in {launched * 1e3:.0f} ms, done after {done * 1e3:.0f} ms")
    assert launched < 0.7 * done
