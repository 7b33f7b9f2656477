"""`plan --instance` and `quote` have one answer for a machine: the same plan, seconds and dollars, less the start."""

from dataclasses import replace
from pathlib import Path

import pytest

from echelon.cli.api.planning import plan
from echelon.cli.api.quoting import quote
from echelon.cli.api.searching import search
from echelon.planner.choose import resolve_plan
from echelon.planner.hardware import instances
from echelon.planner.hardware.accelerators import parse_devices
from echelon.planner.machines import choose_instance
from echelon.planner.search import take_plan
from echelon.planner.shape import build_shape
from echelon.recipe.document import Recipe
from echelon.recipe.load import load_recipe
from echelon.run.lifecycle.model_checks import check_model
from tests.unit.planner.test_search import LLAMA, fields

RECIPES = Path(__file__).parents[3] / "recipes"
TYPES = ("ml.p4d.24xlarge", "ml.g5.2xlarge", "ml.g5.12xlarge", "ml.g6e.2xlarge", "ml.g7e.2xlarge")
START_HOURS = 5 / 60


@pytest.fixture(autouse=True)
def few_types(monkeypatch):
    known = {name: instances.INSTANCES[name] for name in TYPES}
    known["ml.g5.2xlarge"] = replace(known["ml.g5.2xlarge"], ram_gib=64)  # else 1.3 B offloaded cannot be saved
    monkeypatch.setattr(instances, "INSTANCES", known)


def quote_each(name, count):
    """The recipe and its quotes, by the instance type."""
    recipe = load_recipe(RECIPES / f"{name}.yaml", [])[0]
    report = quote(recipe, count=count)
    return recipe, report, {each.candidate.machines.partition(" x ")[2]: each for each in report.quotes}


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", ["pretrain-1.3b", "arithmetic", "tinyshakespeare", "demo"])
def test_a_quote_is_the_plan_of_the_machine_and_a_start(name, count):
    recipe, _, quotes = quote_each(name, count)
    listed = {each.instance.name: each for each in choose_instance(recipe, check_model(recipe).shape, count).candidates}
    fitting = [type_name for type_name, each in listed.items() if each.fits]
    assert len(fitting) >= 2 and set(fitting) <= set(quotes)
    for type_name in fitting:
        found, shown, each = quotes[type_name], plan(recipe, instance=type_name, count=count), listed[type_name]
        hours, usd = each.forecast.hours, each.forecast.usd
        assert replace(found.candidate.plan, why=()) == replace(shown.plan, why=()) == replace(each.plan, why=())
        assert found.candidate.forecast.step == shown.forecast.step == each.forecast.step
        assert (shown.forecast.hours, shown.forecast.usd) == (hours, usd)
        assert found.hours.expected - START_HOURS == pytest.approx(hours)
        hourly = count * instances.INSTANCES[type_name].price.usd_per_hour
        assert found.usd.expected - START_HOURS * hourly == pytest.approx(usd)


@pytest.mark.parametrize(("name", "count", "type_name"), [("pretrain-1.3b", 1, "ml.g6e.2xlarge"),
                                                          ("pretrain-1.3b", 1, "ml.g5.2xlarge"),
                                                          ("arithmetic", 2, "ml.g5.2xlarge")])  # fmt: skip
def test_an_accepted_quote_sets_the_plan_that_it_shows(name, count, type_name):
    """A strategy on one GPU, one that offloads because none fits, and stages: the launched recipe gives the same."""
    _, report, quotes = quote_each(name, count)
    found = quotes[type_name].candidate
    settings = report.accepted(report.quotes.index(quotes[type_name]) + 1)
    launched = load_recipe(RECIPES / f"{name}.yaml", settings)[0]
    chosen = resolve_plan(launched, check_model(launched, elsewhere=True).shape, found.cluster)
    assert replace(chosen, why=()) == replace(found.plan, why=())
    assert (found.plan.cpu_offload, found.plan.pp) == (type_name == "ml.g5.2xlarge" and count == 1, count)


MIXTURE = {"model_type": "mixtral", "hidden_size": 2048, "intermediate_size": 4096, "num_hidden_layers": 16,
           "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8,
           "num_experts_per_tok": 2, "max_position_embeddings": 4096}  # fmt: skip


@pytest.mark.parametrize(
    ("devices", "strategy", "config", "sequence_len"),
    [("16xH100@nvlink,tcp25", "pp+fsdp", LLAMA, 4096), ("8xL4", "fsdp+tp", LLAMA, 4096),
     ("64xH100", "fsdp+ep", MIXTURE, 4096), ("8xA10G", "cp+tp", LLAMA | {"max_position_embeddings": 32768}, 32768)],
)  # fmt: skip
def test_the_settings_of_what_auto_takes_give_the_same_plan(devices, strategy, config, sequence_len):
    given = fields(config=config) | {"data": {"train": "text.txt", "sequence_len": sequence_len}}
    shape, cluster = build_shape(config), parse_devices(devices)
    taken = take_plan(Recipe.model_validate(given), shape, cluster)
    settings = taken.settings()
    pinned = given | {"parallel": settings["parallel"], "train": given["train"] | settings["train"]}
    chosen = resolve_plan(Recipe.model_validate(pinned), shape, cluster)
    assert taken.plan.strategy == strategy and replace(chosen, why=()) == replace(taken.plan, why=())


def test_where_auto_fits_nothing_the_quote_is_searched():
    recipe, _, quotes = quote_each("pretrain-1.3b", 1)
    choice = choose_instance(recipe, build_shape({**recipe.model.config, "vocab_size": 32000}), 1)
    assert "  do not fit: ml.g5.2xlarge" in choice.describe()
    assert (
        "  costs are of all steps, without a start; echelon plan --quote adds 5 min for it, and searches other plans "
        "for "
        "types that do not fit"
    ) in choice.describe()
    first = search(recipe, instance="ml.g5.2xlarge", count=1, by="cost").candidates[0]
    assert replace(quotes["ml.g5.2xlarge"].candidate.plan, why=()) == replace(first.plan, why=())
