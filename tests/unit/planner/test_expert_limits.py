"""What expert parallelism refuses, what it saves, and the parameters that a token uses."""

from dataclasses import replace

import pytest

from echelon.ground.errors import EchelonError
from echelon.planner.axes.table import divide_shape
from echelon.planner.choose import resolve_plan
from echelon.planner.hardware.accelerators import Accelerator, Cluster
from echelon.planner.memory import estimate_memory
from echelon.planner.plan import ParallelPlan
from echelon.planner.shape import build_shape
from echelon.recipe.document import Recipe
from tests.families import small_config
from tests.unit.recipe_samples import RECIPE

MACHINE = Accelerator(
    "machine", memory_bytes=2**33, bf16_flops=None, fp32_flops=None, memory_bandwidth=None, source="-"
)


def resolve(family, ranks, parallel, **sections):
    train, model = {"steps": 2, "global_batch_size": 24}, {"config": small_config(family)}
    content = RECIPE | {"model": model, "train": train, "parallel": parallel, **sections}
    cluster = Cluster(MACHINE, num_devices=ranks, devices_per_node=ranks, kind="cpu")
    return resolve_plan(Recipe.model_validate(content), build_shape(small_config(family)), cluster)


@pytest.mark.parametrize(
    ("family", "ranks", "parallel", "sections", "message"),
    [
        ("llama", 2, {"dp_shard": 2, "ep": 2}, {}, "parallel.ep=2: llama has no experts"),
        ("mixtral", 3, {"dp_shard": 3, "ep": 3}, {}, "does not divide the 4 experts of the model; use ep = 1."),
        ("mixtral", 8, {"dp_shard": 8, "ep": 8}, {}, "does not divide the 4 experts of the model; use ep = 2 or 4."),
        ("mixtral", 4, {"dp_shard": 4, "ep": 3}, {}, "does not divide dp_shard 4 x cp 1 = 4; use ep = "),
        ("mixtral", 6, {"dp_shard": 6, "ep": 2}, {}, "leaves 3 processes to share each expert"),
        ("mixtral", 2, {"ep": 2}, {}, "parallel.ep=2 needs parallel.dp_shard"),
        ("qwen3_moe", 3, {"tp": 3}, {}, "does not divide"),
        (
            "mixtral",
            8,
            {"dp_shard": 4, "ep": 4, "tp": 2},
            {},
            "does not divide the number of experts / 4=1; use tp = 1.",
        ),
        ("mixtral", 6, {"dp_shard": 3, "tp": 2}, {}, "parallel.tp=2 leaves 3 processes to share each expert"),
        (
            "mixtral",
            2,
            {"tp": 2},
            {"adapter": {"method": "lora", "r": 4, "target_parameters": "experts"}},
            "parallel.tp=2 does not work with adapter.target_parameters",
        ),
        (
            "mixtral",
            2,
            {"dp_shard": 2, "ep": 2},
            {"adapter": {"method": "lora", "r": 4, "target_parameters": "experts"}},
            "does not work with adapter.target_parameters",
        ),
    ],
)
def test_refusals(family, ranks, parallel, sections, message):
    with pytest.raises(EchelonError) as caught:
        resolve(family, ranks, parallel, **sections)
    assert message in str(caught.value)


def test_the_part_of_a_rank_of_tensor_parallelism_by_hand():
    """Two of four experts, half of attention and vocabulary, and the whole router and norms."""
    part = divide_shape(build_shape(small_config("mixtral")), ParallelPlan("tp", tp=2))
    attention, norms, router = 2 * 64 * 32 + 2 * 32 * 32, 2 * 64, 4 * 64
    assert part.num_layer_parameters == attention + norms + router + 2 * 3 * 128 * 64
    assert part.num_parameters == 2 * part.num_layer_parameters + 64 + 2 * 128 * 64
    assert part.expert_widths == (1.0, 128) and part.num_chosen_experts == 2
    many = build_shape(small_config("qwen3_moe"))  # two of eight experts for a token
    assert [divide_shape(many, ParallelPlan("tp", tp=n)).num_chosen_experts for n in (1, 2, 4, 8)] == [2, 2, 2, 1]


def test_a_plan_that_fits():
    plan = resolve("mixtral", 4, {"dp_shard": 4, "ep": 2})
    assert (plan.strategy, plan.ep, plan.world_size) == ("fsdp+ep", 2, 4)


def test_counts_of_a_mixture_by_hand():
    """Mixtral: 4 experts of three matrices [128, 64], of which a token uses 2."""
    shape = build_shape(small_config("mixtral"))
    assert shape.num_layer_experts == 4 * 3 * 128 * 64 and shape.num_chosen_experts == 2
    assert shape.expert_widths == (1.0, 128)
    attention, norms, router = 2 * 64 * 64 + 2 * 32 * 64, 2 * 64, 4 * 64
    layer = attention + norms + router + 4 * 3 * 128 * 64
    assert shape.num_layer_parameters == layer
    active = 2 * (layer - 2 * 3 * 128 * 64) + 64 + 256 * 64  # the head is a product, the embedding a look-up
    assert shape.flops_per_token(32) == 6 * active + 12 * 2 * 64 * 32


def test_memory_of_a_rank_by_hand():
    """Shards stay those of fsdp; of the experts of two gathered layers, half are absent."""
    shape = build_shape(small_config("mixtral"))
    whole = ParallelPlan("fsdp", dp_shard=4, reshard_after_forward=True, reduce_gradients="each")
    split = ParallelPlan("fsdp+ep", dp_shard=4, ep=2, reshard_after_forward=True, reduce_gradients="each")
    ours, theirs = (estimate_memory(shape, replace(plan, sequence_len=32), "cpu") for plan in (split, whole))
    half = 4 * 3 * 128 * 64 // 2
    assert theirs.parameters - ours.parameters == 2 * half * 4
    assert (ours.gradients, ours.optimizer) == (theirs.gradients, theirs.optimizer)
    rows = 2 * (32 * 2) * 64 * 4  # sent and received: two experts for each of 32 tokens
    assert theirs.buffers - ours.buffers == 2 * half * 4 - rows
    assert ours.activations == theirs.activations
    assert estimate_memory(shape, replace(split, sequence_len=32), "cuda").buffers == ours.buffers
