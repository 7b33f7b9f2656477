"""The demo of training from rewards, shortened: killed at any moment it goes on with the rewards it would have had.

The recipes are recipes/arithmetic.yaml and recipes/grpo-arithmetic.yaml on the data of docs/tutorial-rewards.md, with
fewer steps and answers.
"""

import json
import random

import pytest

from echelon.run.folder.run_folder import RunFolder
from tests.dist.command import finish, read_lines, start
from tests.docs.test_docs import ROOT

pytestmark = [pytest.mark.dist, pytest.mark.slow]

STEPS = 40
EXACT = (
    "step", "loss", "grad_norm", "reward", "solved", "reward_spread", "answer_tokens", "entropy", "batch_hash", "tokens"
)  # fmt: skip
SHORT = (
    f"train.steps={STEPS}", "train.global_batch_size=128", "train.eval_every=20", "checkpoint.every=4",
    "train.log_every=1", "fault.max_restarts=20",
)  # fmt: skip
# A loop that is echelon's, on ranks that kill themselves: at a random moment while they sample, or at any moment.
LOOP = """
import json
import os
import random
import signal
import threading
import time
from pathlib import Path

from echelon.run.training.reward_loop import train_from_rewards

KILLS = json.loads(Path("kills.json").read_text())


def loop(learner, run):
    rank = int(os.environ["RANK"])
    sample, seconds, is_sampling = learner.generate, [0.5], [False]

    def die(step):
        Path(f"killed-{step}").write_text(str(is_sampling[0]))
        os.kill(os.getpid(), signal.SIGKILL)

    def generate(prompts, sampling, *rest, **more):
        kill = KILLS.get(str(step[0]))
        if kill is not None and kill["rank"] == rank and not Path(f"killed-{step[0]}").exists():
            whole = seconds[-1] if kill["sampling"] else 3 * seconds[-1]
            threading.Timer(kill["moment"] * whole, die, [step[0]]).start()
        started, is_sampling[0] = time.monotonic(), True
        found = sample(prompts, sampling, *rest, **more)
        is_sampling[0] = False
        seconds.append(time.monotonic() - started)
        return found

    step, prompts = [0], run.judge.prompts

    def prompts_of(number, *rest, **more):
        step[0] = number
        return prompts(number, *rest, **more)

    learner.generate, run.judge.prompts = generate, prompts_of
    train_from_rewards(learner, run)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The data of the tutorial, a model that has learned a little, and the loop."""
    place = tmp_path_factory.mktemp("demo")
    pairs = [(a, b) for a in range(1, 51) for b in range(1, 51)]
    random.Random(0).shuffle(pairs)
    for name, part in (("held-out", pairs[:300]), ("sums", pairs[300:])):
        records = ({"prompt": f"{a}+{b}=", "completion": str(a + b), "answer": str(a + b)} for a, b in part)
        (place / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (place / "killing.py").write_text(LOOP)
    (place / "kills.json").write_text("{}")
    job = start("train", str(ROOT / "recipes" / "arithmetic.yaml"), "--nproc", "2", cwd=place)
    assert finish(job, 600).code == 0
    return place


def train(folder, name, nproc, *settings):
    """Train from rewards, shortened; returns the rows of its steps."""
    recipe = ROOT / "recipes" / "grpo-arithmetic.yaml"
    job = start("train", str(recipe), f"run.name={name}", *SHORT, *settings, "--nproc", str(nproc), cwd=folder)
    finish(job, 1500).succeeded()
    return [row for row in read_lines(RunFolder(folder / "runs" / name).metrics_path) if row["kind"] == "train"]


def test_ten_kills_change_no_reward(folder):
    whole = train(folder, "whole", 2)
    draw = random.Random(7)
    steps = sorted(draw.sample(range(1, STEPS), 10))
    kills = {
        step: {"rank": draw.randrange(2), "sampling": number % 2 == 0, "moment": draw.uniform(0, 0.7)}
        for number, step in enumerate(steps)
    }
    (folder / "kills.json").write_text(json.dumps(kills))
    killed = train(folder, "killed", 2, "train.loop=killing:loop")
    while_sampling = [(folder / f"killed-{step}").read_text() == "True" for step in steps]
    assert sum(while_sampling) >= 5, while_sampling
    events = read_lines(RunFolder(folder / "runs" / "killed").events_path)
    assert sum(row["event"] in ("start", "resume") for row in events) == 11
    assert [[row[key] for key in EXACT] for row in killed] == [[row[key] for key in EXACT] for row in whole]


def test_one_two_and_four_processes_have_one_reward_curve(folder):
    """In another order sums of gradients differ in their last bit, which in the end draws another token."""
    curves = {nproc: [row["reward"] for row in train(folder, f"on-{nproc}", nproc)] for nproc in (1, 2, 4)}
    for nproc in (2, 4):
        pairs = zip(curves[1], curves[nproc], strict=True)
        first = next((step for step, pair in enumerate(pairs, 1) if abs(pair[0] - pair[1]) > 1e-9), STEPS + 1)
        assert first > 10, f"with {nproc} processes step {first} has another reward"
