"""`fault.hang_seconds: auto`: a hang is found, but what takes long for a good reason is none. The limit is two seconds
here instead of two minutes."""

import re

import pytest

from tests.dist.command import finish, start, write_recipe

pytestmark = [pytest.mark.dist, pytest.mark.slow]

PARTS = '''
"""An objective of a rank that hangs, or takes six seconds each to compile, to save, and to sample text."""

import time

import torch
import torch.distributed as dist

from echelon.learn.answers import sampling
from echelon.learn.checkpoint.store import CheckpointStore
from echelon.learn.objectives.causal_lm import CausalLM
from echelon.run.training import heartbeat

heartbeat._LEAST_SECONDS, heartbeat._MULTIPLE = 2.0, 1


def delayed(function, seconds):
    def late(*arguments, **options):
        time.sleep(seconds)
        return function(*arguments, **options)

    return late


class Slow(CausalLM):
    def __init__(self, config, hangs):
        self.calls, self.hangs, self.is_slow = 0, hangs, dist.get_rank() == 1
        if self.is_slow and not hangs:
            CheckpointStore.save = delayed(CheckpointStore.save, 6)
            sampling.draw_tokens = delayed(sampling.draw_tokens, 1)

    def count(self, batch):
        self.calls += 1
        if self.calls == 15 and self.is_slow:
            if self.hangs:
                time.sleep(600)
            torch.compile(lambda x: x + 1, backend=delayed(lambda graph, inputs: graph.forward, 6))(torch.ones(1))
        return super().count(batch)
'''


def train(folder, hangs):
    (folder / "slow_parts.py").write_text(PARTS)
    write_recipe(
        folder, objective={"name": "slow_parts:Slow", "options": {"hangs": hangs}}, parallel="ddp",
        train={"steps": 20, "eval_every": 20}, fault={"max_restarts": 0}, checkpoint={"every": 18},
        evaluate={"prompts": ["a"], "prompt_tokens": 6},
    )  # fmt: skip
    return finish(start("train", "recipe.json", "--nproc", "2", cwd=folder, PYTHONPATH=str(folder)), 180)


def read_limit(output):
    found = re.search(
        r"hangs: from now on ([\d.]+) s without progress count as a hang \(fault.hang_seconds: auto\)", output
    )
    assert found, output
    return float(found[1])


def test_compiling_saving_and_sampling_may_take_longer(tmp_path):
    ended = train(tmp_path, hangs=False).succeeded()
    assert read_limit(ended.out) < 6
    assert not list(tmp_path.glob("runs/*/.outcomes/resting-*"))


def test_a_hang_is_found(tmp_path):
    ended = train(tmp_path, hangs=True)
    assert ended.code == 1
    assert re.search(r"step \d+ did not end within [\d.]+ s \(fault.hang_seconds\), and every rank waits", ended.err)
    assert "rank 1 never entered" in ended.err and "slow_parts.py" in ended.err
    assert read_limit(ended.out) < 6
