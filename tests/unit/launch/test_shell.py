"""The script lines shared by all targets, run by a real bash."""

import os
import subprocess

import pytest

from echelon.launch.sagemaker.staging import render_start
from echelon.launch.shell import guard_setup, join_words


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
