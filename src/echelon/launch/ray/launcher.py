"""`--to ray`: submits, queries, reads and cancels jobs of a Ray cluster, with Ray's own client."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

from echelon.ground.errors import LaunchError
from echelon.ground.extras import missing_package
from echelon.ground.stored import read_text, write_bytes, write_text
from echelon.launch.job import (
    FINAL_STATES,
    NAME,
    JobRecord,
    JobSpec,
    JobState,
    JobStatus,
    Launcher,
    RecordForm,
    Submitted,
    count_gpus,
)
from echelon.launch.ray import driver
from echelon.launch.ray.submission import (
    ADDRESS,
    DRIVER,
    REQUEST,
    check_request,
    find_workdir,
    installs_packages,
    render_files,
)
from echelon.launch.records import name_ending
from echelon.launch.source_bundle import build_wheel
from echelon.recipe.launch_sections import LaunchConfig
from echelon.run.supervise.outcome import DONE, FAILED, STOPPED

# The states of Ray Jobs; FAILED is any other exit code than 0.
_STATES: dict[str, JobState] = {"PENDING": "queued", "RUNNING": "running", "SUCCEEDED": "done", "STOPPED": "stopped"}
_OWN = "echelon: "
_LONGEST_MESSAGE = 400


@dataclass(frozen=True)
class RayJob:
    """A job as Ray Jobs describes it. `message` ends with the last lines of its driver."""

    state: str
    message: str
    exit_code: int | None


class RayJobs:
    """The jobs of one cluster."""

    def __init__(self, address: str) -> None:
        """`address`: the dashboard's, or `auto`. Raises LaunchError if it does not answer, ConfigError without ray."""
        try:
            from ray.job_submission import JobSubmissionClient
        except ImportError as error:
            raise missing_package("launch.to=ray", "ray", "ray", "in the version of the cluster") from error
        for name in ("ray", "ray.dashboard.modules.job.sdk"):  # the second sets its own level
            logging.getLogger(name).setLevel(logging.WARNING)
        with _explained(address):
            self._client = JobSubmissionClient(address)
        self.address = str(self._client.get_address())
        if address not in ("auto", self.address):
            raise LaunchError(
                f"launch.ray.address={address}, but RAY_ADDRESS or RAY_API_SERVER_ADDRESS says {self.address}, which "
                "Ray prefers; unset the variable, or give its address in the recipe."
            )

    def submit(self, request: Mapping[str, Any]) -> None:
        """Submit a job; its working directory is uploaded."""
        with _explained(self.address):
            self._client.submit_job(**request)

    def find(self, name: str) -> RayJob | None:
        """The job of this name; None if the cluster does not know it."""
        with _explained(self.address, name):
            info = self._client.get_job_info(name)
            return RayJob(str(info.status.value), info.message or "", info.driver_exit_code)
        return None

    def stop(self, name: str) -> None:
        """Ask the job's driver to stop."""
        with _explained(self.address):
            self._client.stop_job(name)

    def read_log(self, name: str) -> Iterator[str]:
        """The lines that the driver has printed; none before it starts."""
        with _explained(self.address):
            text = self._client.get_job_logs(name)
        yield from text.splitlines()

    def follow_log(self, name: str) -> Iterator[str]:
        """The lines that the driver has printed and prints until it ends."""
        rest = ""
        with _explained(self.address), asyncio.Runner() as runner:
            chunks = self._client.tail_job_logs(name)
            while (chunk := runner.run(_next_chunk(chunks))) is not None:
                *lines, rest = (rest + chunk).split("\n")
                yield from lines
        if rest:
            yield rest


async def _next_chunk(chunks: AsyncIterator[str]) -> str | None:
    return await anext(chunks, None)


class RayLauncher(Launcher):
    """Submits to Ray Jobs; the id is the submission id, the job's name. Its output and state are the cluster's."""

    record_form = RecordForm(id=NAME, place={"address": ADDRESS}, needs_own=True)
    sees_files = True
    way_of_secrets = (
        "set it in the environment of `ray start` on each machine, or keep it in a file there, and read it in "
        "launch.setup: `NAME=$(cat FILE)`, `export NAME`"
    )

    @override
    def find_packages(self, launch: LaunchConfig) -> tuple[str, str]:
        if installs_packages(launch.ray.runtime_env):
            return "wheel", "each machine"
        return ("there", "launch.ray.runtime_env") if launch.ray.runtime_env else super().find_packages(launch)

    @override
    def check(self, job: JobSpec) -> list[str]:
        check_request(job)
        fewest, most = job.nodes
        settings = job.recipe.launch.ray
        machines = f"{fewest}" if fewest == most else f"{fewest} to {most}"
        lines = [
            f"requests {machines} machine(s) with {count_gpus(job) or 'no'} GPU(s) and "
            f"{settings.resources.get('CPU', 1):g} CPU core(s) each from the Ray cluster at {settings.address}; waits "
            f"for them up to {settings.wait_seconds:g} s",
            f"the machines must share {find_workdir(job)}",
        ]
        if not count_gpus(job):
            lines.append("no GPU is requested, so Ray hides those of the machines; set launch.ray.gpus_per_node")
        return lines

    @override
    def render(self, job: JobSpec) -> dict[str, str]:
        """The request, the order for the driver, and the script of each machine."""
        return render_files(job)

    @override
    def submit(self, job: JobSpec) -> Submitted:
        """Uploads the job's folder: the recipe, the driver and its files."""
        jobs = RayJobs(job.recipe.launch.ray.address)
        write_text(job.folder / DRIVER, read_text(Path(driver.__file__)))
        if installs_packages(job.recipe.launch.ray.runtime_env):
            name, content = build_wheel()
            write_bytes(job.folder / name, content)
        jobs.submit(json.loads(read_text(job.folder / REQUEST)))
        return Submitted(job.name, {"address": jobs.address})

    @override
    def status(self, record: JobRecord) -> JobStatus:
        job = _find_jobs(record).find(record.id)
        if job is None:
            return JobStatus("failed", "no longer known to Ray, whose head has been restarted")
        words = f"Ray job {job.state}"
        if job.state not in _STATES:
            code = job.exit_code or FAILED
            last = find_last_words(job.message)
            return JobStatus(name_ending(code), f"{words}, exit code {code}{last and ': '}{last}", code)
        state = _STATES[job.state]
        return JobStatus(state, words, {"done": DONE, "stopped": STOPPED}.get(state))

    @override
    def logs(self, record: JobRecord, follow: bool) -> Iterator[str]:
        """With several machines each line has its machine's name as prefix."""
        jobs = _find_jobs(record)
        return jobs.follow_log(record.id) if follow else jobs.read_log(record.id)

    @override
    def cancel(self, record: JobRecord) -> None:
        """The driver asks every machine to save and end."""
        if self.status(record).state in FINAL_STATES:
            raise LaunchError(f"{record.name} has ended already.")
        _find_jobs(record).stop(record.id)


def _find_jobs(record: JobRecord) -> RayJobs:
    return RayJobs(record.place["address"])


def find_last_words(message: str) -> str:
    """The last message of echelon in a job's output, else the last line, which is Ray's own reason."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    messages = [line.partition(_OWN)[2] for line in lines if _OWN in line]
    return next(reversed(messages or lines), "")


@contextmanager
def _explained(address: str, name: str | None = None) -> Iterator[None]:
    """Turn an error of Ray's client into a LaunchError, except for a job `name` that the cluster does not know."""
    from ray.exceptions import AuthenticationError

    try:
        yield
    except ConnectionError as error:
        raise LaunchError(
            f"launch.ray.address={address}: nothing answers there as Ray's dashboard; give the address that "
            "`ray start --head` prints, usually http://HEAD_MACHINE:8265."
        ) from error
    except AuthenticationError as error:
        raise LaunchError(f"the cluster at {address} asks for a token: {_shorten(str(error))}") from error
    except (RuntimeError, ValueError, OSError) as error:
        words = str(error)
        if name is not None and f"{name} does not exist" in words:
            return
        raise LaunchError(f"the cluster at {address} refused the request: {_shorten(words)}") from error


def _shorten(text: str) -> str:
    plain = " ".join(text.split())
    return plain if len(plain) <= _LONGEST_MESSAGE else plain[: _LONGEST_MESSAGE - 3] + "..."
