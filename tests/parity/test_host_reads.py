"""Inside a step the host asks the device nothing: it runs ahead, and reads what happened one step later.

Nor does it search the model for its parts, or format stack traces, as `torch.manual_seed` does.
"""

import traceback
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from echelon.learn.distributed.runtime import Runtime
from echelon.recipe.load import load_recipe
from echelon.run.folder.run_folder import RunFolder
from echelon.run.lifecycle.assemble import build_trainer
from tests.parity.packed import packed_samples
from tests.parity.training import Row, prepare, with_ranks

pytestmark = pytest.mark.dist

# What bool(), int(), float(), .item() and .tolist() of a tensor come down to, and shapes that depend on values.
READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.equal.default,
}


class HostReads(TorchDispatchMode):
    """Notes every operation that would make the host wait for a GPU."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation in READS:
            self.found.append(str(operation))
        return operation(*args, **(kwargs or {}))


class SlowCalls(ExitStack):
    """Notes every search of a module for others, or for parameters, and every formatted stack trace."""

    def __init__(self):
        super().__init__()
        self.found = []
        for owner, name in ((torch.nn.Module, "named_modules"), (traceback, "format_stack")):
            self.enter_context(mock.patch.object(owner, name, self._noting(getattr(owner, name))))

    def _noting(self, function):
        def noted(*arguments, **options):
            self.found.append(function.__name__)
            return function(*arguments, **options)

        return noted


def reads_of_a_step(rank, world_size, path, plan, samples):
    """The reads and slow calls of the third step, and, to show that both would be seen, those of known causes."""
    recipe, _ = load_recipe(Path(path))
    runtime = Runtime(rank, world_size, rank, world_size, torch.device("cpu"), "gloo")
    with packed_samples(samples):
        trainer = build_trainer(recipe, plan, RunFolder(Path(recipe.run.dir)), runtime)
        trainer.train_step(0)
        trainer.train_step(1)
        with HostReads() as inside, SlowCalls() as slow_inside:
            pending = trainer.train_step(2)
        with HostReads() as outside, SlowCalls() as slow_outside:
            bool(pending.record.verdict.commit)
            torch.manual_seed(0)
            list(torch.nn.Linear(1, 1).parameters())
        trainer.train_step.loader.close()
        trainer.saver.store.close()
        if trainer.accounting.journal is not None:
            trainer.accounting.journal.close()
    return inside.found + slow_inside.found, outside.found, set(slow_outside.found)


ROWS = [
    ("", row)
    for row in (
        Row(micro_batch=4),
        Row(micro_batch=4, precision="bf16", family="gpt2", tied=True, dropout=0.1),
        with_ranks(Row("ddp", checkpointing="full"), 2, micro_batch=2),
        with_ranks(Row("fsdp", family="gemma3_text", precision="bf16"), 2, micro_batch=2),
        with_ranks(Row("zero1", family="mistral"), 2, micro_batch=2),
        with_ranks(Row("fsdp", optimizer="muon", precision="fp16"), 2),
        with_ranks(Row("zero1", optimizer="adafactor"), 2),
        with_ranks(Row("fsdp", optimizer="adamw_8bit", precision="bf16", master_weights="bf16_stochastic"), 2),
        Row(optimizer="lion", precision="bf16", master_weights="bf16_kahan"),
        Row(optimizer="sgd"),
        Row(changes={"fault": {"on_bad_step": "skip", "spike_factor": 2, "spike_window": 2}}, precision="fp16"),
    )
]
ROWS += [
    ("packed", with_ranks(Row("fsdp", family="gemma3_text", precision="bf16"), 2, micro_batch=2)),
    ("pairs", with_ranks(Row("ddp", changes={"objective": {"name": "dpo"}}), 2, micro_batch=2)),
]


@pytest.mark.parametrize(("samples", "row"), ROWS, ids=str)
def test_a_step_reads_and_searches_nothing(workers, text, tmp_path, samples, row):
    path, plan = prepare(row, tmp_path, text, steps=4)
    for inside, reads, slow_calls in workers.run(reads_of_a_step, row.ranks, str(path), plan, samples):
        assert inside == []
        assert reads
        assert slow_calls == {"named_modules", "format_stack"}
