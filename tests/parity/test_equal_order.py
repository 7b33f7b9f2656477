"""Ranks on GPUs would never wait forever for each other, nor use what has not arrived: see `nccl_order`.

Every plan of the parity tables runs as it sends on GPUs, on CPUs, over gloo.
"""

import itertools
from contextlib import nullcontext
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.parity import test_context, test_expert_parallel, test_pipeline, test_tensor, test_tensor_experts
from tests.parity.nccl_order import MESSAGE, Collectives, as_on_gpus, find_cycle, find_disorder
from tests.parity.parity_rows import COVERING
from tests.parity.training import Row, prepare, with_ranks
from tests.parity.warm_step import WARM_UP_STEPS, warm_trainer

pytestmark = pytest.mark.dist


def calls_of_steps(rank, world_size, path, plan, planted):
    """What `Collectives` has found on this rank in a step, and in one after each of the planted mistakes."""
    found = []
    with as_on_gpus(), warm_trainer(rank, world_size, path, plan) as trainer:
        learner = trainer.train_step.learner
        pairs = [dist.new_group(pair) for pair in PAIRS] if planted else []
        for number, name in enumerate(["", *planted]):
            lost = mock.patch.object(torch.cpu.Stream, "wait_event", lambda *given: None)
            noted = Collectives()
            with noted.noting(), lost if name == "a lost event" else nullcontext():
                if name:
                    call_planted(name, learner.meshes.tp.get_group(), pairs)
                trainer.train_step(WARM_UP_STEPS + number).collect()
            found.append((noted.steps, noted.races, [each.call for each in noted.pending]))
    return found


PLANTED = ("swap in a group", "swap between groups", "swapped messages", "a cycle", "no wait", "a lost event")
PAIRS = ((0, 1), (1, 2), (2, 0))


def call_planted(name, tp, pairs):
    """Collectives that gloo ends: swapped on one of four ranks, in a circle of groups, or used before they have ended.

    Messages are received in the other order by their tags.
    """
    rank, world, values, numbers = dist.get_rank(), dist.group.WORLD, torch.ones(4), torch.ones(4, dtype=torch.int32)
    works = []
    if name.startswith("swap "):
        sums = [(values, world), (numbers, world if name.endswith("in a group") else tp)]
        sums = sums[::-1] if rank == dist.get_world_size() - 1 else sums
        works = [dist.all_reduce(each, group=group, async_op=True) for each, group in sums]
    elif name == "swapped messages" and rank == 0:
        works = [dist.isend(values, 1, tag=1), dist.isend(numbers, 1, tag=2)]
    elif name == "swapped messages" and rank == 1:
        works = [dist.irecv(numbers, 0, tag=2), dist.irecv(values, 0, tag=1)]
    elif name == "a cycle" and rank < 3:
        works = [dist.all_reduce(values.clone(), group=pairs[place], async_op=True) for place in (rank, (rank + 2) % 3)]
    elif name == "no wait":
        dist.all_reduce(values, async_op=True)
        values.mul(2)
    for work in works:
        work.wait()


MOE = "qwen3_moe"
ROWS = [
    with_ranks(Row({"dp_shard": 2, "ep": 2}, family=MOE), 2, micro_batch=2),
    with_ranks(Row("fsdp", optimizer="muon", checkpointing="full"), 4, micro_batch=1),
    with_ranks(Row("zero1", precision="fp16"), 4, micro_batch=1),
    with_ranks(Row("zero2", tied=True), 2, micro_batch=2),
    with_ranks(Row("hsdp", optimizer="adafactor"), 4, micro_batch=1),
    with_ranks(Row("ddp", precision="bf16"), 2, micro_batch=2),
    with_ranks(Row("ddp", changes={"sync": {"compress": {"method": "powersgd", "rank": 2}}}), 2, micro_batch=2),
    with_ranks(Row("ddp", changes={"sync": {"name": "diloco", "replicas": 2, "every": 1}}), 2, micro_batch=2),
    with_ranks(Row({"dp_shard": 2, "tp": 2, "sequence_parallel": True}), 4, micro_batch=2),
    with_ranks(Row({"pp": 2, "tp": 2}), 4, micro_batch=2),
    with_ranks(Row({"pp": 2, "dp_shard": 2}, tied=True), 4, micro_batch=2),
    with_ranks(Row({"pp": 2, "schedule": "zero_bubble"}), 2, micro_batch=2),
    with_ranks(Row({"pp": 2, "schedule": "interleaved"}, fields=(("num_hidden_layers", 4),)), 2, micro_batch=2),
    with_ranks(Row({"cp": 2, "dp_shard": 2}), 4, micro_batch=2),
    with_ranks(Row({"cp": 2, "cp_method": "ring"}), 2, micro_batch=2),
    with_ranks(Row({"cp": 2, "cp_method": "ulysses", "tp": 2}), 4, micro_batch=2),
    with_ranks(Row({"dp_shard": 4, "ep": 2}, family=MOE, optimizer="muon"), 4, micro_batch=1),
    with_ranks(Row({"cp": 2, "dp_shard": 2, "ep": 2}, family=MOE), 4, micro_batch=2),
    with_ranks(Row({"dp_shard": 2, "ep": 2, "tp": 2}, family=MOE), 4, micro_batch=2),
]


def list_plans():
    """A row of each plan of the parity tables that is not above."""
    tables = [
        COVERING, test_context.ROWS, test_expert_parallel.MORE, test_pipeline.SLOW, test_tensor.ROWS,
        test_tensor_experts.ROWS, test_tensor_experts.BESIDE_EP,
    ]  # fmt: skip
    rows = [getattr(row, "values", [row])[0] for row in itertools.chain(*tables)]
    plans = {(str(row.parallel), row.ranks): replace(row, compile=False) for row in rows if row.ranks > 1}
    return [row for place, row in plans.items() if place not in {(str(row.parallel), row.ranks) for row in ROWS}]


def run(workers, row, folder, text, *planted):
    """The plan, and what all ranks have found, of each step: see `Collectives`."""
    path, plan = prepare(row, folder, text, steps=8)
    steps = zip(*workers.run(calls_of_steps, row.ranks, str(path), plan, planted), strict=True)
    return plan, [tuple(zip(*ranks, strict=True)) for ranks in steps]


def check(workers, row, folder, text):
    plan, [(steps, races, pending)] = run(workers, row, folder, text)
    assert find_disorder(steps) is None
    assert find_cycle(steps) is None
    assert not any(races) and not any(pending)
    kinds = {call.kind for call in itertools.chain(*steps[0])}
    assert (MESSAGE in kinds) == (plan.pp > 1 or plan.cp_method == "ring")
    assert ("_reduce_scatter_base_" in kinds) == (plan.uses_fully_shard and plan.dp_shard * plan.cp > 1)


def test_planted_mistakes_are_found(workers, text, tmp_path):
    row = with_ranks(Row({"dp_shard": 2, "tp": 2}), 4, micro_batch=2)
    _, steps_of_ranks = run(workers, row, tmp_path, text, *PLANTED)
    for name, (steps, races, pending) in zip(("", *PLANTED), steps_of_ranks, strict=True):
        found, cycle = find_disorder(steps), find_cycle(steps)
        assert (found is not None) == name.startswith("swap"), name
        if found is not None:
            assert "int32" in found
            assert ("message 0 of ranks 0 and 1" if name == "swapped messages" else "allreduce_") in found
        else:
            circle = {ranks for ranks, *_ in cycle or ()}
            assert circle == ({(0, 1), (1, 2), (0, 2)} if name == "a cycle" else set()), name
        assert all(races) == any(races) == (name in ("no wait", "a lost event")), name
        assert all(pending) == any(pending) == (name == "no wait"), name


@pytest.mark.parametrize("row", [*ROWS, *(pytest.param(row, marks=pytest.mark.slow) for row in list_plans())], ids=str)
def test_no_rank_waits_forever_or_too_little(workers, text, tmp_path, row):
    check(workers, row, tmp_path, text)


@pytest.mark.slow
def test_plans_on_eight_ranks(eight_workers, text, tmp_path):
    plans = (
        ({"pp": 2, "dp_shard": 2, "tp": 2}, "llama"), ({"dp_replicate": 2, "dp_shard": 2, "cp": 2}, "llama"),
        ({"dp_shard": 4, "ep": 4, "tp": 2}, MOE),
    )  # fmt: skip
    for number, (parallel, family) in enumerate(plans):
        check(eight_workers, with_ranks(Row(parallel, family=family), 8, micro_batch=1), tmp_path / str(number), text)
