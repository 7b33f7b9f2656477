"""Checkpoints in an object store: S3 over local HTTP, and files; without training or processes."""

import hashlib
import json
import shutil
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest

from echelon.ground.checksums import find_faults
from echelon.ground.errors import CheckpointError, ConfigError, EchelonError
from echelon.ground.object_store import ObjectStore, ObjectStoreError, describe_failure
from echelon.learn.checkpoint.folder import Checkpoint, find_checkpoints, publish
from echelon.recipe.load import load_recipe
from echelon.recipe.render import render_recipe
from echelon.run.folder import upload
from echelon.run.folder.open_run import open_run
from echelon.run.folder.remote import RemoteRuns, read_run_name
from echelon.run.folder.remote_start import RemoteStart, describe_remote
from echelon.run.folder.upload import Uploader
from tests.log_lines import LogLines
from tests.object_server import BUCKET, bucket_served
from tests.waiting import wait_until

RECIPE = """
run: {{name: small, dir: {folder}}}
model: {{config: {{model_type: llama}}}}
tokenizer: bytes
data: {{train: text.txt}}
train: {{steps: 40, global_batch_size: 4}}
optim: {{learning_rate: 1e-3}}
checkpoint: {{remote: '{url}', keep_last: 2}}
"""


@pytest.fixture(scope="module")
def server():
    """One server for all tests; each test has its own address."""
    with bucket_served() as server:
        yield server


@pytest.fixture
def url(tmp_path):
    """An empty `file://` address."""
    return f"file://{tmp_path}/store/run"


@pytest.fixture
def s3_url(server, tmp_path):
    server.fail_after = None
    return f"s3://{BUCKET}/{tmp_path.name}-{time.time_ns()}/run"


class Machine:
    """The run folder of a machine, with the messages and events of a run."""

    def __init__(self, folder, url, recipe=RECIPE, fresh=False):
        self.lines, self.events = LogLines().lines, []
        path = folder.with_suffix(".yaml")
        path.write_text(recipe.format(folder=folder, url=url))
        self.recipe, _ = load_recipe(path)
        self.remote_start = RemoteStart(self.recipe)
        start = self.remote_start
        opened = open_run(self.recipe, fresh, start.reach, start.bring_back)
        self.state, self.run = opened.state, opened.folder
        try:
            self.remote_start.claim(self.run)
        finally:
            self.run.unlock()
        self.run.recipe_path.write_text(render_recipe(self.recipe))
        self.run.plan_path.write_text("{}\n")
        self.uploader = Uploader(url, self.run, 2, self._note)

    def _note(self, event, **fields):
        self.events.append((event, fields.get("step")))
        self.run.rows.append_event(event, **fields)

    def save(self, step, keep=None, content=b"weights"):
        """Emulate training up to a step, and save."""
        with self.run.metrics_path.open("a") as file:
            file.write(json.dumps({"kind": "train", "step": step, "loss": step / 7}) + "\n")
        return self.uploader.offer(self.publish(step, content), keep)

    def publish(self, step, content=b"weights"):
        writing = self.run.checkpoints_dir / f".writing-{step:08d}"
        writing.mkdir(parents=True)
        (writing / "__0_0.distcp").write_bytes(content + b"%d" % step * 1000)
        (writing / ".metadata").write_bytes(b"index")
        checkpoint = Checkpoint(step, self.run.checkpoints_dir / f"step-{step:08d}")
        publish(writing, checkpoint.path, {"train": {"step": step, "best_step": None}}, {})
        return checkpoint

    def settle(self):
        """Wait until the uploader is idle."""
        wait_until(self.uploader.is_done, 30, say=lambda: self.lines)

    def remote(self):
        return RemoteRuns(ObjectStore(self.recipe.checkpoint.remote))

    def found(self):
        return [each.step for each in self.remote().find(read_run_name(self.run)) if not each.faults]

    def rows(self):
        return [json.loads(line)["step"] for line in self.run.metrics_path.read_text().splitlines()]


@pytest.mark.parametrize("address", ["url", "s3_url"])
def test_another_machine_resumes_the_run_of_a_lost_one(address, request, tmp_path):
    url = request.getfixturevalue(address)
    first = Machine(tmp_path / "one", url)
    for step in (10, 20, 30):
        first.save(step)
        first.settle()
    with first.run.metrics_path.open("a") as file:
        file.write(json.dumps({"kind": "train", "step": 31}) + "\n")  # not saved, so not uploaded
    assert first.found() == [20, 30] and first.events == [("upload", 10), ("upload", 20), ("upload", 30)]
    name = read_run_name(first.run)
    # Only markers, the files they name, and run.json.
    sizes = ObjectStore(url).sizes(name)
    assert sorted(path for path in sizes if "/" not in path) == ["step-00000020.json", "step-00000030.json"]
    assert len({path.partition("/")[0] for path in sizes if "/" in path}) == 2

    second = Machine(tmp_path / "two", url)
    assert second.state == "resumed" and read_run_name(second.run) == name
    [checkpoint] = find_checkpoints(second.run.checkpoints_dir)
    assert checkpoint.step == 30 and not find_faults(checkpoint.path, checksums=True)
    for path in (first.run.checkpoints_dir / "step-00000030").iterdir():
        assert (checkpoint.path / path.name).read_bytes() == path.read_bytes()
    assert second.rows() == [10, 20, 30]
    assert {path.name for path in second.run.path.iterdir()} >= {"recipe.yaml", "plan.json", "events.jsonl"}
    # The first machine was only disconnected and continues: it may not publish any more.
    first.save(40)
    wait_until(lambda: first.events[-1][0] == "upload_failed")
    assert "another process has resumed this run" in first.lines[-1] and first.found() == [20, 30]
    second.save(40, content=b"other")
    second.settle()
    assert second.found() == [30, 40]
    # As after a kill during the last step of the download.
    (tmp_path / "three").mkdir()
    (tmp_path / "three" / "metrics.jsonl").write_text('{"step": 1}\n')
    third = Machine(tmp_path / "three", url)
    assert third.rows() == [10, 20, 30, 40]
    assert (third.run.checkpoints_dir / "step-00000040" / "__0_0.distcp").read_bytes().startswith(b"other")


def test_a_damaged_checkpoint_is_detected_and_the_previous_one_used(url, tmp_path):
    first = Machine(tmp_path / "one", url)
    for step in (10, 20):
        first.save(step)
        first.settle()
    store, name = ObjectStore(url), read_run_name(first.run)
    [newest] = [path for path in store.sizes(name) if path.startswith("step-00000020-") and "__0_0" in path]
    content = bytearray(store.read(f"{name}/{newest}"))
    content[500] ^= 1
    store.write(f"{name}/{newest}", bytes(content))
    lines = list(describe_remote(first.run.path, verify=True))
    assert [damaged for _, damaged in lines] == [False, True]
    assert "step 20  damaged: the contents of __0_0.distcp changed after it was written" in lines[1][0]
    second = Machine(tmp_path / "two", url)
    assert [each.step for each in find_checkpoints(second.run.checkpoints_dir)] == [10] and second.rows() == [10]
    assert any("Skipping a damaged checkpoint" in line and "step-00000020" in line for line in second.lines)
    # A new save replaces the damaged one.
    second.save(20)
    second.settle()
    assert [damaged for _, damaged in describe_remote(second.run.path, verify=True)] == [False, False]


def test_a_marker_cannot_name_other_locations(tmp_path):
    url = f"file://{tmp_path}/store"
    first = Machine(tmp_path / "one", url)
    first.save(10)
    first.settle()
    [marker] = (tmp_path / "store").glob("*/step-*.json")
    values = json.loads(marker.read_text())
    for changed in (
        {**values, "files": {**values["files"], "../../evil": values["files"]["manifest.json"]}},
        {**values, "folder": "../other"},
        {**values, "step": 11},
        {**values, "format": 2},
        {"files": []},
    ):
        marker.write_text(json.dumps(changed))
        with pytest.raises(CheckpointError, match="All checkpoints in"):
            Machine(tmp_path / "two", url)
        assert not (tmp_path / "two" / "recipe.yaml").exists()
    marker.write_text(json.dumps(values)[:40])
    with pytest.raises(CheckpointError, match="All checkpoints in"):
        Machine(tmp_path / "two", url)
    # Files that an unreadable marker may name are not removed.
    first.remote().sweep(read_run_name(first.run))
    marker.write_text(json.dumps(values))
    assert first.found() == [10]


@pytest.mark.slow
def test_a_server_that_dies_during_an_upload_leaves_no_partial_checkpoint(server, s3_url, tmp_path, monkeypatch):
    monkeypatch.setattr(upload, "_FIRST_DELAY_SECONDS", 0.05)
    first = Machine(tmp_path / "one", s3_url)
    first.save(10)
    first.settle()
    for sent in (0, 3, 5):  # out of five files and the marker
        server.fail_after = sent
        first.save(20 + sent)
        wait_until(lambda: server.fail_after < 0 and first.uploader.is_failing)
        found = first.remote().find(read_run_name(first.run))
        assert 20 + sent not in [each.step for each in found] and all(not each.faults for each in found)
        server.fail_after = None
        first.settle()
        assert first.found()[-1] == 20 + sent
    sent = [path for method, path in server.requests if method == "PUT" and "/step-00000023-" in path]
    assert [path.rpartition("/")[2] for path in sent].count("__0_0.distcp") == 1  # files that arrived are not resent
    said = [line for line in first.lines if "could not be uploaded" in line]
    assert len(said) == 3 and len([line for line in first.lines if "work again" in line]) == 3
    assert not any("the-secret" in line or "AKIA" in line for line in first.lines)


def test_uploads_never_delay_a_run_that_saves_faster(server, s3_url, tmp_path, monkeypatch):
    monkeypatch.setattr(upload, "_FIRST_DELAY_SECONDS", 0.2)
    first = Machine(tmp_path / "one", s3_url)
    server.stop()
    first.save(10)
    wait_until(lambda: first.uploader.is_failing)
    began = time.monotonic()
    held = [first.save(step) for step in (20, 30)]
    assert time.monotonic() - began < 20
    # Checkpoints being uploaded or queued must not be removed locally.
    assert 30 in held[-1] and len(held[-1]) <= 2
    server.start()
    first.settle()
    assert first.found()[-1] == 30 and ("upload_left_out", 20) in first.events
    assert "checkpoint: uploads to" in first.lines[-1]


def test_a_dead_server_delays_the_end_only_up_to_the_limit(server, s3_url, tmp_path, monkeypatch):
    first = Machine(tmp_path / "one", s3_url)
    server.stop()
    first.save(10)
    began = time.monotonic()
    assert not first.uploader.wait(0.3) and time.monotonic() - began < 20
    first.uploader.tell_unfinished()
    assert "step-00000010 is saved in" in first.lines[-1] and first.events[-1] == ("upload_unfinished", 10)
    monkeypatch.setattr(upload, "PATIENCE_SECONDS", 0.0)
    wait_until(lambda: first.uploader.is_failing)
    assert first.uploader.wait(0.0)  # the end of a run gives up
    server.start()
    first.settle()
    # The next start of a finished run uploads what an outage prevented.
    second = Machine(tmp_path / "two", s3_url)
    assert second.rows() == [10]
    second.publish(20)
    second.remote_start.send_rest(second.run)
    assert second.found() == [10, 20]


def test_a_start_without_the_server(server, s3_url, tmp_path):
    first = Machine(tmp_path / "one", s3_url)
    server.stop()
    try:
        with pytest.raises(EchelonError, match="run the same command again when the server answers") as caught:
            Machine(tmp_path / "two", s3_url)
        assert caught.value.exit_code == 1
        for fresh in (False, True):  # it has no local checkpoint either
            with pytest.raises(EchelonError, match="run the same command again"):
                Machine(tmp_path / "one", s3_url, fresh=fresh)
        assert not list(tmp_path.glob("one.old*"))
        first.publish(10)
        again = Machine(tmp_path / "one", s3_url)
        assert (
            again.state == "resumed"
            and "continuing from the checkpoints in" in again.lines[0]
            and len(again.lines) == 1
        )
    finally:
        server.start()
    with pytest.raises(ConfigError, match=r"checkpoint.remote=s3://nobucket/run cannot be used .*its bucket exists"):
        Machine(tmp_path / "three", "s3://nobucket/run")


def test_an_address_belongs_to_one_run(url, tmp_path):
    first = Machine(tmp_path / "one", url)
    first.save(10)
    first.settle()
    with pytest.raises(ConfigError, match=r"contains a run with another recipe:\n  train.global_batch_size: 4 -> 8"):
        Machine(tmp_path / "two", url, RECIPE.replace("batch_size: 4", "batch_size: 8"))
    assert not find_checkpoints(tmp_path / "two" / "checkpoints")
    other = Machine(tmp_path / "three", f"{url}-b")
    with pytest.raises(ConfigError, match="contains checkpoints of another run than"):
        Machine(other.run.path, url)
    # A fresh start keeps the old checkpoints.
    name = read_run_name(first.run)
    again = Machine(tmp_path / "one", url, fresh=True)
    assert again.state == "new" and read_run_name(again.run) != name
    assert again.lines[-1] == f"checkpoint: the checkpoints of the old run remain in {url}/{name}"
    assert [each.step for each in again.remote().find(name)] == [10] and again.found() == []
    store = ObjectStore(url)
    owner = json.loads(store.read("run.json"))
    for content in ([], {**owner, "run": "../other"}):
        store.write("run.json", json.dumps(content).encode())
        with pytest.raises(CheckpointError, match="was not written by echelon"):
            Machine(tmp_path / "two", url)


def test_a_lost_or_damaged_disk_is_restored_from_the_newer_checkpoint(url, tmp_path):
    first = Machine(tmp_path / "one", url)
    for step in (10, 20):
        first.save(step)
        first.settle()
    assert not Machine(tmp_path / "one", url).lines  # the local checkpoint is as new
    path = first.run.checkpoints_dir / "step-00000020" / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[700] ^= 1
    path.write_bytes(content)
    first.run.metrics_path.write_text("")
    again = Machine(tmp_path / "one", url)
    assert "Downloading step-00000020" in again.lines[0] and again.rows() == [10, 20]
    assert not find_faults(path.parent, checksums=True)
    assert [each.step for each in find_checkpoints(again.run.checkpoints_dir)] == [10, 20]
    shutil.rmtree(path.parent)
    (first.run.checkpoints_dir / "step-00000010").rename(path.parent)  # as if it were step 20, with step 10's rows
    assert not Machine(tmp_path / "one", url).lines


def test_the_best_checkpoint_is_kept_and_uploaded_later(url, tmp_path):
    first = Machine(tmp_path / "one", url)
    first.publish(5)  # saved while uploads were behind, and skipped
    for step in (10, 20, 30):
        first.save(step, keep=5)
        first.settle()
    assert first.found() == [5, 20, 30]
    first.save(40, keep=40)
    first.settle()
    assert first.found() == [30, 40]


def test_files_of_a_killed_upload_are_removed_by_the_next_start(tmp_path):
    url = f"file://{tmp_path}/store"
    first = Machine(tmp_path / "one", url)
    first.save(10)
    first.settle()
    half = tmp_path / "store" / str(read_run_name(first.run)) / "step-00000020-00000000"
    half.mkdir()
    (half / "__0_0.distcp").write_bytes(b"half")
    second = Machine(tmp_path / "one", url)
    second.uploader.offer(find_checkpoints(second.run.checkpoints_dir)[-1], if_missing=True)
    second.settle()
    assert not half.exists() and second.found() == [10] and not second.events  # nothing was sent twice


def test_a_bundle_contains_only_allowed_files(tmp_path):
    url = f"file://{tmp_path}/store"
    first = Machine(tmp_path / "one", url)
    (first.run.path / "trackers").mkdir()
    (first.run.path / "trackers" / "mlflow.json").write_text("{}")
    (first.run.path / "samples.jsonl").write_text('{"step": 10}\n{"step": 20}\n{"ste')
    first.save(10)
    first.settle()
    [bundle] = (tmp_path / "store").glob("*/*/run.zip")
    with zipfile.ZipFile(bundle) as archive:
        names = set(archive.namelist())
        assert archive.read("samples.jsonl") == b'{"step": 10}\n'
    assert names == {"recipe.yaml", "plan.json", "metrics.jsonl", "samples.jsonl", "trackers/mlflow.json"}
    second = Machine(tmp_path / "two", url)
    assert (second.run.path / "trackers" / "mlflow.json").exists()


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("s3://user:secret@bucket/run", "checkpoint.remote must be an address without a user name, password or query"),
        (
            "s3://bucket/run?X-Amz-Signature=secret",
            "checkpoint.remote must be an address without a user name, password",
        ),
        ("runs/backup", "checkpoint.remote=runs/backup must be one address with its protocol"),
        ("simplecache::s3://bucket/run", "must be one address with its protocol"),
    ],
)
def test_refused_addresses(address, message, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(folder=tmp_path, url=address))
    with pytest.raises(ConfigError, match=message) as caught:
        load_recipe(path)
    assert "secret" not in str(caught.value)


def test_missing_protocols(monkeypatch):
    with pytest.raises(ConfigError, match="fsspec has no protocol nowhere"):
        ObjectStore("nowhere://bucket/run")
    with pytest.raises(ConfigError, match="requires the fsspec package for oss, which is not installed; install it"):
        ObjectStore("oss://bucket/run")
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ConfigError, match=r"requires the package gcsfs, .* pip install 'gcsfs>=.*', or use another"):
        ObjectStore("gs://bucket/run")


def test_no_secret_gets_into_a_message():
    query = f"X-Amz-Credential=ASIAABCDEFGHIJKLMNOP%2Fus-east-1&X-Amz-Signature={hashlib.sha256(b'').hexdigest()}"
    error = OSError(f"GET https://me:pw@host/b?{query} with AKIAABCDEFGHIJKLMNOP\nmore")
    assert describe_failure(error) == (
        "OSError: GET https://***@host/b?X-Amz-Credential=***&X-Amz-Signature=*** with ***"
    )


def test_the_thread_survives_any_client_error(tmp_path, monkeypatch):
    monkeypatch.setattr(upload, "_FIRST_DELAY_SECONDS", 0.05)
    first = Machine(tmp_path / "one", f"file://{tmp_path}/store")
    calls = iter([RuntimeError("odd"), ObjectStoreError("refused", "refused")])
    real = RemoteRuns.publish

    def publish_(self, *arguments):
        if error := next(calls, None):
            raise error
        return real(self, *arguments)

    monkeypatch.setattr(RemoteRuns, "publish", publish_)
    first.save(10)
    first.settle()
    assert first.found() == [10] and first.lines[0].count("RuntimeError: odd") == 1
    assert threading.main_thread().is_alive() and not list(Path(first.run.path).glob(".run.zip*"))
