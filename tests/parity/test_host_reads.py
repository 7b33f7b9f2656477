"""Inside a step the host asks the device nothing: it runs ahead, and reads what happened one step later.

Nor does it search the model for its parts, or format stack traces, as `torch.manual_seed` does. On a GPU,
`tests/gpu/test_gpu_host.py` lets CUDA itself forbid what waits; here every plan runs, on tensors of a CPU.
"""

import gc
import sys
import threading
import traceback
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import FrameType
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from echelon.learn.objectives.causal_lm import CausalLM
from echelon.run.training import trainer as trainer_module
from tests.parity.training import Row, masked_trainer, prepare, with_ranks
from tests.parity.warm_step import WARM_UP_STEPS, warm_trainer

pytestmark = pytest.mark.dist

# Where a step may read a value: `file:function`, and why.
ALLOWED = {"learn/parallel/expert.py:find_route": "how many rows of experts ranks send each other: one read a layer"}

aten = torch.ops.aten
# What bool(), int(), float() and .item() of a tensor come down to, and shapes that depend on values.
READS = {
    aten._local_scalar_dense, aten.is_nonzero, aten.equal, aten.nonzero, aten.masked_select, aten.bincount,
    aten._unique2, aten.unique_dim, aten.unique_consecutive, aten.unique_dim_consecutive, aten.argwhere,
}  # fmt: skip
# Those that hand a tensor's values to Python, or copy them to the host: on a CPU torch dispatches nothing for them.
METHODS = ("tolist", "numpy", "cpu")


class HostReads(TorchDispatchMode):
    """Notes every operation of this thread that would make the host wait for a GPU, with its place in echelon."""

    def __init__(self):
        super().__init__()
        self.found = []
        self._thread = threading.get_ident()
        self._patches = ExitStack()

    @classmethod
    def ignore_compile_internals(cls):
        """Let torch.compile work: `test_compiled_layers.py` finds breaks in graphs, which a read would be."""
        return True

    def __enter__(self):
        for name in METHODS:
            noting = self._noting(getattr(torch.Tensor, name))
            self._patches.enter_context(mock.patch.object(torch.Tensor, name, noting))
        return super().__enter__()

    def __exit__(self, *error):
        self._patches.close()
        return super().__exit__(*error)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if reads_values(operation.overloadpacket, args, kwargs or {}):
            self._note(str(operation))
        return operation(*args, **(kwargs or {}))

    def _noting(self, method):
        def noted(tensor, *arguments, **options):
            if threading.get_ident() == self._thread:
                self._note(method.__name__)
            return method(tensor, *arguments, **options)

        return noted

    def _note(self, operation):
        self.found.append((find_place(sys._getframe(2)), operation))


def reads_values(operation, args, kwargs):
    """Whether an operation waits for values of its arguments: also those whose shape a mask or numbers decide."""
    if operation in (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_):
        masks = [each for each in args[1] if each is not None and each.dtype in (torch.bool, torch.uint8)]
        is_fill = operation is not aten.index and args[2].numel() == 1  # computed as a masked fill
        return bool(masks) and not is_fill
    if operation is aten.repeat_interleave:
        repeats = args[0] if len(args) == 1 else args[1]
        return isinstance(repeats, torch.Tensor) and kwargs.get("output_size") is None
    return operation in READS


def find_place(frame: FrameType | None) -> str:
    """The innermost function of echelon, or of a test, below which a frame is: `file:function`."""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if "echelon" in path.parts or ("tests" in path.parts and path.name != Path(__file__).name):
            return f"{'/'.join(path.parts[-3:])}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "an unknown place"


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
    """The reads and slow calls of a step, and, to show that both would be seen, those of known causes."""
    with warm_trainer(rank, world_size, path, plan, samples) as trainer:
        with HostReads() as inside, SlowCalls() as slow_inside:
            pending = trainer.train_step(WARM_UP_STEPS)
        with HostReads() as outside, SlowCalls() as slow_outside:
            bool(pending.record.verdict.commit)
            torch.manual_seed(0)
            list(torch.nn.Linear(1, 1).parameters())
    return inside.found, slow_inside.found, outside.found, set(slow_outside.found)


MOE = "qwen3_moe"
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
    ("pairs", with_ranks(Row("ddp", changes={"objective": {"name": "orpo"}}), 2, micro_batch=2)),
    ("judged", with_ranks(Row("fsdp", changes={"objective": {"name": "kto"}}), 2, micro_batch=2)),
]
LONG_ROWS = [
    with_ranks(Row({"tp": 2}), 2, micro_batch=2),
    with_ranks(
        Row({"tp": 2, "sequence_parallel": True}, precision="bf16", checkpointing="selective"), 2, micro_batch=2
    ),
    with_ranks(Row({"pp": 2}), 2, micro_batch=2),
    with_ranks(Row({"cp": 2}), 2, micro_batch=2),
    with_ranks(Row({"cp": 2, "cp_method": "ulysses"}), 2, micro_batch=2),
    with_ranks(Row({"cp": 2, "cp_method": "ring"}), 2, micro_batch=2),
    with_ranks(Row({"dp_shard": 2, "ep": 2}, family=MOE), 2, micro_batch=2),
    with_ranks(Row({"dp_shard": 2, "ep": 2}, family="mixtral", checkpointing="full"), 2, micro_batch=2),
    with_ranks(Row({"dp_shard": 2, "tp": 2}), 4, micro_batch=2),
    with_ranks(Row("zero2", precision="bf16"), 2, micro_batch=2),
    with_ranks(Row("hsdp"), 4, micro_batch=1),
    with_ranks(Row("fsdp", adapter="qlora", checkpointing="full"), 2, micro_batch=2),
    with_ranks(Row("ddp", adapter="lora", precision="bf16"), 2, micro_batch=2),
    Row(micro_batch=4, adapter="dora"),
    Row(micro_batch=4, compile=True),
    with_ranks(Row("fsdp", compile=True, precision="bf16", family="gpt2", tied=True), 2, micro_batch=2),
    with_ranks(Row("ddp", family=MOE), 2, micro_batch=2),
    with_ranks(Row({"pp": 2, "schedule": "zero_bubble"}), 2, micro_batch=2),
    with_ranks(Row({"pp": 2, "tp": 2}), 4, micro_batch=2),
    with_ranks(Row({"dp_shard": 2, "ep": 2, "tp": 2}, family=MOE), 4, micro_batch=2),
    with_ranks(Row("ddp", changes={"sync": {"compress": {"method": "powersgd", "rank": 2}}}), 2, micro_batch=2),
    with_ranks(Row("ddp", changes={"sync": {"compress": {"method": "fp16"}}}), 2, micro_batch=2),
    with_ranks(Row("ddp", changes={"sync": {"name": "diloco", "replicas": 2, "every": 2}}), 2, micro_batch=2),
]
ROWS += [pytest.param("", row, marks=pytest.mark.slow) for row in LONG_ROWS]


@pytest.mark.parametrize(("samples", "row"), ROWS, ids=str)
def test_a_step_reads_and_searches_nothing(workers, text, tmp_path, samples, row):
    path, plan = prepare(row, tmp_path, text, steps=4)
    layers = row.config()["num_hidden_layers"] if plan.ep > 1 else 0
    for inside, slow_inside, reads, slow_calls in workers.run(reads_of_a_step, row.ranks, str(path), plan, samples):
        assert [(place, read) for place, read in inside if place not in ALLOWED] == []
        assert len(inside) == layers * plan.num_microbatches
        # torch's schedules list the parameters of a stage before each backward pass.
        assert slow_inside == [] or (plan.pp > 1 and set(slow_inside) == {"named_modules"})
        assert reads
        assert slow_calls == {"named_modules", "format_stack"}


@pytest.mark.slow
def test_a_step_in_float8_reads_nothing(workers, text, tmp_path):
    """Scales of shards that are gathered in float8 stay on the device; torchao looks for its layers once a step."""
    pytest.importorskip("torchao")
    path, plan = prepare(with_ranks(Row("fsdp", precision="bf16"), 2, micro_batch=2), tmp_path, text, steps=4)
    plan = replace(plan, precision=replace(plan.precision, float8=True))
    for inside, slow_inside, reads, _ in workers.run(reads_of_a_step, 2, str(path), plan, ""):
        assert inside == [] and set(slow_inside) == {"named_modules"}
        assert reads


def plant(read):
    """Make the objective read a value as it counts targets."""

    def count(self, batch):
        counted = (batch.labels >= 0).sum()
        read(counted, batch)
        return counted

    return mock.patch.object(CausalLM, "count", count)


PLANTED = {
    "item": lambda counted, batch: counted.item(),
    "branch": lambda counted, batch: 1 if counted > 0 else 2,
    "list": lambda counted, batch: counted.tolist(),
    "array": lambda counted, batch: counted.numpy(),
    "copy": lambda counted, batch: counted.cpu(),
    "mask": lambda counted, batch: batch.labels[batch.labels >= 0],
    "masked assignment": lambda counted, batch: torch.zeros(2).index_put_((torch.ones(2) > 0,), torch.ones(2)),
    "repeats": lambda counted, batch: batch.labels[0].repeat_interleave(batch.labels[0].clamp(0, 1)),
    "unique": lambda counted, batch: batch.labels.unique(),
}


def planted_reads(rank, world_size, path, plan):
    """The reads of a step with each of the planted reads; and the loss that a mask in a fill leaves unread."""
    found = {}
    with warm_trainer(rank, world_size, path, plan) as trainer:
        for number, (name, read) in enumerate(PLANTED.items()):
            with plant(read), HostReads() as inside:
                trainer.train_step(WARM_UP_STEPS + number)
            found[name] = inside.found
        with HostReads() as fill:
            values = torch.ones(4)
            values[values > 0] = 0.0
    return found, fill.found


def test_planted_reads_are_found(workers, text, tmp_path):
    path, plan = prepare(Row(micro_batch=4), tmp_path, text, steps=16)
    [(found, fill)] = workers.run(planted_reads, 1, str(path), plan)
    assert [name for name, reads in found.items() if not reads] == []
    assert fill == []


def collect(rank, world_size, path, plan):
    """The steps after which Python collects garbage during a training, with the generation."""
    found = []
    with masked_trainer(rank, world_size, path, plan) as trainer:

        def note(phase, told):
            if phase == "start" and len(found) < 4:  # at the end it collects by itself again
                found.append((trainer.num_recorded, told["generation"]))

        gc.callbacks.append(note)
        with mock.patch.object(trainer_module, "_COLLECT_EVERY", 3):
            trainer.fit()
        gc.callbacks.remove(note)
    assert gc.isenabled() and not gc.get_freeze_count()
    return found


def test_all_ranks_collect_garbage_after_the_same_steps(workers, text, tmp_path):
    """All others wait in the next collective for one that does."""
    path, plan = prepare(with_ranks(Row("ddp"), 2, micro_batch=2), tmp_path, text, 8)
    one, other = workers.run(collect, 2, str(path), plan)
    assert one == other == [(steps, 2) for steps in (0, 3, 6, 8)]
