"""Which exits of ranks end the others of their machine, and how these end."""

import json
import signal
import sys

import pytest

from echelon.ground.variables import read_environment
from echelon.run.folder.run_folder import RunFolder
from echelon.run.supervise.workers import LocalRanks


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path / "run", tmp_path / "outcomes")
    folder.create()
    return folder


@pytest.fixture
def ranks(folder):
    """Ranks that are lines of Python; `start(*lines)` starts one of each."""
    ranks = LocalRanks(folder)

    def start(*lines):
        for rank, line in enumerate(lines):
            ranks.start((sys.executable, "-c", line), rank, read_environment())
        return ranks

    yield start
    ranks.kill()
    ranks.end()


def test_a_failure_is_told_to_the_others(ranks, folder):
    waiting = f"import os, time\nwhile not os.path.exists({str(folder.death_path)!r}): time.sleep(0.05)"
    started = ranks(waiting, "raise SystemExit(7)")
    started.wait()
    assert [(death.rank, death.exit_code) for death in started.deaths] == [(1, 7)]


def test_a_suspended_rank_is_killed(ranks, folder, monkeypatch):
    monkeypatch.setattr("echelon.run.supervise.workers.PATIENCE_SECONDS", 1.0)
    stop = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
    started = ranks(stop, "raise SystemExit(1)")
    started.wait()
    assert [(death.rank, death.exit_code) for death in started.deaths] == [(1, 1), (0, -signal.SIGKILL)]


def test_a_rank_of_another_machine_that_died_ends_these(ranks, folder, monkeypatch):
    monkeypatch.setattr("echelon.run.supervise.workers.PATIENCE_SECONDS", 0.5)
    started = ranks("import time; time.sleep(60)")
    folder.death_path.write_text("another machine has lost a rank\n")
    started.wait()
    assert [death.exit_code for death in started.deaths] == [-signal.SIGKILL]


def test_ranks_that_listen_are_asked_to_stop_once(ranks, folder):
    """Not before all have written that they listen: SIGTERM would kill the others."""
    count = (
        "import os, signal, sys, time, json\nasked = []\n"
        "signal.signal(signal.SIGTERM, lambda *_: asked.append(1))\n"
        "time.sleep(float(sys.argv[1]))\n"
        f"open({str(folder.outcomes_dir)!r} + '/pid-' + sys.argv[2], 'w').write(str(os.getpid()))\n"
        "while not asked: time.sleep(0.05)\n"
        f"time.sleep(0.5); open({str(folder.outcomes_dir)!r} + '/asked-' + sys.argv[2], 'w').write(json.dumps(asked))\n"
    )
    started = LocalRanks(folder)
    for rank, seconds in enumerate(("0", "1")):
        started.start((sys.executable, "-c", count, seconds, str(rank)), rank, read_environment())
    started.wait(leaves=lambda: True)
    assert started.deaths == []
    assert [json.loads((folder.outcomes_dir / f"asked-{rank}").read_text()) for rank in range(2)] == [[1], [1]]
