"""Every rank issues the collectives that it shares with another one in the same order: NCCL would wait forever else.

gloo finds a wrong order only if it waits too, or if sizes differ; so each rank notes what it calls, and any two ranks
must agree on all that both take part in, over all of their groups together. Messages from one rank to another must be
received in the order in which they are sent: NCCL has no tags to tell them apart.
"""

import itertools
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import ScriptObject
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.parity.training import Row, prepare, with_ranks
from tests.parity.warm_step import WARM_UP_STEPS, warm_trainer

pytestmark = pytest.mark.dist

# Parts of different sizes are sent, or only one rank has the whole.
UNEVEN = ("alltoall_base_", "all_to_all_single", "scatter_", "gather_")
MESSAGE = "message"
# Which rank of a message its caller is: the one that sends, or the one that receives.
ENDS = {"send": 0, "recv_": 1}


class Call(NamedTuple):
    """A collective: the global ranks of its group, the operation, and the shapes and types of its tensors.

    Of a message the ranks are (from, to), and the operation is MESSAGE.
    """

    ranks: tuple[int, ...]
    kind: str
    tensors: tuple[Any, ...]


class Collectives(TorchDispatchMode):
    """Notes the collectives that this thread calls, in their order, as torch dispatches them."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation.overloadpacket.__name__
        is_noted = operation.namespace in ("c10d", "_c10d_functional")
        if is_noted and (group := find_group(operation, args)) is not None:
            tensors = [each for each in tree_leaves(args) if isinstance(each, torch.Tensor)]
            shapes = () if name in UNEVEN else tuple(tuple(each.shape) for each in tensors)
            described = (*shapes, *sorted({str(each.dtype) for each in tensors}))
            ranks = dist.get_process_group_ranks(group)
            if name in ENDS:
                ends = [dist.get_rank(), ranks[args[2]]]
                self.calls.append(Call(tuple(reversed(ends) if ENDS[name] else ends), MESSAGE, described))
            else:
                self.calls.append(Call(tuple(ranks), name, described))
        return operation(*args, **(kwargs or {}))


def find_group(operation, args):
    """The group of a collective; None if it waits for one, or its group has a single rank."""
    boxed = next((each for each in args if isinstance(each, ScriptObject)), None)
    if boxed is not None:
        group = ProcessGroup.unbox(boxed)
    else:
        names = [schema.name for schema in operation._schema.arguments]
        if "group_name" not in names:
            return None
        group = _resolve_process_group(args[names.index("group_name")])
    return group if group.size() > 1 else None


def calls_of_steps(rank, world_size, path, plan, planted):
    """This rank's collectives of a step, and of one with each of the planted swaps."""
    found = []
    with warm_trainer(rank, world_size, path, plan) as trainer:
        learner = trainer.train_step.learner
        forward_backward = learner.engine.forward_backward
        for number, swap in enumerate(["", *planted]):
            if swap == "messages":
                learner.engine.forward_backward = after_messages(forward_backward)
            elif swap:
                second = learner.meshes.tp.get_group() if swap == "between groups" else dist.group.WORLD
                learner.engine.forward_backward = after_sums(forward_backward, dist.group.WORLD, second)
            with Collectives() as noted:
                trainer.train_step(WARM_UP_STEPS + number)
            found.append(noted.calls)
    return found


def after_sums(forward_backward, *groups):
    """A pass after two sums, which the last rank calls in the other order."""

    def called(*arguments):
        sums = [(torch.ones(4), groups[0]), (torch.ones(4, dtype=torch.int32), groups[1])]
        if dist.get_rank() == dist.get_world_size() - 1:
            sums.reverse()
        for work in [dist.all_reduce(values, group=group, async_op=True) for values, group in sums]:
            work.wait()
        return forward_backward(*arguments)

    return called


def after_messages(forward_backward):
    """A pass after two messages from rank 0, which rank 1 receives in the other order, by their tags."""

    def called(*arguments):
        messages = [(torch.ones(4), 1), (torch.ones(4, dtype=torch.int32), 2)]
        if dist.get_rank() == 0:
            works = [dist.isend(values, 1, tag=tag) for values, tag in messages]
        else:
            works = [dist.irecv(values, 0, tag=tag) for values, tag in reversed(messages)]
        for work in works:
            work.wait()
        return forward_backward(*arguments)

    return called


def find_disorder(calls):
    """The first collective or message of two ranks that differs, of those that both take part in; None if all agree.

    Args:
        calls: of each rank, in the order in which it calls them.
    """
    for first, second in itertools.permutations(range(len(calls)), 2):
        shared = [
            [call for call in calls[one] if call.kind != MESSAGE and other in call.ranks]
            for one, other in ((first, second), (second, first))
        ]
        sent = [[call for call in calls[one] if call[:2] == ((first, second), MESSAGE)] for one in (first, second)]
        for kind, (ours, theirs) in (("collective", shared), (MESSAGE, sent)):
            for number, pair in enumerate(itertools.zip_longest(ours, theirs)):
                if pair[0] != pair[1]:
                    return f"{kind} {number} of ranks {first} and {second}: {pair[0]}, but {pair[1]}"
    return None


MOE = "qwen3_moe"
ROWS = [
    with_ranks(Row({"dp_shard": 2, "ep": 2}, family=MOE), 2, micro_batch=2),
    with_ranks(Row("fsdp", optimizer="muon", checkpointing="full"), 4, micro_batch=1),
    with_ranks(Row("zero1", precision="fp16"), 4, micro_batch=1),
    with_ranks(Row("hsdp", optimizer="adafactor"), 4, micro_batch=1),
    with_ranks(Row({"dp_shard": 2, "tp": 2, "sequence_parallel": True}), 4, micro_batch=2),
    with_ranks(Row({"pp": 2, "tp": 2}), 4, micro_batch=2),
    with_ranks(Row({"pp": 2, "dp_shard": 2}, tied=True), 4, micro_batch=2),
    with_ranks(Row({"pp": 2, "schedule": "zero_bubble"}), 2, micro_batch=2),
    with_ranks(Row({"pp": 2, "schedule": "interleaved"}, fields=(("num_hidden_layers", 4),)), 2, micro_batch=2),
    with_ranks(Row({"cp": 2, "dp_shard": 2}), 4, micro_batch=2),
    with_ranks(Row({"cp": 2, "cp_method": "ulysses", "tp": 2}), 4, micro_batch=2),
    with_ranks(Row({"dp_shard": 4, "ep": 2}, family=MOE, optimizer="muon"), 4, micro_batch=1),
    with_ranks(Row({"cp": 2, "dp_shard": 2, "ep": 2}, family=MOE), 4, micro_batch=2),
    with_ranks(Row({"dp_shard": 2, "ep": 2, "tp": 2}, family=MOE), 4, micro_batch=2),
]


def run(workers, row, folder, text, *planted):
    """The calls of all ranks, of each step."""
    path, plan = prepare(row, folder, text, steps=8)
    return list(zip(*workers.run(calls_of_steps, row.ranks, str(path), plan, planted), strict=True))


def test_planted_swaps_are_found(workers, text, tmp_path):
    """Of two sums in one group, of two in different groups of the same ranks, and of two messages."""
    row = with_ranks(Row({"tp": 2}), 2, micro_batch=2)
    whole, *swapped, messages = run(workers, row, tmp_path, text, "in a group", "between groups", "messages")
    assert find_disorder(whole) is None
    assert all(len(each) > 2 for each in whole)
    for calls in swapped:
        found = find_disorder(calls)
        assert found is not None and "allreduce_" in found and "int32" in found
    found = find_disorder(messages)
    assert found is not None and found.startswith("message 0 of ranks 0 and 1") and "int32" in found


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_all_ranks_call_their_collectives_in_the_same_order(workers, text, tmp_path, row):
    [calls] = run(workers, row, tmp_path, text)
    assert find_disorder(calls) is None
    assert all(len(each) > 2 for each in calls)
    parallel = row.parallel if isinstance(row.parallel, dict) else {}
    assert any(call.kind == MESSAGE for each in calls for call in each) == ("pp" in parallel)


@pytest.mark.slow
def test_plans_on_eight_ranks(eight_workers, text, tmp_path):
    plans = (
        ({"pp": 2, "dp_shard": 2, "tp": 2}, "llama"), ({"dp_replicate": 2, "dp_shard": 2, "cp": 2}, "llama"),
        ({"dp_shard": 4, "ep": 4, "tp": 2}, MOE),
    )  # fmt: skip
    for number, (parallel, family) in enumerate(plans):
        row = with_ranks(Row(parallel, family=family), 8, micro_batch=1)
        [calls] = run(eight_workers, row, tmp_path / str(number), text)
        assert find_disorder(calls) is None
