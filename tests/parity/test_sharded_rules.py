"""Rules on matrices cut unevenly, by rows and by columns, equal the same rules on whole ones."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from echelon.ground.errors import ConfigError
from echelon.learn.model.sharding import local_places
from echelon.learn.optimizer.sharded_parameter import ParameterPlacement
from echelon.learn.optimizer.slot import Slot, random_bits
from echelon.learn.optimizer.stepper import Optimizer, ParameterGroup, choose_rule
from echelon.recipe.training import OptimConfig

pytestmark = pytest.mark.dist

# For three ranks: uneven, one of them empty. Rows are whole vectors of a CPU, whose kernels round leftovers anew.
SHAPES = {"matrix": (7, 16), "wide": (2, 304), "vector": (5,)}
PLACEMENTS = {"rows": [Shard(0)], "columns": [Shard(1)], "replicas": [Replicate()]}


def random(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def run_steps(place, name, master_weights):
    """Three steps on each shape; what each parameter and its state are afterwards."""
    config = OptimConfig(name=name, learning_rate=1e-2)
    dtype = torch.float32 if master_weights == "fp32" else torch.bfloat16
    results = {}
    for index, (label, shape) in enumerate(SHAPES.items()):
        parameter = torch.nn.Parameter(place(random(shape, index).to(dtype)))
        rule = choose_rule(config, is_layer_matrix=len(shape) == 2)
        slot = Slot(label, parameter, rule, name == "adamw_8bit", master_weights == "bf16_kahan")
        optimizer = Optimizer([ParameterGroup(rule, 0.1, 1.0, [slot])], seed=1)
        for step in range(3):
            parameter.grad = place(random(shape, 10 * index + step + 5).to(dtype))
            optimizer.step(step, 1e-2, torch.tensor(step != 1))
        results |= {label: parameter.detach(), **dict(optimizer.tensors())}
    return {
        key: (value.full_tensor() if isinstance(value, DTensor) else value).float() for key, value in results.items()
    }


def sharded_and_whole(rank, world_size, name, placement, master_weights):
    mesh = init_device_mesh("cpu", (world_size,))

    def place(tensor):
        placements = [Shard(0)] if tensor.ndim == 1 and placement != "replicas" else PLACEMENTS[placement]
        return distribute_tensor(tensor, mesh, placements)

    sharded, whole = run_steps(place, name, master_weights), run_steps(torch.clone, name, master_weights)
    assert sharded.keys() == whole.keys()
    return {key: (sharded[key] - whole[key]).abs().max().item() for key in whole}


@pytest.mark.parametrize("placement", ["rows", "columns", "replicas"])
@pytest.mark.parametrize("name", ["adafactor", "muon", "lion"])
def test_equal_the_whole(workers, name, placement):
    for differences in workers.run(sharded_and_whole, 3, name, placement, "fp32"):
        assert max(differences.values()) <= 1e-6, differences


@pytest.mark.parametrize("master_weights", ["fp32", "bf16_kahan", "bf16_stochastic"])
def test_packed_moments_and_random_bits_are_the_same_bit_for_bit(workers, master_weights):
    for differences in workers.run(sharded_and_whole, 3, "adamw_8bit", "rows", master_weights):
        assert max(differences.values()) == 0, differences


def refusal(rank, world_size):
    parameter = distribute_tensor(torch.zeros(4, 6), init_device_mesh("cpu", (world_size,)), [Shard(1)])
    rule = choose_rule(OptimConfig(name="adamw_8bit", learning_rate=1.0), is_layer_matrix=True)
    try:
        Slot("w", torch.nn.Parameter(parameter), rule, packs=True, keeps_remainder=False)
    except ConfigError as error:
        return str(error)
    return "nothing"


def test_rows_that_are_cut_cannot_be_packed(workers):
    for message in workers.run(refusal, 2):
        assert message.startswith("optim.name=adamw_8bit") and "adamw." in message


def parts_of_bits(rank, world_size, placement):
    mesh = init_device_mesh("cpu", (world_size,))
    tensor = distribute_tensor(torch.zeros(7, 10), mesh, PLACEMENTS[placement])
    whole, part = (
        random_bits(local_places(each), each.device, "w", seed=1, step=2) for each in (torch.zeros(7, 10), tensor)
    )
    return torch.equal(part, ParameterPlacement(tensor).keep_part(whole))


@pytest.mark.parametrize("placement", ["rows", "columns"])
def test_random_bits_belong_to_places_of_the_whole(workers, placement):
    assert all(workers.run(parts_of_bits, 3, placement))
