"""Muon orthogonalises each matrix on one rank, and each rank gets what a single process computes, bit for bit."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from echelon.learn.model.sharding import whole
from echelon.learn.optimizer import muon
from echelon.learn.optimizer.muon import Muon, assign_owners, plan_rounds
from echelon.learn.optimizer.slot import Slot
from echelon.learn.optimizer.stepper import Optimizer, ParameterGroup

pytestmark = pytest.mark.dist

# Uneven parts, some of them empty. The last two are large enough that ranks with copies divide the work on them.
SHAPES = [(7, 16), (2, 304), (33, 33), (1, 40), (40, 1), (130, 200), (256, 128)]
NUM_STEPS = 3


def draw(shape, seed):
    """Eighths of small integers: their momentum is exact, however a kernel rounds."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)) / 8


def run_steps(place, copies=None):
    """The updates of each step, and weights and momenta at the end, whole; how many matrices this process computed."""
    rule = Muon(momentum=0.5)
    parameters = [torch.nn.Parameter(place(draw(shape, index))) for index, shape in enumerate(SHAPES)]
    slots = [Slot(str(index), each, rule, False, False, copies) for index, each in enumerate(parameters)]
    optimizer = Optimizer([ParameterGroup(rule, 0.1, 1.0, slots)], seed=1)
    exact, computed = [], []

    def count(matrix):
        computed.append(matrix.shape)
        return orthogonalize(matrix)

    orthogonalize = muon.orthogonalize
    with mock.patch.object(muon, "orthogonalize", count):
        for step in range(NUM_STEPS):
            for index, parameter in enumerate(parameters):
                parameter.grad = place(draw(parameter.shape, 100 * step + index + 50))
            optimizer.step(step, 1e-2, torch.tensor(step != 1))
            exact += [whole(parameter.grad) for parameter in parameters]
    exact += [whole(tensor) for _, tensor in optimizer.tensors()]
    return exact, [whole(parameter.detach()) for parameter in parameters], computed


def compare(rank, world_size, sizes, placements, round_size):
    """Whether updates and momenta are those of one process, how far weights are, and what this rank computed."""
    expected, expected_weights, _ = run_steps(torch.clone)
    place, copies = torch.clone, dist.group.WORLD
    if placements is not None:
        mesh = init_device_mesh("cpu", sizes)
        place, copies = lambda tensor: distribute_tensor(tensor, mesh, placements), None
    with mock.patch.object(muon, "ROUND", round_size):
        exact, weights, computed = run_steps(place, copies)
    same = all(torch.equal(ours, theirs) for ours, theirs in zip(exact, expected, strict=True))
    pairs = zip(weights, expected_weights, strict=True)
    return same, max((ours - theirs).abs().max().item() for ours, theirs in pairs), computed


LARGE, ALL = 2, len(SHAPES)


@pytest.mark.parametrize(
    ("sizes", "placements", "round_size", "num_computed"),
    [
        ((3,), [Shard(0)], muon.ROUND, ALL),
        ((3,), [Shard(1)], 600, ALL),
        ((3,), None, 600, LARGE + 3 * (ALL - LARGE)),
        ((2, 2), [Replicate(), Shard(0)], muon.ROUND, 2 * ALL),
        ((2, 2), [Shard(0), Shard(1)], muon.ROUND, 4 * ALL),
    ],
    ids=["rows", "columns in rounds", "copies in rounds", "rows and replicas", "two axes"],
)
def test_equals_one_process(workers, sizes, placements, round_size, num_computed):
    results = workers.run(compare, torch.Size(sizes).numel(), sizes, placements, round_size)
    assert all(same for same, _, _ in results)
    assert max(distance for _, distance, _ in results) <= 1e-6
    assert sum(len(computed) for _, _, computed in results) == NUM_STEPS * num_computed


def test_the_costliest_goes_to_the_rank_with_the_least_work():
    # costs: 64, 32, 32, 8, 9; so 64 and 9 against 32, 32 and 8
    shapes = tuple(torch.Size(shape) for shape in [(4, 4), (2, 8), (8, 2), (2, 2), (1, 9)])
    assert assign_owners(shapes, 2) == [[0, 4], [1, 2, 3]]
    # numbers: 16, 16, 16, 4, 9
    assert plan_rounds(shapes, 2, 20) == (((0,), (1,)), ((4,), (2, 3)))
    assert plan_rounds(shapes, 2, 1) == (((0,), (1,)), ((4,), (2,)), ((), (3,)))
    assert plan_rounds(shapes[:1], 3, 100) == (((0,), (), ()),)


def test_layers_are_divided_evenly():
    """The matrices of 24 layers of Llama 1.3B on 8 ranks: each has at most 2 % more work than the mean."""
    layer = [(2048, 2048)] * 4 + [(5504, 2048), (5504, 2048), (2048, 5504)]
    shapes = [torch.Size(shape) for shape in layer * 24]
    work = [sum(min(shapes[each]) ** 2 * max(shapes[each]) for each in owned) for owned in assign_owners(shapes, 8)]
    assert max(work) <= 1.02 * sum(work) / 8
