"""Benchmarks of a run that goes on, by another process: what the training ranks themselves find, and no wait for it."""

import json
import signal
from importlib.util import find_spec

import pytest

from echelon.run.folder.run_folder import RunFolder
from tests.dist.command import await_line, finish, read_lines, start, write_recipe

pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is not installed"),
]


def test_a_checkpoint_is_measured_while_the_training_goes_on(echelon, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    questions = [{"question": f"{one} plus {one}", "choices": ["is", "and so"], "answer": one % 2} for one in range(6)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    write_recipe(
        tmp_path,
        train={"steps": 100_000, "log_every": 100_000, "eval_every": 10},
        evaluate={"batches": 1, "tasks": ["sums.jsonl"], "tasks_every": 10},
        checkpoint={"every": 10, "keep_last": 10_000},
    )
    run = RunFolder(tmp_path / "runs" / "tiny")
    job = start("train", "recipe.json", "--nproc", "2", cwd=tmp_path)
    await_line(run.events_path, '"event": "checkpoint", "step": 10', job, seconds=200)
    beside = echelon("eval", "runs/tiny", "--checkpoint", "10", "--tasks", "sums.jsonl", "--json")
    assert beside.code == 0 and job.poll() is None, beside
    job.send_signal(signal.SIGTERM)
    assert finish(job, 120).code == 3
    [row] = [row for row in read_lines(run.metrics_path) if row["kind"] == "tasks" and row["step"] == 10]
    found = json.loads(beside.out.splitlines()[-1])
    for metric, value in row["tasks"]["sums"].items():
        assert found[metric] == pytest.approx(value, rel=1e-5), metric
    assert read_lines(run.metrics_path)[-1]["step"] > 10
