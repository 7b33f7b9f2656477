"""The planner's part of a rollout: how many answers are sampled at once, their memory, and their time."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from echelon.planner.activations import answer_bytes
from echelon.planner.choose import MEMORY_HEADROOM, resolve_plan
from echelon.planner.hardware.accelerators import parse_devices
from echelon.planner.memory import estimate_memory
from echelon.planner.plan import ParallelPlan
from echelon.planner.search import search_plans
from echelon.planner.shape import build_shape
from echelon.planner.time import estimate_time
from echelon.recipe.document import Recipe
from tests.families import small_config

EIGHT_B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
}  # fmt: skip


def build_recipe(config=EIGHT_B, parallel="auto", train=None, **rollout):
    return Recipe.model_validate({
        "run": {"name": "r"}, "model": {"config": config}, "tokenizer": "bytes",
        "data": {"train": "prompts.jsonl", "sequence_len": 4096}, "objective": {"name": "grpo"}, "reward": "number",
        "rollout": {"group_size": 8, "max_new_tokens": 2048, **rollout}, "parallel": parallel,
        "train": {"steps": 10, "global_batch_size": 512, "precision": "bf16", **(train or {})},
        "optim": {"learning_rate": 1e-6},
    })  # fmt: skip


def resolve(recipe, devices="8xH100"):
    shape, cluster = build_shape(recipe.model.config), parse_devices(devices)
    return shape, cluster, resolve_plan(recipe, shape, cluster)


def test_the_keys_and_values_of_an_answer_are_those_that_a_model_keeps():
    config = small_config("llama")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    cache = model(torch.zeros(3, 24, dtype=torch.long), use_cache=True).past_key_values
    kept = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)

    recipe = build_recipe({**config, "max_position_embeddings": 4096}, train={"precision": "fp32"})
    shape, _, plan = resolve(recipe, "1xH100")
    # A layer more, for the copy that is made while a token is added; the difference of two lengths has nothing else.
    longer, shorter = (
        answer_bytes(
            shape, replace(plan, rollout=replace(plan.rollout, max_new_tokens=length - 8), sequence_len=length)
        )
        for length in (48, 24)
    )
    assert 3 * (longer - shorter) == kept * (shape.num_layers + 1) / shape.num_layers


@pytest.mark.parametrize("parallel", ["zero2", "fsdp"])
def test_as_many_answers_are_sampled_at_once_as_fit_beside_weights_and_optimizer(parallel):
    shape, cluster, plan = resolve(build_recipe(parallel=parallel))
    usable = cluster.accelerator.memory_bytes * (1 - MEMORY_HEADROOM)
    rows = plan.rollout.max_num_seqs
    assert 1 < rows < 64  # of 512 answers on 8 ranks
    for count, fits in ((rows, True), (rows + 1, False)):
        sized = replace(plan, rollout=replace(plan.rollout, max_num_seqs=count))
        assert (estimate_memory(shape, sized).total <= usable) is fits
    assert any(f"rollout: {rows} of the 64 answers of each rank" in line for line in plan.why)


def test_a_number_of_the_recipe_is_an_upper_limit():
    assert resolve(build_recipe(max_num_seqs=5))[2].rollout.max_num_seqs == 5
    assert resolve(build_recipe(max_num_seqs=1000))[2] == resolve(build_recipe())[2]


def test_all_turns_with_an_environment_are_counted():
    environment = {"name": "their:Game", "max_turns": 4}
    assert resolve(build_recipe(max_new_tokens=256, environment=environment))[2].rollout.max_new_tokens == 4 * 256
    assert resolve(build_recipe(environment=environment))[2].rollout.max_new_tokens == 4095, "one sequence"


def test_every_candidate_of_a_search_samples_as_many_as_it_has_room_for():
    recipe = build_recipe()
    shape, cluster = build_shape(recipe.model.config), parse_devices("8xH100")
    fitting = [found for found in search_plans(recipe, shape, cluster) if found.fits]
    assert {found.plan.strategy for found in fitting} >= {"fsdp", "zero2"}
    assert len({found.plan.rollout.max_num_seqs for found in fitting}) > 1


def test_a_token_takes_at_least_the_time_to_read_the_weights():
    shape, cluster, plan = resolve(build_recipe(parallel="zero2", train={"global_batch_size": 64}), "8xH200")
    seconds = estimate_time(shape, plan, cluster).sampling
    # 8.03e9 parameters in 2 bytes, of which the embedding is not read, at 4.8 TB/s, 2,048 times.
    assert seconds > (8.03e9 - 0.53e9) * 2 / 4.8e12 * 2048


def test_weights_that_are_gathered_for_every_token_make_sampling_slow():
    shape, cluster, plan = resolve(build_recipe(parallel="fsdp"))
    assert plan.rollout.gathers_once and plan.reshard_after_forward  # it frees them only while it trains
    freed = replace(plan, rollout=replace(plan.rollout, gathers_once=False))
    slow, fast = (estimate_time(shape, candidate, cluster) for candidate in (freed, plan))
    memory = estimate_memory(shape, plan).answers - estimate_memory(shape, freed).answers
    assert memory == pytest.approx(30 / 32 * 7.5e9 * 2, rel=0.1)  # all but two of 32 layers, in bf16
    # One token: 7/8 of 7.5e9 parameters in 2 bytes at 370 GB/s, if nothing is beside it.
    assert slow.sampling - fast.sampling > 0.5 * 2048 * 7 / 8 * 15e9 / 370e9
    assert slow.limit == "sampling"
    assert any("most of it for the network" in line for line in slow.assumptions)


def test_each_update_on_the_answers_takes_as_long_as_the_first():
    shape, cluster, plan = resolve(build_recipe())
    once, thrice = (
        estimate_time(shape, replace(plan, rollout=replace(plan.rollout, updates=updates)), cluster)
        for updates in (1, 3)
    )
    assert thrice.sampling == once.sampling
    assert thrice.total - thrice.sampling == pytest.approx(3 * (once.total - once.sampling))


def test_a_plan_of_another_objective_has_no_rollout(tmp_path):
    recipe = build_recipe()
    _, _, plan = resolve(recipe.model_copy(update={"objective": type(recipe.objective)(name="causal_lm")}))
    assert plan.rollout is None
    assert ParallelPlan.from_dict(plan.to_dict()) == plan
    rewarded = resolve(recipe)[2]
    assert ParallelPlan.from_dict(rewarded.to_dict()) == rewarded
