"""What a step reports over the ranks of any plan: everything is counted once, and several replicas report one loss."""

from dataclasses import dataclass

import pytest
import torch

from echelon.learn.distributed.mesh import build_mesh
from echelon.learn.engines.engine import Targets
from echelon.planner.plan import ParallelPlan
from echelon.run.training.bad_steps import Verdict
from echelon.run.training.metrics import GpuLoad, Measured, PendingMetrics, StepRecord

pytestmark = pytest.mark.dist


@dataclass(frozen=True)
class Share:
    """What ranks with the same data read, and the ranks among them with a part of the loss of their own."""

    tokens: int
    hash: int
    loss: float
    targets: int
    experts: list[float]


# The second reads another number of targets, so that a mean of means would be wrong. Together the hash is 5.
SHARES = [
    Share(100, 7, loss=30.0, targets=10, experts=[4.0, 1.0]),
    Share(80, 2**64 - 2, loss=10.0, targets=30, experts=[2.0, 1.0]),
]
PLANS = {
    "dp": ParallelPlan("ddp", dp_replicate=2),
    "dp x tp": ParallelPlan("mapping", dp_replicate=2, tp=2),
    "pp x dp": ParallelPlan("mapping", dp_replicate=2, pp=2),
    "dp x cp": ParallelPlan("mapping", dp_shard=2, cp=2),
    "replicas": ParallelPlan("mapping", num_replicas=2),
    "replicas x tp": ParallelPlan("mapping", num_replicas=2, tp=2),
}


def report(rank, world_size, plan, all_tell=False):
    """One step's metrics. Stages before the last one know no loss, and context peers have half of it each."""
    meshes = build_mesh(plan, "cpu")
    share = SHARES[meshes.data_rank]
    knows_loss = meshes.place["pp"] == plan.pp - 1
    counts = torch.tensor([share.experts, [3.0, 3.0]]) / plan.cp
    if plan.pp > 1:  # each stage has one of two routers
        counts[1 - meshes.place["pp"]] = 0
    own = torch.tensor(share.targets // plan.cp)
    shared = torch.tensor(share.targets if plan.num_replicas > 1 else sum(each.targets for each in SHARES))
    good = torch.ones((), dtype=torch.bool)
    is_apart = torch.tensor(meshes.place["replica"] == 1)  # the second replica skips its second step in a row
    record = StepRecord(
        step=3,
        loss_sum=torch.tensor(share.loss / plan.cp if knows_loss else 0.0),
        router_sum=torch.tensor(2 * share.loss / plan.cp if knows_loss else 0.0),
        expert_tokens=counts,
        targets=Targets(own, shared),
        grad_norm=torch.tensor(1.5 if is_apart else 1.0),
        verdict=Verdict(good & ~is_apart, torch.tensor(rank == world_size - 1), 2 * is_apart.long()),
        loss_scale=None,
        learning_rate=1e-3,
        num_tokens=share.tokens,
        num_labels=share.targets,
        batch_hash=share.hash,
        data_wait_seconds=float(rank),
        stop_flags=[0.0] * 4 + [float(rank == world_size - 1)],
    )
    load = None if rank == 0 and not all_tell else GpuLoad(rank / 10, 100.0 * rank, 1000.0 * (1 + rank))
    measured = Measured(1000 + rank, sent_bytes=100.0 * rank, wall_seconds=6.0, busy_seconds=10.0, gpu=load)
    return PendingMetrics(record, meshes, measured).read()


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_every_plan_reports_the_same_step(workers, plan):
    found = workers.run(report, plan.world_size, plan)
    assert len(set(map(repr, found))) == 1, "ranks read different metrics"
    metrics = found[0]
    assert metrics.loss == 1.0 and metrics.router_loss == 2.0, "of all targets, not a mean of each replica's mean"
    assert metrics.expert_load == 1.5, "6 and 2 tokens of two experts, on all ranks"
    assert (metrics.tokens, metrics.target_tokens, metrics.batch_hash) == (180, 40, f"{5:016x}")
    assert metrics.data_wait_seconds == (plan.world_size - 1) / 2
    assert metrics.sent_bytes == 100 * (plan.world_size - 1) / 2
    means = (plan.world_size / 20, 50 * plan.world_size, 1000 + 500 * plan.world_size)
    assert metrics.gpu == pytest.approx(means), "of ranks 1 and later"
    assert metrics.own_seconds == [10.0 + rank for rank in range(plan.world_size)], "with waiting for data"
    assert metrics.memory_peak_bytes == 1000 + plan.world_size - 1
    several = plan.num_replicas > 1
    assert (metrics.grad_norm, metrics.committed, metrics.bad_in_a_row) == (
        (1.5, False, 2) if several else (1, True, 0)
    )
    assert metrics.is_bad and metrics.stopped_by is not None, "what one rank sees, all of them do"


def test_the_gpu_with_the_lowest_clock_computes_all_the_time(workers):
    [metrics, _] = workers.run(report, 2, PLANS["dp"], True)
    assert metrics.own_seconds == [10 + 6, 11 + 3], "of 6 seconds, at 1,000 and 2,000 MHz; 1 s of waiting for data"
