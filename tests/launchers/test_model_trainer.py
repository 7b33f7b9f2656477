"""SageMaker's SDK sends the same request. Runs only where `sagemaker-train` is installed.

Use a separate, large environment: `pip install '.[sagemaker-sdk]' 'moto[server,s3]' pytest`.
"""

import importlib.util
import json
from contextlib import suppress

import boto3
import pytest

from echelon.launch.records import submit_job
from echelon.launch.sagemaker.launcher import SageMakerLauncher
from tests.object_server import ObjectServer
from tests.unit.launch.sagemaker.sagemaker_jobs import make_job

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("sagemaker") is None,
        reason="SageMaker's SDK (the extra sagemaker-sdk) is not installed",
    ),
]

OVERRIDES = (
    "launch.nodes=2",
    "launch.env={NOTE: 'it''s \"$HOME\"'}",
    "launch.sagemaker.spot={max_wait_hours: 3}",
    "launch.sagemaker.subnets=[subnet-0abc]",
    "launch.sagemaker.security_group_ids=[sg-0abc]",
    "launch.sagemaker.tags={team: ours}",
    "launch.sagemaker.max_attempts=3",
    "launch.sagemaker.remote_debug=true",
    "track=[tensorboard]",
)


@pytest.fixture
def aws(monkeypatch, tmp_path):
    # The SDK reports its use to AWS unless its configuration disables that.
    quiet = tmp_path / "config.yaml"
    quiet.write_text('SchemaVersion: "1.0"\nSageMaker: {PythonSDK: {Modules: {TelemetryOptOut: true}}}\n')
    server = ObjectServer()
    for name, value in {
        **server.environment,
        "SAGEMAKER_VALIDATE_ROLE": "false",
        "SAGEMAKER_USER_CONFIG_OVERRIDE": str(quiet),
        "SAGEMAKER_ADMIN_CONFIG_OVERRIDE": str(quiet),
    }.items():
        monkeypatch.setenv(name, value)
    s3 = boto3.client("s3", region_name="us-west-2")
    with suppress(s3.exceptions.BucketAlreadyOwnedByYou):  # the servers of a process share their state
        s3.create_bucket(Bucket="my-bucket", CreateBucketConfiguration={"LocationConstraint": "us-west-2"})
    yield
    server.stop()


@pytest.mark.parametrize("overrides", [(), OVERRIDES], ids=["one machine", "two on spot"])
def test_model_trainer_sends_the_same_request(tmp_path, monkeypatch, aws, overrides):
    monkeypatch.chdir(tmp_path)
    sent = []
    call = boto3.client("sagemaker").__class__.__mro__[1]._make_api_call

    def listen(client, operation, given):
        if operation == "CreateTrainingJob":
            sent.append(given)
        return call(client, operation, given)

    monkeypatch.setattr("botocore.client.BaseClient._make_api_call", listen)
    launcher, job = SageMakerLauncher(), make_job(tmp_path, "launch.sagemaker.sdk=model_trainer", *overrides)
    record = submit_job(job, launcher, launcher.render(job))
    assert sent == [json.loads((job.folder / "request.json").read_text())]
    assert launcher.status(record).state == "done"
