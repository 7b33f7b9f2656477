"""`echelon train` with the keys of SageMaker's model-parallel library is the run of echelon's own keys."""

import pytest

from tests.dist.command import read_lines, write_recipe
from tests.parity.training import LOSS

pytestmark = [pytest.mark.dist, pytest.mark.slow]

EQUAL = ("kind", "step", "loss", "grad_norm", "batch_hash", "tokens", "target_tokens")
# Version 1 with a pipeline, version 2 with tensors divided, version 2 with sequences divided among those that shard.
PAIRS = {
    "pipeline": (
        2,
        "{pipeline_parallel_degree: 2, microbatches: 2, pipeline: interleaved, placement_strategy: cluster, ddp: true}",
        "parallel={dp_replicate: auto, pp: 2, microbatches: 2, schedule: 1f1b, placement: cluster}",
    ),
    "tensors": (
        4,
        "{tensor_parallel_degree: 2, hybrid_shard_degree: 2}",
        "parallel={dp_replicate: auto, dp_shard: 2, tp: 2}",
    ),
    "sequences": (
        4,
        "{context_parallel_degree: 2, hybrid_shard_degree: 4}",
        "parallel={dp_replicate: auto, dp_shard: 2, cp: 2}",
    ),
}


def train(echelon, folder, name, processes, *overrides):
    """The rows of a run's metrics, and what it printed."""
    ending = echelon("train", "recipe.json", f"run.name={name}", "--nproc", processes, *overrides).succeeded()
    return read_lines(folder / "runs" / name / "metrics.jsonl"), ending.out + ending.err


def test_a_run_by_smps_keys_is_that_of_the_native_ones(echelon, tmp_path):
    write_recipe(tmp_path, train={"eval_every": 3, "global_batch_size": 4})
    expected, _ = train(echelon, tmp_path, "one", 1)
    for name, (processes, parameters, native) in PAIRS.items():
        theirs, printed = train(echelon, tmp_path, f"{name}-smp", processes, "engine=smp", f"smp={parameters}")
        ours, _ = train(echelon, tmp_path, name, processes, native)
        assert "smp.ddp=true: no change, gradients are summed over replicas" in printed or name != "pipeline"
        assert [[row.get(key) for key in EQUAL] for row in theirs] == [[row.get(key) for key in EQUAL] for row in ours]
        assert [row["loss"] for row in theirs] == pytest.approx([row["loss"] for row in expected], abs=LOSS)
        assert [row.get("batch_hash") for row in theirs] == [row.get("batch_hash") for row in expected]
        plans = [(tmp_path / "runs" / each / "plan.json").read_text() for each in (f"{name}-smp", name)]
        assert plans[0] == plans[1]
