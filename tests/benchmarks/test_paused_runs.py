"""benchmarks/paused_runs.py: which steps of another trainer are done, and that its ranks end with their run."""

import json

import psutil
import pytest

from paused_runs import PausedRun, PeerRecords
from tests.waiting import wait_until

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
    wait_until(lambda: pid_file.exists() and pid_file.read_text())
    rank = psutil.Process(int(pid_file.read_text()))
    run.end()
    try:
        rank.wait(10)
    except psutil.TimeoutExpired:
        rank.kill()
        pytest.fail("the rank outlived its run")


def test_a_step_is_done_once_its_seconds_and_its_loss_are_recorded_on_every_rank(tmp_path):
    seconds, loss = {"seconds": 1.0, "peak": 100}, {"loss": 2.0}
    for rank, rows in enumerate([[seconds, loss, seconds], [loss, seconds, loss, seconds]]):
        lines = "".join(f"{json.dumps(row)}\n" for row in [{"pid": 1}, *rows])
        (tmp_path / f"rank-{rank}.jsonl").write_text(lines)
    records = PeerRecords(tmp_path, 2)
    assert records.count_steps() == len(records.read()[1]) == 1
