"""`parallel.prefetch`: the order of gathers and layers in real processes, and an unchanged result."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from echelon.learn.data.loader import Microbatch
from echelon.learn.distributed.mesh import build_mesh
from echelon.learn.engines import EngineSpec
from echelon.learn.engines.native_build import build_native_engine
from echelon.learn.model.build import load_config
from echelon.learn.model.parts import find_layers
from echelon.learn.objectives.causal_lm import CausalLM
from echelon.planner.plan import ParallelPlan
from echelon.recipe.load import load_recipe
from tests.families import small_config
from tests.parity.training import Row, write_recipe

pytestmark = pytest.mark.dist

DEPTH = 4
CONFIG = {**small_config("llama"), "num_hidden_layers": DEPTH}
FSDP = {"dp_shard": 2, "reshard_after_forward": True, "reduce_gradients": "each"}


class Recorded:
    """An all-gather that notes which unit it gathers."""

    def __init__(self, name, diary):
        self._name, self._diary = name, diary

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self._diary.append(f"gather {self._name}")
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


def record_step(rank, world_size, path, plan):
    """The gathers and layers of one step in order, the loss, and the norm of the gradients."""
    recipe, _ = load_recipe(Path(path))
    meshes = build_mesh(plan, "cpu")
    engine = build_native_engine(EngineSpec(recipe, load_config(CONFIG), plan, meshes, torch.device("cpu")))
    diary = []
    layers = find_layers(engine.decoder)
    units = [("rest", engine.parallel.module), *((str(place), layer) for place, layer in enumerate(layers))]
    for name, unit in units:
        assert isinstance(unit, FSDPModule)
        unit.set_custom_all_gather(Recorded(name, diary))
    for place, layer in enumerate(layers):  # inside the layer: after the gathers that its start triggers
        note = partial(lambda word, *_: diary.append(word), f"forward {place}")
        layer.input_layernorm.register_forward_pre_hook(note)
        note = partial(lambda word, *_: diary.append(word), f"backward {place}")
        layer.mlp.register_full_backward_pre_hook(note)
    tokens, places = torch.arange(32).view(2, 16) + rank, np.arange(2, dtype=np.int64)
    sums = engine.forward_backward(0, [Microbatch(tokens, tokens, places, places)], torch.tensor(32.0), CausalLM())
    return diary, float(sums.loss), float(engine.clip(None))


def orders(diary):
    """(forward, backward) parts of a diary."""
    turn = diary.index(f"forward {DEPTH - 1}") + 1
    return diary[:turn], diary[turn:]


@pytest.fixture(scope="module")
def recorded(workers, text, tmp_path_factory):
    path = str(write_recipe(Row(), tmp_path_factory.mktemp("prefetch"), text, steps=4))
    plans = {count: ParallelPlan("fsdp", prefetch=count, **FSDP) for count in (None, 1, 2)}
    return {count: workers.run(record_step, 2, path, plan)[0] for count, plan in plans.items()}


def test_layers_are_gathered_ahead_in_both_directions(recorded):
    forward, backward = orders(recorded[2][0])
    assert forward == [
        "gather rest", "gather 0", "gather 1", "gather 2", "forward 0", "gather 3", "forward 1", "forward 2",
        "forward 3",
    ]  # fmt: skip
    assert backward == [
        "gather 3", "gather 2", "gather 1", "backward 3", "gather 0", "backward 2", "backward 1", "backward 0",
    ]  # fmt: skip
    forward, backward = orders(recorded[1][0])
    assert forward[:4] == ["gather rest", "gather 0", "gather 1", "forward 0"]
    assert backward[:3] == ["gather 3", "gather 2", "backward 3"]


def test_without_it_a_layer_is_gathered_as_it_starts(recorded):
    forward, _ = orders(recorded[None][0])
    assert forward[:5] == ["gather rest", "gather 0", "forward 0", "gather 1", "forward 1"]


@pytest.mark.parametrize("count", [1, 2])
def test_the_planned_number_of_layers_is_gathered_at_once(recorded, count):
    forward, _ = orders(recorded[count][0])
    gathered = [
        sum(word.startswith("gather") and word != "gather rest" for word in forward[:place]) - int(word.split()[1])
        for place, word in enumerate(forward)
        if word.startswith("forward")
    ]
    assert max(gathered) == 1 + count


def test_the_result_and_the_number_of_gathers_do_not_change(recorded):
    plain, *others = recorded.values()
    for diary, loss, norm in others:
        assert (loss, norm) == plain[1:]
        assert sorted(diary) == sorted(plain[0])
