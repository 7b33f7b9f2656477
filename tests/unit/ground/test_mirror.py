"""Copies of folders in a store: the order of publication, damage, and attempts."""

import json

import pytest

from echelon.ground import mirror
from echelon.ground.checksums import describe_files, list_all_files, parse_manifest
from echelon.ground.object_store import ObjectStore, ObjectStoreError


class Recorded(ObjectStore):
    """A store that records what it is asked to write, and fails at each name in `failing` once."""

    def __init__(self, url):
        super().__init__(url)
        self.calls, self.failing = [], []

    def _take(self, call, name):
        self.calls.append((call, name))
        if name in self.failing:
            self.failing.remove(name)
            raise ObjectStoreError("no answer", "failed")

    def upload(self, path, name):
        self._take("upload", name)
        super().upload(path, name)

    def download(self, name, path, num_bytes):
        self._take("download", name)
        super().download(name, path, num_bytes)

    def write(self, name, content):
        self._take("write", name)
        super().write(name, content)


@pytest.fixture
def store(tmp_path):
    return Recorded(f"file://{tmp_path}/store")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "copy" / "sub").mkdir(parents=True)
    (tmp_path / "copy" / "one").write_bytes(b"1" * 10)
    (tmp_path / "copy" / "sub" / "two").write_bytes(b"2" * 20)
    return tmp_path / "copy"


def test_the_marker_is_written_last_and_the_copy_comes_back(store, folder, tmp_path):
    store.failing = ["copy/sub/two"]
    with pytest.raises(ObjectStoreError, match="no answer"):
        mirror.publish(store, folder)
    assert store.read("copy.json") is None
    store.calls.clear()
    sources = list_all_files(folder)
    files = describe_files(sources.values(), folder)
    mirror.send(store, "copy", sources, files, sent=("one",))
    assert store.calls == [("upload", "copy/sub/two")] and mirror.count_bytes(files) == 30
    store.calls.clear()
    mirror.publish(store, folder)
    assert store.calls == [("upload", "copy/one"), ("upload", "copy/sub/two"), ("write", "copy.json")]
    assert parse_manifest(store.read("copy.json"))[1] == files

    store.failing = ["copy/one", "copy/one"]
    into = tmp_path / "there"
    assert mirror.bring(store, "copy", files, into, (0.0, 0.0)) == []
    assert {path.relative_to(into) for path in into.rglob("*")} == {
        path.relative_to(folder) for path in folder.rglob("*")
    }
    assert (into / "sub" / "two").read_bytes() == b"2" * 20
    store.failing = ["copy/one"]
    with pytest.raises(ObjectStoreError, match="no answer"):
        mirror.bring(store, "copy", files, into)


def test_damage_is_named(store, folder, tmp_path):
    mirror.publish(store, folder)
    files = parse_manifest(store.read("copy.json"))[1]
    (tmp_path / "store" / "copy" / "one").write_bytes(b"3" * 10)
    (tmp_path / "store" / "copy" / "sub" / "two").unlink()
    changed = "the contents of one changed after it was written"
    assert mirror.verify(store, "copy", files) == [changed, "sub/two is missing"]
    assert mirror.bring(store, "copy", files, tmp_path / "there") == [changed, "two is missing"]
    assert mirror.compare_sizes(files, {"copy/one": 9}, "copy/") == [
        "one has 9 bytes; 10 were written", "sub/two is missing",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["../one", "/one", "a/../../one", "", "a\\..\\one", "..", "a\0b"])
def test_a_manifest_names_only_files_of_its_folder(name):
    with pytest.raises(ValueError, match="is not a file of the folder"):
        parse_manifest(json.dumps({"format": 1, "files": {name: {"bytes": 1, "sha256": ""}}}).encode())
