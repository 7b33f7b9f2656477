"""Prepared folders in an object store: S3 over local HTTP, and files."""

import logging
import shutil
import time

import fsspec
import pytest

from echelon.ground import mirror
from echelon.ground.errors import ConfigError
from echelon.learn.data import prepare as prepare_module
from echelon.learn.data.prepare import prepare
from echelon.learn.data.prepare_spec import PrepareSpec
from echelon.learn.data.source import Source
from tests.object_server import BUCKET, bucket_served

TEXT = "".join(f"{number} and {number} make {2 * number}.\n" for number in range(300))


@pytest.fixture(scope="module")
def server():
    with bucket_served() as server:
        yield server


@pytest.fixture
def store(server):
    return fsspec.filesystem("s3", use_listings_cache=False, skip_instance_cache=True)


@pytest.fixture
def address(server):
    """An empty address; the server answers."""
    server.fail_after = None
    server.start()
    return f"s3://{BUCKET}/shared-{time.time_ns()}/prepared"


class Machines:
    """Machines that see the same text, each with a disk of its own; counts what each writes itself."""

    def __init__(self, folder, address, patch):
        self._folder, self._address = folder, address
        self._written = []
        (folder / "text.txt").write_text(TEXT)
        write = prepare_module.write_folder
        patch.setattr(
            prepare_module, "write_folder", lambda path, *rest: (self._written.append(path), write(path, *rest))
        )
        patch.setattr(mirror, "RETRY_DELAYS_SECONDS", (0.0,))

    def prepare(self, name):
        """Prepare the data on a machine; returns it, and whether that machine tokenized the text."""
        before = len(self._written)
        spec = PrepareSpec(
            train=(Source("data.train.0", str(self._folder / "text.txt")),), validation=(), validation_fraction=0.1,
            tokenizer=300, checkpoint=None, prepared_dir=self._folder / name, sequence_len=16, workers=1,
            prepared_remote=self._address,
        )  # fmt: skip
        return prepare(spec, verify=True), len(self._written) > before


@pytest.fixture
def machines(tmp_path, address, monkeypatch):
    return Machines(tmp_path, address, monkeypatch)


def read_files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_one_machine_prepares_and_the_others_download(machines, store, address):
    first, was_written = machines.prepare("one")
    assert was_written
    other, was_written = machines.prepare("two")
    assert not was_written and other.path != first.path
    assert read_files(other.path) == read_files(first.path)
    # A machine that has its data from before gives it to a store that has lost it.
    store.rm(address, recursive=True)
    assert not machines.prepare("one")[1] and not machines.prepare("three")[1]


@pytest.mark.parametrize("damage", ["changed", "truncated", "missing", "unmarked", "unreadable"])
def test_a_damaged_folder_is_prepared_again_and_replaced(machines, store, address, damage, caplog):
    first, _ = machines.prepare("one")
    marker, shard = f"{address}/{first.path.name}.json", f"{address}/{first.path.name}/train-000-00000.bin"
    content = store.cat_file(shard)
    if damage == "changed":
        store.pipe_file(shard, content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "truncated":
        store.pipe_file(shard, content[:-2])
    elif damage == "unreadable":
        store.pipe_file(marker, b"{")
    else:
        store.rm_file(shard if damage == "missing" else marker)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        other, was_written = machines.prepare("two")
    assert was_written and read_files(other.path) == read_files(first.path)
    if damage != "unmarked":
        assert any("the data is prepared here" in line and address in line for line in caplog.messages)
    assert not machines.prepare("three")[1], "what was damaged is replaced"


def test_a_server_that_fails_is_named_and_the_data_is_prepared_here(machines, server, address, caplog):
    server.stop()
    try:
        assert machines.prepare("one")[1]
    finally:
        server.start()
    [line] = [line for line in caplog.messages if "cannot be used" in line]
    assert line.startswith(f"data: data.prepared_remote={address} cannot be used (")
    server.fail_after = 2  # an upload ends in the middle
    caplog.clear()
    machines.prepare("one")
    assert any("other machines prepare the data themselves" in line for line in caplog.messages)
    server.fail_after = None
    assert machines.prepare("two")[1] and not machines.prepare("three")[1]


def test_a_bucket_that_does_not_exist_is_refused(tmp_path, server, monkeypatch):
    server.start()
    machines = Machines(tmp_path, "s3://no-such-bucket/prepared", monkeypatch)
    with pytest.raises(ConfigError, match=r"^data\.prepared_remote=s3://no-such-bucket/prepared cannot be used"):
        machines.prepare("one")


def test_a_folder_is_shared_through_a_mounted_disk(tmp_path, monkeypatch):
    machines = Machines(tmp_path, f"file://{tmp_path}/disk/prepared", monkeypatch)
    first, _ = machines.prepare("one")
    shutil.rmtree(tmp_path / "one")
    again, was_written = machines.prepare("one")
    assert not was_written and again.content_digest == first.content_digest
