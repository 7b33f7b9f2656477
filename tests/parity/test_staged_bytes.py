"""For a save, all ranks together copy one checkpoint, however often the plan holds it; the files are DCP's own."""

from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from echelon.learn.checkpoint.fill import read_metadata
from echelon.learn.checkpoint.store import CheckpointStore, Stager
from echelon.learn.distributed.mesh import build_mesh
from echelon.planner.plan import ParallelPlan
from tests.parity.training import Row, equal_tensors, masked_trainer, prepare, tensors_of, with_ranks

pytestmark = pytest.mark.dist

STEP = 1


def local_part(tensor):
    """What a rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def fill(tensors):
    """Give every tensor values that depend on its place among the names alone, so that every plan has the same."""
    for seed, name in enumerate(sorted(tensors)):
        held = tensors[name]
        whole = (100 * torch.rand(held.shape, generator=torch.Generator().manual_seed(seed))).to(held.dtype)
        if isinstance(held, DTensor):
            whole = distribute_tensor(whole, held.device_mesh, held.placements, src_data_rank=None)
        held.copy_(whole)


@torch.no_grad()
def save_and_resume(store, tensors):
    """Save filled tensors and read them back; the bytes that this rank copied, and the largest that it holds."""
    stage, copied = Stager.stage, []

    def counted(self, state_dict):
        copies = stage(self, state_dict)
        copied.append(sum(local_part(each).nbytes for each in copies.values()))
        return copies

    fill(tensors)
    expected = {name: local_part(tensor).clone() for name, tensor in tensors.items()}
    with mock.patch.object(Stager, "stage", counted):
        store.save(STEP, tensors, {"train": {}})
    for tensor in tensors.values():
        local_part(tensor).fill_(7)
    store.wait()
    store.load(store.newest(), tensors)
    assert equal_tensors({name: local_part(tensor) for name, tensor in tensors.items()}, expected)
    [num_bytes] = copied
    return num_bytes, max(each.nbytes for each in expected.values())


def check_shares(ranks, one):
    """All ranks together copied `one` checkpoint's bytes, and each at most one tensor more than its share."""
    num_bytes = [copied for copied, _ in ranks]
    assert sum(num_bytes) == one
    for copied, largest in ranks:
        assert copied <= one / len(ranks) + largest, num_bytes


# Two of the largest on one of four ranks would be more than its share and another tensor.
SHAPES = {
    "embed": (64, 16),
    "head": (64, 16),
    "up": (32, 16),
    "down": (16, 32),
    "norm": (16,),
    "bias": (3,),
    "step": (),
}
PLANS = [
    ParallelPlan("ddp", dp_replicate=2),
    ParallelPlan("ddp", dp_replicate=4),
    ParallelPlan("hsdp", dp_replicate=2, dp_shard=2),
]


def build_tensors(plan):
    """A state as the plan holds it: whole on every rank, or divided over one axis and repeated over the other."""
    tensors = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    if plan.dp_shard > 1:
        mesh, placements = build_mesh(plan, "cpu").shard, [Replicate(), Shard(0)]
        tensors |= {
            name: distribute_tensor(tensor, mesh, placements) for name, tensor in tensors.items() if name != "step"
        }
    return tensors


def save_beside_dcp(rank, world_size, folder, plan):
    """Save the same tensors with echelon, and with DCP alone, which copies nothing."""
    tensors = build_tensors(plan)
    store = CheckpointStore(Path(folder) / "checkpoints", keep_last=1, asynchronous=True)
    store.rehearse(tensors)
    copied = save_and_resume(store, tensors)
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(Path(folder) / "dcp"))
    store.close()
    return copied


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.strategy} {plan.world_size} ranks")
def test_a_tensor_is_copied_by_the_rank_that_writes_it(workers, tmp_path, plan):
    """DCP alone decides, with every tensor of every rank before it, who writes what: the files are the same bytes."""
    ranks = workers.run(save_beside_dcp, plan.world_size, str(tmp_path), plan)
    check_shares(ranks, 4 * sum(torch.Size(shape).numel() for shape in SHAPES.values()))
    ours, theirs = tmp_path / "checkpoints" / f"step-{STEP:08d}", tmp_path / "dcp"
    names = sorted(path.name for path in theirs.glob("*.distcp"))
    assert names == [f"__{rank}_0.distcp" for rank in range(plan.world_size)], "every rank writes a part"
    assert names == sorted(path.name for path in ours.glob("*.distcp"))
    assert all((ours / name).read_bytes() == (theirs / name).read_bytes() for name in names)
    metadata = [read_metadata(folder) for folder in (ours, theirs)]
    assert metadata[0].state_dict_metadata == metadata[1].state_dict_metadata
    assert metadata[0].storage_data == metadata[1].storage_data


def save_trainer(rank, world_size, path, plan):
    """Save what a run of this plan saves, through its own store."""
    with masked_trainer(rank, world_size, path, plan) as trainer:
        return save_and_resume(trainer.saver.store, trainer.saver.contents.tensors())


def save_row(workers, row, folder, text):
    """Save the state of a row; what its ranks copied, and the tensors of the checkpoint."""
    path, plan = prepare(row, folder, text, steps=4)
    return workers.run(save_trainer, plan.world_size, str(path), plan), tensors_of(folder / "run", STEP)


@pytest.fixture(scope="module")
def alone(workers, text, tmp_path_factory):
    """What a single process copies, and its checkpoint, by optimizer."""
    found = {}

    def find(optimizer):
        if optimizer not in found:
            found[optimizer] = save_row(workers, Row(optimizer=optimizer), tmp_path_factory.mktemp("one"), text)
        return found[optimizer]

    return find


@pytest.mark.parametrize(
    "row",
    [
        with_ranks(Row("hsdp"), 4),
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in (
                with_ranks(Row("ddp"), 2),
                with_ranks(Row("ddp"), 4),
                with_ranks(Row("zero1"), 4),
                with_ranks(Row("fsdp"), 4),
                with_ranks(Row("ddp", optimizer="adamw_8bit"), 4),
            )
        ),
    ],
    ids=str,
)
def test_a_run_copies_one_checkpoint(workers, text, tmp_path, alone, row):
    [(one, _)], expected = alone(row.optimizer)
    ranks, saved = save_row(workers, row, tmp_path, text)
    assert equal_tensors(saved, expected)
    check_shares(ranks, one)
