"""A job with a low limit of open files: it trains if the hard limit allows it, and else says what to raise."""

import resource
import subprocess
import sys

import pytest

from tests.dist.command import write_recipe

pytestmark = pytest.mark.dist


def train(folder, soft, hard):
    def limit():
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    command = [sys.executable, "-m", "echelon", "train", "recipe.json", "--nproc", "4"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, preexec_fn=limit, timeout=300)


def test_the_soft_limit_is_raised(tmp_path):
    write_recipe(tmp_path, train={"steps": 2})
    ending = train(tmp_path, 43, 1024)
    assert ending.returncode == 0, ending.stdout + ending.stderr


def test_too_low_a_hard_limit_is_named(tmp_path):
    write_recipe(tmp_path, train={"steps": 2})
    ending = train(tmp_path, 43, 43)
    assert ending.returncode == 1
    assert "too many open files: a process here may have 43 (ulimit -n)" in ending.stderr, ending.stderr
