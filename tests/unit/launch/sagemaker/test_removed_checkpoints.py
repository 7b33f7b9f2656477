"""Removed checkpoints of a run are removed in S3 too."""

import logging
import shutil

import pytest

from echelon.launch.sagemaker.checkpoint_folder import CheckpointRemover
from tests.object_server import BUCKET, ObjectServer

boto3 = pytest.importorskip("boto3", reason="no boto3 here; pip install boto3")

STEPS = ("step-00000010", "step-00000020", "step-00000100")


@pytest.fixture
def s3(monkeypatch):
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
