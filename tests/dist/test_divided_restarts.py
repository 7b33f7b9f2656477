"""Restarts of runs whose model or sequences are divided: after a killed rank, and on another number of processes."""

import signal

import pytest

from echelon.run.folder.run_folder import RunFolder
from tests.dist import command
from tests.parity.training import LOSS, NORM

pytestmark = [pytest.mark.dist, pytest.mark.slow]

MODEL = {"config": {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
                    "num_attention_heads": 2}}  # fmt: skip
MIXTURE = {
    "config": {
        **MODEL["config"],
        "model_type": "mixtral",
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
}
PLANS = [
    ({"tp": 2, "pp": 2}, 4, MODEL),
    ({"tp": 2, "dp_shard": 2}, 4, MODEL),
    ({"cp": 2}, 2, MODEL),
    ({"dp_shard": 2, "ep": 2}, 2, MIXTURE),
]
# Steps with divided tensors take a second where four processes share two cores: many small collectives wait for a core.
STEPS, SAVED, KILLED = 30, 5, 8
ORPHAN_SECONDS = 10


def name_plan(parallel):
    return "-".join(f"{axis}{degree}" for axis, degree in parallel.items())


def trained(path):
    return [row for row in command.read_lines(path / "metrics.jsonl") if row["kind"] == "train"]


@pytest.mark.parametrize(("parallel", "ranks", "model"), PLANS, ids=[name_plan(each) for each, *_ in PLANS])
def test_a_killed_rank_is_restarted_and_nothing_differs(echelon, tmp_path, parallel, ranks, model):
    train = {"steps": STEPS, "log_every": STEPS}
    command.write_recipe(tmp_path, model=model, parallel=parallel, train=train, checkpoint={"every": SAVED})
    echelon("train", "recipe.json", "run.dir=runs/whole", "--nproc", ranks).succeeded()
    run = RunFolder(tmp_path / "runs" / "tiny")
    job = command.start("train", "recipe.json", "--nproc", str(ranks), cwd=tmp_path)
    try:
        command.await_line(run.metrics_path, f'"step": {KILLED},', job, 200)
        command.process_of(run, ranks - 1).send_signal(signal.SIGKILL)
        ending = command.finish(job, 300)
    finally:
        job.kill()
    assert ending.code == 0, ending.err
    assert [row["event"] for row in command.read_lines(run.events_path)].count("recovered") == 1
    ours, theirs = trained(run.path), trained(tmp_path / "runs" / "whole")
    assert [[row.get(key) for key in command.EXACT] for row in ours] == [
        [row.get(key) for key in command.EXACT] for row in theirs
    ]


@pytest.mark.parametrize("parallel", [{"tp": 2}, {"pp": 2}, {"cp": 2}], ids=name_plan)
def test_a_run_goes_on_with_the_processes_that_are_left(echelon, tmp_path, parallel):
    """Four, then two with half as many shards; three cannot be divided and are refused."""
    [axis] = parallel
    command.write_recipe(
        tmp_path,
        model=MODEL,
        parallel={**parallel, "dp_shard": "auto"},
        optim={"schedule": "constant"},
        checkpoint={"every": 2},
    )
    assert echelon("train", "recipe.json", "run.dir=runs/whole", "parallel=ddp", "--nproc", 1).code == 0
    assert echelon("train", "recipe.json", "train.steps=2", "--nproc", 4).code == 0
    refused = echelon("train", "recipe.json", "train.steps=6", "--nproc", 3)
    assert refused.code == 2
    assert f"{axis} 2 needs a multiple of 2 processes, but there are 3; run 2 or 4 processes" in refused.err
    ending = echelon("train", "recipe.json", "train.steps=6", "--nproc", 2).succeeded()
    assert f"on 2 processes ({axis} 2)" in ending.out
    for ours, right in zip(trained(tmp_path / "runs" / "tiny"), trained(tmp_path / "runs" / "whole"), strict=True):
        keys = ("step", "batch_hash", "tokens")
        assert [ours[key] for key in keys] == [right[key] for key in keys]
        assert ours["loss"] == pytest.approx(right["loss"], abs=LOSS)
        assert ours["grad_norm"] == pytest.approx(right["grad_norm"], rel=NORM)
