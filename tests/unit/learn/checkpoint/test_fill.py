"""Untrusted checkpoints: everything except plain DCP checkpoints of tensors is refused before any code runs."""

import copyreg
import json
import os
import pickle
import shutil
import struct

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from echelon.ground.checksums import check_files
from echelon.ground.errors import CheckpointError
from echelon.learn.checkpoint.fill import load_alone, read_metadata
from echelon.learn.checkpoint.folder import find_checkpoints, publish
from echelon.learn.checkpoint.store import CheckpointStore

GREEDY = pickle.PROTO + b"\x05" + pickle.BYTEARRAY8 + struct.pack("<Q", 2**62) + b"x" + pickle.STOP
"""A pickle of 12 bytes that asks for a bytearray of 2**62."""


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


class Hostile:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_malicious_metadata_is_refused_and_not_executed(tmp_path):
    folder = save(tmp_path)
    (folder / ".metadata").write_bytes(pickle.dumps(Hostile(tmp_path / "owned")))
    with pytest.raises(CheckpointError, match=r"refused: its \.metadata names (posix|os)\.mkdir"):
        read_metadata(folder)
    assert not (tmp_path / "owned").exists()


class Attribute:
    """Is pickled as an attribute of something."""

    def __init__(self, owner, name):
        self.named = owner, name

    def __reduce__(self):
        return getattr, self.named


def test_metadata_of_the_first_releases_of_python_3_11_is_read(tmp_path, monkeypatch):
    """Python 3.11.0 to 3.11.3 pickles a member of an enum as an attribute of its class."""
    folder = save(tmp_path)
    before = read_metadata(folder)
    monkeypatch.setitem(copyreg.dispatch_table, _MEM_FORMAT_ENCODING, lambda each: (getattr, (type(each), each.name)))
    content = pickle.dumps(before)
    assert b"getattr" in content
    (folder / ".metadata").write_bytes(content)
    assert read_metadata(folder) == before


@pytest.mark.parametrize(
    ("owner", "name"), [(Metadata, "__init__"), (_MEM_FORMAT_ENCODING, "__subclasses__"), (_MEM_FORMAT_ENCODING, ["a"])]
)
def test_any_other_attribute_is_refused(tmp_path, owner, name):
    folder = save(tmp_path)
    (folder / ".metadata").write_bytes(pickle.dumps(Attribute(owner, name)))
    with pytest.raises(CheckpointError, match=r"refused: its \.metadata names the attribute"):
        read_metadata(folder)


def test_entries_of_pickled_bytes_are_refused(tmp_path):
    folder = tmp_path / "step-00000001"
    dcp.save({"a": torch.ones(2), "evil": Hostile(tmp_path / "owned")}, checkpoint_id=folder)
    with pytest.raises(CheckpointError, match="evil is not a tensor but pickled bytes"):
        read_metadata(folder)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_a_pipe_that_the_manifest_does_not_name_is_refused(tmp_path, name):
    folder = save(tmp_path)
    manifest = folder / "manifest.json"
    content = json.loads(manifest.read_text())
    del content["files"][name]
    manifest.write_text(json.dumps(content))
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(CheckpointError, match="not a regular file"):
        load_alone(folder, {"a": torch.zeros(4)})


def test_files_outside_the_folder_are_refused(tmp_path):
    folder = save(tmp_path)
    metadata = read_metadata(folder)
    for key, info in metadata.storage_data.items():
        metadata.storage_data[key] = _StorageInfo("../elsewhere", info.offset, info.length)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"points at \.\./elsewhere, outside its folder"):
        read_metadata(folder)


@pytest.mark.parametrize("content", [b"", b"garbage", pickle.dumps({"a": 1}), GREEDY])
def test_damaged_metadata_is_a_clear_error(tmp_path, content):
    folder = save(tmp_path)
    (folder / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"Checkpoint .*\.metadata"):
        read_metadata(folder)


def test_round_trip_and_asynchronous_copy(tmp_path):
    store = CheckpointStore(tmp_path, keep_last=3, asynchronous=True)
    tensor = torch.arange(1000.0)
    store.save(7, {"a": tensor}, {"train": {"step": 7}})
    tensor.zero_()  # training continues: the checkpoint holds the values at the time of the call
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


def test_damaged_and_partial_checkpoints_are_skipped(tmp_path, caplog):
    for step in (1, 2, 3):
        save(tmp_path, step)
    shard = next((tmp_path / "step-00000003").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    (tmp_path / "step-00000002" / "state.json").unlink()
    (tmp_path / ".writing-00000004").mkdir()
    store = CheckpointStore(tmp_path, keep_last=3, asynchronous=True)
    newest = store.newest()
    assert newest is not None and newest.step == 1
    assert len(caplog.messages) == 2 and "bytes" in caplog.messages[0] and "state.json is missing" in caplog.messages[1]
    store.close()


def flip_a_byte(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def steps(folder):
    return [checkpoint.step for checkpoint in find_checkpoints(folder)]


def test_damaged_checkpoints_do_not_count_as_newest(tmp_path):
    """Two good ones are kept, however many damaged ones are newer; a damaged one goes after two newer good ones."""
    for step in (1, 2, 3, 4, 5):
        save(tmp_path, step, keep_last=9)
    flip_a_byte(next((tmp_path / "step-00000005").glob("*.distcp")))
    (tmp_path / "step-00000003" / "state.json").unlink()
    store = CheckpointStore(tmp_path, keep_last=2, asynchronous=False)
    newest = store.newest()
    assert newest is not None and newest.step == 4
    for step, left in ((6, [4, 5, 6]), (5, [5, 6]), (7, [6, 7])):
        store.save(step, {"a": torch.arange(4.0)}, {})
        assert steps(tmp_path) == left
    store.close()


@pytest.mark.parametrize("killed_at", ["the second rename", "the removal"])
def test_a_step_saved_again_never_loses_the_earlier_one(tmp_path, monkeypatch, killed_at):
    folder = save(tmp_path)
    writing = tmp_path / ".writing-00000001"
    shutil.copytree(folder, writing, ignore=shutil.ignore_patterns("*.json"))

    class Killed(BaseException):
        """The end of the process, at once."""

    rename = type(folder).rename

    def cut_off(path, *args, **kwargs):
        if path == writing or killed_at == "the removal":
            raise Killed
        rename(path, *args)

    if killed_at == "the removal":
        monkeypatch.setattr("shutil.rmtree", cut_off)
    else:
        monkeypatch.setattr(type(folder), "rename", cut_off)
    with pytest.raises(Killed):
        publish(writing, folder, {"train": {"step": "new"}}, {})
    monkeypatch.undo()
    CheckpointStore(tmp_path, keep_last=3, asynchronous=False).close()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    check_files(folder, checksums=True)
    [checkpoint] = find_checkpoints(tmp_path)
    assert checkpoint.read_state()["train"]["step"] == ("new" if killed_at == "the removal" else 1)


def test_a_changed_byte_is_found_by_its_checksum(tmp_path):
    folder = save(tmp_path)
    flip_a_byte(next(folder.glob("*.distcp")))
    check_files(folder)
    with pytest.raises(CheckpointError, match="changed after it was written"):
        check_files(folder, checksums=True)


def test_files_of_a_killed_save_are_removed(tmp_path):
    (tmp_path / ".writing-00000009").mkdir()
    save(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_other_shapes_and_missing_tensors_are_named(tmp_path):
    folder = save(tmp_path, 1, a=torch.ones(4))
    with pytest.raises(CheckpointError, match=r"has a with shape \(4,\), and the recipe's model has shape \(5,\)"):
        load_alone(folder, {"a": torch.ones(5)})
    with pytest.raises(CheckpointError, match="has no b"):
        load_alone(folder, {"b": torch.ones(5)})


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_failed_save_is_reported_and_repeated_and_keeps_earlier_ones(tmp_path, monkeypatch, asynchronous, caplog):
    save(tmp_path, 1)
    events = []
    store = CheckpointStore(tmp_path, 3, asynchronous, lambda event, **fields: events.append((event, fields)))

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("echelon.learn.checkpoint.store.publish", full)
    reason = "No space left on device: the disk is full"
    store.save(2, {"a": torch.ones(4)}, {})
    assert not store.wait() and not store.wait()
    assert events[-1] == ("save_failed", {"step": 2, "reason": reason})
    assert caplog.messages == [
        f"The checkpoint step-00000002 could not be written: {reason} (failure 1 of 3; it will be retried)."
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert [store.agree_on_retry(step) for step in (3, 11, 12, 13)] == [False, False, True, True]
    store.save(12, {"a": torch.ones(4)}, {})
    assert not store.wait()
    assert [store.agree_on_retry(step) for step in (13, 111, 112)] == [False, False, True]
    with pytest.raises(CheckpointError, match=r"third consecutive failure.*last good one is step-00000001; free space"):
        store.save(112, {"a": torch.ones(4)}, {})
        store.wait()

    # A successful save resets the count.
    monkeypatch.undo()
    store.save(113, {"a": torch.ones(4)}, {})
    assert store.wait() and steps(tmp_path) == [1, 113]
    monkeypatch.setattr("echelon.learn.checkpoint.store.publish", full)
    store.save(114, {"a": torch.ones(4)}, {})
    assert not store.wait() and not store.agree_on_retry(115)
    monkeypatch.undo()
    store.close()
