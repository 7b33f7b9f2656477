"""Calls of the AWS services that a job uses: S3, SageMaker and CloudWatch, through boto3;
and prices of its machines.

boto3 handles credentials, `AWS_ENDPOINT_URL` and proxies.
"""

import json
import os
import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from echelon.ground.errors import BusyError, ConfigError, LaunchError
from echelon.ground.extras import missing_package
from echelon.ground.stored import write_text
from echelon.launch.job import FINAL_STATES, JobState, JobStatus
from echelon.launch.sagemaker.staging import Upload
from echelon.planner.hardware.instances import INSTANCES
from echelon.planner.hardware.price_files import find_price_folder
from echelon.recipe.yaml_text import render_yaml
from echelon.run.folder.run_folder import OWNER_ONLY
from echelon.run.supervise.outcome import DONE, FAILED, STOPPED

LOG_GROUP = "/aws/sagemaker/TrainingJobs"

# Secondary statuses before training: machines are being requested and set up.
_WAITING = frozenset(
    {"Starting", "Pending", "LaunchingMLInstances", "PreparingTrainingStack", "Downloading",
     "DownloadingTrainingImage", "Interrupted", "Restarting"}
)  # fmt: skip
_LOOK_SECONDS = 5.0
# Lines of several machines arrive slightly out of order: this much is read again, and known lines are skipped.
_OVERLAP_MILLISECONDS = 60_000
_BUSY = ("ResourceLimitExceeded", "ThrottlingException", "RequestLimitExceeded")
# A job that does not exist: the first as documented, the second as answered.
_UNKNOWN = ("ResourceNotFound", "ValidationException")
_HINTS = {
    "AccessDeniedException": "the caller's role lacks the permission; docs/sagemaker.md lists them",
    "AccessDenied": "the caller's role lacks the permission; docs/sagemaker.md lists them",
    "ResourceLimitExceeded": "ask for a higher quota of this instance type in Service Quotas",
    "NoSuchBucket": "create the bucket first, or change launch.sagemaker.bucket",
    "ExpiredTokenException": "log in again",
    "ExpiredToken": "log in again",
}

# The price list is served by a few regions only, for all of them.
_SERVED_IN = "us-east-1"
_TRAINING = re.compile(r"(?:^|-)Train:(ml\.\S+)$")
_SPOT_DAYS = 7


class Service:
    """The AWS services of one region. Raises ConfigError without boto3, and a one-line LaunchError if AWS refuses."""

    def __init__(self, region: str) -> None:
        try:
            import boto3
        except ImportError:
            raise missing_package("launch.to=sagemaker", "boto3", "sagemaker") from None
        self._session = boto3.Session(region_name=region)
        self._client = cache(self._session.client)  # a sweep asks all the time, and a client is slow to make
        self._region = region

    def upload(self, uploads: Sequence[Upload], kms_key: str | None) -> None:
        """Upload every object to its address."""
        extra = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": kms_key} if kms_key else {}
        with explained("uploading the job's files"):
            s3 = self._client("s3")
            for upload in uploads:
                bucket, _, key = upload.address.removeprefix("s3://").partition("/")
                if isinstance(upload.source, Path):
                    s3.upload_file(str(upload.source), bucket, key, ExtraArgs=extra)
                else:
                    s3.put_object(Bucket=bucket, Key=key, Body=upload.source(), **extra)

    def create(self, request: Mapping[str, Any]) -> None:
        """Create the training job. If the answer is lost, the error says how to look for a job that may be running."""
        from botocore.exceptions import ClientError, HTTPClientError

        with explained("creating the training job"):
            try:
                self._client("sagemaker").create_training_job(**request)
            except (ClientError, HTTPClientError) as error:
                # If an answer was lost, boto3 retries the request and gets the error that the name is in use.
                if isinstance(error, ClientError) and error.response.get("Error", {}).get("Code") != "ResourceInUse":
                    raise
                words = " ".join(str(error).split()).rstrip(".")
                raise LaunchError(
                    f"creating the training job: AWS did not confirm it, so the job may be running ({words}); check "
                    f"with `aws sagemaker describe-training-job --region {self._region} --training-job-name "
                    f"{request['TrainingJobName']}`, and end it with stop-training-job."
                ) from error

    def describe(self, name: str, usd_per_hour: float | None = None) -> JobStatus:
        """The status of the job, with dollars if `usd_per_hour` of one machine is known."""
        with explained(f"asking for {name}"):
            answer = self._client("sagemaker").describe_training_job(TrainingJobName=name)
        return read_status(answer, usd_per_hour)

    def knows(self, name: str) -> bool:
        """Whether there is a training job of this name."""
        from botocore.exceptions import ClientError

        with explained(f"looking for {name}"):
            try:
                self._client("sagemaker").describe_training_job(TrainingJobName=name)
            except ClientError as error:
                if error.response.get("Error", {}).get("Code") in _UNKNOWN:
                    return False
                raise
        return True

    def download(self, address: str, names: Collection[str], folder: Path) -> None:
        """Copy the objects with these names directly below the address to a folder; unchanged ones are left out."""
        bucket, _, prefix = address.removeprefix("s3://").partition("/")
        folder.mkdir(OWNER_ONLY, parents=True, exist_ok=True)
        with explained(f"reading {address}"):
            s3 = self._client("s3")
            pages = s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=f"{prefix}/", Delimiter="/")
            for entry in (item for page in pages for item in page.get("Contents", [])):
                name = entry["Key"].removeprefix(f"{prefix}/")
                target, changed = folder / name, entry["LastModified"].timestamp()
                stat = target.stat() if name in names and target.exists() else None
                if name in names and (stat is None or (stat.st_size, stat.st_mtime) != (entry["Size"], changed)):
                    partial = folder / f".{name}.tmp"
                    s3.download_file(bucket, entry["Key"], str(partial))
                    os.utime(partial, (changed, changed))
                    partial.replace(target)

    def stop(self, name: str) -> None:
        """Ask the job to end."""
        with explained(f"stopping {name}"):
            self._client("sagemaker").stop_training_job(TrainingJobName=name)

    def read_log(self, name: str, follow: bool) -> Iterator[str]:
        """Yield the lines of all machines by time; with `follow`, also new lines until the job ends."""
        logs = self._client("logs")
        seen: dict[str, int] = {}
        newest = 0
        while True:
            ended = not follow or self.describe(name).state in FINAL_STATES
            for event in _list_events(logs, name, max(0, newest - _OVERLAP_MILLISECONDS)):
                if event["eventId"] not in seen:
                    seen[event["eventId"]] = event["timestamp"]
                    newest = max(newest, event["timestamp"])
                    yield _render_event(event, name)
            if ended:
                return
            oldest = newest - 2 * _OVERLAP_MILLISECONDS
            seen = {key: moment for key, moment in seen.items() if moment >= oldest}
            time.sleep(_LOOK_SECONDS)


def read_status(answer: Mapping[str, Any], usd_per_hour: float | None = None) -> JobStatus:
    """The state of a job from SageMaker's description of it.

    Billed hours are the sum over all machines; for spot machines, after the saving. Dollars use `usd_per_hour`, the
    (mean) price of one machine.
    """
    primary, secondary = answer["TrainingJobStatus"], answer.get("SecondaryStatus", "")
    state = _read_state(primary, secondary)
    words = [primary if secondary in ("", primary) else f"{primary}, {secondary}"]
    if reason := answer.get("FailureReason"):
        words.append(" ".join(reason.split()))
    trained, billed = answer.get("TrainingTimeInSeconds"), answer.get("BillableTimeInSeconds")
    if answer.get("EnableManagedSpotTraining") and trained and billed is not None:
        words.append(f"spot saved {1 - billed / trained:.0%}")
    hours = usd = None
    if billed is not None:
        resources = answer["ResourceConfig"]
        groups = resources.get("InstanceGroups") or [resources]
        hours = billed * sum(group.get("InstanceCount", 1) for group in groups) / 3600
        usd = None if usd_per_hour is None else hours * usd_per_hour
    return JobStatus(state, ": ".join(words), _read_exit_code(state, answer.get("FailureReason", "")), hours, usd)


def _read_state(primary: str, secondary: str) -> JobState:
    ends: dict[str, JobState] = {"Completed": "done", "Failed": "failed", "Stopped": "stopped", "Stopping": "running"}
    if primary in ends:
        return ends[primary]
    if primary != "InProgress":
        return "unknown"
    return "queued" if secondary in _WAITING else "running"


def _read_exit_code(state: JobState, reason: str) -> int | None:
    """The exit code; that of a failure is at the end of SageMaker's reason: `AlgorithmError: ..., exit code: 2`."""
    if state == "failed":
        match = re.search(r"exit code: (\d+)", reason)
        return int(match[1]) if match and int(match[1]) else FAILED
    return {"done": DONE, "stopped": STOPPED}.get(state)


def _list_events(logs: Any, name: str, start: int) -> Iterator[dict[str, Any]]:
    with explained(f"reading the log {LOG_GROUP} {name}"):
        streams = {"logGroupName": LOG_GROUP, "logStreamNamePrefix": f"{name}/"}
        pages = logs.get_paginator("filter_log_events").paginate(startTime=start, **streams)
        try:
            for page in pages:
                yield from page["events"]
        except logs.exceptions.ResourceNotFoundException:
            return  # nothing has been logged in this region yet


def _render_event(event: Mapping[str, Any], name: str) -> str:
    """A log line, after its host's name unless it is the first host. Streams are named JOB/algo-1-1700000000."""
    host = event["logStreamName"].removeprefix(f"{name}/").rpartition("-")[0]
    line = str(event["message"]).rstrip("\n")
    return line if host == "algo-1" else f"{host}  {line}"


@contextmanager
def explained(action: str) -> Iterator[None]:
    """Turn an error of AWS into a one-line LaunchError, without headers or credentials."""
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except ClientError as error:
        code = error.response.get("Error", {}).get("Code", "")
        words = " ".join(str(error.response.get("Error", {}).get("Message", "")).split()).rstrip(".")
        hint = f"; {_HINTS[code]}" if code in _HINTS else ""
        kind = BusyError if code in _BUSY else LaunchError
        raise kind(f"AWS refused {action} ({code}): {words}{hint}.") from error
    except (BotoCoreError, Boto3Error, OSError) as error:
        raise LaunchError(f"{action} failed: {' '.join(str(error).split()).rstrip('.')}.") from error


def refresh_prices(region: str | None, with_spot: bool) -> tuple[Path, int, int]:
    """Ask AWS for the prices of a region (default: that of the account's configuration), and keep them in a file.

    The caller needs `pricing:GetProducts`, and for spot machines `ec2:DescribeSpotPriceHistory`. Plans then use these
    prices. Returns the file, and the numbers of types with a price on demand and with one of spot machines.

    Raises ConfigError without boto3 or a region, and LaunchError if AWS refuses; then the prices of before stay.
    """
    try:
        import boto3
    except ImportError:
        raise missing_package("--prices", "boto3", "sagemaker") from None
    session = boto3.Session()
    if (region := region or session.region_name) is None:
        raise ConfigError(
            "--prices: the region is unknown; name a recipe with launch.sagemaker.region, or set AWS_DEFAULT_REGION."
        )
    with explained(f"asking for the prices of {region}"):
        pricing = session.client("pricing", region_name=_SERVED_IN)
        prices = dict(_read_price_list(pricing, region))
    if not prices:
        raise LaunchError(f"AWS's price list has no training machine in {region}; correct launch.sagemaker.region.")
    date = datetime.now(UTC).date().isoformat()
    rows = [_row(region, date, "AWS price list, training rate", usd_per_hour=prices)]
    spot: dict[str, float] = {}
    if with_spot:
        with explained(f"asking for the spot prices of {region}"):
            spot = _read_spot_prices(session.client("ec2", region_name=region), list(prices))
        rows.append(_row(region, date, f"mean of EC2's spot prices of {_SPOT_DAYS} days", spot_usd_per_hour=spot))
    folder = find_price_folder()
    path = folder / f"aws-{region}.yaml"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(path, render_yaml(rows))
    except OSError as error:
        raise LaunchError(f"the prices cannot be kept in {folder} ({error}); set ECHELON_CACHE.") from error
    return path, len(prices), len(spot)


def _row(region: str, date: str, source: str, **prices: dict[str, float]) -> dict[str, Any]:
    return {"region": region, "date": date, "source": source, **prices}


def _read_price_list(pricing: Any, region: str) -> Iterator[tuple[str, float]]:
    """The types of the catalogue, with dollars per hour on demand."""
    filters = [{"Type": "TERM_MATCH", "Field": "regionCode", "Value": region}]
    for page in pricing.get_paginator("get_products").paginate(ServiceCode="AmazonSageMaker", Filters=filters):
        for text in page["PriceList"]:
            offer = json.loads(text)
            match = _TRAINING.search(offer["product"]["attributes"].get("usagetype", ""))
            if match is None or match[1] not in INSTANCES:
                continue
            for term in offer["terms"].get("OnDemand", {}).values():
                for part in term["priceDimensions"].values():
                    if (usd := float(part["pricePerUnit"].get("USD", 0))) > 0:
                        yield match[1], usd


def _read_spot_prices(ec2: Any, names: list[str]) -> dict[str, float]:
    """The mean price of each type that EC2 has, over the last days and all zones."""
    by_type: dict[str, list[float]] = {}
    pages = ec2.get_paginator("describe_spot_price_history").paginate(
        Filters=[{"Name": "instance-type", "Values": [name.removeprefix("ml.") for name in names]}],
        ProductDescriptions=["Linux/UNIX"],
        StartTime=datetime.now(UTC) - timedelta(days=_SPOT_DAYS),
    )
    for page in pages:
        for entry in page["SpotPriceHistory"]:
            by_type.setdefault(f"ml.{entry['InstanceType']}", []).append(float(entry["SpotPrice"]))
    return {name: round(fmean(prices), 4) for name, prices in sorted(by_type.items())}
