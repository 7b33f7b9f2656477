"""`--to skypilot`: a managed job of SkyPilot, on machines of any cloud; when they are taken away it finds others.

Uses SkyPilot's own command `sky`, which may be installed in an environment of its own.
"""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from typing_extensions import override

from echelon.ground.errors import ConfigError, LaunchError, MissingSettingError
from echelon.ground.launch_environment import SHARED_VARIABLE
from echelon.ground.stored import write_bytes
from echelon.ground.variables import asked_environment
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
    list_inputs,
)
from echelon.launch.patch import merge_patch
from echelon.launch.records import name_ending
from echelon.launch.shell import guard_setup, join_words, limit_command
from echelon.launch.source_bundle import build_wheel, name_requirement
from echelon.recipe.launch_sections import LaunchConfig
from echelon.recipe.yaml_text import render_documents
from echelon.run.supervise.outcome import DONE, FAILED, STOPPED

_KEY = "launch.skypilot"
_TASK = "task.yaml"
_FOLDER = "~/echelon"
"""The working directory on the machines."""

_AGAIN = 75
"""The exit code of a machine that saved because it was told to stop; SkyPilot then starts the job on other machines."""

# SkyPilot's names of accelerators that have others here.
_NAMES = {"V100-32": "V100-32GB", "A100-40": "A100", "A100-80": "A100-80GB"}
_STATES: dict[str, JobState] = {
    "PENDING": "queued", "SUBMITTED": "queued", "STARTING": "queued", "RECOVERING": "queued", "RUNNING": "running",
    "WINDING_DOWN": "running", "CANCELLING": "running", "SUCCEEDED": "done", "CANCELLED": "stopped",
}  # fmt: skip
_NO_JOBS = "No in-progress managed jobs"
_COMMAND_SECONDS = 900  # the first job of an account starts SkyPilot's controller
# 124 is `timeout` at launch.max_hours.
_ENDING = """\
code=$?
if [ $code -eq 124 ]; then
    code=3
elif [ $code -eq 3 ] && tail -n 1 {run}/events.jsonl | grep -q 'stopped by SIG'; then
    code={again}  # saved, because the machine was told to stop: SkyPilot recovers the job
fi
exit $code"""


class SkyPilotLauncher(Launcher):
    """Submits with `sky jobs launch`; the id is the job's name."""

    record_form = RecordForm(id=NAME)
    keeps_runs = False
    way_of_secrets = "set it as an environment variable of `echelon launch`, and name it in launch.skypilot.secrets"

    @override
    def find_packages(self, launch: LaunchConfig) -> tuple[str, str]:
        return "wheel", "a machine without echelon"

    @override
    def check(self, job: JobSpec) -> list[str]:
        recipe = job.recipe
        settings = recipe.launch.skypilot
        _check_places(job)
        lines = [f"requests {job.nodes[1]} machine(s) from SkyPilot: {_describe_resources(_build_resources(job))}"]
        if settings.secrets:
            lines.append(f"sky sends these variables of this terminal as secrets: {', '.join(settings.secrets)}")
        return lines

    @override
    def render(self, job: JobSpec) -> dict[str, str]:
        """The task."""
        task = merge_patch(_build_task(job), job.recipe.launch.skypilot.patch, f"{_KEY}.patch")
        return {_TASK: render_documents([task])}

    @override
    def submit(self, job: JobSpec) -> Submitted:
        """Runs in the working directory, from which local paths of the task start."""
        name, content = build_wheel()
        write_bytes(job.workdir / job.folder / name, content)
        secrets = [word for name in job.recipe.launch.skypilot.secrets for word in ("--secret", name)]
        _call("launch", "--yes", "--detach-run", *secrets, str(job.workdir / job.folder / _TASK), cwd=str(job.workdir))
        return Submitted(job.name)

    @override
    def status(self, record: JobRecord) -> JobStatus:
        job = _find(record.id)
        if job is None:
            return JobStatus("failed", "no longer known to SkyPilot")
        state, reason = str(job.get("status")), str(job.get("failure_reason") or "")
        words = f"SkyPilot job {job.get('job_id')} {state}"
        if job.get("recovery_count"):
            words += f", recovered {job['recovery_count']} time(s)"
        if state in _STATES:
            return JobStatus(_STATES[state], words, {"SUCCEEDED": DONE, "CANCELLED": STOPPED}.get(state))
        codes = [int(code) for code in re.findall(r"\d+", reason.partition("exit code")[2].partition("(")[0])]
        code = next((code for code in codes if code), FAILED)
        return JobStatus(name_ending(code), f"{words}{reason and ': '}{' '.join(reason.split())}", code)

    @override
    def logs(self, record: JobRecord, follow: bool) -> Iterator[str]:
        """As SkyPilot prints them, with the machine and its number before each line."""
        shown = "--follow" if follow else "--no-follow"
        with _start("logs", "--name", record.id, shown, "--tail", "0", stderr=subprocess.STDOUT) as sky:
            assert sky.stdout is not None
            for line in sky.stdout:
                yield line.rstrip("\n")

    @override
    def cancel(self, record: JobRecord) -> None:
        """SkyPilot removes the machines; what is not saved by then is lost."""
        if self.status(record).state in FINAL_STATES:
            raise LaunchError(f"{record.name} has ended already.")
        _call("cancel", "--yes", "--name", record.id)


def _build_task(job: JobSpec) -> dict[str, Any]:
    launch = job.recipe.launch
    wheel, _ = build_wheel()
    sent = {f"{_FOLDER}/recipe.yaml": str(job.recipe_path), f"{_FOLDER}/{wheel}": str(job.workdir / job.folder / wheel)}
    sent |= {f"{_FOLDER}/{path}": str(job.workdir / path) for _, path in _list_sent(job)}
    return {
        "name": job.name,
        "num_nodes": job.nodes[1],
        "resources": _build_resources(job),
        "envs": {**_shared_environment(job), **asked_environment(*_find_asked(job)), **launch.env},
        "file_mounts": sent,
        "run": "\n".join(_list_commands(job)) + "\n",
    }


def _build_resources(job: JobSpec) -> dict[str, Any]:
    """`launch.skypilot.resources`, with the accelerators of the recipe, and recovery after a save."""
    launch = job.recipe.launch
    resources = launch.skypilot.resources
    gpus = {}
    if launch.accelerator is not None:
        gpus = {"accelerators": f"{_NAMES.get(launch.accelerator, launch.accelerator)}:{launch.nproc_per_node}"}
    recovery = resources.get("job_recovery") or {}
    strategy = recovery if isinstance(recovery, dict) else {"strategy": recovery}
    return {**gpus, **resources, "job_recovery": {"recover_on_exit_codes": [_AGAIN], **strategy}}


def _shared_environment(job: JobSpec) -> dict[str, str]:
    """The variable that tells machines whether they see the same run folder; by default they do not."""
    return {SHARED_VARIABLE: "1"} if _is_mounted(job, str(job.recipe.run.dir)) else {}


def _find_asked(job: JobSpec) -> tuple[int | None, str]:
    """The GPUs that each machine must see, None for at least one, and the key that asks for them."""
    launch = job.recipe.launch
    if launch.accelerator is None and "accelerators" not in launch.skypilot.resources:
        return 0, ""
    if launch.nproc_per_node == "auto":
        return None, f"{_KEY}.resources.accelerators"
    return launch.nproc_per_node, f"launch.nproc_per_node={launch.nproc_per_node}"


def _list_commands(job: JobSpec) -> list[str]:
    """The script of each machine, which finds the others by SkyPilot's variables. The environment has `launch.env`."""
    launch = job.recipe.launch
    train = join_words(limit_command(launch, job.train_command("recipe.yaml"), own_code=True))
    run, python = join_words([str(job.recipe.run.dir)]), join_words([launch.python])
    install = join_words([launch.python, "-m", "pip", "install", "--quiet", name_requirement(job.recipe, ".")])
    return [
        f"cd {_FOLDER} || exit 2",
        *guard_setup(launch.setup),
        "# A machine without echelon installs it from the wheel of the job.",
        f"{python} -m echelon --version > /dev/null 2>&1 || PIP_BREAK_SYSTEM_PACKAGES=1 {install} || exit 1",
        "# This shell ignores signals, so that it can report the exit code of training.",
        "trap : TERM INT USR1",
        train,
        _ENDING.format(run=run, again=_AGAIN),
    ]


def _check_places(job: JobSpec) -> None:
    """Check that SkyPilot gets every input, and that the run outlives its machines."""
    recipe = job.recipe
    if job.nodes[0] != job.nodes[1]:
        raise ConfigError(
            f"launch.nodes={recipe.launch.nodes}: a task of SkyPilot has a fixed number of machines; use "
            f"launch.nodes={job.nodes[1]}."
        )
    if recipe.launch.accelerator is not None and recipe.launch.nproc_per_node == "auto":
        raise MissingSettingError(
            f"launch.nproc_per_node is auto, so the number of {recipe.launch.accelerator} to request per machine is "
            "unknown; set it.",
            {"launch.nproc_per_node": 8},
        )
    if recipe.checkpoint.remote is None and not _is_mounted(job, str(recipe.run.dir)):
        raise MissingSettingError(
            f"run.dir={recipe.run.dir} is deleted with the machines, so nothing could be resumed; set "
            f"checkpoint.remote=s3://BUCKET/runs/{recipe.run.name} (or gs://), or name a folder of a bucket that "
            f"{_KEY}.patch.file_mounts mounts.",
            {"checkpoint.remote": f"s3://set-checkpoint.remote/runs/{recipe.run.name}"},
        )
    for key, path in _list_sent(job):
        if path.startswith(("/", "..", "~")) or not (job.workdir / path).exists():
            raise ConfigError(
                f"{key}={path} is not in {job.workdir}, from which files are sent to the machines; give a path below "
                f"it, an address such as s3://bucket/text, or a path below one of {_KEY}.patch.file_mounts."
            )


def _list_sent(job: JobSpec) -> list[tuple[str, str]]:
    """Key and path of the inputs that are sent from this machine: all but addresses and what is mounted."""
    return [(key, path) for key, path in list_inputs(job.recipe) if "://" not in path and not _is_mounted(job, path)]


def _is_mounted(job: JobSpec, path: str) -> bool:
    """Whether a path of the recipe is below one of `launch.skypilot.patch.file_mounts`."""
    absolute = PurePosixPath(_FOLDER) / path
    return any(absolute.is_relative_to(target) for target in job.recipe.launch.skypilot.patch.get("file_mounts") or ())


def _describe_resources(resources: dict[str, Any]) -> str:
    shown = {name: value for name, value in resources.items() if name != "job_recovery"}
    return ", ".join(f"{name} {value}" for name, value in shown.items()) or "the cheapest CPUs"


def _find(name: str) -> dict[str, Any] | None:
    """The newest job of this name, as SkyPilot lists it."""
    try:
        text = _call("queue", "--all", "--output", "json")
    except LaunchError as error:
        if _NO_JOBS in str(error):
            return None
        raise
    rows: list[dict[str, Any]] = json.loads(text[text.find("[") :] or "[]")
    named = [row for row in rows if row.get("job_name") == name]
    return max(named, key=lambda row: int(row.get("job_id") or 0), default=None)


def _start(*words: str, **options: Any) -> "subprocess.Popen[str]":
    """Start `sky jobs`."""
    try:
        return subprocess.Popen(
            ("sky", "jobs", *words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # the caller handles Ctrl-C
            **options,
        )
    except FileNotFoundError:
        raise LaunchError(
            "launch.to=skypilot: `sky` is not installed on this machine; run: pip install 'skypilot[aws]', or that of "
            "another cloud, if need be in an environment of its own whose `sky` is in PATH."
        ) from None


def _call(*words: str, cwd: str | None = None) -> str:
    """What `sky jobs` prints. Raises LaunchError with its reason."""
    with _start(*words, cwd=cwd, stderr=subprocess.PIPE) as sky:
        try:
            out, err = sky.communicate(timeout=_COMMAND_SECONDS)
        except subprocess.TimeoutExpired:
            sky.kill()
            raise LaunchError(f"SkyPilot did not answer `sky jobs {words[0]}` within {_COMMAND_SECONDS} s.") from None
    if sky.returncode != 0:
        lines = [line.strip() for line in (out + err).splitlines() if line.strip()]
        raise LaunchError(f"SkyPilot refused `sky jobs {words[0]}`: {lines[-1] if lines else 'no reason was given'}")
    return out
