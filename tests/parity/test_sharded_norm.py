"""The global norm and clipping, over parts on real ranks, against the same tensors whole and in fp64."""

import math

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from echelon.learn.distributed.mesh import build_mesh
from echelon.learn.model.sharding import whole
from echelon.learn.optimizer import clip_gradients, global_norm
from echelon.planner.plan import ParallelPlan

pytestmark = pytest.mark.dist


def random(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def exact_norm(tensors):
    return math.sqrt(sum(each.double().square().sum().item() for each in tensors))


class Pair(nn.Module):
    """Two matrices that tensor parallelism divides by rows and by columns, and a vector that it leaves whole."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.gain = nn.Linear(6, 10), nn.Linear(10, 6, bias=False), nn.LayerNorm(6)
        for seed, parameter in enumerate(self.parameters()):
            parameter.data = random(*parameter.shape, seed=seed)


def sharded_over_tensor_parallel(meshes):
    """The parameters of `Pair`, under both kinds of sharding at once: rows are dealt out in strides, columns not."""
    model = Pair()
    expected = [parameter.detach().clone() for parameter in model.parameters()]
    parallelize_module(model, meshes.tp, {"first": ColwiseParallel(), "second": RowwiseParallel()})
    model.gain.weight = nn.Parameter(distribute_tensor(model.gain.weight.detach(), meshes.tp, [Replicate()]))
    fully_shard(model, mesh=meshes.shard)
    parameters = [parameter.detach() for parameter in model.parameters()]
    kinds = {type(placement).__name__ for each in parameters for placement in each.placements}
    assert kinds == {"_StridedShard", "Shard", "Replicate"}, kinds
    return parameters, expected


def mixed(world_size, plain_dtype=torch.float32):
    """Parts on one mesh, on another with uneven and empty parts, and plain tensors that every rank holds."""
    meshes = build_mesh(ParallelPlan("mapping", dp_shard=2, tp=2), "cpu")
    parts, expected = sharded_over_tensor_parallel(meshes)
    other = init_device_mesh("cpu", (world_size,))
    for shape, seed in (((5, 3), 20), ((2, 8), 21), ((7,), 22)):
        expected.append(random(*shape, seed=seed))
        parts.append(distribute_tensor(expected[-1].clone(), other, [Shard(0)]))
    expected.append(random(4, 4, seed=30).to(plain_dtype))
    parts.append(expected[-1].clone())
    return parts, expected


def norm_and_clipped(rank, world_size, max_norm):
    parts, expected = mixed(world_size)
    assert all(torch.equal(whole(part), right) for part, right in zip(parts, expected, strict=True))
    norm = global_norm(parts)
    clip_gradients(parts, max_norm, norm)
    factor = min(1.0, max_norm / (exact_norm(expected) + 1e-6))
    gap = max((whole(part) - factor * right).abs().max().item() for part, right in zip(parts, expected, strict=True))
    return norm.item(), exact_norm(expected), global_norm(parts).item(), gap


@pytest.mark.parametrize("max_norm", [2.5, 1e9])
def test_parts_on_two_meshes_and_plain_tensors(workers, max_norm):
    results = workers.run(norm_and_clipped, 4, max_norm)
    assert len({norm for norm, *_ in results}) == 1, "ranks must clip by the same number, bit for bit"
    for norm, exact, after, gap in results:
        assert norm == pytest.approx(exact, rel=1e-6)
        assert after == pytest.approx(min(max_norm, exact), rel=1e-6)
        assert gap <= 1e-6


def norm_over_stages(rank, world_size):
    """Two stages, each of which has a part of the layers; of the second one the layers are sharded."""
    meshes = build_mesh(ParallelPlan("mapping", pp=2, dp_shard=2), "cpu")
    stages = [[random(3, 4, seed=1)], [random(6, 2, seed=2), random(5, seed=3)]]
    mine = [distribute_tensor(each, meshes.shard, [Shard(0)]) for each in stages[meshes.place["pp"]]]
    return global_norm(mine, meshes.pp).item(), exact_norm(stages[0] + stages[1])


def test_a_pipeline_adds_up_its_stages(workers):
    for norm, exact in workers.run(norm_over_stages, 4):
        assert norm == pytest.approx(exact, rel=1e-6)


def norm_of_large(rank, world_size):
    gradient = random(50257, 768, seed=0)
    part = distribute_tensor(gradient, init_device_mesh("cpu", (world_size,)), [Shard(0)])
    return global_norm([part]).item(), exact_norm([gradient])


@pytest.mark.slow
def test_a_large_gradient_in_parts_is_not_off(workers):
    for norm, exact in workers.run(norm_of_large, 2):
        assert norm == pytest.approx(exact, rel=1e-6)


def not_finite(rank, world_size):
    gradient = torch.ones(4, 2)
    gradient[3, 1] = math.inf
    part = distribute_tensor(gradient, init_device_mesh("cpu", (world_size,)), [Shard(0)])
    assert isinstance(part, DTensor)
    return global_norm([torch.ones(2), part]).item()


def test_what_is_not_finite_on_one_rank_reaches_all(workers):
    assert all(norm == math.inf for norm in workers.run(not_finite, 2))
