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
    ending = train(tmp_path, 28, 1024)
    assert ending.returncode == 0, ending.stdout + ending.stderr


@pytest.mark.parametrize(
    ("limit", "policy"),
    [(28, "restart"), (20, "restart"), (20, "replace")],
    ids=["rank", "agent", "keeper"],
)
def test_too_low_a_hard_limit_is_named(tmp_path, limit, policy):
    write_recipe(tmp_path, train={"steps": 2}, fault={"on_lost_process": policy})
    ending = train(tmp_path, limit, limit)
    assert ending.returncode == 1
    assert f"too many open files: a process here may have {limit} (ulimit -n)" in ending.stderr, ending.stderr
