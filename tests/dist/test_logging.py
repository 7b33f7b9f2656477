"""The log output of a real run with two processes: on the console with --quiet and --verbose, and in its log files."""

import os
import pty
import re
import signal
import subprocess
import sys
import threading
from contextlib import suppress

import pytest

from tests.dist.command import LAUNCHER_KEYS, await_line, finish, start, write_recipe

pytestmark = pytest.mark.dist

RECORD = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (DEBUG|INFO|WARNING) (?:rank (\d) )?(echelon[\w.]*): (.*)")
STEP = re.compile(r"step \d+/")


@pytest.fixture
def echelon(echelon, tmp_path):
    write_recipe(tmp_path)
    return echelon


def records(text):
    """(level, rank, logger, message) of each log record."""
    return [match.groups() for line in text.splitlines() if (match := RECORD.fullmatch(line))]


def kept_console(folder):
    """The lines of the console that the run has kept."""
    return (folder / "runs" / "tiny" / "logs" / "console.log").read_text().splitlines()


@pytest.mark.slow
def test_a_quiet_run_prints_nothing_but_logs_everything(echelon, tmp_path):
    ending = echelon("train", "recipe.json", "--nproc", "2", "-q")
    assert (ending.code, ending.out, ending.err) == (0, "", "")
    log = records((tmp_path / "runs" / "tiny" / "logs" / "rank-00000.log").read_text())
    steps = [message for _, _, name, message in log if name == "echelon.run.journal.journal" and "step" in message]
    kept = kept_console(tmp_path)
    assert [line for line in kept if STEP.match(line)] == [each for each in steps if STEP.match(each)]
    assert "run folder: runs/tiny" in kept, "what this process logged before rank 0 did"
    assert len(steps) >= 3 and {(level, rank) for level, rank, *_ in log} == {("INFO", "0")}


@pytest.mark.slow
def test_a_verbose_run_prints_time_rank_and_logger(echelon, tmp_path):
    ending = echelon("-v", "train", "recipe.json", "--nproc", "2").succeeded()
    shown = records(ending.out)
    assert len(shown) == len(ending.out.splitlines()), "every line is a record"
    assert kept_console(tmp_path) == ending.out.splitlines()
    assert {rank for _, rank, *_ in shown} == {None, "0"}
    assert {level for level, *_ in shown} == {"DEBUG", "INFO"}
    for rank in range(2):
        log = records((tmp_path / "runs" / "tiny" / "logs" / f"rank-{rank:05d}.log").read_text())
        assert ("DEBUG", str(rank), "echelon.learn.distributed.runtime") in {each[:3] for each in log}


PATIENCE = 300  # seconds


def drain(terminal):
    """Read what processes write to a terminal, until it is closed."""
    with suppress(OSError):
        while os.read(terminal, 4096):
            pass


LONG = {"train": {"steps": 400, "log_every": 5}, "checkpoint": {"every": 20}}


@pytest.mark.slow
def test_restarts_and_resumes_append_each_line_once_and_in_order(echelon, tmp_path):
    write_recipe(tmp_path, **LONG)
    process = start("train", "recipe.json", "--nproc", "2")
    await_line(tmp_path / "runs/tiny/logs/rank-00000.log", " 25/400", process, PATIENCE)
    os.kill(int((tmp_path / "runs/tiny/.outcomes/pid-1").read_text()), signal.SIGKILL)
    await_line(tmp_path / "runs/tiny/events.jsonl", '"event": "resume"', process, PATIENCE)
    assert echelon("cancel", "tiny").code == 0
    first = finish(process, PATIENCE)
    second = finish(start("train", "recipe.json", "--nproc", "2"), PATIENCE)
    assert (first.code, second.code) == (3, 0), first.err + second.err
    shown = [*first.out.splitlines(), *first.err.splitlines(), *second.out.splitlines()]
    assert kept_console(tmp_path) == shown
    assert sum(line.startswith("restart 1 of ") for line in shown) == 1
    assert sum(line.startswith("echelon: stopped by SIGTERM") for line in shown) == 1


@pytest.mark.slow
def test_a_broken_pipe_loses_no_line_of_the_kept_console(echelon, tmp_path):
    process = start("train", "recipe.json", "--nproc", "1", "train.log_every=2")
    process.stdout.close()
    process.stderr.close()
    assert process.wait(timeout=PATIENCE) == 0
    kept = kept_console(tmp_path)
    steps = [word for line in kept if line.startswith("step ") and (word := line.split()[1]).endswith("/6")]
    assert steps == ["1/6", "2/6", "4/6", "6/6"]
    assert kept[-1].startswith("next: echelon export")


@pytest.mark.slow
def test_a_closed_terminal_loses_no_line_of_the_kept_console(echelon, tmp_path):
    write_recipe(tmp_path, **LONG)
    terminal, ours = pty.openpty()
    env = {key: value for key, value in os.environ.items() if key not in LAUNCHER_KEYS}
    command = [sys.executable, "-m", "echelon", "train", "recipe.json", "--nproc", "1"]
    hold = f"import fcntl, os, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv({command[0]!r}, {command!r})"
    process = subprocess.Popen(
        [sys.executable, "-c", hold], stdin=ours, stdout=ours, stderr=ours, env=env, start_new_session=True
    )
    os.close(ours)
    threading.Thread(target=drain, args=(terminal,), daemon=True).start()  # else the terminal fills up
    try:
        await_line(tmp_path / "runs/tiny/logs/console.log", "  5/400", process, PATIENCE)
    finally:
        os.close(terminal)  # the kernel sends SIGHUP to the terminal's processes
    assert process.wait(timeout=PATIENCE) == 1
    assert kept_console(tmp_path)[-1].startswith("echelon: stopped by SIGHUP")
