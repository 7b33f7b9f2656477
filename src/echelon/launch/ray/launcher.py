"""Submit, query, read and cancel jobs of a Ray cluster."""

import json
from collections.abc import Iterator
from pathlib import Path

from typing_extensions import override

from echelon.ground.errors import LaunchError
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
from echelon.launch.job_logs import name_ending
from echelon.launch.ray import driver
from echelon.launch.ray.jobs import RayJobs
from echelon.launch.ray.submission import (
    ADDRESS,
    DRIVER,
    REQUEST,
    check_request,
    find_workdir,
    installs_packages,
    render_files,
)
from echelon.launch.source_bundle import build_wheel
from echelon.recipe.launch_sections import LaunchConfig
from echelon.run.supervise.outcome import DONE, FAILED, STOPPED

# The states of Ray Jobs; FAILED is any other exit code than 0.
_STATES: dict[str, JobState] = {"PENDING": "queued", "RUNNING": "running", "SUCCEEDED": "done", "STOPPED": "stopped"}
_OWN = "echelon: "


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
