"""Snapshots in a process group of one: the newest of memory and disk, and failures without consequences."""

import pytest
import torch
import torch.distributed as dist

from echelon.ground.errors import CheckpointError
from echelon.learn.checkpoint import store as store_module
from echelon.learn.checkpoint.snapshot import Snapshots
from echelon.learn.checkpoint.store import CheckpointStore


@pytest.fixture(autouse=True)
def group(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "group"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_newer_one_is_used(tmp_path):
    disk = CheckpointStore(tmp_path / "disk", 3, True)
    snapshots = Snapshots(tmp_path / "memory", 2)
    assert [step for step in range(1, 7) if snapshots.is_due(step)] == [2, 4, 6]
    assert snapshots.newest() is None
    for step in (2, 4):
        snapshots.save(step, {"a": torch.full((3,), float(step))}, {"train": {}})
    disk.save(3, {"a": torch.zeros(3)}, {"train": {}})
    snapshots.close()
    disk.close()
    held = snapshots.newest()
    assert held is not None and held.step == 4 and len(list((tmp_path / "memory").glob("step-*"))) == 1
    assert disk.newest(beyond=held.step) is None and disk.newest(beyond=2).step == 3
    found = {"a": torch.zeros(3)}
    disk.load(held, found)
    assert found["a"].tolist() == [4.0, 4.0, 4.0]


def test_without_shared_memory_there_are_no_snapshots(tmp_path):
    snapshots = Snapshots(None, 2)
    assert not snapshots.is_due(2) and snapshots.newest() is None
    snapshots.rehearse({"a": torch.zeros(3)})
    snapshots.close()


def test_failures_end_the_snapshots_and_not_the_run(tmp_path, monkeypatch, caplog):
    snapshots = Snapshots(tmp_path / "memory", 1)

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store_module, "publish", full)
    for step in range(1, 6):
        if snapshots.is_due(step):
            snapshots.save(step, {"a": torch.zeros(3)}, {"train": {}})
    assert not snapshots.is_due(6) and caplog.messages[-1].startswith("No further snapshots will be taken: ")
    snapshots.close()


def test_too_little_memory_is_refused_before_training(tmp_path):
    snapshots = Snapshots(tmp_path / "memory", 5)
    with pytest.raises(CheckpointError, match=r"checkpoint.snapshot_every_steps=5: .* remove this key"):
        snapshots.rehearse({"a": torch.zeros(1, device="meta").expand(2**50)})
