"""A slow disk under the prepared text: the advice of a report names it, and following it brings what was predicted."""

import re
from statistics import median

import pytest

from tests.dist.command import finish, read_lines, start, write_recipe

pytestmark = pytest.mark.slow

PARTS = '''
"""An objective whose step takes 50 ms or more, over text from which each read takes 30 ms on a "network" folder."""

import time

from echelon.learn.data.shards import TokenStore
from echelon.learn.objectives.causal_lm import CausalLM

READ = TokenStore.read


def read_from_network(store, start, stop):
    if "network" in store._folder.parts:
        time.sleep(0.03)
    return READ(store, start, stop)


TokenStore.read = read_from_network


class Steady(CausalLM):
    def __init__(self, config):
        pass

    def loss_sum(self, outputs, batch):
        time.sleep(0.05)
        return super().loss_sum(outputs, batch)
'''


def train(folder, prepared):
    """Train in one process; return its tokens per second and the report."""
    (folder / "steady_parts.py").write_text(PARTS)
    write_recipe(folder, objective={"name": "steady_parts:Steady"}, train={"steps": 40}, checkpoint={"every": 40})
    command = ("train", "recipe.json", "--nproc", "1", "--fresh", f"data.prepared_dir={folder / prepared}")
    finish(start(*command, cwd=folder, PYTHONPATH=str(folder)), 120).succeeded()
    rows = [row for row in read_lines(folder / "runs" / "tiny" / "metrics.jsonl") if row["kind"] == "train"]
    report = finish(start("report", "tiny", "--text", cwd=folder)).out
    return median(row["tokens_per_second"] for row in rows[1:]), report


def test_the_advice_about_a_slow_disk_comes_true(tmp_path):
    slow, report = train(tmp_path, "network")
    advice = " ".join(report.partition("Advice\n")[2].split("\n- ")[1].split())
    assert advice.startswith("Steps wait for data for "), report
    predicted = float(re.search(r"data.prepared_dir\): steps would be up to ([\d.]+) times as fast", advice)[1])
    fast, report = train(tmp_path, "local")
    assert "Steps wait for data" not in report
    print(f"{slow:,.0f} and {fast:,.0f} tokens per second: {fast / slow:.2f}, predicted {predicted}")
    assert fast / slow == pytest.approx(predicted, rel=0.25)
