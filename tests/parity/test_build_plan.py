"""`echelon plan --build`: what ranks store, from the real division of a model, against sums by hand."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig

from echelon.cli.api.planning import plan
from echelon.ground.errors import ConfigError
from echelon.learn.distributed.mesh import build_mesh
from echelon.learn.engines import EngineSpec, build_engine
from echelon.learn.model.sharding import local_part
from echelon.learn.objectives.objective import build_objective
from echelon.planner.memory_parts import StoredBytes
from echelon.planner.plan import ParallelPlan
from echelon.recipe.load import build_recipe
from echelon.run.lifecycle.plan_build import build_stages

TINY = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip
# Llama 3 70B and Llama 3.1 405B, by the sizes in their papers and model cards.
LARGE = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "tie_word_embeddings": False,
}  # fmt: skip
LARGEST = {
    **LARGE, "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128,
}  # fmt: skip


def recipe_of(config: dict[str, Any], parallel: dict[str, int], batch: int = 8, **train: Any) -> dict[str, Any]:
    return {
        "run": {"name": "built"},
        "model": {"config": config},
        "tokenizer": "bytes",
        "data": {"train": "python-stdlib", "sequence_len": 64},
        "train": {"steps": 1, "global_batch_size": batch, "micro_batch_size": 1, **train},
        "optim": {"learning_rate": 1e-3},
        "parallel": parallel,
    }


def bytes_by_hand(num_matrices: int, num_norms: int, num_tensors: int, tp: int, shards: int) -> StoredBytes:
    """AdamW in fp32. Matrices are divided over tp and shards, norms over shards alone.

    num_matrices and num_norms count the numbers of a stage; of each tensor AdamW keeps a step of 4 bytes.
    """
    numbers = num_matrices // (tp * shards) + num_norms // shards
    return StoredBytes(parameters=4 * numbers, gradients=4 * numbers, optimizer=8 * numbers + 4 * num_tensors)


@pytest.mark.slow
def test_a_stage_at_each_end(capsys: pytest.CaptureFixture[str]) -> None:
    """A layer: q and o 64 x 64, k and v 32 x 64, three of 128 x 64 in the MLP, two norms of 64."""
    report = plan(recipe_of(TINY, {"tp": 2, "pp": 2, "dp_shard": 2}), "8xH100", build=True)
    layer, table = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64, 256 * 64
    first = bytes_by_hand(2 * layer + table, 2 * 128, 2 * 9 + 1, tp=2, shards=2)
    last = bytes_by_hand(2 * layer + table, 2 * 128 + 64, 2 * 9 + 2, tp=2, shards=2)
    assert report.built == {0: first, 1: last}
    assert sum(line.startswith("  stage ") for line in report.lines) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "parallel", "devices", "batch"),
    [
        (LARGE, {"tp": 8, "pp": 2, "dp_shard": 4}, "64xH100", 64),
        (LARGEST, {"tp": 8, "pp": 32, "dp_shard": 4}, "1024xH100", 128),
    ],
    ids=["70b-on-64", "405b-on-1024"],
)
def test_large_models(config: dict[str, Any], parallel: dict[str, int], devices: str, batch: int) -> None:
    report = plan(recipe_of(config, parallel, batch, compile=False), devices, build=True)
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    key_value = hidden // heads * 8
    layer, table = 2 * hidden * hidden + 2 * key_value * hidden + 3 * inner * hidden, 128256 * hidden
    ranks = {"tp": parallel["tp"], "shards": parallel["dp_shard"]}
    stages = report.plan.stages
    assert sum(stages) == config["num_hidden_layers"]
    first = bytes_by_hand(stages[0] * layer + table, stages[0] * 2 * hidden, stages[0] * 9 + 1, **ranks)
    last = bytes_by_hand(stages[-1] * layer + table, (stages[-1] * 2 + 1) * hidden, stages[-1] * 9 + 2, **ranks)
    assert report.built == {0: first, parallel["pp"] - 1: last}


def count_stored(rank: int, world_size: int, mapping: dict[str, Any], planned: ParallelPlan) -> tuple[int, StoredBytes]:
    """Build the engine of a rank among real ones: its stage, and the bytes that it stores."""
    recipe, _ = build_recipe(mapping)
    meshes = build_mesh(planned, "cpu")
    config = AutoConfig.for_model(**TINY)
    objective = build_objective(recipe.objective)
    engine: Any = build_engine(
        EngineSpec(recipe, config, planned, meshes, torch.device("cpu"), needs_reference=objective.needs_reference)
    )
    sizes = {name: local_part(each).nbytes for name, each in engine.state_dict().items()}
    weights = sum(size for name, size in sizes.items() if name.startswith("model."))
    assert dist.get_world_size() == world_size
    return meshes.place["pp"], StoredBytes(weights, weights, sum(sizes.values()) - weights)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [{"tp": 2, "pp": 2}, {"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 2}], ids=str)
def test_real_ranks_store_the_same(workers: Any, parallel: dict[str, int]) -> None:
    mapping = recipe_of(TINY, parallel, compile=False, precision="fp32")
    report = plan(mapping, "4xH100")
    built = build_stages(build_recipe(mapping)[0], report.shape, report.plan)
    found = workers.run(count_stored, 4, mapping, report.plan)
    assert [each for stage, each in found if stage in built] == [built[stage] for stage, _ in found if stage in built]


def test_a_model_that_cannot_be_cut_is_refused() -> None:
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 256}
    with pytest.raises(ConfigError, match=r"parallel\.tp"):
        plan(recipe_of(config, {"tp": 2}), "2xH100", build=True)
