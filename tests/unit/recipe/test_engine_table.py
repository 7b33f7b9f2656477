"""The table of engines: what a row refuses, with the key, the value and the way out, before anything starts."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from echelon.ground.errors import ConfigError, PlanError
from echelon.planner.choose import resolve_plan
from echelon.planner.engine_limits import compare_engines
from echelon.planner.hardware.accelerators import parse_devices
from echelon.planner.plan_lines import describe_plan
from echelon.planner.shape import build_shape
from echelon.recipe.document import Recipe, find_refused
from echelon.recipe.key_limits import Limit
from echelon.recipe.names import ENGINES, EngineRow
from echelon.run.lifecycle.model_checks import check_model
from tests.docs.reference import replace_table
from tests.unit.recipe_samples import SMALL, load_text

ROW = EngineRow(
    "my_parts:build",
    package="no_such_package",
    strategies=("zero1",),
    compiles=False,
    limits=(
        Limit("optim.name", ("adamw", "sgd"), "has no kernel of it"),
        Limit("parallel.tp", (1,), "does not divide matrices"),
    ),
    check="tests.unit.recipe.test_engine_table:check_batch",
)


def check_batch(recipe, plan):
    if plan.micro_batch_size > 2:
        raise ConfigError(f"train.micro_batch_size={plan.micro_batch_size} is too much for toy.")


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(ENGINES.loaded, "toy", ROW)
    yield


PAGE = Path(__file__).parents[3] / "docs" / "engines.md"


def test_the_page_has_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ENGINES, "loaded", {})  # without those of tests
    page = PAGE.read_text(encoding="utf-8")
    assert page == replace_table(page), "run python -m tests.docs.reference"


def test_every_engine_is_compared_for_a_recipe(tmp_path) -> None:
    lines = list(compare_engines(load_text(tmp_path, SMALL, "optim.name=lion")[0], plan_of))
    assert "  native: ddp, 1 x 4 sequences" in lines
    [refusal] = [line for line in lines if line.startswith("  toy: refuses it")]
    assert "engine" in refusal


def recipe_of(tmp_path, *overrides: str) -> Recipe:
    """A valid recipe that names an engine which no recipe file can name."""
    return load_text(tmp_path, SMALL, *overrides)[0].model_copy(update={"engine": "toy"})


def plan_of(recipe: Recipe):
    return resolve_plan(recipe, build_shape({**recipe.model.config, "vocab_size": 256}), parse_devices("2xcpu"))


def test_a_limit_names_key_value_rule_and_way_out(tmp_path) -> None:
    assert list(find_refused(recipe_of(tmp_path, "optim.name=lion"))) == [
        "optim.name=lion: engine=toy has no kernel of it; use optim.name=adamw or sgd, or engine=native."
    ]


def test_an_engine_can_run_objectives_from_outside_and_none_with_a_reference(tmp_path) -> None:
    own = load_text(tmp_path, SMALL, "engine=deepspeed", "objective.name=my_parts:focal")[0]
    assert not list(find_refused(own))
    with pytest.raises(
        ConfigError, match=r"name=dpo: engine=deepspeed has no .*use objective.name=causal_lm or package"
    ):
        load_text(tmp_path, SMALL, "engine=deepspeed", "objective.name=dpo")
    with pytest.raises(
        ConfigError, match=r"name=my_parts:focal: engine=tensorflow computes the loss of next tokens only"
    ):
        load_text(tmp_path, SMALL, "engine=tensorflow", "objective.name=my_parts:focal")


def test_keys_of_a_mapping_are_checked_only_in_a_mapping(tmp_path) -> None:
    assert not list(find_refused(recipe_of(tmp_path, "parallel=zero1")))
    [message] = find_refused(recipe_of(tmp_path, "parallel={tp: 2}"))
    assert message.startswith("parallel.tp=2: engine=toy does not divide matrices")


def test_native_refuses_nothing(tmp_path) -> None:
    assert not list(find_refused(load_text(tmp_path, SMALL, "optim.name=lion", "parallel={tp: 2}")[0]))


def test_auto_chooses_from_the_strategies_of_the_engine_and_leaves_compile_off(tmp_path) -> None:
    plan = plan_of(recipe_of(tmp_path, "train.micro_batch_size=2"))
    assert (plan.strategy, plan.engine, plan.compile) == ("zero1", "toy", False)
    assert describe_plan(plan)[0].startswith("plan: zero1 by toy on 2 processes")


def test_another_strategy_is_refused(tmp_path) -> None:
    with pytest.raises(PlanError, match=re.escape("parallel: the plan is fsdp, and engine=toy runs zero1;")):
        plan_of(recipe_of(tmp_path, "parallel=fsdp"))


def test_the_check_of_an_engine_is_called_with_the_plan(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"train\.micro_batch_size=4 is too much for toy"):
        plan_of(recipe_of(tmp_path, "train.micro_batch_size=4"))


def test_an_engine_without_its_package_is_refused_here_and_left_elsewhere(tmp_path) -> None:
    recipe = recipe_of(tmp_path)
    with pytest.raises(ConfigError, match="engine=toy requires the package no_such_package, which is not installed"):
        check_model(recipe)
    assert "engine: the package no_such_package (it is not installed here)" in check_model(recipe, elsewhere=True).left


@pytest.mark.parametrize(("key", "engine"), [("horovod.compression=fp16", "horovod"), ("toy={x: 1}", "toy")])
def test_settings_of_another_engine_are_refused(tmp_path, key, engine) -> None:
    with pytest.raises(ConfigError) as caught:
        load_text(tmp_path, SMALL, key)
    assert str(caught.value).endswith(
        f"{engine} has settings of engine={engine}, and the recipe has engine=native; set engine: {engine}, or remove "
        f"{engine}."
    )
