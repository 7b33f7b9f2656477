"""The search over plans: what a recipe sets is kept, what it leaves is tried, and the table says why the best wins."""

import json
import re
from dataclasses import replace
from functools import cache

import pytest
import yaml

from echelon.api.searching import search
from echelon.commands.plan import plan as plan_command
from echelon.errors import ConfigError, PlanError
from echelon.hardware.accelerators import parse_devices
from echelon.planner.choose import resolve_plan
from echelon.planner.memory import estimate_memory
from echelon.planner.search import search_plans
from echelon.planner.shape import build_shape
from echelon.planner.time import estimate_time
from echelon.recipe import Recipe

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
    assert {each.schedule for each in found} >= {None, "1f1b", "interleaved"}


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
    ],
)
def test_what_the_recipe_sets_is_kept_by_every_candidate(given, holds):
    found = candidates(given=given)
    assert found and all(holds(each.plan) for each in found)


def test_a_candidate_is_the_plan_that_its_settings_give_on_the_devices():
    """Memory and time are those of a recipe that sets what the search chose, resolved with the real memory."""
    shape, cluster = build_shape(LLAMA), parse_devices("8xH100")
    layouts = {each.plan.strategy: each for each in reversed(candidates()) if each.fits}
    assert len(layouts) >= 4
    for each in layouts.values():
        degrees = {"dp_replicate": each.plan.dp_replicate, "dp_shard": each.plan.dp_shard}
        if each.plan.tp > 1 or each.plan.pp > 1:
            degrees |= {"tp": each.plan.tp, "pp": each.plan.pp}
            degrees |= {"sequence_parallel": True} if each.plan.tp > 1 else {}
            degrees |= {"schedule": each.plan.schedule} if each.plan.schedule else {}
        parallel = degrees if "tp" in degrees else each.plan.strategy
        train = {
            "micro_batch_size": each.plan.micro_batch_size,
            "activation_checkpointing": each.plan.activation_checkpointing,
        }
        plan = resolve_plan(Recipe.model_validate(fields(parallel, **train)), shape, cluster)
        assert estimate_memory(shape, plan, 4096).total == each.memory.total
        assert estimate_time(shape, plan, 4096, cluster).total == pytest.approx(each.forecast.step.total)


def test_a_model_that_fits_nowhere_is_answered_with_its_smallest_plans():
    found = candidates("1xT4", given=fields(precision="fp32"))
    assert found and not any(each.fits or each.to_dict()["fits"] for each in found)
    report = search(fields(precision="fp32"), "1xT4")
    assert "no plan fits in memory; the smallest ones:" in str(report)
    assert "does not fit" in str(report)


def test_offloading_is_tried_only_if_nothing_else_fits():
    assert not any(each.plan.cpu_offload for each in candidates())
    found = candidates("1xH100")  # 128 GB of training state
    assert found[0].plan.cpu_offload and found[0].fits and found[0].forecast.step.offload > 0


def test_a_recipe_that_no_plan_can_honour_is_refused_with_the_reason():
    with pytest.raises(PlanError, match=r"parallel\.tp=3"):
        candidates("6xH100", given=fields({"tp": 3}))
    with pytest.raises(PlanError, match="the speed of cpu is unknown"):
        search(fields("ddp"), "2xcpu")


def test_a_budget_and_a_deadline_leave_out_plans():
    given = fields(activation_checkpointing="full", micro_batch_size=1)
    free = search(given, instance="ml.p5.48xlarge")
    hours = sorted(each.forecast.hours for each in free.allowed)
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


def test_the_command_prints_a_table_or_json(tmp_path, capsys):
    path = tmp_path / "large.yaml"
    path.write_text(yaml.safe_dump(fields("fsdp")))
    plan_command(path, devices="8xH100@nvlink,efa", as_json=True)
    found = json.loads(capsys.readouterr().out)
    best = found["candidates"][0]
    assert best["fits"] is True and best["parallel"]["dp_shard"] == 8 and best["usd"] is None
    assert best["tokens_per_second"] == pytest.approx(64 * 4096 / best["step_seconds"])
    assert sum(best["seconds"].values()) == pytest.approx(best["step_seconds"])
    plan_command(path, devices="8xH100", by="memory")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("search by memory:") and "limited by" in lines[1]
    with pytest.raises(ConfigError, match="--build divides one plan"):
        plan_command(path, devices="8xH100", by="memory", build=True)
