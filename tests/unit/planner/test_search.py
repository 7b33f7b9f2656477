"""The search over plans: what a recipe sets is kept, what it leaves is tried, and the table says why the best wins."""

import json
import re
import shlex
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from echelon.cli.api.searching import SearchReport, prefer_fewer_machines, search
from echelon.cli.commands.plan import plan as plan_command
from echelon.ground.errors import ConfigError, PlanError
from echelon.planner.choose import resolve_plan
from echelon.planner.forecast import HourlyPrice
from echelon.planner.hardware.accelerators import parse_devices
from echelon.planner.memory import estimate_memory
from echelon.planner.model_shape import ExpertShape
from echelon.planner.reliability import Goodput, Reliability, estimate_goodput
from echelon.planner.search import rank_plans, search_plans
from echelon.planner.shape import build_shape
from echelon.planner.time import estimate_time
from echelon.recipe.document import Recipe
from echelon.recipe.load import load_recipe
from echelon.run.report.picture import draw_search, find_frontier

PARTS = ("matmul", "attention", "memory_bound", "recompute", "bubble", "optimizer", "offload", "overhead")
LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
}  # fmt: skip


def fields(parallel="auto", config=None, **train):
    return {
        "run": {"name": "r"}, "model": {"config": config or LLAMA}, "tokenizer": "bytes",
        "data": {"train": "text.txt", "sequence_len": 4096}, "parallel": parallel,
        "train": {"steps": 1000, "global_batch_size": 64, **train}, "optim": {"learning_rate": 1e-3},
    }  # fmt: skip


@cache
def free_candidates(devices, by):
    return search_plans(Recipe.model_validate(fields()), build_shape(LLAMA), parse_devices(devices), by)


def candidates(devices="8xH100", by="time", given=None):
    if given is None:
        return free_candidates(devices, by)
    return search_plans(Recipe.model_validate(given), build_shape(LLAMA), parse_devices(devices), by)


def test_candidates_are_ranked_by_the_goal_and_those_that_do_not_fit_come_last():
    found = candidates()
    fitting = [each.forecast.step.total for each in found if each.fits]
    assert len(fitting) > 10 and fitting == sorted(fitting)
    assert [each.fits for each in found] == sorted((each.fits for each in found), reverse=True)
    small = [each.memory.total for each in candidates(by="memory") if each.fits]
    assert small == sorted(small) and small[0] < found[0].memory.total


def test_different_layouts_micro_batches_and_policies_are_tried():
    found = [each.plan for each in candidates()]
    for name in ("tp", "pp", "dp_shard", "micro_batch_size"):
        assert len({getattr(each, name) for each in found}) > 1, name
    assert {each.activation_checkpointing for each in found} == {"none", "selective", "full"}
    assert {each.schedule for each in found} == {None, "1f1b", "interleaved", "zero_bubble"}
    assert {each.activation_checkpointing for each in found if each.schedule == "zero_bubble"} == {"none"}
    assert {each.checkpoint_every for each in found} == {1, 2}
    assert {each.cpu_offload for each in found} == {each.activation_offloading for each in found} == {True, False}
    kinds = {(each.reshard_after_forward, each.reduce_gradients) for each in found if each.tp > 1 == each.pp}
    assert kinds == {(True, "each"), (False, "each"), (False, "last")}


def test_long_sequences_are_divided_in_both_ways():
    given = fields()
    given["data"] = {"train": "text.txt", "sequence_len": 16384}
    found = [each.plan for each in candidates(given=given)]
    assert {each.cp_method for each in found} == {None, "allgather", "ulysses"}
    assert {each.cp for each in found} == {1, 2, 4, 8}


def test_experts_are_divided_beside_every_other_axis():
    experts = (ExpertShape("gate_up_proj", 8, 1024, 4096, 32), ExpertShape("down_proj", 8, 4096, 512, 32))
    layer = 8 * (1024 * 4096 + 4096 * 512)
    sizes = {"num_parameters": 3_000_000_000, "num_layer_parameters": layer + 42_000_000}
    shape = replace(build_shape(LLAMA), experts=experts, num_idle_parameters=32 * layer * 3 // 4, **sizes)
    found = [each.plan for each in search_plans(Recipe.model_validate(fields()), shape, parse_devices("8xH100"))]
    assert {each.ep for each in found} >= {1, 2, 4, 8}
    assert any(each.ep > 1 < each.tp for each in found) and any(each.ep > 1 < each.pp for each in found)


def test_prefetch_and_gpipe_cannot_be_better_by_the_planners_formulas():
    """Why the search leaves them out."""
    shape, cluster = build_shape(LLAMA), parse_devices("8xH100")
    plans = [
        resolve_plan(Recipe.model_validate(fields(parallel, micro_batch_size=1)), shape, cluster)
        for parallel in ({"dp_shard": 8}, {"dp_shard": 8, "prefetch": 3}, {"pp": 8}, {"pp": 8, "schedule": "gpipe"})
    ]
    seconds = [estimate_time(shape, each, cluster).total for each in plans]
    needs = [estimate_memory(shape, each).total for each in plans]
    assert seconds[1] == seconds[0] and needs[1] > needs[0]
    assert seconds[3] >= seconds[2] and needs[3] > needs[2]


def test_no_other_candidate_is_a_plan_twice():
    keys = [replace(each.plan, why=(), strategy="") for each in candidates()]
    assert len(keys) == len(set(keys))


@pytest.mark.parametrize(
    ("given", "holds"),
    [
        (fields({"tp": 2, "dp_shard": 4}), lambda plan: (plan.tp, plan.dp_shard) == (2, 4)),
        (fields("fsdp"), lambda plan: plan.strategy == "fsdp"),
        (fields(micro_batch_size=2), lambda plan: plan.micro_batch_size == 2),
        (fields(activation_checkpointing="full"), lambda plan: plan.activation_checkpointing == "full"),
        (fields(activation_checkpointing="none"), lambda plan: plan.activation_checkpointing == "none"),
        (fields({"pp": 2, "microbatches": 8}), lambda plan: (plan.pp, plan.num_microbatches) == (2, 8)),
        (fields(activation_checkpointing={"every": 4}), lambda plan: plan.checkpoint_every == 4),
        (fields(activation_offloading=True), lambda plan: plan.activation_offloading),
        (fields(activation_offloading=False), lambda plan: not plan.activation_offloading),
        (fields(precision="fp16"), lambda plan: plan.precision.compute == "float16"),
        (fields(precision="fp8"), lambda plan: plan.precision.float8 and plan.tp == 1),
        (fields(compile=True), lambda plan: plan.compile),
        (fields({"dp_shard": 8, "prefetch": 2}), lambda plan: plan.prefetch == 2),
        (fields({"dp_shard": 8, "cpu_offload": True}), lambda plan: plan.cpu_offload),
        ({**fields(), "sync": {"name": "local_sgd", "replicas": 2, "every": 10}},
         lambda plan: (plan.num_replicas, plan.sync.every) == (2, 10)),
    ],
)  # fmt: skip
def test_what_the_recipe_sets_is_kept_by_every_candidate(given, holds):
    found = candidates(given=given)
    assert found and all(holds(each.plan) for each in found)


def test_a_candidate_is_the_plan_that_its_settings_give_on_the_devices():
    """Memory and time are those of a recipe that sets what the search chose, resolved with the real memory."""
    shape, cluster = build_shape(LLAMA), parse_devices("8xH100")
    layouts = {(each.plan.strategy, each.activations): each for each in candidates() if each.fits}
    assert len(layouts) >= 20
    for each in layouts.values():
        settings = each.settings()
        plan = resolve_plan(Recipe.model_validate(fields(settings["parallel"], **settings["train"])), shape, cluster)
        assert replace(plan, why=()) == replace(each.plan, why=())
        assert estimate_memory(shape, plan).total == each.memory.total
        assert estimate_time(shape, plan, cluster).total == pytest.approx(each.forecast.step.total)


def test_on_one_device_strategies_that_round_differently_are_different_plans():
    """DDP casts the weights in each of 16 microbatches, ZeRO-1 once: it is the faster one."""
    cluster, given = parse_devices("1xH100"), fields(config=LLAMA | {"num_hidden_layers": 2}, micro_batch_size=4)
    shape = build_shape(given["model"]["config"])
    found = search_plans(Recipe.model_validate(given), shape, cluster)
    best = {each.plan.strategy: each.forecast.step.total for each in reversed(found) if each.fits}
    seconds = {name: best[name] for name in ("ddp", "zero1", "zero2")}
    for name, each in seconds.items():
        alone = resolve_plan(Recipe.model_validate(given | {"parallel": name}), shape, cluster)
        assert estimate_time(shape, alone, cluster).total == pytest.approx(each)
    assert seconds["zero1"] < min(seconds["ddp"], seconds["zero2"]) and found[0].plan.strategy == "zero1"


def test_a_model_that_fits_nowhere_is_answered_with_its_smallest_plans():
    found = candidates("1xT4", given=fields(precision="fp32"))
    assert found and not any(each.fits or each.to_dict()["fits"] for each in found)
    report = search(fields(precision="fp32"), "1xT4")
    assert "no plan fits in memory; the smallest ones:" in str(report)
    assert "does not fit" in str(report)


def test_offloading_is_chosen_where_it_is_needed():
    first = candidates()[0].plan
    assert not first.cpu_offload and not first.activation_offloading
    found = candidates("1xH100")  # 128 GB of training state
    assert found[0].plan.cpu_offload and found[0].fits and found[0].forecast.step.offload > 0


def test_the_faster_way_to_keep_activations_is_taken_where_it_fits():
    """Of plans that differ in checkpointing alone, the table has none that is slower and smaller than another one."""
    keys = [replace(each.plan, why=(), activation_checkpointing="none") for each in candidates()
            if each.fits and each.plan.checkpoint_every == 1 and not each.plan.activation_offloading]  # fmt: skip
    assert len(keys) == len(set(keys)) > 50
    small = candidates(by="memory")
    policies = {
        each.plan.activation_checkpointing for each in small if each.fits and each.plan.schedule != "zero_bubble"
    }
    assert policies == {"full"}


def test_a_recipe_that_no_plan_can_honour_is_refused_with_the_reason():
    with pytest.raises(PlanError, match=r"parallel\.tp=3"):
        candidates("6xH100", given=fields({"tp": 3}))
    with pytest.raises(PlanError, match="the speed of cpu is unknown"):
        search(fields("ddp"), "2xcpu")


def test_a_budget_and_a_deadline_leave_out_plans():
    given = fields(activation_checkpointing="full", micro_batch_size=1)
    hours = sorted(each.forecast.hours for each in search(given, instance="ml.p5.48xlarge").allowed)
    limited = search(given, instance="ml.p5.48xlarge", deadline_hours=hours[4])
    assert sorted(each.forecast.hours for each in limited.allowed) == hours[:5]
    assert f"5 of them within {hours[4]:g} h" in str(limited)
    poor = search(given, instance="ml.p5.48xlarge", budget_usd=0.01)
    assert not poor.allowed and "no plan is within the limits" in str(poor)
    with pytest.raises(ConfigError, match="the price of these machines is unknown"):
        search(fields(), "8xH100", by="cost")
    epochs = {**fields(), "train": {"epochs": 1, "global_batch_size": 64}}
    with pytest.raises(ConfigError, match="depends on data that is not prepared"):
        search(epochs, "8xH100", deadline_hours=1)


def test_all_instance_types_are_compared_and_few_machines_preferred():
    report = search(fields(activation_checkpointing="full", micro_batch_size=1), instance="auto", by="cost")
    first, *others = report.allowed
    cost = [each.forecast.usd_per_billion_tokens for each in report.allowed]
    assert cost[0] <= 1.05 * min(cost)
    close = [each for each in report.allowed if each.forecast.usd_per_billion_tokens <= 1.05 * min(cost)]
    assert first.cluster.num_nodes == min(each.cluster.num_nodes for each in close)
    assert len({each.machines.split()[-1] for each in others}) > 3
    assert re.match(r"\d x ml\.", first.machines)
    assert re.search(r"why 1 and not 2: [\d.]+% (faster|slower)", str(report))
    assert "\n  prices on demand: us-west-2, 2026-09-01\n" in str(report)


def test_candidates_with_prices_of_different_regions_are_named():
    report = search(Path(__file__).parents[3] / "recipes" / "pretrain-1.3b.yaml", instance="auto", count=1, by="cost")
    [prices] = [line for line in str(report).splitlines() if line.startswith("  prices on demand: ")]
    places = {
        terms: [place for place, each in enumerate(report.shown[:10], 1) if each.forecast.price.terms == terms]
        for terms in ("us-west-2, 2026-09-01", "us-east-1, 2026-08")
    }
    assert all(f"{terms} of {', '.join(map(str, found))}" in prices for terms, found in places.items() if found)
    assert all(places.values()), "the catalogue has prices of two regions among the first ten"
    assert prices.endswith("; they differ between regions, so yours may rank otherwise")


def test_pipelines_and_divided_sequences_are_tried_where_they_could_come_first():
    """Where a divided plan is the cheapest, `--instance auto` finds it, as the full search of that type does."""
    config = LLAMA | {"max_position_embeddings": 65536, "hidden_size": 8192, "intermediate_size": 28672}
    given = fields(config=config | {"num_attention_heads": 64}, activation_checkpointing="full", micro_batch_size=1)
    given["data"] = {"train": "text.txt", "sequence_len": 65536}
    first = search(given, instance="auto", count=2, by="cost").candidates[0]
    assert first.plan.pp > 1 or first.plan.cp > 1
    alone = search(given, instance=first.machines.split()[-1], count=2, by="cost")
    assert replace(alone.candidates[0].plan, why=()) == replace(first.plan, why=())


def test_the_command_prints_a_table_or_json(tmp_path, capsys):
    path = tmp_path / "large.yaml"
    path.write_text(yaml.safe_dump(fields("fsdp")))
    plan_command(path, devices="8xH100@nvlink,efa", as_json=True)
    best = json.loads(capsys.readouterr().out)["candidates"][0]
    assert best["fits"] is True and best["parallel"]["dp_shard"] == 8 and best["usd"] is None
    assert best["tokens_per_second"] == pytest.approx(64 * 4096 / best["step_seconds"])
    assert sum(best["seconds"].values()) == pytest.approx(best["step_seconds"])
    plan_command(path, devices="8xH100", by="memory")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("search by memory:") and "limited by" in lines[1]
    with pytest.raises(ConfigError, match="--build divides one plan"):
        plan_command(path, devices="8xH100", by="memory", build=True)


def test_the_frontier_has_what_no_other_plan_beats():
    points = [(3.0, 1.0), (1.0, 5.0), (2.0, 5.0), (2.0, 2.0), (4.0, 1.0), (1.0, 6.0)]
    assert find_frontier(points) == [(1.0, 5.0), (2.0, 2.0), (3.0, 1.0)]


def test_a_search_over_machines_is_drawn_as_time_against_cost(tmp_path):
    report = search(fields(activation_checkpointing="full", micro_batch_size=1), instance="auto", count=1)
    root = ElementTree.fromstring(draw_search(report.allowed))
    space = "{http://www.w3.org/2000/svg}"
    assert len(list(root.iter(f"{space}circle"))) == len(report.allowed) > 3
    words = {each.text for each in root.iter(f"{space}text")}
    assert {"hours of the run", "dollars"} <= words
    assert min(report.allowed, key=lambda each: each.forecast.usd).machines in words
    memory = ElementTree.fromstring(draw_search(candidates()[:5]))
    assert "bytes of a device" in {each.text for each in memory.iter(f"{space}text")}
    with pytest.raises(ConfigError, match="nothing to draw"):
        draw_search([])


def test_fewer_machines_win_unless_the_numbers_say_otherwise():
    """One large machine, two of them at 3 % and at 20 % less cost: only the latter comes first, and says why."""
    fitting = (each for each in candidates() if each.fits and each.plan.pp == 1 and each.plan.dp_shard == 8)
    one = replace(next(fitting), machines="1 x ml.large")
    for factor, first in ((0.97, "1 x ml.large"), (0.8, "2 x ml.small")):
        price = HourlyPrice(10.0, "here")
        alone = replace(one, forecast=replace(one.forecast, price=price))
        step = one.forecast.step
        halves = {name: factor / 2 * getattr(step, name) for name in PARTS}
        sent = {axis: factor / 2 * seconds for axis, seconds in step.exposed_communication.items()}
        faster = replace(step, exposed_communication=sent, **halves)
        two = replace(one.cluster, num_devices=16)
        other = replace(
            alone,
            cluster=two,
            machines="2 x ml.small",
            forecast=replace(alone.forecast, step=faster, num_machines=2, num_devices=16),
        )
        ranked = prefer_fewer_machines(rank_plans([alone, other], "cost"), "cost")
        assert ranked[0].machines == first
        text = str(SearchReport(ranked, "cost"))
        assert ("why 2 machines, where 1 x ml.large would do: " in text) == (factor == 0.8)
        if factor == 0.8:
            rates = [each.forecast.tokens_per_second for each in ranked]
            assert f"{rates[0]:,.0f} tokens/s instead of {rates[1]:,.0f}" in text
            assert "for a billion tokens instead of $" in text


def test_failures_and_stragglers_count_in_the_ranking_and_in_the_limits():
    """Two machines at 15 % less cost come first, but not if they train in 60 % of the time instead of 90 %."""
    goodput = partial(Goodput, failure_hours=10.0, save_seconds=1.0, interval_seconds=600.0, slowdown=1.0)
    priced = (replace(each, forecast=replace(each.forecast, price=HourlyPrice(10.0, "here"))) for each in candidates())
    one = replace(next(priced), machines="one", goodput=goodput(share=0.9))
    forecast = replace(one.forecast, step=one.forecast.step.scaled(0.85 / 2), num_machines=2, num_devices=16)
    two = replace(one, machines="two", forecast=forecast, cluster=replace(one.cluster, num_devices=16))
    for share, first in ((0.9, "two"), (0.6, "one")):
        both = [one, replace(two, goodput=goodput(share=share))]
        for by in ("cost", "time") if share == 0.9 else ("cost",):
            ranked = prefer_fewer_machines(rank_plans(both, by), by)
            assert ranked[0].machines == first
        text = str(SearchReport(ranked, "cost"))
        assert f"{share:.1%}" in text and "% of the time is training" in text
    hours = one.forecast.hours
    assert SearchReport((one,), "time", deadline_hours=hours / 0.89).allowed
    assert not SearchReport((one,), "time", deadline_hours=hours / 0.91).allowed
    assert SearchReport((replace(one, goodput=None),), "time", deadline_hours=hours * 1.01).allowed


def test_the_goodput_of_machines_is_in_the_table_and_in_json():
    report = search(fields("fsdp"), "16xH100", reliability=Reliability(mtbf_hours=100.0))
    plan = report.candidates[0].plan
    share = estimate_goodput(build_shape(LLAMA), plan, 2, Reliability(mtbf_hours=100.0)).share
    assert 0.9 < share < 1 and report.to_dict()["candidates"][0]["goodput"] == report.to_dict()["goodput"] == share
    lines = str(report).splitlines()
    assert lines[1].endswith("goodput") and lines[2].endswith(f"{share:.1%}")
    assert any(line.startswith(f"useful time (goodput): {share:.1%} of the time") for line in lines)


def test_float8_is_told_of_and_not_chosen():
    report = search(fields("fsdp"), "8xH100")
    assert not any(each.plan.precision.float8 for each in report.candidates)
    assert report.float8.step.total < report.candidates[0].forecast.step.total
    assert "train.precision=fp8 would make a step of 1" in str(report)
    assert search(fields("fsdp", precision="bf16"), "8xH100").float8 is None
    assert search(fields("fsdp"), "8xA100-80").float8 is None


def test_the_recipe_of_the_first_candidate_can_be_given_to_the_command(tmp_path):
    path = tmp_path / "large.yaml"
    path.write_text(yaml.safe_dump(fields()))
    report = search(path, "8xH100")
    line = next(each for each in report.describe() if each.startswith("recipe of 1: "))
    recipe = load_recipe(path, shlex.split(line.removeprefix("recipe of 1: ")))[0]
    plan = resolve_plan(recipe, build_shape(LLAMA), parse_devices("8xH100"))
    assert replace(plan, why=()) == replace(report.candidates[0].plan, why=())
