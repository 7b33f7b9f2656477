"""What each strategy sends, counted in real processes, is what docs/memory-and-traffic.md says."""

import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist

from echelon.learn.distributed.traffic import count_traffic as count_meter
from echelon.learn.model.sharding import whole
from echelon.learn.objectives.causal_lm import CausalLM
from echelon.planner.more_devices import count_step_bytes
from echelon.planner.plan import ParallelPlan, Precision, SyncPlan
from echelon.planner.shape import build_shape
from tests.families import microbatch_of, small_config
from tests.parity.training import Row, build_engine, write_recipe
from traffic import (
    TrafficCounter,
    count_sent_bytes,
    expect_muon_bytes,
    expect_traffic,
    plan_strategies,
    read_sent_bytes,
)

pytestmark = pytest.mark.dist

CONFIG = small_config("llama")
# So large that the headers of messages and the scalars of a step are far below 2 % of what is sent.
LARGE = CONFIG | {"vocab_size": 8192}
BF16 = Precision(compute="bfloat16")
ROUNDED = {"precision": Precision(reduce="bfloat16"), "sync": SyncPlan(method="bf16")}


def count_traffic(rank, world_size, path, config, plan):
    """The payload of a step's collectives, and the bytes this rank has sent, by its sockets and by the run's count."""
    meter = count_meter()
    engine, _ = build_engine(path, config, plan)
    microbatch = microbatch_of(torch.zeros(1, 8, dtype=torch.int64))
    engine.rehearse(microbatch, 1, CausalLM())
    for _ in range(2):  # DDP talks about its buckets once more in the first step
        sent = read_sent_bytes()
        meter.take()
        with TrafficCounter() as counter:
            engine.forward_backward(0, [microbatch] * plan.num_microbatches, torch.tensor(1.0), CausalLM())
        dist.barrier()  # the others have received what this rank sent
    return counter.traffic, count_sent_bytes(sent), meter.take()


@pytest.mark.slow
@pytest.mark.parametrize(("num_microbatches", "precision"), [(1, Precision()), (3, BF16)], ids=["fp32", "bf16"])
def test_a_step_sends_what_the_table_says(workers, text, tmp_path, num_microbatches, precision):
    recipe = write_recipe(Row(), tmp_path, text, steps=4)
    for plan in plan_strategies(4, num_microbatches=num_microbatches, precision=precision):
        for traffic, _, _ in workers.run(count_traffic, 4, str(recipe), CONFIG, plan):
            assert traffic == expect_traffic(plan, build_shape(CONFIG)), plan.strategy


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts the bytes of a socket")
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_sockets_send_what_the_table_says(workers, text, tmp_path, ranks):
    """Gloo may send more than a collective needs: its own reduce-scatter sends twice as much."""
    recipe = write_recipe(Row(), tmp_path, text, steps=4)
    for plan in (*plan_strategies(ranks, precision=BF16), *plan_strategies(ranks, **ROUNDED)[1:]):
        expected = expect_traffic(plan, build_shape(LARGE)).sent_bytes(plan)
        assert sum(count_step_bytes(build_shape(LARGE), plan).values()) == pytest.approx(expected)
        for _, sent, counted in workers.run(count_traffic, ranks, str(recipe), LARGE, plan):
            assert counted == pytest.approx(expected, rel=1e-9), plan.strategy
            assert sent == pytest.approx(expected, rel=0.02), plan.strategy


def sum_gradients(rank, world_size, path, plan, readers):
    """The whole gradients of the batch of each reader."""
    found, (engine, _) = [], build_engine(path, CONFIG, plan)
    for reader in readers or [rank]:
        microbatch = microbatch_of(torch.arange(16).view(1, 16) + 20 * reader)
        engine.forward_backward(0, [microbatch], torch.tensor(64.0), CausalLM())
        found.append({name: whole(parameter.grad).numpy().copy() for name, parameter in engine.trained.items()})
        engine.discard()
    return found


@pytest.mark.parametrize(("strategy", "ranks"), [("zero1", 2), ("fsdp", 2), ("hsdp", 4)])
def test_shards_that_are_reduced_in_bf16_are_the_sums_but_for_rounding(workers, text, tmp_path, strategy, ranks):
    """Rounded by 2^-8 at most: each rank's gradient, the sum over those that shard, and that of the copies."""
    recipe = str(write_recipe(Row(), tmp_path, text, steps=4))
    [single] = workers.run(sum_gradients, 1, recipe, ParallelPlan("ddp"), range(ranks))
    [plan] = [each for each in plan_strategies(ranks, **ROUNDED) if each.strategy == strategy]
    [sums] = workers.run(sum_gradients, ranks, recipe, plan, None)[0]
    for name, found in sums.items():
        parts = np.stack([each[name] for each in single])
        assert (abs(found - parts.sum(0)) <= 3 * 2**-8 * abs(parts).sum(0) + 1e-6).all()
        assert not (found.view(np.uint32) & 0xFFFF).any(), "these are numbers of bfloat16"


def count_muon_bytes(rank, world_size, path, config, plan):
    """The bytes that this rank's sockets send in an optimizer step."""
    engine, _ = build_engine(path, config, plan)
    microbatch = microbatch_of(torch.zeros(1, 8, dtype=torch.int64))
    engine.rehearse(microbatch, 1, CausalLM())
    engine.forward_backward(0, [microbatch], torch.tensor(1.0), CausalLM())
    dist.barrier()
    sent = read_sent_bytes()
    engine.step(1e-3, torch.tensor(True))
    dist.barrier()
    return count_sent_bytes(sent)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts the bytes of a socket")
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_muon_sends_what_the_table_says(workers, text, tmp_path, ranks):
    recipe = write_recipe(Row(optimizer="muon"), tmp_path, text, steps=4)
    config = small_config("llama", hidden_size=256, intermediate_size=512)
    for plan in plan_strategies(ranks):
        sent = workers.run(count_muon_bytes, ranks, str(recipe), config, plan)
        assert sum(sent) / ranks == pytest.approx(expect_muon_bytes(plan, build_shape(config)), rel=0.02), plan.strategy


def test_ring_shares():
    """1 GB gathered over 4 ranks sends 0.75 GB from each; 1 GB reduced over 4 ranks sends 1.5 GB."""
    shape = build_shape(CONFIG)
    ddp = expect_traffic(ParallelPlan("ddp", dp_replicate=4), shape).sent_bytes(ParallelPlan("ddp", dp_replicate=4))
    assert ddp == 1.5 * 4 * shape.num_parameters
    plan = ParallelPlan("zero1", dp_shard=4, precision=BF16)
    assert expect_traffic(plan, shape).sent_bytes(plan) == 0.75 * (2 + 4) * shape.num_parameters
    for plan in plan_strategies(4, **ROUNDED)[1:]:
        assert sum(count_step_bytes(shape, plan).values()) == expect_traffic(plan, shape).sent_bytes(plan)
