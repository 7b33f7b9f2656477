"""`--to slurm`: one batch job with one task per machine, by Slurm's own commands; the files that all of them need."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import override

from echelon.ground.errors import LaunchError
from echelon.ground.stored import read_text, write_text
from echelon.launch.job import (
    FINAL_STATES,
    ArrayLauncher,
    JobRecord,
    JobSpec,
    JobState,
    JobStatus,
    RecordForm,
    Submitted,
    count_gpus,
    list_inputs,
)
from echelon.launch.records import Log, rarely, read_exit_code, record_job, write_job
from echelon.launch.slurm_script import (
    ARRAY,
    BATCH,
    CANCELLED,
    CODE,
    LOG,
    MACHINE,
    NEEDED,
    check_request,
    format_time,
    list_hidden_inputs,
    render_array,
    render_batch,
    render_machine,
)
from echelon.recipe.launch_sections import LaunchConfig
from echelon.run.supervise.outcome import DONE, STOPPED

# Slurm's job states; every other state is a failure.
_STATES: dict[str, JobState] = {
    "PENDING": "queued", "CONFIGURING": "queued", "REQUEUED": "queued", "REQUEUE_HOLD": "queued",
    "REQUEUE_FED": "queued", "SPECIAL_EXIT": "queued", "RESV_DEL_HOLD": "queued", "SUSPENDED": "queued",
    "RUNNING": "running", "COMPLETING": "running", "RESIZING": "running", "SIGNALING": "running",
    "STAGE_OUT": "running", "STOPPED": "running", "COMPLETED": "done", "CANCELLED": "stopped",
}  # fmt: skip
_COMMAND_SECONDS = 60
# Between two queries of the controller while a log is followed.
_ASK_SECONDS = 15.0
# File systems of one machine; others are shared by their nature, such as NFS, Lustre, GPFS, BeeGFS, Ceph and FUSE.
_LOCAL = (
    "bcachefs",
    "btrfs",
    "ext2",
    "ext3",
    "ext4",
    "f2fs",
    "jfs",
    "overlay",
    "ramfs",
    "squashfs",
    "tmpfs",
    "xfs",
    "zfs",
)


class SlurmLauncher(ArrayLauncher):
    """Submits with sbatch, on a machine of the cluster that shares its file system with the job's machines."""

    record_form = RecordForm(id=r"[0-9]+(_[0-9]+)?")
    sees_files = keeps_others = has_spares = True
    way_of_secrets = (
        "set it as an environment variable of `echelon launch`, which sbatch passes on, or read it in launch.setup "
        "from a file that only you can read: `NAME=$(cat FILE)`, `export NAME`"
    )

    @override
    def find_packages(self, launch: LaunchConfig) -> tuple[str, str]:
        container = launch.slurm.container
        passes_path = launch.slurm.options.get("export", "ALL") == "ALL"
        if container is not None:
            return "there", f"the image {container.image}"
        if self.starts_this_python(launch, shutil.which(launch.python) if passes_path else launch.python):
            return "shared", ""
        return super().find_packages(launch)

    @override
    def check(self, job: JobSpec) -> list[str]:
        check_request(job)
        self.render(job)
        launch = job.recipe.launch
        slurm = launch.slurm
        fewest, most = job.nodes
        machines = f"{fewest}" if fewest == most else f"{fewest} to {most}"
        hours = "the partition's limit" if launch.max_hours is None else format_time(launch.max_hours)
        lines = [
            f"requests {machines} machine(s) with {count_gpus(job) or 'no'} GPU(s) each from Slurm, for "
            f"{hours}; output goes to {job.folder / LOG}"
        ]
        if not (slurm.options.get("cpus-per-task") or slurm.options.get("exclusive")):
            lines.append(
                "launch.slurm.options has neither cpus-per-task nor exclusive: most clusters then give each task one "
                "core"
            )
        return [*lines, *list_local_files(job), *list_hidden_inputs(job)]

    @override
    def render(self, job: JobSpec) -> dict[str, str]:
        """The batch script, the script of each machine, and what it looks for."""
        return {BATCH: render_batch(job), **_render_own(job)}

    @override
    def submit(self, job: JobSpec) -> Submitted:
        """The id is the Slurm job id."""
        return Submitted(_submit(job.folder / BATCH))

    @override
    def status(self, record: JobRecord) -> JobStatus:
        """Asks Slurm while it knows the job, since only Slurm knows about a requeue; then reads the script's files."""
        job = _find_job(record.id)
        code = read_exit_code(record.folder / CODE)
        if job is None:
            if code is None and (record.folder / CANCELLED).exists():
                code = STOPPED  # cancelled while pending, before its script could write a code
            return _describe_end("", code, "no longer known to Slurm")
        state = _STATES.get(job.state, "failed")
        words = f"job {record.id} {job.state}"
        if job.reason not in ("", "None"):
            words += f" ({job.reason})"
        if job.restarts:
            words += f", restarted {job.restarts} time(s)"
        if state not in FINAL_STATES:
            return JobStatus(state, words)
        return _describe_end(job.state, job.exit_code if code is None else code, words)

    @override
    def logs(self, record: JobRecord, follow: bool) -> Iterator[str]:
        """Continues after a requeue; a pending job has no lines yet."""
        ask = rarely(lambda: self.status(record).state in FINAL_STATES, _ASK_SECONDS)

        def has_ended() -> bool:
            left = read_exit_code(record.folder / CODE) is not None and self.status(record).state in FINAL_STATES
            return left or ask()

        return Log(record.folder / LOG).follow(has_ended if follow else lambda: True)

    @override
    def cancel(self, record: JobRecord) -> None:
        """A job that is training saves first, any other just ends; neither is requeued."""
        if self.status(record).state in FINAL_STATES:
            raise LaunchError(f"{record.name} has ended already.")
        write_text(record.folder / CANCELLED, "")
        steps = _call("squeue", "--noheader", "--steps", f"--jobs={record.id}", "--format=%i", "--states=RUNNING")
        trains = any(step.strip().rpartition(".")[2].isdigit() for step in steps.splitlines())
        _call("scancel", *(("--signal=TERM",) if trains else ()), record.id)

    @override
    def render_array(self, jobs: Sequence[JobSpec], parallel: int) -> dict[str, str]:
        """The script of the array, and the machine script of the first job."""
        return {ARRAY: render_array(jobs, parallel), **_render_own(jobs[0])}

    @override
    def launch_array(self, jobs: Sequence[JobSpec], parallel: int) -> list[JobRecord]:
        """A job's id is the array's job id and the task index, `4711_0`."""
        for job in jobs:
            self.check(job)
        first, *others = jobs
        texts = self.render_array(jobs, parallel)
        write_job(first, texts)
        for job in others:
            write_job(job, _render_own(job))
        number = _submit(first.folder / ARRAY)
        return [record_job(job, Submitted(f"{number}_{index}")) for index, job in enumerate(jobs)]


@dataclass(frozen=True)
class _SlurmJob:
    """A job as Slurm reports it; `exit_code` is 0 until it ends."""

    state: str
    exit_code: int
    reason: str = ""
    restarts: int = 0


def _find_job(job_id: str) -> _SlurmJob | None:
    """Query the controller, which forgets a job minutes after its end; then the accounting database, if any."""
    answer = _run("scontrol", "--oneliner", "show", "job", job_id)
    if answer.returncode == 0:
        fields = dict(re.findall(r"\b(JobState|Reason|Restarts|ExitCode)=(\S*)", answer.stdout))
        code = int(fields["ExitCode"].partition(":")[0])
        return _SlurmJob(fields["JobState"], code, fields.get("Reason", ""), int(fields.get("Restarts", 0)))
    # An array task that was cancelled while pending is reported as not found on stdout, not as an error.
    if "Invalid job id" not in answer.stderr and f"Job {job_id} not found" not in answer.stdout:
        raise LaunchError(f"cannot query Slurm for job {job_id}: {_last_line(answer.stderr)}")
    accounts = _run(
        "sacct", "--allocations", "--noheader", "--parsable2", f"--jobs={job_id}", "--format=State,ExitCode"
    )
    match = re.match(r"(\w+)[^|]*\|(\d+):", accounts.stdout)
    return None if accounts.returncode or match is None else _SlurmJob(match[1], int(match[2]))


def _describe_end(slurm_state: str, code: int | None, words: str) -> JobStatus:
    """The final status of a job, from the exit code of training, if known, and Slurm's state."""
    if code is None:
        return JobStatus("failed", words)
    if code == STOPPED or slurm_state == "CANCELLED":
        return JobStatus("stopped", words, STOPPED)
    if code == DONE and slurm_state in ("", "COMPLETED"):
        return JobStatus("done", words, code)
    return JobStatus("failed", words, code or 1)


def _render_own(job: JobSpec) -> dict[str, str]:
    """The files that a job of an array has of its own."""
    return {MACHINE: render_machine(job), NEEDED: render_needed(job)}


def _submit(script: Path) -> str:
    """Submit a script and return the job id. Raises LaunchError with Slurm's reason."""
    return _call("sbatch", "--parsable", str(script)).strip().partition(";")[0]


def _call(*command: str) -> str:
    answer = _run(*command)
    if answer.returncode != 0:
        raise LaunchError(f"Slurm refused `{command[0]}`: {_last_line(answer.stderr)}")
    return answer.stdout


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_COMMAND_SECONDS,
            check=False,
            start_new_session=True,  # the caller handles Ctrl-C
        )
    except FileNotFoundError:
        raise LaunchError(
            f"launch.to=slurm: `{command[0]}` is not installed on this machine; run this on a login node of "
            "the cluster."
        ) from None
    except subprocess.TimeoutExpired:
        raise LaunchError(f"Slurm did not answer `{command[0]}` within {_COMMAND_SECONDS} s.") from None


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "no reason was given")


def list_local_files(job: JobSpec, mounts: Path = Path("/proc/self/mounts")) -> list[str]:
    """A line for each local file system with files that the machines of the job need; none where /proc is missing.

    A machine of the cluster may mount the same files in another way, so this is no error.
    """
    types = _read_mounts(mounts)
    by_mount: dict[Path, list[str]] = {}
    for key, path in _list_needed(job):
        real_path = Path(os.path.realpath(path))
        mount = next((mount for mount in (real_path, *real_path.parents) if mount in types), None)
        if mount is not None and types[mount] in _LOCAL:
            by_mount.setdefault(mount, []).append(f"{key}={path}")
    return [
        f"{', '.join(keys)}: on {mount}, a file system of this machine ({types[mount]}); if the job's machines do not "
        "see it, the job fails when it starts; move it to a file system that all of them share"
        for mount, keys in by_mount.items()
    ]


def render_needed(job: JobSpec) -> str:
    """The paths that each machine looks for, one per line; of what is not there yet, the folder that will have it.

    Only the working directory and the run folder, where `launch.setup` or a container may bring the rest.
    """
    launch = job.recipe.launch
    brings = bool(launch.setup) or launch.slurm.container is not None
    paths = [path for key, path in _list_needed(job) if not brings or key in ("the working directory", "run.dir")]
    there = (next(folder for folder in (path, *path.parents) if folder.exists()) for path in paths)
    return "".join(f"{path}\n" for path in dict.fromkeys(there) if path != Path("/"))


def _list_needed(job: JobSpec) -> Iterator[tuple[str, Path]]:
    """Key and path of what every machine must see under the same path."""
    recipe = job.recipe
    yield "the working directory", job.workdir
    yield "run.dir", job.workdir / recipe.run.dir
    for key, path in list_inputs(recipe):
        if "://" not in path:
            yield key, job.workdir / Path(path).expanduser()
    if recipe.launch.slurm.container is None and "/" in recipe.launch.python:
        yield "launch.python", job.workdir / Path(recipe.launch.python).expanduser()


def _read_mounts(mounts: Path) -> dict[Path, str]:
    """The type of the file system at each mount point; of several at one, the last is the one that is seen."""
    try:
        lines = read_text(mounts).splitlines()
    except OSError:
        return {}
    rows = (line.split() for line in lines)
    return {Path(_unescape(row[1])): row[2] for row in rows if len(row) > 2}


def _unescape(name: str) -> str:
    """A mount point as it is, without the escapes of spaces, such as `\\040`."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), name)
