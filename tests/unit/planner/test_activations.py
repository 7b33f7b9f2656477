"""`train.activation_checkpointing: auto`: what is weighed, by which rule, and what the plan says about it."""

from dataclasses import replace

import pytest

from echelon.planner.activations import list_activations
from echelon.planner.choose import resolve_plan
from echelon.planner.hardware.accelerators import parse_devices
from echelon.planner.shape import build_shape
from echelon.planner.time import estimate_time
from echelon.recipe.document import Recipe
from tests.unit.planner.test_search import LLAMA, fields

SHAPE = build_shape(LLAMA)


def plan_on(devices, given="auto", parallel="fsdp", **train):
    recipe = Recipe.model_validate(fields(parallel, activation_checkpointing=given, **train))
    return resolve_plan(recipe, SHAPE, parse_devices(devices))


def why(plan):
    return next((line for line in plan.why if line.startswith("activation_checkpointing auto")), "")


@pytest.mark.parametrize(
    ("devices", "chosen"), [("8xH100", "none"), ("16xRTXPRO6000", "selective"), ("8xA100-40", "full")]
)
def test_auto_is_the_fastest_that_fits(devices, chosen):
    cluster = parse_devices(devices)
    plan = plan_on(devices)
    assert plan.activation_checkpointing == chosen and f"auto: {chosen}" in why(plan)
    others = [plan_on(devices, given) for given in ("none", "selective", "full")]
    fitting = [each for each in others if not any("may run out of memory" in line for line in each.why)]
    seconds = [estimate_time(SHAPE, each, cluster).total for each in fitting]
    assert estimate_time(SHAPE, plan, cluster).total == min(seconds)
    assert all(not why(each) for each in others)


def test_on_devices_of_unknown_speed_it_is_the_first_that_fits():
    """Every strategy comes before more is recomputed."""
    device = parse_devices("8xH100")
    known = device.accelerator.memory_bytes
    found = []
    for share in (1, 0.8, 0.55):
        unknown = replace(device.accelerator, name="a GPU", memory_bytes=int(known * share))
        recipe = Recipe.model_validate(fields("auto", micro_batch_size=2))
        plan = resolve_plan(recipe, SHAPE, replace(device, accelerator=unknown))
        found.append((plan.strategy, why(plan).removeprefix("activation_checkpointing auto: ")))
    assert found == [
        ("fsdp", "none, all activations fit"), ("fsdp", "selective, the first that fits"),
        ("fsdp", "full, the first that fits"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "allowed"),
    [
        ({}, ["none", "selective", "full"]),
        ({"engine": "tensorflow"}, ["none"]),
        ({"parallel": {"pp": 2, "schedule": "zero_bubble"}}, ["none"]),
        ({"activation_offloading": True}, ["none", "full"]),
        ({"activation_offloading": True, "compile": True}, ["full"]),
        ({"activation_checkpointing": "selective"}, ["selective"]),
    ],
)
def test_what_the_rest_of_a_recipe_rules_out_is_not_weighed(changes, allowed):
    train = {key: value for key, value in changes.items() if key not in ("engine", "parallel")}
    given = fields(changes.get("parallel", "ddp"), **train) | {"engine": changes.get("engine", "native")}
    assert [kept.policy for kept in list_activations(Recipe.model_validate(given))] == allowed
