"""Activation offloading under `fully_shard` in real processes: the same loss and gradients as without it."""

from functools import partial
from unittest import mock

import pytest
import torch

import echelon.learn.parallel
from echelon.learn.objectives.causal_lm import CausalLM
from echelon.learn.parallel.kept_activations import offload_activations
from echelon.planner.plan import ParallelPlan, Precision
from tests.families import microbatch_of, small_config
from tests.late_copies import LateCopies
from tests.parity.training import Row, build_engine, write_recipe

pytestmark = [pytest.mark.dist, pytest.mark.slow]

FSDP = {"dp_shard": 2, "reshard_after_forward": True, "reduce_gradients": "each"}
CONFIG = {**small_config("llama"), "num_hidden_layers": 4}


def train_step(rank, world_size, path, plan):
    """The loss and the norm of the gradients of two microbatches; the number of copies."""
    side = LateCopies()
    apply = partial(offload_activations, side=side, smallest=1)
    with mock.patch.object(echelon.learn.parallel, "offload_activations", apply):
        engine, _ = build_engine(path, CONFIG, plan)
    batch = microbatch_of(torch.arange(32).view(2, 16) + rank)
    sums = engine.forward_backward(0, [batch, batch], torch.tensor(64.0), CausalLM())
    return float(sums.loss), float(engine.clip(None)), side.diary.count("save"), side.diary.count("load")


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_sharded_layers_have_the_same_gradients(workers, text, tmp_path, checkpointing, compute):
    path = str(write_recipe(Row(), tmp_path, text, steps=4))
    common = {"precision": Precision(compute=compute), "activation_checkpointing": checkpointing}
    plans = [ParallelPlan("fsdp", activation_offloading=each, **common, **FSDP) for each in (False, True)]
    plain, offloaded = (workers.run(train_step, 2, path, plan)[0] for plan in plans)
    assert offloaded[:2] == plain[:2]
    assert plain[2:] == (0, 0) and offloaded[2] == offloaded[3] > 0
