"""The SageMaker launcher: checks, renders and submits jobs."""

from collections.abc import Iterator

from echelon.errors import ConfigError
from echelon.launch.job import JobRecord, JobSpec, JobStatus, Submitted
from echelon.launch.sagemaker.request import build_submission
from echelon.recipe import check_built, render_recipe


class SageMakerLauncher:
    """Runs SageMaker training jobs. A job's inputs are uploaded to S3; its run folder is stored there too."""

    def check(self, job: JobSpec) -> list[str]:
        """See Launcher."""
        settings = job.recipe.launch.sagemaker
        if settings.instance_type is None and not settings.instance_groups:
            raise ConfigError("launch.sagemaker.instance_type is not set; set it, such as ml.g5.12xlarge, or to auto.")
        submission = build_submission(job)
        check_built(submission.staging.recipe)
        return list(submission.lines)

    def render(self, job: JobSpec) -> dict[str, str]:
        """See Launcher: the request, the container's recipe, and a line for each uploaded object.

        The container's recipe has its own file name, since the launched recipe is in the same folder.
        """
        submission = build_submission(job)
        return {
            "request.json": submission.render_request(),
            "container-recipe.yaml": render_recipe(submission.staging.recipe),
            "uploads.txt": submission.staging.render_uploads(),
        }

    def submit(self, job: JobSpec) -> Submitted:
        """See Launcher: the id is the job's name at SageMaker."""
        from echelon.launch.sagemaker.service import Service

        submission = build_submission(job)
        service = Service(submission.region)
        request = submission.request
        if job.recipe.launch.sagemaker.sdk == "model_trainer":
            request = service.merge_defaults(request)
        service.upload(submission.staging.uploads, job.recipe.launch.sagemaker.kms_key)
        service.create(request)
        # Stored, because the price of a type outside the catalogue is only in the recipe.
        price = job.recipe.budget.usd_per_hour or submission.machines.usd_per_hour(submission.region)
        return Submitted(job.name, {"region": submission.region} | ({} if price is None else {"price": str(price)}))

    def status(self, record: JobRecord) -> JobStatus:
        """See Launcher."""
        from echelon.launch.sagemaker.service import Service

        price = record.place.get("price")
        return Service(record.place["region"]).describe(record.id, None if price is None else float(price))

    def logs(self, record: JobRecord, follow: bool) -> Iterator[str]:
        """See Launcher: lines from CloudWatch; lines of other machines than the first have the machine's name."""
        from echelon.launch.sagemaker.service import Service

        return Service(record.place["region"]).read_log(record.id, follow)

    def cancel(self, record: JobRecord) -> None:
        """See Launcher: the machines get SIGTERM and have two minutes to save."""
        from echelon.launch.sagemaker.service import Service

        Service(record.place["region"]).stop(record.id)
