"""Temporary folders of killed processes are removed, those of live ones and of others are not."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from echelon.ground.scratch import keep, scratch_folder, sweep

HOLD = (
    "import sys, time; from echelon.ground.scratch import scratch_folder\n"
    "with scratch_folder(sys.argv[1]) as folder:\n    print(folder, flush=True); time.sleep(60)\n"
)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)


def hold(kind: str) -> tuple[subprocess.Popen[str], Path]:
    """A process with a folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, kind], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def grow_old(folder: Path) -> None:
    for path in (folder, *folder.iterdir()):
        os.utime(path, (time.time() - 100, time.time() - 100))


def test_folders_of_killed_processes_are_removed(tmp_path: Path) -> None:
    (live, alive), (killed, left) = hold("agent"), hold("ranks")
    other = tmp_path / "echelon-agent-of-an-older-version"
    other.mkdir()
    (left / "sub").mkdir()
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    sweep(tmp_path)
    assert left.exists(), "its process may be about to lock it"
    for folder in (alive, left, other):
        grow_old(folder)
    with scratch_folder("agent") as mine:
        assert sorted(tmp_path.iterdir()) == sorted([alive, other, mine])
        assert mine.stat().st_mode & 0o777 == 0o700
    live.terminate()
    live.wait()
    assert not mine.exists() and other.exists()


def test_a_folder_can_be_kept(tmp_path: Path) -> None:
    with scratch_folder("ranks") as folder:
        (folder / "log").write_text("why it failed")
        keep(folder)
    grow_old(folder)
    sweep(tmp_path)
    assert (folder / "log").exists()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (place := tmp_path / "place").mkdir()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / ".used").touch()
    grow_old(tmp_path / "mine")
    (place / "echelon-agent-x").symlink_to(tmp_path / "mine")
    sweep(place)
    assert (tmp_path / "mine" / ".used").exists()
