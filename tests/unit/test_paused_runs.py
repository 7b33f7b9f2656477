"""benchmarks/paused_runs.py: what a run of another trainer has started ends with it."""

import time

import psutil
import pytest

from paused_runs import PausedRun

LAUNCHER = """
import pathlib, subprocess, sys, time
rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
pathlib.Path(sys.argv[1]).write_text(str(rank.pid))
time.sleep(600)
"""


class NoRecords:
    """Of a run that has not begun its first step."""

    def count_steps(self):
        return 0


def test_ranks_end_with_a_run_that_is_still_warming_up(tmp_path):
    """They lead sessions of their own, and have not yet recorded their process ids."""
    script, pid_file = tmp_path / "launcher.py", tmp_path / "pid"
    script.write_text(LAUNCHER)
    run = PausedRun([script, pid_file], None, tmp_path / "log", NoRecords())
    patience = time.monotonic() + 60
    while not (pid_file.exists() and pid_file.read_text()):
        assert time.monotonic() < patience
        time.sleep(0.01)
    rank = psutil.Process(int(pid_file.read_text()))
    run.end()
    try:
        rank.wait(10)
    except psutil.TimeoutExpired:
        rank.kill()
        pytest.fail("the rank outlived its run")
