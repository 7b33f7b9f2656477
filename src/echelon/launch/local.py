"""`--to local`: `echelon train` in the background on this machine, in its own session."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from typing_extensions import override

from echelon.ground.errors import ConfigError, LaunchError
from echelon.launch.job import JobRecord, JobSpec, JobStatus, Launcher, RecordForm, Submitted
from echelon.launch.records import Log, name_ending, read_exit_code
from echelon.launch.shell import limit_command, watched_lines
from echelon.recipe.launch_sections import LaunchConfig

# Files in the job's folder.
_SCRIPT, _LOG, _CODE = "run.sh", "output.log", "exit_code"


class LocalLauncher(Launcher):
    """Runs a job on this machine; it survives the terminal. Its folder contains the output and the exit code."""

    record_form = RecordForm(id="[0-9]{1,9}")
    sees_files = keeps_others = True
    look_seconds = 0.5
    way_of_secrets = "set it as an environment variable of `echelon launch`; the job inherits it"

    @override
    def find_packages(self, launch: LaunchConfig) -> tuple[str, str]:
        return "self", ""

    @override
    def check(self, job: JobSpec) -> list[str]:
        if job.nodes != (1, 1):
            raise ConfigError(
                f"launch.nodes={job.recipe.launch.nodes}: launch.to=local runs on this machine only; use "
                "launch.nodes=1, or another target."
            )
        launch = job.recipe.launch
        if launch.max_hours is not None and shutil.which("timeout") is None:
            raise ConfigError(
                f"launch.max_hours={launch.max_hours:g}: the `timeout` command that enforces it is not installed; "
                "install GNU coreutils, or use budget.max_hours."
            )
        lines = [f"output goes to {job.folder / _LOG}"]
        if launch.python != LaunchConfig().python:
            lines.append(f"launch.python={launch.python} is ignored on this machine; the job uses {sys.executable}")
        return lines

    @override
    def render(self, job: JobSpec) -> dict[str, str]:
        """The job's bash script."""
        code = shlex.quote(str(job.workdir / job.folder / _CODE))
        launch = job.recipe.launch
        train = limit_command(launch, job.train_command(str(job.recipe_path), sys.executable))
        lines = ("#!/bin/bash", *watched_lines(launch, job.workdir, train, code))
        return {_SCRIPT: "\n".join(lines) + "\n"}

    @override
    def submit(self, job: JobSpec) -> Submitted:
        """The id is the process group id."""
        with (job.folder / _LOG).open("ab") as log:
            process = subprocess.Popen(
                ["bash", _script(job.folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        # `status` knows a job by its command line, which Linux shows shortly after a process has started.
        while process.poll() is None and not read_command_line(str(process.pid)):
            time.sleep(0.001)
        return Submitted(str(process.pid))

    @override
    def status(self, record: JobRecord) -> JobStatus:
        lives = _lives(record)
        if (code := read_exit_code(record.folder / _CODE)) is not None:
            return JobStatus(name_ending(code), f"exit code {code}", code)
        if lives:
            return JobStatus("running", f"process {record.id}")
        return JobStatus("failed", "killed before it wrote its exit code")

    @override
    def logs(self, record: JobRecord, follow: bool) -> Iterator[str]:
        return Log(record.folder / _LOG).follow(lambda: not (follow and _lives(record)))

    @override
    def cancel(self, record: JobRecord) -> None:
        if not _lives(record):
            raise LaunchError(f"{record.name} has ended already.")
        os.killpg(int(record.id), signal.SIGTERM)


def _lives(record: JobRecord) -> bool:
    """Whether the job's script is still running. Compares the command line, since process ids are reused."""
    with suppress(ChildProcessError):
        os.waitpid(int(record.id), os.WNOHANG)  # a child of this process would stay a zombie
    return _script(record.folder) in read_command_line(record.id)


def read_command_line(pid: str) -> str:
    """The command line of a process; empty if there is none. Uses `ps` only without /proc (macOS)."""
    if not Path("/proc/self").exists():
        return subprocess.run(
            ["ps", "-ww", "-o", "args=", "-p", pid], capture_output=True, text=True, check=False
        ).stdout
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace")
    return ""


def _script(folder: Path) -> str:
    """The script's absolute path, which differs from that of a job with the same name in another folder."""
    return str((folder / _SCRIPT).resolve())
