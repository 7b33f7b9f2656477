"""The SageMaker launcher: checks, renders and submits jobs."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from echelon.ground.errors import MissingSettingError
from echelon.launch.job import NAME, JobRecord, JobSpec, JobStatus, RecordForm, RemoteLauncher, Submitted
from echelon.launch.sagemaker.request import REGION, Submission, build_submission, find_run_uri
from echelon.recipe.launch_sections import LaunchConfig
from echelon.recipe.render import render_recipe
from echelon.run.folder.run_folder import FILES

if TYPE_CHECKING:
    from echelon.launch.sagemaker.service import Service


class SageMakerLauncher(RemoteLauncher):
    """Runs SageMaker training jobs. A job's inputs are uploaded to S3; its run folder is stored there too."""

    record_form = RecordForm(
        id=NAME, place={"region": REGION, "run": r"s3://[^\s\0]+", "price?": r"[0-9]{1,9}(\.[0-9]{1,12})?"}
    )
    way_of_secrets = "store it in AWS Secrets Manager, and name it in launch.sagemaker.secrets: `{HF_TOKEN: <ARN>}`"

    @override
    def find_packages(self, launch: LaunchConfig) -> tuple[str, str]:
        image = launch.sagemaker.image
        return ("there", f"the image {image}") if launch.sagemaker.network_isolation else ("index", str(image))

    def __init__(self) -> None:
        self._services: dict[str, Service] = {}

    def _find_service(self, region: str) -> "Service":
        """The AWS services of a region, whose package is imported with the first call."""
        from echelon.launch.sagemaker.service import Service

        if region not in self._services:
            self._services[region] = Service(region)
        return self._services[region]

    @override
    def check(self, job: JobSpec) -> list[str]:
        settings = job.recipe.launch.sagemaker
        if settings.instance_type is None and not settings.instance_groups:
            raise MissingSettingError(
                "launch.sagemaker.instance_type is not set; set it, such as ml.g5.12xlarge, or to auto.",
                {"launch.sagemaker.instance_type": "ml.p5.48xlarge"},
            )
        return list(build_submission(job).lines)

    @override
    def render(self, job: JobSpec) -> dict[str, str]:
        """The request, the container's recipe, and a line for each uploaded object.

        The container's recipe has its own file name, since the launched recipe is in the same folder.
        """
        submission = build_submission(job)
        return {
            "request.json": submission.render_request(),
            "container-recipe.yaml": render_recipe(submission.staging.recipe),
            "uploads.txt": submission.staging.render_uploads(),
        }

    @override
    def submit(self, job: JobSpec) -> Submitted:
        """The id is the job's name at SageMaker."""
        submission = build_submission(job)
        service = self._find_service(submission.region)
        service.upload(submission.staging.uploads, job.recipe.launch.sagemaker.kms_key)
        service.create(submission.request)
        return _describe_place(job, submission)

    @override
    def status(self, record: JobRecord) -> JobStatus:
        price = record.place.get("price")
        return self._find_service(record.place["region"]).describe(record.id, None if price is None else float(price))

    @override
    def logs(self, record: JobRecord, follow: bool) -> Iterator[str]:
        """Lines from CloudWatch; lines of other machines than the first have the machine's name."""
        return self._find_service(record.place["region"]).read_log(record.id, follow)

    @override
    def cancel(self, record: JobRecord) -> None:
        """The machines get SIGTERM and have two minutes to save."""
        self._find_service(record.place["region"]).stop(record.id)

    @override
    def fetch_records(self, record: JobRecord) -> None:
        """From S3, to which SageMaker copies the run folder during training and at its end."""
        self._find_service(record.place["region"]).download(record.place["run"], FILES, Path(record.run_dir))

    @override
    def find_submitted(self, job: JobSpec) -> Submitted | None:
        submission = build_submission(job)
        return _describe_place(job, submission) if self._find_service(submission.region).knows(job.name) else None


def _describe_place(job: JobSpec, submission: Submission) -> Submitted:
    """The id of the submitted job, and where to find it and its run folder."""
    place = {"region": submission.region, "run": find_run_uri(job.recipe)}
    # Stored, because the price of a type outside the catalogue is only in the recipe.
    price = job.recipe.budget.usd_per_hour or submission.machines.usd_per_hour(submission.region)
    return Submitted(job.name, place if price is None else {**place, "price": str(price)})
