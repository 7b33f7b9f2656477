"""Processes that work for this one."""

import subprocess
import sys

WORK = """
def work(connection, number):
    connection.send(number + 1)
"""
SCRIPT = """
from echelon.learn.data.child_process import ChildProcess
from work import work

print("begins")
child = ChildProcess(work, 41)
print(child.connection.recv())
print(child.wait_for_exit())
"""


def test_a_script_needs_no_guard(tmp_path):
    """Python would run it again in the new process, which would wait for the first one or start another one."""
    (tmp_path / "work.py").write_text(WORK)
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout.split() == ["begins", "42", "0"], done.stderr
