"""A rank that needs 1.5 times as long for its own part of a step is named, and ends the run if the recipe says so."""

import platform

import pytest

from tests.dist.command import finish, read_lines, start, write_recipe

pytestmark = [pytest.mark.dist, pytest.mark.slow]

SLOW = '''
"""An objective that is slower on one rank: half of what the rest of its step costs is worked once more."""

import time

import torch.distributed as dist

from echelon.learn.objectives.causal_lm import CausalLM


class Slow(CausalLM):
    def __init__(self, config, rank=1, share=0.5):
        self.rank, self.share, self.left = rank, share, None

    def loss_sum(self, outputs, batch):
        now = time.thread_time()
        if dist.get_rank() == self.rank and self.left is not None:
            end = now + self.share * (now - self.left)
            while time.thread_time() < end:
                pass
        self.left = time.thread_time()
        return super().loss_sum(outputs, batch)
'''


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_slow_rank_is_named_and_ends_the_run(tmp_path, parallel):
    (tmp_path / "slow_parts.py").write_text(SLOW)
    write_recipe(
        tmp_path,
        objective={"name": "slow_parts:Slow", "options": {"rank": 1}},
        train={"steps": 400, "global_batch_size": 16},
        parallel=parallel,
        fault={"on_straggler": "stop"},
        checkpoint={"every": 1000},
    )
    ended = finish(start("train", "recipe.json", "--nproc", "2", cwd=tmp_path, PYTHONPATH=str(tmp_path)), 150)
    assert ended.code == 3, ended.out + ended.err
    assert f"rank 1 on {platform.node()} is slow" in ended.out
    assert "stopped by fault.on_straggler=stop at step" in ended.out + ended.err
    run = tmp_path / "runs" / "tiny"
    [found] = [row for row in read_lines(run / "events.jsonl") if row["event"] == "straggler"]
    assert (found["rank"], found["host"]) == (1, platform.node()) and found["step"] % 25 == 0
    assert 1.25 < found["own_seconds"] / found["peer_seconds"] < 2.5
    advice = finish(start("report", "tiny", "--text", cwd=tmp_path)).out.partition("Advice\n")[2].splitlines()
    assert advice[1].startswith(f"- Rank 1 on {platform.node()} is slow")
