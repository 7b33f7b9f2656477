"""Initial weights are the same under every plan, and no rank ever holds the whole model."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from echelon.learn.distributed.mesh import build_mesh
from echelon.learn.engines import EngineSpec
from echelon.learn.engines.native_build import build_native_engine
from echelon.learn.model.build import load_config
from echelon.learn.model.sharding import local_part, local_places
from echelon.learn.model.weights import WeightPlace
from echelon.learn.optimizer.slot import random_bits
from echelon.planner.plan import ParallelPlan
from echelon.recipe.load import load_recipe
from tests.families import small_config, small_model
from tests.parity.training import Row, build_engine, resolve, with_ranks, write_recipe

pytestmark = pytest.mark.dist


def whole_weights(rank, world_size, path, plan, family, tied):
    engine, _ = build_engine(path, small_config(family, tied), plan)
    return {
        name: np.array((value.full_tensor() if hasattr(value, "full_tensor") else value).detach())
        for name, value in engine.decoder.named_parameters()
    }


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "gemma", "mistral"])
@pytest.mark.parametrize(("parallel", "ranks"), [("ddp", 2), ("fsdp", 4), ("hsdp", 4)])
def test_weights_do_not_depend_on_the_plan(workers, text, tmp_path, family, tied, parallel, ranks):
    row = with_ranks(Row(parallel), ranks)
    path = write_recipe(row, tmp_path, text, steps=4)
    recipe, _ = load_recipe(path)
    plan = resolve(row, recipe, num_samples=1000)
    expected = dict(small_model(family, tied, seed=recipe.run.seed).named_parameters())
    for weights in workers.run(whole_weights, ranks, str(path), plan, family, tied):
        assert weights.keys() == expected.keys()
        for name, value in weights.items():
            assert np.array_equal(value, expected[name].detach().numpy()), name


def peak_while_building(rank, world_size, path, plan, config):
    """How far resident memory rose above where it stood, in bytes, while the model was built."""
    import threading
    import time

    import psutil

    recipe, _ = load_recipe(Path(path))
    meshes = build_mesh(plan, "cpu")
    process = psutil.Process()
    before = peak = process.memory_info().rss
    done = threading.Event()

    def watch():
        nonlocal peak
        while not done.is_set():
            peak = max(peak, process.memory_info().rss)
            time.sleep(0.002)

    thread = threading.Thread(target=watch)
    thread.start()
    engine = build_native_engine(EngineSpec(recipe, load_config(config), plan, meshes, torch.device("cpu")))
    done.set()
    thread.join()
    return peak - before, sum(parameter.numel() * 4 for parameter in engine.decoder.parameters())


EXPERTS = {"num_local_experts": 16, "intermediate_size": 256, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("source", "family", "experts"),
    [
        pytest.param("config", "llama", {}, marks=pytest.mark.slow),
        ("checkpoint", "llama", {}),
        pytest.param("checkpoint", "mixtral", EXPERTS, marks=pytest.mark.slow),  # each expert apart in the file
    ],
    ids=["config", "checkpoint", "experts"],
)
def test_no_rank_holds_the_whole_model(workers, text, tmp_path, source, family, experts):
    """512 MB of parameters on four ranks: each holds its quarter and a layer or two (64 MB each), never the whole.

    With Adafactor, which keeps next to nothing beside them. A rank that built the whole would rise by 1.0 or more;
    0.5 to 0.65 is measured, as the allocator gives memory back late.
    """
    size = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8}
    fields = small_config(family, **size, num_attention_heads=8, num_key_value_heads=8) | experts
    row = with_ranks(Row("fsdp", optimizer="adafactor"), 4)
    path = write_recipe(row, tmp_path, text, steps=4)
    plan = resolve(row, load_recipe(path)[0], num_samples=1000)
    config = fields
    if source == "checkpoint":
        small_model(family, **fields).save_pretrained(tmp_path / "saved")
        content = path.read_text().replace('"config": ', f'"checkpoint": "{tmp_path / "saved"}", "_": ')
        path = tmp_path / "from_checkpoint.json"
        path.write_text(_without_config(content))
        config = str(tmp_path / "saved")
    for rise, whole in workers.run(peak_while_building, 4, str(path), plan, config):
        assert whole > 500e6
        assert rise < 0.8 * whole, f"rose by {rise / 1e6:.0f} MB of {whole / 1e6:.0f} MB"


def _without_config(content: str) -> str:
    import json

    recipe = json.loads(content)
    recipe["model"].pop("_")
    return json.dumps(recipe)


def parts_of_every_kind(rank, world_size):
    """Whether what is taken of a whole tensor is the part that torch gives this rank; and which parts are blocks."""
    meshes = build_mesh(ParallelPlan("mapping", dp_shard=2, tp=2), "cpu")
    whole = torch.arange(96.0).view(12, 8)
    layer = torch.nn.Linear(8, 12, bias=False)
    layer.weight.data = whole.clone()
    parallelize_module(layer, meshes.tp, ColwiseParallel())
    fully_shard(layer, mesh=meshes.shard)
    parts = {
        "plain": whole.clone(),
        "uneven": distribute_tensor(whole, init_device_mesh("cpu", (4,)), [Shard(1)]),
        "fsdp over tp": layer.weight.detach(),
        "packed": distribute_tensor(whole, meshes.tp, [_StridedShard(0, split_factor=2)], src_data_rank=None),
        "packed columns": distribute_tensor(whole, meshes.tp, [_StridedShard(1, split_factor=2)], src_data_rank=None),
    }
    for name, part in parts.items():
        place = WeightPlace(part)
        assert torch.equal(place.take(whole), local_part(part)), name
        assert place.block is None or torch.equal(whole[place.block], local_part(part)), name
        bits = random_bits(local_places(whole), whole.device, "w", seed=1, step=2)
        assert torch.equal(random_bits(local_places(part), whole.device, "w", seed=1, step=2), place.take(bits)), name
    return {name for name, part in parts.items() if WeightPlace(part).block is not None}


def test_a_rank_takes_its_part_of_a_whole_however_it_is_dealt_out(workers):
    for blocks in workers.run(parts_of_every_kind, 4):
        assert blocks == {"plain", "uneven", "fsdp over tp"}
