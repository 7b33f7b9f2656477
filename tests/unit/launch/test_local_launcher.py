"""Local jobs, with a stub for training, and the script lines shared by all targets, run by a real bash."""

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from echelon.ground.errors import ConfigError
from echelon.launch import local
from echelon.launch.local import LocalLauncher
from echelon.launch.records import find_job, make_job, submit_job
from echelon.launch.sagemaker.staging import render_start
from echelon.launch.shell import guard_setup, join_words
from echelon.recipe.load import parse_recipe
from tests.unit.recipe_samples import DEMO
from tests.waiting import wait_until

RECIPE = DEMO + "launch: {to: local}\n"
TRAINING = """#!/bin/bash
printf '%s\\n' "$@" "$ODD" > words
trap 'echo saved; exit 3' TERM
exec 2> shell-words
echo begun
while [ ! -e finish ]; do sleep 0.05; done
"""
ODD = 'it\'s $HOME "quoted" \\ and\nanother line'


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with an awkward name, and a stub for Python."""
    folder = tmp_path / "it's $HERE"
    folder.mkdir()
    program = tmp_path / "training"
    program.write_text(TRAINING)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.chdir(folder)
    return folder


def submit(*overrides):
    recipe, _ = parse_recipe(RECIPE, "recipe.yaml", list(overrides))
    job = make_job(recipe, Path.cwd(), "demo-20300102-030405")
    return submit_job(job, LocalLauncher(), LocalLauncher().render(job))


def await_end(record):
    deadline = time.monotonic() + 20
    while (now := LocalLauncher().status(record)).state == "running":
        assert time.monotonic() < deadline, now
        time.sleep(0.05)
    return now.state, now.exit_code


def await_line(record, line):
    wait_until(lambda: line in list(LocalLauncher().logs(record, False)), 20)


def test_awkward_arguments_arrive_and_a_job_is_found_from_another_folder(here, tmp_path, monkeypatch):
    record = submit(f"launch.env={json.dumps({'ODD': ODD})}", "launch.setup=['cd . # a comment']")
    await_line(record, "begun")
    assert f"\n{ODD}\n" in (here / "words").read_text()
    monkeypatch.chdir(tmp_path)
    found = find_job(str(here / record.folder))
    assert LocalLauncher().status(found).state == "running"
    LocalLauncher().cancel(found)
    assert await_end(found) == ("stopped", 3)
    assert list(LocalLauncher().logs(found, True)) == ["begun", "saved"]


def test_at_a_time_limit_the_run_saves(here):
    assert await_end(submit("launch.max_hours=0.0005")) == ("stopped", 3)


def test_a_job_counts_as_running_as_soon_as_it_is_submitted(here, monkeypatch):
    """On a busy machine, Linux shows the command line of a new process as empty for a moment."""
    empty = ["", ""]
    read = local.read_command_line
    monkeypatch.setattr(local, "read_command_line", lambda pid: empty.pop() if empty else read(pid))
    record = submit()
    assert LocalLauncher().status(record).state == "running"
    await_line(record, "begun")
    LocalLauncher().cancel(record)
    assert await_end(record) == ("stopped", 3)


def test_a_setup_that_exits_is_a_failed_job(here):
    assert await_end(submit("launch.setup=['cd /', code=0, 'exit 5']")) == ("failed", 5)


def test_a_job_cancelled_during_its_setup_is_not_done(here):
    record = submit("launch.setup=[echo waiting, sleep 5]")
    await_line(record, "waiting")
    time.sleep(0.2)  # the shell handles the signal after its current line, so that line must have begun
    LocalLauncher().cancel(record)
    assert await_end(record) == ("failed", 1)


def test_a_time_limit_that_cannot_be_enforced_is_refused(here, monkeypatch):
    monkeypatch.setenv("PATH", str(here))
    recipe, _ = parse_recipe(RECIPE, "recipe.yaml", ["launch.max_hours=2"])
    with pytest.raises(ConfigError, match=r"launch\.max_hours=2: the `timeout` command .* is not installed"):
        LocalLauncher().check(make_job(recipe, here))


def test_an_unused_launch_python_is_reported(here):
    recipe, _ = parse_recipe(RECIPE, "recipe.yaml", ["launch.python=/opt/python"])
    lines = LocalLauncher().check(make_job(recipe, here))
    assert lines[1:] == [f"launch.python=/opt/python is ignored on this machine; the job uses {sys.executable}"]


def run(lines, home):
    script = "\n".join(lines)
    environment = {**os.environ, "HOME": str(home)}
    return subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("setup", "failed"),
    [
        (["false"], "exit code 1: false"),
        (["true", "(exit 3)", "echo never"], "exit code 3: ( exit 3 )"),
        (["source /no/such/file"], "exit code 1: source /no/such/file"),
        (["for each in 1 2; do", "  test $each = 1", "done"], "exit code 1: test $each = 1"),
    ],
)
def test_a_line_of_setup_that_fails_ends_the_script(tmp_path, setup, failed):
    note = tmp_path / "failure"
    ended = run([*guard_setup(setup, str(note)), "echo trained"], tmp_path)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert f"echelon: launch.setup failed with {failed}\n" in ended.stderr
    assert note.read_text() == f"echelon: launch.setup failed with {failed}\n"


def test_handled_failures_and_training_do_not_end_the_script(tmp_path):
    setup = ["false || true", "if false; then exit 9; fi", "export NAME=value"]
    ended = run([*guard_setup(setup), "false", 'echo "trained with $NAME"'], tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "trained with value\n", "")
    assert guard_setup([]) == []


def test_a_tilde_is_expanded_on_the_machine(tmp_path):
    python = tmp_path / "an env" / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\necho "$0" "$@"\n')
    python.chmod(0o755)
    ended = run([join_words(["~/an env/python", "-m", "echelon", "~", "a b", "$HOME"])], tmp_path)
    assert ended.stdout == f"{python} -m echelon ~ a b $HOME\n"
    assert render_start((), "~/venv/bin/python").startswith("#!/bin/bash\nexec ~/venv/bin/python /opt/ml/")
