"""A job submitted to a server with AWS's protocols, compared on the wire; then status, logs and stop."""

import io
import json
import time
import zipfile
from datetime import UTC, datetime
from pathlib import Path

import boto3
import pytest
import yaml
from botocore.exceptions import ClientError, ReadTimeoutError

from echelon.cli.commands.jobs import status
from echelon.ground.errors import ConfigError, LaunchError
from echelon.launch.job import JobRecord, JobStatus, Submitted
from echelon.launch.job_checks import check_job
from echelon.launch.records import find_job, record_job, submit_job
from echelon.launch.sagemaker.launcher import SageMakerLauncher
from echelon.launch.sagemaker.service import LOG_GROUP, Service, read_status
from echelon.launch.sagemaker.staging import Upload
from echelon.run.folder.cost import Spending, write_spending
from echelon.run.folder.run_folder import RunFolder
from tests.object_server import ObjectServer
from tests.unit.launch.sagemaker.sagemaker_jobs import make_job

OVERRIDES = (
    "launch.nodes=2",
    "launch.max_hours=1.5",
    "launch.env={NCCL_DEBUG: INFO, NOTE: 'it''s \"$HOME\"'}",
    "launch.sagemaker.spot={max_wait_hours: 3}",
    "launch.sagemaker.tags={team: ours}",
    "data.train=[data/text, {path: 'data/it''s a \"$x\" & #1.txt'}]",
    "track=[tensorboard]",
)
HARD_NAME = 'it\'s a "$x" & #1.txt'


@pytest.fixture(scope="module")
def server():
    started = ObjectServer()
    yield started
    started.stop()


@pytest.fixture
def aws(server, monkeypatch):
    """The environment of a user, with the address of the local server."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def wire(monkeypatch):
    """The requested AWS operations with their bodies, as sent."""
    sent = []
    made = boto3.Session.__init__

    def listen(session, *args, **kwargs):
        made(session, *args, **kwargs)
        session.events.register(
            "before-send", lambda request, **_: sent.append((request.headers.get("X-Amz-Target"), request.body))
        )

    monkeypatch.setattr(boto3.Session, "__init__", listen)
    return sent


def test_a_job_from_launch_to_log(tmp_path, monkeypatch, aws, wire):
    monkeypatch.chdir(tmp_path)
    s3 = boto3.client("s3", region_name="us-west-2")
    s3.create_bucket(Bucket="my-bucket", CreateBucketConfiguration={"LocationConstraint": "us-west-2"})
    launcher, job = SageMakerLauncher(), make_job(tmp_path, *OVERRIDES)
    (tmp_path / "data" / HARD_NAME).write_text("a name as hard as any")
    wire.clear()
    record = submit_job(job, launcher, launcher.render(job))
    place = {"region": "us-west-2", "run": "s3://my-bucket/echelon/checkpoints/small/small"}
    assert (record.id, record.place, find_job("small-1")) == ("small-1", place, record)

    (body,) = (body for target, body in wire if target == b"SageMaker.CreateTrainingJob")
    assert [target for target, _ in wire].index(b"SageMaker.CreateTrainingJob") == len(wire) - 1  # after the uploads
    assert json.loads(body) == json.loads((job.folder / "request.json").read_text())

    prefix = "echelon/jobs/small-1/"
    keys = [each["Key"].removeprefix(prefix) for each in s3.list_objects_v2(Bucket="my-bucket")["Contents"]]
    assert keys == [
        "echelon/echelon.zip", "echelon/enter.py", "echelon/recipe.yaml", "echelon/requirements.txt",
        "train-0/text/a.txt", "train-0/text/b.txt", f"train-1/{HARD_NAME}",
    ]  # fmt: skip
    read = {key: s3.get_object(Bucket="my-bucket", Key=prefix + key)["Body"].read() for key in keys}
    assert read["train-0/text/a.txt"] == b"hello"
    assert read[f"train-1/{HARD_NAME}"] == b"a name as hard as any"
    recipe = yaml.safe_load(read["echelon/recipe.yaml"])
    assert [each["path"] for each in recipe["data"]["train"]] == [
        "/opt/ml/input/data/train-0/text",
        f"/opt/ml/input/data/train-1/{HARD_NAME}",
    ]
    assert read["echelon/recipe.yaml"].decode() == (job.folder / "container-recipe.yaml").read_text()
    assert "echelon/launch/sagemaker/request.py" in zipfile.ZipFile(io.BytesIO(read["echelon/echelon.zip"])).namelist()

    assert launcher.status(record).state == "done"  # moto ends a job at once
    check_log(launcher, record)
    asked = [json.loads(body) for target, body in wire if target == b"Logs_20140328.FilterLogEvents"]
    assert {each["logStreamNamePrefix"] for each in asked} == {"small-1/"}  # small-10 is another job


def check_log(launcher, record):
    logs = boto3.client("logs", region_name="us-west-2")
    assert list(launcher.logs(record, False)) == []  # no logs in this region yet
    logs.create_log_group(logGroupName=LOG_GROUP)
    now = int(time.time() * 1000)
    for host, lines in (("algo-1", ["step 1/2  loss 5.5\n", "step 2/2  loss 5.0\n"]), ("algo-2", ["waiting\n"])):
        stream = {"logGroupName": LOG_GROUP, "logStreamName": f"small-1/{host}-1700000000"}
        logs.create_log_stream(**stream)
        events = [{"timestamp": now + 2 * number, "message": line} for number, line in enumerate(lines)]
        logs.put_log_events(**stream, logEvents=events)
    expected = ["algo-2  waiting", "step 1/2  loss 5.5", "step 2/2  loss 5.0"]
    assert sorted(launcher.logs(record, False)) == expected
    assert sorted(launcher.logs(record, True)) == expected  # the job has ended, so the command does not wait


def test_following_shows_each_line_once_until_the_end(monkeypatch, aws):
    """Between two polls a line of another machine arrives that is older than those shown."""
    logs = boto3.client("logs", region_name="eu-west-1")
    logs.create_log_group(logGroupName=LOG_GROUP)
    now = int(time.time() * 1000)

    def put(host, *lines):
        stream = {"logGroupName": LOG_GROUP, "logStreamName": f"told/{host}-1700000000"}
        logs.create_log_stream(**stream)
        logs.put_log_events(**stream, logEvents=[{"timestamp": when, "message": line} for when, line in lines])

    put("algo-1", (now, "first"), (now + 100, "third"))
    states = iter([JobStatus("running"), JobStatus("running"), JobStatus("done")])
    monkeypatch.setattr(Service, "describe", lambda self, name: next(states))
    late = iter([lambda: put("algo-2", (now + 50, "second")), lambda: None])
    monkeypatch.setattr("echelon.launch.sagemaker.service.time.sleep", lambda seconds: next(late)())
    assert list(Service("eu-west-1").read_log("told", follow=True)) == ["first", "third", "algo-2  second"]
    assert next(states, None) is None


def test_a_refusal_of_aws_is_one_message(tmp_path, monkeypatch, aws):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LaunchError, match=r"uploading the job's files \(NoSuchBucket\).*create the bucket first"):
        SageMakerLauncher().submit(make_job(tmp_path, "launch.sagemaker.bucket=s3://no-such-bucket"))
    record = JobRecord("gone", "sagemaker", "gone", "", 0.0, Path("jobs/gone"), {"region": "us-west-2"})
    with pytest.raises(LaunchError, match="asking for gone"):
        SageMakerLauncher().status(record)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(LaunchError, match="stopping gone failed: Could not connect") as refused:
        SageMakerLauncher().cancel(record)
    assert "\n" not in str(refused.value) and "secret" not in str(refused.value)


def test_a_local_run_of_the_same_name_is_not_the_job(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    job = make_job(tmp_path)
    folder = RunFolder(job.recipe.run.dir)
    folder.path.mkdir(parents=True)
    write_spending(folder, Spending(seconds=7200.0, usd=9.0))
    assert not any("so far" in line for line in check_job(job).lines)
    job.folder.mkdir(parents=True)
    record_job(job, Submitted("small-1", {"region": "us-west-2", "run": "s3://b/runs/small"}))
    monkeypatch.setattr(SageMakerLauncher, "status", lambda launcher, record: JobStatus("running", "InProgress"))
    capsys.readouterr()
    status(None)
    assert capsys.readouterr().out == "small-1  sagemaker  running  InProgress\n"


def test_a_file_removed_before_upload_is_one_message(tmp_path, aws):
    with pytest.raises(LaunchError, match=r"uploading the job's files failed: .*No such file.*/gone"):
        Service("us-west-2").upload([Upload("s3://bucket/x", tmp_path / "gone", "gone")], None)


@pytest.mark.parametrize(
    "lost",
    [
        ReadTimeoutError(endpoint_url="https://api"),
        ClientError({"Error": {"Code": "ResourceInUse", "Message": "names must be unique"}}, "CreateTrainingJob"),
    ],
)
def test_a_job_whose_response_was_lost_can_be_found(monkeypatch, aws, lost):
    def call(client, name, given):
        raise lost

    monkeypatch.setattr("botocore.client.BaseClient._make_api_call", call)
    with pytest.raises(LaunchError, match=r"may be running .*--region us-west-2 --training-job-name small-1`"):
        Service("us-west-2").create({"TrainingJobName": "small-1"})


def test_a_cancelled_job_is_asked_to_stop(monkeypatch, aws):
    """moto lacks StopTrainingJob, so the call is intercepted where botocore would send it."""
    asked = []
    monkeypatch.setattr(
        "botocore.client.BaseClient._make_api_call", lambda client, name, given: asked.append((name, given))
    )
    Service("us-west-2").stop("small-1")
    assert asked == [("StopTrainingJob", {"TrainingJobName": "small-1"})]


def test_without_boto3_the_message_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "boto3", None)
    with pytest.raises(ConfigError, match=r"pip install 'boto3>="):
        SageMakerLauncher().submit(make_job(tmp_path))
    with pytest.raises(ConfigError, match=r"launch\.sagemaker\.region is not set"):
        SageMakerLauncher().check(make_job(tmp_path, "launch.sagemaker.region=null"))


RESOURCES = {"InstanceType": "ml.g5.12xlarge", "InstanceCount": 2}


@pytest.mark.parametrize(
    ("primary", "secondary", "state", "code"),
    [
        ("InProgress", "Pending", "queued", None),
        ("InProgress", "DownloadingTrainingImage", "queued", None),
        ("InProgress", "Interrupted", "queued", None),
        ("InProgress", "Training", "running", None),
        ("InProgress", "Uploading", "running", None),
        ("Stopping", "Stopping", "running", None),
        ("Stopped", "MaxRuntimeExceeded", "stopped", 3),
        ("Stopped", "Stopped", "stopped", 3),
        ("Completed", "Completed", "done", 0),
        ("Failed", "Failed", "failed", 1),
        ("Deleting", "", "unknown", None),
    ],
)
def test_states(primary, secondary, state, code):
    answer = {"TrainingJobStatus": primary, "SecondaryStatus": secondary, "ResourceConfig": RESOURCES}
    status = read_status(answer)
    assert (status.state, status.exit_code) == (state, code)
    assert status.detail == (primary if secondary in ("", primary) else f"{primary}, {secondary}")


def test_billed_time_and_reason_of_a_failure():
    answer = {
        "TrainingJobStatus": "Failed",
        "SecondaryStatus": "Failed",
        "FailureReason": "AlgorithmError: parallel.tp=3 does not divide\nnum_heads=8, exit code: 2",
        "EnableManagedSpotTraining": True,
        "TrainingTimeInSeconds": 3600,
        "BillableTimeInSeconds": 900,
        "ResourceConfig": RESOURCES,
        "TrainingStartTime": datetime.now(UTC),
    }
    status = read_status(answer, usd_per_hour=7.09)
    assert status.exit_code == 2
    assert status.detail == (
        "Failed: AlgorithmError: parallel.tp=3 does not divide num_heads=8, exit code: 2: spot saved 75%"
    )
    # Two machines for a quarter of an hour.
    assert (status.billed_hours, round(status.billed_usd, 6)) == (0.5, 3.545)
    assert read_status(answer).billed_usd is None
    groups = [{"InstanceType": "ml.g5.xlarge", "InstanceCount": count} for count in (1, 3)]
    grouped = read_status({**answer, "ResourceConfig": {"InstanceGroups": groups}}, usd_per_hour=2.0)
    assert (grouped.billed_hours, grouped.billed_usd) == (1.0, 2.0)
