"""Checkpoints from strangers: what is not a plain DCP checkpoint of tensors is refused before anything runs."""

import os
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from echelon.checkpoint.safety import read_metadata
from echelon.checkpoint.store import CheckpointStore, check_files, find_checkpoints, find_newest, load_alone
from echelon.errors import CheckpointError


@pytest.fixture(autouse=True)
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def save(folder, step=1, keep_last=3, **tensors):
    store = CheckpointStore(folder, keep_last=keep_last, asynchronous=False)
    store.save(step, tensors or {"a": torch.arange(4.0)}, {"train": {"step": step}})
    store.close()
    return folder / f"step-{step:08d}"


class Malice:
    """Unpickling this would make a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_hostile_metadata_is_refused_and_does_not_run(tmp_path):
    folder = save(tmp_path)
    (folder / ".metadata").write_bytes(pickle.dumps(Malice(tmp_path / "owned")))
    with pytest.raises(CheckpointError, match=r"refused: its \.metadata names (posix|os)\.mkdir"):
        read_metadata(folder)
    assert not (tmp_path / "owned").exists()


def test_entries_of_pickled_bytes_are_refused(tmp_path):
    folder = tmp_path / "step-00000001"
    dcp.save({"a": torch.ones(2), "evil": Malice(tmp_path / "owned")}, checkpoint_id=folder)
    with pytest.raises(CheckpointError, match="evil is not a tensor but pickled bytes"):
        read_metadata(folder)


def test_files_outside_the_folder_are_refused(tmp_path):
    folder = save(tmp_path)
    metadata = read_metadata(folder)
    for key, info in metadata.storage_data.items():
        metadata.storage_data[key] = _StorageInfo("../elsewhere", info.offset, info.length)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"points at \.\./elsewhere, outside its folder"):
        read_metadata(folder)


@pytest.mark.parametrize("content", [b"", b"garbage", pickle.dumps({"a": 1})])
def test_damaged_metadata_is_a_clear_error(tmp_path, content):
    folder = save(tmp_path)
    (folder / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"Checkpoint .*\.metadata"):
        read_metadata(folder)


def test_round_trip_and_asynchronous_copy(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=3, asynchronous=True)
    tensor = torch.arange(1000.0)
    store.save(7, {"a": tensor}, {"train": {"step": 7}})
    tensor.zero_()  # training goes on: what is saved is what stood there when save was called
    store.close()
    loaded = {"a": torch.empty(1000)}
    load_alone(tmp_path / "step-00000007", loaded)
    assert torch.equal(loaded["a"], torch.arange(1000.0))
    assert find_checkpoints(tmp_path)[0].read_state() == {"train": {"step": 7}}


def test_keep_last(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=2, asynchronous=True)
    for step in range(1, 6):
        store.save(step, {"a": torch.ones(2)}, {})
    store.close()
    assert [checkpoint.step for checkpoint in find_checkpoints(tmp_path)] == [4, 5]


def test_damaged_and_half_written_ones_are_passed_over(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    shard = next((tmp_path / "step-00000003").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    (tmp_path / "step-00000002" / "state.json").unlink()
    (tmp_path / ".writing-00000004").mkdir()
    lines = []
    newest = find_newest(tmp_path, lines.append)
    assert newest is not None and newest.step == 1
    assert len(lines) == 2 and "bytes" in lines[0] and "state.json is missing" in lines[1]


def test_a_changed_byte_is_found_by_its_checksum(tmp_path):
    folder = save(tmp_path)
    shard = next(folder.glob("*.distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    check_files(folder)
    with pytest.raises(CheckpointError, match="changed after it was written"):
        check_files(folder, checksums=True)


def test_leftovers_of_a_killed_save_are_swept(tmp_path):
    (tmp_path / ".writing-00000009").mkdir()
    save(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_other_shapes_and_missing_tensors_are_named(tmp_path):
    folder = save(tmp_path, 1, a=torch.ones(4))
    with pytest.raises(CheckpointError, match=r"holds a as \(4,\) and the recipe's model has \(5,\)"):
        load_alone(folder, {"a": torch.ones(5)})
    with pytest.raises(CheckpointError, match="has no b"):
        load_alone(folder, {"b": torch.ones(5)})


def test_a_save_that_fails_says_why_and_leaves_earlier_ones(tmp_path, monkeypatch):
    save(tmp_path, 1)
    store = CheckpointStore(tmp_path, keep_last=3, asynchronous=True)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("echelon.checkpoint.store.publish", full)
    store.save(2, {"a": torch.ones(4)}, {})
    with pytest.raises(CheckpointError, match=r"could not be written: .*No space left"):
        store.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
