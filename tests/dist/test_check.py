"""`make check` finds failed and broken tests, goes on after a kill, and leaves out no folder of tests."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests import check
from tests.house.source_tree import ROOT
from tests.waiting import wait_until

SETTINGS = '[tool.pytest.ini_options]\naddopts = "-q -m \'not slow\'"\nmarkers = ["slow: later"]\n'
TESTS = """
import os, time
from pathlib import Path
import pytest

def test_good():
    with open("good.txt", "a") as out:
        out.write("once ")

@pytest.mark.slow
def test_bad():
    assert Path("mended").exists(), "planted"

def test_dies():
    Path("mended").exists() or os._exit(3)

def test_waits():
    Path("waits").touch()
    while not Path("go").exists():
        time.sleep(0.05)

def test_left_out():
    pytest.skip("no browser")
"""


@pytest.fixture
def project(tmp_path):
    """A project with the check and one suite."""
    (tmp_path / "tests" / "faults").mkdir(parents=True)
    (tmp_path / "tests" / "__init__.py").touch()
    (tmp_path / "tests" / "faults" / "test_planted.py").write_text(TESTS, encoding="utf-8")
    (tmp_path / "pyproject.toml").write_text(SETTINGS, encoding="utf-8")
    shutil.copy(check.__file__, tmp_path / "tests")
    return tmp_path


def start(project, *arguments):
    argv = [sys.executable, "-m", "tests.check", "faults", *arguments]
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # starts faster
    return subprocess.Popen(argv, cwd=project, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for(path):
    wait_until(path.exists, say=lambda: f"no {path}")


def finish(process):
    printed = process.communicate(timeout=120)[0]
    row = next(line for line in printed.splitlines() if line.startswith("faults "))
    return process.returncode, row.split()[1:-1], printed


def test_a_killed_check_goes_on_and_reports_what_failed(project):
    process = start(project)
    wait_for(project / "waits")
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    (project / "go").touch()
    deadline = time.monotonic() + 60
    results = check.Results(project / ".check" / "results.jsonl", check.digest_source(project))
    while results.read()["tests/faults/test_planted.py::test_waits"]["outcome"] == "began":  # pytest outlives the kill
        assert time.monotonic() < deadline, "pytest did not end"
        time.sleep(0.05)

    code, row, printed = finish(start(project))
    assert (code, row) == (1, ["5", "2", "2", "1", "0"])  # tests, passed, failed, skipped, not run
    assert "failed: tests/faults/test_planted.py::test_bad: AssertionError: planted" in printed
    assert "broken: tests/faults/test_planted.py::test_dies: pytest ended with status 3 in the test" in printed
    assert "1 skipped: no browser" in printed
    assert (project / "good.txt").read_text() == "once "  # not run again after it had passed

    assert finish(start(project, "--table"))[:2] == (1, ["5", "2", "2", "1", "0"])
    (project / "mended").touch()
    assert finish(start(project))[:2] == (0, ["5", "4", "0", "1", "0"])

    (project / "docs").mkdir()
    (project / "docs" / "page.md").touch()  # another source: everything runs again, but with --keep
    assert finish(start(project, "--keep"))[:2] == (0, ["5", "4", "0", "1", "0"])
    assert (project / "good.txt").read_text() == "once "
    assert finish(start(project, "--table"))[:2] == (1, ["5", "0", "0", "1", "4"])  # --keep skipped one anew
    assert (project / "good.txt").read_text() == "once "
    assert finish(start(project))[:2] == (0, ["5", "4", "0", "1", "0"])
    assert (project / "good.txt").read_text() == "once once "


@pytest.mark.slow
def test_an_interrupted_check_says_what_was_not_run(project):
    process = start(project)
    wait_for(project / "waits")
    process.send_signal(signal.SIGTERM)
    code, row, _ = finish(process)
    assert (code, row) == (1, ["5", "1", "2", "0", "2"])


@pytest.mark.slow
def test_a_test_longer_than_the_limit_is_broken(project):
    code, row, printed = finish(start(project, "--limit", "1"))
    assert (code, row) == (1, ["5", "1", "3", "1", "0"])
    assert "broken: tests/faults/test_planted.py::test_waits" in printed


def test_no_folder_of_tests_is_left_out():
    folders = {path.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").rglob("test_*.py")}
    slow = {name for name in folders if any("mark.slow" in path.read_text() for path in named(name))}
    apart = {"engines", "gpu", "codegen"}  # need other environments and machines
    assert slow - apart - {"house"} == {name for name in folders if f"tests/{name}" in " ".join(check.SUITES.values())}


def test_the_suites_are_those_of_the_make_targets():
    makefile = (ROOT / "Makefile").read_text()
    assert [name for name, arguments in check.SUITES.items() if f"pytest {arguments}" not in makefile] == []
    assert [command for command in check.LINT if f"$(BIN)/{command}\n" not in makefile] == []


def named(folder):
    return (ROOT / "tests" / folder).rglob("test_*.py")


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_says_what_it_left_out(workers):
    command = [sys.executable, "-m", "pytest", "-n", str(workers), "tests/gpu/test_gpu_records.py", "tests/house"]
    printed = subprocess.run([*command, "-k", "records"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    assert "Not run: 2 by `make gpu`" in printed
