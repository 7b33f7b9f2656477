"""Which process exits the agent treats as deaths, also when new processes follow under the same agent."""

import subprocess
import sys
import time

import pytest

from echelon.run.folder.run_folder import RunFolder
from echelon.run.supervise.outcome import FAILED, STOPPED, report, write_outcome
from echelon.run.supervise.restart import deaths_watched, forget_ended


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path / "run", tmp_path / "outcomes")
    folder.create()
    return folder


@pytest.fixture
def start(folder):
    """Start a child as rank 0 that exits with a code on request."""
    children = []

    def start(code):
        command = [sys.executable, "-c", f"input(); raise SystemExit({code})"]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
        (folder.outcomes_dir / "pid-0").write_text(str(child.pid))
        children.append(child)
        return child

    yield start
    for child in children:
        child.kill()
        child.communicate()


def say(child):
    child.stdin.write("\n")
    child.stdin.flush()


def test_an_exit_after_a_save_is_no_death_and_the_next_rank_is_watched(folder, start):
    with deaths_watched(folder, 1) as watch:
        first = start(1)
        time.sleep(0.3)
        write_outcome(folder.outcomes_dir, report(0, STOPPED, "stopped by SIGTERM"))
        say(first)
        time.sleep(0.5)
        assert watch.died_at is None and not folder.death_path.exists()
        first.wait()
        for kind in ("resting", "late", "hanging"):
            (folder.outcomes_dir / f"{kind}-0").touch()
        forget_ended(folder)
        assert not list(folder.outcomes_dir.iterdir())
        second = start(1)
        time.sleep(0.3)
        assert watch.died_at is None
        say(second)
        deadline = time.monotonic() + 10
        while not folder.death_path.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_the_report_of_a_live_rank_is_kept(folder, start):
    start(0)
    write_outcome(folder.outcomes_dir, report(0, FAILED, "about to leave"))
    forget_ended(folder)
    assert {path.name for path in folder.outcomes_dir.iterdir()} == {"pid-0", "rank-0.json"}
