"""Runs `echelon` commands: in this process, or in a separate process if the test acts on it from outside."""

import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from echelon.cli.main import main
from echelon.learn.data.limits import helper_ended
from echelon.run.folder.run_folder import RunFolder
from tests.waiting import wait_until

LAUNCHER_KEYS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
MARK = "ECHELON_TEST_MARK"
# Keys that are equal bit for bit in an interrupted and an uninterrupted run.
EXACT = ("step", "tokens", "loss", "grad_norm", "learning_rate", "batch_hash")
TEXT = "".join(f"{number} plus {number} is {2 * number}, and so on.\n" for number in range(500))

RECIPE = {
    "run": {"name": "tiny"},
    "model": {
        "config": {
            "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 2, "max_position_embeddings": 64,
        },
    },
    "tokenizer": "bytes",
    "data": {"train": "text.txt", "sequence_len": 32, "validation_fraction": 0.05},
    "train": {"steps": 6, "global_batch_size": 4, "eval_every": None, "precision": "fp32"},
    "optim": {"learning_rate": 1e-3},
    "evaluate": {"batches": 1},
    "checkpoint": {"every": 3},
}  # fmt: skip


@dataclass(frozen=True)
class Ending:
    """The exit code, output and duration of a command."""

    code: int
    out: str
    err: str
    seconds: float = 0.0

    def succeeded(self):
        """This ending, of a command whose exit code must be 0."""
        assert self.code == 0, self
        return self


class CommandLine:
    """Calls the entry point of the console script in this process; the ranks are still separate processes."""

    def __init__(self, capfd, monkeypatch):
        self._capfd, self._monkeypatch = capfd, monkeypatch

    def __call__(self, *arguments):
        self._monkeypatch.setattr(sys, "argv", ["echelon", *map(str, arguments)])
        self._capfd.readouterr()
        started = time.monotonic()
        try:
            with helper_ended():  # it would end with the process
                main()
            code = 0
        except SystemExit as ended:
            code = int(ended.code or 0)
        seconds = time.monotonic() - started
        out, err = self._capfd.readouterr()
        return Ending(code, out, err, seconds)


def start(*arguments, cwd=None, **environment):
    """Start the command as a separate process in a separate session, as a terminal would.

    A folder given as PYTHONPATH comes before those of this process.
    """
    env = {key: value for key, value in os.environ.items() if key not in LAUNCHER_KEYS}
    if "PYTHONPATH" in environment and "PYTHONPATH" in env:
        environment["PYTHONPATH"] += os.pathsep + env["PYTHONPATH"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    return subprocess.Popen([sys.executable, "-m", "echelon", *arguments], env=env | environment, cwd=cwd, **pipes)


def finish(process, seconds=60):
    """Wait for a process to end."""
    started = time.monotonic()
    out, err = process.communicate(timeout=seconds)
    return Ending(process.returncode, out, err, time.monotonic() - started)


def await_line(path, words, process, seconds=40):
    """Wait until a file contains the text; fail if the process ends first."""
    wait_until(
        lambda: path.exists() and words in path.read_text(), seconds, process, say=lambda: f"no {words} in {path}"
    )


def process_of(run, rank):
    """The process of a rank that has started."""
    return psutil.Process(run.read_pids()[rank])


def marked_processes():
    """All processes that inherited this test's environment mark, such as those a command left behind."""
    mark = os.environ[MARK]
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return [process for process in found if process.pid != os.getpid() and not is_tracker(process)]


def is_tracker(process):
    """Whether this is Python's own tracker of the shared memory of this process, which ends with this process."""
    try:
        return process.ppid() == os.getpid() and any("resource_tracker" in word for word in process.cmdline())
    except psutil.Error:
        return False


def find_listeners():
    """The addresses and ports on which processes of this test listen, by process id."""
    return {
        (process.pid, line.laddr.ip, line.laddr.port)
        for process in marked_processes()
        for line in process.net_connections("inet")
        if line.status == psutil.CONN_LISTEN or (line.type == socket.SOCK_DGRAM and not line.raddr)
    }


def assert_no_orphan(seconds=3.0):
    """Give stopped processes a moment to exit; kill any that remain, and fail the test."""
    deadline = time.monotonic() + seconds
    while (left := marked_processes()) and time.monotonic() < deadline:
        time.sleep(0.05)
    orphans = [process.as_dict(["pid", "cmdline"]) for process in left]
    for process in left:
        process.kill()
    assert not left, f"orphans: {orphans}"


def write_recipe(folder, **sections):
    """Write the small recipe, with the given sections updated, and its text."""
    recipe = {key: {**value, **sections.pop(key, {})} if isinstance(value, dict) else value
              for key, value in RECIPE.items()}  # fmt: skip
    (folder / "recipe.json").write_text(json.dumps({**recipe, **sections}, indent=1))
    (folder / "text.txt").write_text(TEXT)
    return folder / "recipe.json"


def train_in_process(folder, name, nproc, *settings, kill_at=None, by=None, code=0):
    """Train recipe.json as run `name` in a process of its own, which exits with `code`. Ending and run.

    After the step `kill_at` the job gets the signal `by`, or without one a rank is killed.
    """
    job = start("train", "recipe.json", f"run.name={name}", *settings, "--nproc", str(nproc), cwd=folder)
    run = RunFolder(folder / "runs" / name)
    if kill_at is not None:
        await_line(run.metrics_path, f'"step": {kill_at},', job, seconds=200)
        process_of(run, nproc - 1).kill() if by is None else job.send_signal(by)
    ending = finish(job, 300)
    assert ending.code == code, ending
    return ending, run


def read_lines(path):
    """The rows of a .jsonl file."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def train_rows(run):
    """The rows of the steps of a run."""
    return [row for row in read_lines(run.metrics_path) if row["kind"] == "train"]


def exact_rows(run, keys=EXACT):
    """The values of these keys of each step."""
    return [[row[key] for key in keys] for row in train_rows(run)]


def read_events(run, name):
    """The events of a run of this name."""
    return [row for row in read_lines(run.events_path) if row["event"] == name]


def mount(folder, size):
    """Mount a small disk at `folder`; skip the test if this user may not."""
    folder.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if sys.platform != "linux" or os.getuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a small disk")
