"""A stranger's loop, of public names alone: policy gradients with rollouts, on one and two processes, after a kill."""

import ast
import shutil
from pathlib import Path

import pytest

from tests.dist.command import train_in_process, train_rows, write_recipe

pytestmark = pytest.mark.dist

SCRIPT = Path(__file__).parent / "policy_gradient.py"
STEPS = 20


def train(folder, nproc, kills):
    """Train in a process of its own; returns the rows. `kills`: whether a rank is killed in the sixth step or later."""
    settings = ("train.loop=policy_gradient:grpo", "parallel=fsdp")
    ending, run = train_in_process(folder, f"{nproc}-{kills}", nproc, *settings, kill_at=6 if kills else None)
    assert ("restart 1 of" in ending.out) == kills, ending
    return train_rows(run)


@pytest.fixture
def folder(echelon, tmp_path):
    shutil.copy(SCRIPT, tmp_path)
    write_recipe(
        tmp_path, train={"steps": STEPS, "global_batch_size": 32, "log_every": 1},
        optim={"learning_rate": 2e-2, "schedule": "constant"},
        checkpoint={"every": 4},
    )  # fmt: skip
    return tmp_path


def assert_learned(rows):
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    rewards = [row["reward"] for row in rows]
    assert sum(rewards[-4:]) > 1.7 * sum(rewards[:4]), rewards


def test_the_script_is_short_and_imports_public_names_alone():
    text = SCRIPT.read_text()
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert [ast.unparse(node) for node in imports] == ["import torch", "import echelon"]
    assert len(text.splitlines()) <= 200


@pytest.mark.slow
def test_the_reward_rises_although_a_rank_is_killed(folder):
    assert_learned(train(folder, 2, kills=True))


@pytest.mark.slow
@pytest.mark.parametrize("nproc", [1, 2])
def test_a_killed_run_equals_an_uninterrupted_one(folder, nproc):
    killed, whole = train(folder, nproc, kills=True), train(folder, nproc, kills=False)
    assert_learned(whole)
    keys = ("step", "loss", "grad_norm", "reward", "spread", "batch_hash", "tokens")
    assert [[row[key] for key in keys] for row in killed] == [[row[key] for key in keys] for row in whole]
