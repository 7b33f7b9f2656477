"""The shipped fine-tuning recipes: their memory by hand, and a dry run of each on the real model without weights.

A dry run builds the model, adapter and optimizer of one rank on meta, sharded over a fake process group. Then it runs
one forward and backward pass on tensors without memory, with two layers by default and with all layers in the slow
test: `pytest -m slow tests/unit/planner/test_finetuning_recipes.py`.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig

from echelon.learn.data.loader import Microbatch
from echelon.learn.distributed.mesh import build_mesh
from echelon.learn.engines.prepared_layers import place_buffers, store_parameters
from echelon.learn.model.adapters import apply_adapter
from echelon.learn.model.build import build_on_meta
from echelon.learn.model.sharding import local_part
from echelon.learn.model.traits import apply_plain_causal, find_traits
from echelon.learn.objectives.causal_lm import CausalLM
from echelon.learn.optimizer import build_optimizer
from echelon.learn.parallel import parallelize, shard_model
from echelon.learn.parallel.step import SingleStage
from echelon.planner.adapter_plan import frozen_bytes
from echelon.planner.choose import resolve_plan
from echelon.planner.hardware.accelerators import parse_devices
from echelon.planner.memory import MemoryEstimate, estimate_memory
from echelon.planner.model_shape import ModelShape
from echelon.planner.plan import ParallelPlan
from echelon.planner.shape import build_shape
from echelon.recipe.document import Recipe
from echelon.recipe.load import load_recipe
from echelon.run.lifecycle.model_checks import find_model_fields

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "fine-tuning-recipes.md").read_text(encoding="utf-8")
CPU = torch.device("cpu")

LLAMA3 = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8, "tie_word_embeddings": False}
LLAMA3_8B = {**LLAMA3, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
             "num_attention_heads": 32}  # fmt: skip
LLAMA3_70B = {**LLAMA3, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
              "num_attention_heads": 64}  # fmt: skip
RECIPES = {
    "qlora-8b": (LLAMA3_8B, "1xRTX4090"),
    "lora-8b-ddp": (LLAMA3_8B, "4xA10G"),
    "finetune-8b-fsdp": (LLAMA3_8B, "8xA100-40"),
    "qlora-70b-fsdp": (LLAMA3_70B, "8xA10G"),
}
# Numbers of parameters: all, of one layer, outside the layers, in 4 bits. A 4-bit block of 64 takes 32 bytes, and 1 and
# 1/64 bytes for its scale. Trained with rank r: r * 81,920 in each of 8 B's 32 layers, r * 161,792 in 70 B's 80.
ALL_8B, LAYER_8B, OUTSIDE_8B = 8_030_261_248, 218_112_000, 1_050_677_248
LAYER_70B, OUTSIDE_70B = 855_654_400, 2_101_354_496
PACKED_8B, PACKED_70B = 6_979_321_856 / 64 * (33 + 1 / 64), 80 * 855_638_016 / 64 * (33 + 1 / 64)
LORA_64, LORA_16, LORA_64_70B = 64 * 32 * 81_920, 16 * 32 * 81_920, 64 * 80 * 161_792
STATES = {
    # 4-bit and bf16 weights; 18 bytes per trained one (fp32, bf16 copy, gradient, moments); the largest weight in bf16
    "qlora-8b": PACKED_8B + 2 * OUTSIDE_8B + 18 * LORA_64 + 2 * 4096 * 14336,
    "lora-8b-ddp": 2 * ALL_8B + 18 * LORA_16,
    # 16 bytes each over 8 ranks; gathered weights in bf16; bf16 and fp32 buffers of the head, half of what is outside
    "finetune-8b-fsdp": 16 * ALL_8B / 8 + 2 * (OUTSIDE_8B + 2 * LAYER_8B) + 3 * OUTSIDE_8B,
    "qlora-70b-fsdp": (PACKED_70B + 2 * OUTSIDE_70B + 16 * LORA_64_70B) / 8 + 2 * OUTSIDE_70B
    + 2 * (PACKED_70B + 2 * LORA_64_70B) / 80 + OUTSIDE_70B + 2 * 8192 * 28672,
}  # fmt: skip


@dataclass(frozen=True)
class Planned:
    """A shipped recipe with its model config, planned for its devices."""

    recipe: Recipe
    config: dict[str, Any]
    devices: str
    shape: ModelShape
    plan: ParallelPlan

    def estimate(self, kind: Any = "cuda") -> MemoryEstimate:
        return estimate_memory(self.shape, self.plan, kind)


def plan_recipe(name: str, folder: Path, *overrides: str, **fields: Any) -> Planned:
    config, devices = RECIPES[name]
    config = {**config, **fields}
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    recipe, _ = load_recipe(ROOT / "recipes" / f"{name}.yaml", [f"model.checkpoint={folder}", *overrides])
    shape = build_shape(find_model_fields(recipe, LLAMA3["vocab_size"])[0])
    return Planned(recipe, config, devices, shape, resolve_plan(recipe, shape, parse_devices(devices)))


@pytest.mark.parametrize("name", RECIPES)
def test_states_equal_values_by_hand_and_everything_fits(name: str, tmp_path: Path) -> None:
    planned = plan_recipe(name, tmp_path)
    estimate = planned.estimate()
    assert estimate.states == pytest.approx(STATES[name], rel=0.002)
    memory = parse_devices(planned.devices).accelerator.memory_bytes
    assert memory is not None and estimate.total <= 0.9 * memory
    assert not any("may run out" in line for line in planned.plan.why)


@pytest.mark.parametrize("name", RECIPES)
def test_the_page_shows_the_prediction(name: str, tmp_path: Path) -> None:
    planned = plan_recipe(name, tmp_path)
    estimate, plan = planned.estimate(), planned.plan
    parts = [estimate.states, estimate.activations + estimate.logits, estimate.total]
    shown = " | ".join(f"{part / 2**30:.1f}" for part in parts)
    chosen = f"{plan.micro_batch_size} | {plan.activation_checkpointing}"
    assert f"| `{name}.yaml` | {planned.devices} | {chosen} | {shown} |" in PAGE


@contextmanager
def pretended_ranks(number: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=number)
    try:
        yield
    finally:
        dist.destroy_process_group()


def dry_run(planned: Planned, seen: dict[str, int]) -> None:
    """Build what a rank builds, on meta, and count bytes; then run a forward and backward pass without memory."""
    recipe, plan = planned.recipe, planned.plan
    meshes = build_mesh(plan, "cpu")  # outside the fake mode, because it reads the ranks from a tensor
    model = build_on_meta(AutoConfig.for_model(**planned.config))
    traits = find_traits(model, recipe.data.sequence_len)
    apply_plain_causal(model, traits)
    if recipe.adapter.is_adapter:
        apply_adapter(model, recipe.adapter)
    store_parameters(model, plan.precision)
    module = shard_model(model, plan, meshes, "eager", traits)
    optimizer = build_optimizer(model, recipe.optim, recipe.train.master_weights, 0)
    seen["parameters"] = sum(local_part(each).nbytes for each in model.parameters())
    seen["optimizer"] = sum(local_part(each).nbytes for _, each in optimizer.tensors())
    ids = np.arange(plan.micro_batch_size, dtype=np.int64)
    with FakeTensorMode(allow_non_fake_inputs=True):
        module.to_empty(device="cpu")
        place_buffers(model, CPU)
        module.train()
        # DDP would compare the replicas, which do not exist here, so the pass runs on one of them.
        parallel = parallelize(module, replace(plan, dp_replicate=1), meshes, seed=0)
        tokens = torch.zeros(plan.micro_batch_size, recipe.data.sequence_len, dtype=torch.long)
        batch = Microbatch(tokens, tokens, ids, ids)
        SingleStage(parallel, 0)(0, [batch], torch.ones(()), CausalLM())
        seen["gradients"] = sum(local_part(each.grad).nbytes for each in model.parameters() if each.grad is not None)


def check_dry_run(planned: Planned) -> None:
    seen: dict[str, int] = {}
    with pretended_ranks(planned.plan.world_size):
        dry_run(planned, seen)
    plan, estimate = planned.plan, planned.estimate()
    frozen, trained = 0, planned.shape.num_parameters
    if plan.adapter is not None:
        frozen, trained = sum(frozen_bytes(planned.shape, plan.adapter, 2)), plan.adapter.num_trained_parameters
    # A rank's share of each tensor is a whole number of rows.
    assert seen["parameters"] == pytest.approx((frozen + 4 * trained) / plan.dp_shard, rel=1e-5)
    assert seen["gradients"] == pytest.approx(estimate.gradients, rel=1e-5)
    assert seen["optimizer"] == pytest.approx(estimate.optimizer, rel=1e-4)


@pytest.mark.parametrize("name", RECIPES)
def test_dry_run_of_two_layers(name: str, tmp_path: Path) -> None:
    overrides = ["train.compile=false", "train.micro_batch_size=1", "data.sequence_len=512"]
    check_dry_run(plan_recipe(name, tmp_path, *overrides, num_hidden_layers=2))


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_dry_run_of_the_whole(name: str, tmp_path: Path) -> None:
    check_dry_run(plan_recipe(name, tmp_path, "train.compile=false"))
