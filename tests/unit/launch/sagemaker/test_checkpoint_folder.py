"""A container's checkpoint folder: prepared data comes back at later starts, and what is removed is gone in S3 too."""

import logging
import shutil

import pytest
import yaml

from echelon.launch.sagemaker import checkpoint_folder
from echelon.launch.sagemaker.checkpoint_folder import CheckpointRemover, open_kept
from echelon.learn.data import prepare
from echelon.learn.data.prepare import prepare_data
from echelon.recipe.load import load_recipe
from tests.object_server import BUCKET, ObjectServer
from tests.unit.recipe_samples import RECIPE

STEPS = ("step-00000010", "step-00000020", "step-00000100")


@pytest.fixture
def s3(monkeypatch):
    boto3 = pytest.importorskip("boto3", reason="no boto3 here; pip install boto3")
    server = ObjectServer()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3")
    client.create_bucket(Bucket=BUCKET)
    yield client
    server.stop()


def put(s3, folder):
    """As SageMaker copies the folder of checkpoints, and a file of the run beside it."""
    for step in STEPS:
        (folder / step / "state").mkdir(parents=True)
        for name in ("manifest.json", "state/0.distcp"):
            (folder / step / name).write_text("x")
            s3.put_object(Bucket=BUCKET, Key=f"team/run/checkpoints/{step}/{name}", Body=b"x")
    s3.put_object(Bucket=BUCKET, Key="team/run/metrics.jsonl", Body=b"x")


def list_keys(s3):
    return {each["Key"] for each in s3.list_objects_v2(Bucket=BUCKET)["Contents"]}


def test_only_what_was_seen_and_is_gone_is_removed(s3, tmp_path):
    put(s3, tmp_path)
    s3.put_object(Bucket=BUCKET, Key="team/run/checkpoints/step-00000001/manifest.json", Body=b"x")  # of another start
    before = list_keys(s3)
    remover = CheckpointRemover(tmp_path, f"s3://{BUCKET}/team/run/checkpoints", "us-east-1")
    remover.look()
    assert list_keys(s3) == before
    shutil.rmtree(tmp_path / "step-00000010")
    remover.look()
    remover.look()
    assert before - list_keys(s3) == {
        "team/run/checkpoints/step-00000010/manifest.json", "team/run/checkpoints/step-00000010/state/0.distcp",
    }  # fmt: skip


def test_what_was_copied_of_an_unfinished_checkpoint_is_removed(s3, tmp_path):
    """SageMaker copies files while they are written, and a file that it is copying arrives after the folder is gone."""
    (tmp_path / ".writing-00000005").mkdir()  # of a start that was killed, brought back from S3
    put(s3, tmp_path)
    shutil.rmtree(tmp_path / "step-00000100")
    before = list_keys(s3)
    remover = CheckpointRemover(tmp_path, f"s3://{BUCKET}/team/run/checkpoints", "us-east-1")

    def copy(name):
        s3.put_object(Bucket=BUCKET, Key=f"team/run/checkpoints/{name}/state/0.distcp", Body=b"x")

    for name in (".writing-00000005", ".writing-00000100", ".writing-00000300"):
        copy(name)
    (tmp_path / ".writing-00000300").mkdir()
    shutil.rmtree(tmp_path / ".writing-00000005")
    (tmp_path / "step-00000100").mkdir()  # written and published between two looks
    remover.look()
    assert list_keys(s3) - before == {"team/run/checkpoints/.writing-00000300/state/0.distcp"}, "it is being written"
    (tmp_path / ".writing-00000300").rename(tmp_path / "step-00000300")
    remover.look()
    copy(".writing-00000300")
    remover.look()
    assert list_keys(s3) == before


def test_a_refusal_is_one_line_and_ends_no_run(s3, tmp_path, caplog):
    put(s3, tmp_path)
    remover = CheckpointRemover(tmp_path, "s3://of-somebody-else/checkpoints", "us-east-1")
    caplog.set_level(logging.WARNING, "echelon")
    for step in STEPS[:2]:
        shutil.rmtree(tmp_path / step)
        remover.look()
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("container: removed checkpoints stay in S3 below s3://of-somebody-else/")


TEXT = "".join(f"{number} and {number} make {2 * number}.\n" for number in range(300))


class Container:
    """Starts of a container: only the checkpoint folder is the same, and the channel is copied anew."""

    def __init__(self, folder, monkeypatch):
        self.base = folder / "ml"
        self.writings = 0
        monkeypatch.setattr(checkpoint_folder, "find_large_disk", lambda base: (base / "disk", 2**40))
        write = prepare.write_folder

        def count(*arguments):
            self.writings += 1
            write(*arguments)

        monkeypatch.setattr(prepare, "write_folder", count)

    def start(self, text=TEXT):
        """Prepare the data as a training would; return the prepared folder and how often it was written."""
        data = self.base / "input" / "data"
        for path in (data, self.base / "disk"):
            shutil.rmtree(path, ignore_errors=True)
        (data / "train").mkdir(parents=True)
        (data / "train" / "text.txt").write_text(text)
        recipe = RECIPE | {"data": {"train": str(data / "train"), "sequence_len": 32}}
        path = self.base / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe))
        keeper = open_kept(load_recipe(path)[0], self.base)
        self.writings = 0
        prepared = prepare_data(load_recipe(path, [f"data.prepared_dir={keeper.place}"])[0], verify=True)
        keeper.keep(wait=True)
        return prepared.path, self.writings

    @property
    def kept(self):
        return sorted((self.base / "checkpoints" / "prepared").glob("*"))


@pytest.fixture
def container(tmp_path, monkeypatch):
    return Container(tmp_path, monkeypatch)


def test_a_restart_uses_the_data_that_the_first_start_prepared(container):
    first, writings = container.start()
    assert writings == 1 and not first.is_symlink()
    assert [path.name for path in container.kept] == [first.name, f"{first.name}.json"]
    for _ in range(2):
        again, writings = container.start()
        assert (again, writings) == (first, 0)
        assert again.is_symlink() and again.resolve() == container.kept[0].resolve()
    other, writings = container.start(TEXT.replace("and", "AND"))  # of the same size
    assert writings == 1 and other.name != first.name


@pytest.mark.parametrize("damage", ["truncated", "missing", "unrecorded"])
def test_an_incomplete_copy_is_prepared_again(container, damage, caplog):
    first, _ = container.start()
    folder, record = container.kept
    shard = next(folder.glob("*.bin"))
    if damage == "truncated":
        shard.write_bytes(shard.read_bytes()[:-3])
    elif damage == "missing":
        (folder / "manifest.json").unlink()
    else:
        record.unlink()
    again, writings = container.start()
    assert (again, writings) == (first, 1)
    assert f"container: {folder} is incomplete, so the data is prepared again" in caplog.messages
    assert container.start()[1] == 0


def test_without_room_nothing_is_kept_and_the_job_goes_on(container, monkeypatch, caplog):
    monkeypatch.setattr(shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(100, 99, 1))
    container.start()
    assert container.kept == []
    assert any("is not kept for later starts" in message and "1 B free" in message for message in caplog.messages)
