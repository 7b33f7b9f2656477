"""SageMaker's training API behind real HTTP, beside moto's S3: jobs that run, end, and can be stopped.

moto completes a job at once and cannot stop one. Here a `run` function is the machines of a job.
"""

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.object_server import ObjectServer


@dataclass
class TrainingJob:
    """A job: its request, and its state. `stop` is set when it is asked to end."""

    request: dict[str, Any]
    state: str = "InProgress"
    reason: str = ""
    stop: threading.Event = field(default_factory=threading.Event)

    @property
    def name(self) -> str:
        return self.request["TrainingJobName"]


class TrainingServer(ObjectServer):
    """`run(job)` returns None if the job completed, and the reason of a failure; it runs in a thread of its own.

    `quota`: jobs that may run at the same time. `lost`: the number of the CreateTrainingJob whose answer gets lost.
    """

    def __init__(self, run: Callable[[TrainingJob], str | None], quota: int = 100, lost: int | None = None) -> None:
        self.jobs: dict[str, TrainingJob] = {}
        self.most_at_once = 0
        self.refused = 0
        self._run, self._quota, self._lost = run, quota, lost
        self._lock = threading.Lock()
        super().__init__()

    def _answer(self, environ: dict[str, Any], respond: Any) -> Any:
        _, _, action = environ.get("HTTP_X_AMZ_TARGET", "").partition("SageMaker.")
        if action not in ("CreateTrainingJob", "DescribeTrainingJob", "StopTrainingJob"):
            return super()._answer(environ, respond)
        asked = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
        with self._lock:
            status, answer = getattr(self, f"_{action}")(asked)
        body = json.dumps(answer).encode()
        respond(status, [("Content-Type", "application/x-amz-json-1.1"), ("Content-Length", str(len(body)))])
        return [body]

    def _running(self) -> list[TrainingJob]:
        return [job for job in self.jobs.values() if job.state in ("InProgress", "Stopping")]

    def _CreateTrainingJob(self, asked: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        if asked["TrainingJobName"] in self.jobs:
            return _refuse("ResourceInUse", "Training job names must be unique")
        if len(self._running()) >= self._quota:
            self.refused += 1
            return _refuse("ResourceLimitExceeded", "The account-level service limit is exceeded")
        job = self.jobs[asked["TrainingJobName"]] = TrainingJob(asked)
        self.most_at_once = max(self.most_at_once, len(self._running()))
        threading.Thread(target=self._work, args=(job,), daemon=True).start()
        if self._lost == len(self.jobs):
            return "503 Service Unavailable", {"__type": "ServiceUnavailable", "message": "lost"}
        return "200 OK", {"TrainingJobArn": f"arn:aws:sagemaker:us-east-1:111122223333:training-job/{job.name}"}

    def _work(self, job: TrainingJob) -> None:
        reason = self._run(job)
        with self._lock:
            job.reason = reason or ""
            job.state = "Stopped" if job.stop.is_set() and reason else "Failed" if reason else "Completed"

    def _DescribeTrainingJob(self, asked: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        job = self.jobs.get(asked["TrainingJobName"])
        if job is None:
            return _refuse("ValidationException", "Requested resource not found.")
        state = {"TrainingJobStatus": job.state, "SecondaryStatus": "Training" if job in self._running() else job.state}
        billed = {} if job in self._running() else {"TrainingTimeInSeconds": 360, "BillableTimeInSeconds": 360}
        reason = {"FailureReason": job.reason} if job.state == "Failed" else {}
        return "200 OK", {**job.request, **state, **billed, **reason}

    def _StopTrainingJob(self, asked: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        job = self.jobs[asked["TrainingJobName"]]
        if job.state != "InProgress":
            return _refuse("ValidationException", f"The request was rejected because the job is {job.state}")
        job.state = "Stopping"
        job.stop.set()
        return "200 OK", {}


def _refuse(code: str, message: str) -> tuple[str, dict[str, Any]]:
    return "400 Bad Request", {"__type": code, "message": message}
