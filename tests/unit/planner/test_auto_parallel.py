"""`parallel: auto` on devices of known speed: simple plans first, tp, cp and pp where they pay, one choice per run."""

import re
from dataclasses import replace

import pytest

from echelon.ground.errors import PlanError
from echelon.learn.model.build import build_on_meta, load_config
from echelon.learn.model.copy_checks import check_divides
from echelon.learn.model.stage import find_ends
from echelon.learn.model.traits import find_traits
from echelon.learn.parallel.expert import find_experts
from echelon.learn.parallel.tensor import find_divided
from echelon.planner.choose import resolve_plan
from echelon.planner.families import FAMILIES
from echelon.planner.hardware.accelerators import parse_devices
from echelon.planner.hardware.detection import calibrated_cluster
from echelon.planner.layout import DIVIDED, list_divided
from echelon.planner.memory import estimate_memory
from echelon.planner.search import search_plans
from echelon.planner.shape import build_shape
from echelon.planner.time import estimate_time
from echelon.recipe.document import Recipe
from echelon.recipe.load import load_recipe
from echelon.run.lifecycle.setup import prepare_run
from tests.families import small_config
from tests.unit.planner.hardware.test_calibration import CALIBRATION, write_recipe
from tests.unit.planner.test_published_models import PUBLISHED
from tests.unit.planner.test_search import LLAMA, fields

SHAPE = build_shape(LLAMA)
NETWORK = "16xH100@nvlink,tcp25"  # two machines


def choose(devices, shape=SHAPE, given=None, **train):
    """The plan and the line about its choice."""
    plan = resolve_plan(Recipe.model_validate(given or fields(**train)), shape, parse_devices(devices))
    return plan, [line for line in plan.why if line.startswith("parallel auto")][-1]


def test_a_simple_plan_is_taken_if_no_other_is_clearly_faster():
    """Also where the search finds a faster pipeline, but by less than 10 %."""
    plan, line = choose("8xH100", activation_checkpointing="full", micro_batch_size=2)
    assert (plan.strategy, plan.tp, plan.pp) == ("zero2", 1, 1)
    assert "zero2, the fastest of those that fit, by the predicted time of a step on H100 with nvlink4: " in line
    sizes = {"hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": 24, "vocab_size": 32000}
    small = LLAMA | sizes | {"num_attention_heads": 16, "num_key_value_heads": 16}
    given = fields(config=small, global_batch_size=192, activation_checkpointing="none", micro_batch_size=2)
    cluster = parse_devices(NETWORK)
    plan, line = choose(NETWORK, build_shape(small), given)
    taken = estimate_time(build_shape(small), plan, cluster).total
    best = search_plans(Recipe.model_validate(given), build_shape(small), cluster)[0]
    assert (plan.strategy, best.plan.pp) == ("zero1", 2)
    assert 1.05 < taken / best.forecast.step.total < 1.1
    assert re.search(r"; the best of \d+ with tp, cp or pp is dp_shard 8, pp 2 \(1f1b\), [\d.]+ s$", line)


def test_one_gpu_keeps_both_copies_of_the_gradients_where_they_fit():
    """ZeRO-1 then copies a gradient once a step, ZeRO-2 in each microbatch; the latter needs less memory."""
    sizes = {"hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": 32, "vocab_size": 32000}
    small = LLAMA | sizes | {"num_attention_heads": 16, "num_key_value_heads": 16}
    given = fields(config=small, global_batch_size=192)
    plan, line = choose("1xH100", build_shape(small), given)
    assert (plan.strategy, plan.reduce_gradients) == ("zero1", "last") and plan.num_microbatches > 1
    assert "zero1, the fastest of those that fit" in line
    plan, _ = choose("1xA100-40", build_shape(small), given)
    assert (plan.strategy, plan.reduce_gradients) == ("zero2", "each")
    assert any("zero1 needs" in line for line in plan.why)


def test_a_divided_plan_is_taken_where_the_network_is_slow():
    plan, line = choose(NETWORK, activation_checkpointing="full")
    assert plan.pp > 1 and "clearly faster than" in line and "H100 with nvlink4 and tcp25" in line
    seconds = {}
    for name in ("zero1", "zero2", "hsdp", "fsdp", "chosen"):
        try:
            other = plan if name == "chosen" else choose_named(name)
        except PlanError:
            continue
        seconds[name] = estimate_time(SHAPE, other, parse_devices(NETWORK)).total
    assert len(seconds) > 3 and all(1.1 * seconds["chosen"] < seconds[name] for name in seconds if name != "chosen")


def choose_named(name):
    recipe = Recipe.model_validate(fields(name, activation_checkpointing="full"))
    return resolve_plan(recipe, SHAPE, parse_devices(NETWORK))


def test_a_divided_plan_is_taken_where_no_other_fits():
    """8 B parameters on eight GPUs of 24 GB: states take 16 GB of each, and a layer's activations must be divided."""
    given = fields(activation_checkpointing="full")
    given["model"] = {"config": LLAMA | {"max_position_embeddings": 32768}}
    given["data"] = {"train": "text.txt", "sequence_len": 32768}
    plan, line = choose("8xA10G", given=given)
    assert plan.tp * plan.cp == 8 and "the best of" in line
    assert any("fsdp needs" in why for why in plan.why)


def test_the_choice_is_the_plan_that_the_mapping_gives():
    """So what other parts refuse of a mapping is not chosen."""
    recipe, cluster = Recipe.model_validate(fields(activation_checkpointing="full")), parse_devices(NETWORK)
    plan = resolve_plan(recipe, SHAPE, cluster)
    plans = []
    for parallel in list_divided(recipe, SHAPE, cluster):
        given = Recipe.model_validate(fields(parallel.model_dump(exclude_none=True), activation_checkpointing="full"))
        try:
            plans.append(replace(resolve_plan(given, SHAPE, cluster), why=()))
        except PlanError:
            continue
    assert replace(plan, why=()) in plans and len(plans) > 20
    assert all(each.tp * each.cp * each.pp > 1 for each in plans)
    assert all(each.schedule != "zero_bubble" and not each.cpu_offload for each in plans)


@pytest.mark.parametrize(
    "changes",
    [
        {"adapter": {"method": "lora"}},
        {"objective": {"name": "dpo"}, "data": {"train": "pairs.jsonl", "sequence_len": 4096}},
        {"sync": {"name": "local_sgd", "replicas": 2, "every": 10}},
        {"sync": {"compress": {"method": "fp16"}}},
        {"engine": "deepspeed"},
        {"model": {"config": LLAMA, "attn_implementation": "sdpa"}},
    ],
)
def test_what_only_a_part_can_divide_is_not_divided(changes):
    recipe = Recipe.model_validate(fields(activation_checkpointing="full") | changes)
    assert not list_divided(recipe, SHAPE, parse_devices(NETWORK))
    try:
        plan = resolve_plan(recipe, SHAPE, parse_devices(NETWORK))
    except PlanError as error:
        assert "nothing fits" in str(error)
    else:
        assert plan.tp == plan.cp == plan.pp == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_that_auto_divides_can_be_divided(family):
    model = build_on_meta(load_config(small_config(family)))
    assert find_divided(model) and find_ends(model)
    for method in ("allgather", "ulysses"):
        check_divides(model, method, find_traits(model, 64), 64)


def test_experts_are_divided_where_gathering_them_is_slow():
    """Two machines with a slow network; beside NVLink alone gathering and sending take about as long."""
    config = PUBLISHED["Qwen3-30B-A3B"]
    given, shape = fields(config=config, global_batch_size=512), build_shape(config)
    plan, line = choose(NETWORK, shape, given)
    assert plan.ep > 1 and plan.tp == plan.cp == plan.pp == 1
    assert "ep 8" in line and "clearly faster than hsdp" in line
    seconds = {}
    for name in ("hsdp", "fsdp"):
        other = resolve_plan(Recipe.model_validate(given | {"parallel": name}), shape, parse_devices(NETWORK))
        seconds[name] = estimate_time(shape, other, parse_devices(NETWORK)).total
    assert 1.1 * estimate_time(shape, plan, parse_devices(NETWORK)).total < min(seconds.values())
    mapping = {"dp_replicate": plan.dp_replicate, "dp_shard": plan.dp_shard, "ep": plan.ep}
    named = resolve_plan(Recipe.model_validate(given | {"parallel": mapping}), shape, parse_devices(NETWORK))
    assert replace(named, why=()) == replace(plan, why=())
    plan, line = choose("8xH200", shape, given)
    assert plan.strategy == "fsdp" and re.search(r"; the best of \d+ with ep is dp_shard 8, ep \d, [\d.]+ s$", line)


LATENT = {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
LATENT |= {"qk_nope_head_dim": 8, "n_routed_experts": 8, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
MORE = {
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT | {"n_group": 2, "topk_group": 1},
    "qwen2_moe": {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 4},
    "qwen3_moe": {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
}


def small(family):
    """The fields of a small mixture."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return {"model_type": family, "vocab_size": 96, "num_key_value_heads": 2, **sizes, **MORE.get(family, {})}


@pytest.mark.parametrize("family", DIVIDED)
def test_every_mixture_of_which_auto_divides_the_experts_can_have_them_divided(family):
    sparse = {"first_k_dense_replace": 0} if family == "deepseek_v3" else {}
    assert len(find_experts(build_on_meta(load_config(small(family) | sparse)))) == 2


def test_the_choice_of_a_run_is_kept_when_it_resumes(monkeypatch, tmp_path):
    """Between the starts the machine was calibrated again, and a new run would be planned otherwise."""
    monkeypatch.chdir(tmp_path)
    path = write_recipe(tmp_path)
    (tmp_path / "text.txt").write_text("a few words of text\n" * 100)
    sends_slowly = replace(CALIBRATION, bandwidth=1e5, gather_bandwidth=1e5, scatter_bandwidth=1e5)
    sends_fast = replace(CALIBRATION, bandwidth=1e12, latency=0.0)

    def prepare(known, *overrides):
        run = prepare_run(load_recipe(path, overrides)[0], False, lambda: calibrated_cluster(known, 2, 2), {})
        run.folder.unlock()
        return run.plan

    first = prepare(sends_slowly)
    assert first.pp == 2
    assert any(re.search(r"auto: pp, pp 2 \(1f1b\), .* clearly faster than ddp", line) for line in first.why)
    assert prepare(sends_fast) == first
    assert prepare(sends_fast, "train.steps=9") == first
    assert prepare(sends_fast, "run.name=anew").strategy == "ddp"


def test_a_layout_that_never_fits_is_estimated_once(monkeypatch):
    """Not with every micro batch and every way to keep activations: a plan for many devices answers in a second."""
    large = LLAMA | {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126}
    shape = build_shape(large | {"num_attention_heads": 128})
    recipe, cluster, counted = Recipe.model_validate(fields()), parse_devices("8xH100"), []

    def count(*arguments):
        counted.append(arguments)
        return estimate_memory(*arguments)

    monkeypatch.setattr("echelon.planner.choose.estimate_memory", count)
    with pytest.raises(PlanError, match="nothing fits H100"):
        resolve_plan(recipe, shape, cluster)
    layouts = 3 + len(list_divided(recipe, shape, cluster))  # zero1, zero2 and fsdp, and two trials for the advice
    assert len(counted) <= layouts + 2
