"""What each strategy sends, counted in real processes, is what docs/strategies.md says."""

from pathlib import Path

import numpy as np
import pytest
import torch

from echelon.data.loader import Microbatch
from echelon.distributed.mesh import build_mesh
from echelon.engines.native import build_native_engine
from echelon.model.build import load_config
from echelon.objectives.causal_lm import CausalLM
from echelon.planner.plan import ParallelPlan, Precision
from echelon.planner.shape import build_shape
from echelon.recipe import load_recipe
from families import small_config
from traffic import TrafficCounter, expect_traffic
from training import Row, write_recipe

pytestmark = pytest.mark.dist

CONFIG = small_config("llama")
BF16 = Precision(compute="bfloat16")


def count_traffic(rank, world_size, path, plan):
    recipe, _ = load_recipe(Path(path))
    meshes = build_mesh(plan, "cpu")
    engine = build_native_engine(recipe, load_config(CONFIG), plan, meshes, CausalLM(), torch.device("cpu"))
    tokens, places = torch.zeros(1, 8, dtype=torch.int64), np.zeros(1, dtype=np.int64)
    microbatch = Microbatch(tokens, tokens, places, places)
    engine.rehearse(microbatch, 1)
    for _ in range(2):  # DDP talks about its buckets once more in the first step
        with TrafficCounter() as counter:
            engine.forward_backward(0, [microbatch] * plan.num_microbatches, torch.tensor(1.0))
    return counter.traffic


@pytest.mark.parametrize(("num_microbatches", "precision"), [(1, Precision()), (3, BF16)], ids=["fp32", "bf16"])
def test_a_step_sends_what_the_table_says(workers, text, tmp_path, num_microbatches, precision):
    recipe = write_recipe(Row(), tmp_path, text, steps=4)
    sharded = {"dp_shard": 4, "num_microbatches": num_microbatches, "precision": precision}
    resharded = {**sharded, "reduce_gradients": "each", "reshard_after_forward": True}
    plans = [
        ParallelPlan("ddp", dp_replicate=4, num_microbatches=num_microbatches, precision=precision),
        ParallelPlan("zero1", **sharded),
        ParallelPlan("zero2", **sharded, reduce_gradients="each"),
        ParallelPlan("fsdp", **resharded),
        ParallelPlan("hsdp", **{**resharded, "dp_shard": 2}, dp_replicate=2),
    ]
    for plan in plans:
        for traffic in workers.run(count_traffic, 4, str(recipe), plan):
            assert traffic == expect_traffic(plan, build_shape(CONFIG)), plan.strategy


def test_ring_shares():
    """1 GB gathered over 4 ranks sends 0.75 GB from each; 1 GB reduced over 4 ranks sends 1.5 GB."""
    shape = build_shape(CONFIG)
    ddp = expect_traffic(ParallelPlan("ddp", dp_replicate=4), shape).sent_bytes(ParallelPlan("ddp", dp_replicate=4))
    assert ddp == 1.5 * 4 * shape.num_parameters
    plan = ParallelPlan("zero1", dp_shard=4, precision=BF16)
    assert expect_traffic(plan, shape).sent_bytes(plan) == 0.75 * (2 + 4) * shape.num_parameters
