"""External classes named in a recipe: accepted ones, and one clear error for each unusable one."""

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import jsonschema
import numpy as np
import pytest
import torch

from echelon.cli.commands.arguments import read_recipe
from echelon.ground.errors import ConfigError
from echelon.ground.extensions import find_named
from echelon.learn.data.prepare import prepare_data
from echelon.learn.objectives.objective import build_objective
from echelon.learn.optimizer.stepper import choose_rule
from echelon.planner.memory import estimate_memory
from echelon.recipe.difference import blocking_differences
from echelon.recipe.load import build_recipe, load_recipe
from echelon.recipe.render import recipe_json_schema, render_recipe
from echelon.recipe.training import OptimConfig
from echelon.run.lifecycle.extension_checks import check_extensions, describe_extensions, list_extensions
from echelon.run.training.callbacks import build_callbacks
from tests.own_parts import write_package
from tests.unit.recipe_samples import RECIPE

GIVEN = RECIPE | {"data": {"train": "text.txt", "sequence_len": 16, "validation_fraction": 0.2}}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed external package, with a new name for each test, because Python caches imports."""
    name = write_package(tmp_path / "site", f"their_parts_{abs(hash(tmp_path))}")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.chdir(tmp_path)
    return name


def build(**overrides):
    return build_recipe(GIVEN, {key.replace("__", "."): value for key, value in overrides.items()})[0]


def test_an_optimizer_gets_its_options(package):
    config = build(optim__name=f"{package}:SignMomentum", optim__options={"momentum": 0.25}).optim
    rule = choose_rule(config, True)
    assert (rule.momentum, rule.is_layer_matrix, rule.config) == (0.25, True, config)
    assert rule == choose_rule(config, True) != choose_rule(config, False), "parameters of equal rules go together"


def test_an_objective_gets_its_options(package):
    recipe = build(objective__name=f"{package}:ZLoss", objective__options={"weight": 0.5})
    assert build_objective(recipe.objective).weight == 0.5
    assert load_recipe_text(recipe) == recipe


def test_a_function_is_a_loss_and_gets_its_options(package):
    recipe = build(objective__name=f"{package}:smoothed", objective__options={"smoothing": 0.5})
    check_extensions(recipe)
    objective = build_objective(recipe.objective)
    logits, labels = torch.randn(3, 8), torch.tensor([1, -100, 2])
    outputs = SimpleNamespace(logits_loss_sum=lambda function, labels, extra: function(logits, labels, extra))
    expected = torch.nn.functional.cross_entropy(logits, labels, reduction="sum", label_smoothing=0.5)
    assert torch.equal(objective.loss_sum(outputs, SimpleNamespace(labels=labels, extra={})), expected)
    assert (objective.unit, objective.measures, objective.needs_reference) == ("target_tokens", (), False)
    assert load_recipe_text(recipe) == recipe


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("shutil:rmtree", None, r"function of \(path, ignore_errors, .*\), and a loss is a function of \(logits, l"),
        ("os:system", None, r"must be a class with loss_sum, like echelon's Objective, but it is a builtin_function"),
        ("torch.optim:AdamW", None, r"but it is one of torch\.optim, which are not accepted; use such a class"),
        ("subprocess:Popen", None, r"must be a class with loss_sum, .* but it has no count\(\); use such a class"),
        ("{package}:smoothed", {"wait": 1}, r"\{'wait': 1\} does not fit .* argument 'wait'"),
        ("{package}:Unfinished", None, r"must be a class with loss_sum, .* but it has no loss_sum\(\)"),
    ],
)  # fmt: skip
def test_an_unusable_loss_is_one_error(package, name, options, message):
    recipe = build(objective__name=name.format(package=package), objective__options=options)
    for use in (check_extensions, lambda recipe: build_objective(recipe.objective)):
        with pytest.raises(ConfigError, match=rf"^objective\.(name|options)=.*{message}"):
            use(recipe)


def load_recipe_text(recipe):
    from echelon.recipe.load import parse_recipe

    return parse_recipe(render_recipe(recipe), "recipe.yaml")[0]


def test_a_reader_feeds_what_it_reads(package, tmp_path):
    (tmp_path / "poems.verse").write_text("one two\n+++\n  three\n+++\nfour\n" + "+++\nmore of it\n" * 20)
    source = {"path": "poems.verse", "format": f"{package}:Verses", "options": {"stars": "+++"}}
    prepared = prepare_data(build(data__train=[source], data__validation_fraction=0))
    text = b"one two" + b"three" + b"four" + b"more of it" * 20
    assert bytes(prepared.train.read_samples(np.array([0])).inputs[0].tolist()) == text[:16]
    assert prepared.train.num_tokens == len(text)
    again = prepare_data(build(data__train=[{**source, "options": {"stars": "more"}}]))
    assert again.path != prepared.path, "other options are other text"
    with pytest.raises(
        ConfigError, match=r"^data.train.0.format=\S+:Verses: it cannot be built: no such star; see data"
    ):
        prepare_data(build(data__train=[{**source, "options": {"fault": "no such star"}}]))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_package.parts:Rule", r"no_such_package.parts cannot be imported on this machine .*PYTHONPATH"),
        ("{package}:Nothing", r"the module their_parts\w* has no Nothing; correct the name"),
        ("os:system", r"must be a class with build_state, update, like echelon's Rule, but it is a builtin_function"),
        ("subprocess:Popen", r"must be a class with build_state, update, .* but it has no build_state\(\)"),
        ("__main__:Mine", r"training processes cannot import .* use my_parts:Mine"),
    ],
)
def test_an_unusable_class_is_one_error(package, name, message):
    recipe = build(optim__name=name.format(package=package))
    for use in (check_extensions, lambda recipe: choose_rule(recipe.optim, True)):
        with pytest.raises(ConfigError, match=rf"^optim.name={name.format(package=package)}: .*{message}"):
            use(recipe)


def test_options_are_checked_against_the_class(package):
    recipe = build(objective__name=f"{package}:ZLoss", objective__options={"wait": 1})
    with pytest.raises(ConfigError, match=r"^objective.options=\{'wait': 1\} does not fit .* argument 'wait'\)"):
        check_extensions(recipe)
    with pytest.raises(ConfigError, match=r"optim.options=\{x: 1\} has no effect with optim.name=lion"):
        build(optim__name="lion", optim__options={"x": 1})


@pytest.mark.parametrize("key", ["optim.name", "objective.name", "sync.name"])
@pytest.mark.parametrize("name", ["adamx", "a.b", "a:", ":b", "a b:c", "a:b.c"])
def test_other_names_are_refused_when_the_recipe_is_read(key, name):
    with pytest.raises(ConfigError, match=rf"{key}={name!r} must be .* or package.module:Name|{key}={name} must be"):
        build_recipe(GIVEN, {key: name})


def test_the_schema_accepts_both_spellings():
    schema = recipe_json_schema()
    check = jsonschema.Draft202012Validator(schema).is_valid
    for name, good in (("muon", True), ("their.parts:Rule", True), ("muom", False), ("a b:c", False)):
        recipe = {**GIVEN, "data": {"train": [{"path": "x"}]}, "optim": {"learning_rate": 1e-3, "name": name}}
        assert check(recipe) is good, name


def test_plans_are_made_without_importing(package):
    import echelon

    recipe = build(optim__name="not_here.at_all:Rule", data__train=[{"path": "x", "format": "nor.this:Reader"}])
    assert [each.key for each in list_extensions(recipe)] == ["data.train.0.format", "optim.name"]
    report = echelon.plan(recipe, "2xH100")
    told = f"left to train: optim.name=not_here.at_all:Rule: {describe_extensions(recipe)[1].partition(': ')[2]}"
    assert told in report.lines and "whether the package not_here is installed on every machine" in told
    adamw = echelon.plan(GIVEN, "2xH100")
    own = "not_here.at_all:Rule keeps two numbers per parameter, like AdamW"
    assert set(report.memory.assumptions) == {*adamw.memory.assumptions, own}
    assert replace(report.memory, assumptions=adamw.memory.assumptions) == adamw.memory
    assert adamw.memory == estimate_memory(adamw.shape, adamw.plan, "cuda")


def test_a_users_own_recipe_finds_modules_beside_it(package, tmp_path, monkeypatch):
    """The recipe's folder is importable, as for a script; commands that only read a run do not import from it."""
    write_package(tmp_path, "beside_it")
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps({**GIVEN, "objective": {"name": "beside_it:ZLoss"}}))
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    with pytest.raises(ConfigError, match="cannot be imported"):
        build_objective(load_recipe(path)[0].objective)
    assert type(build_objective(read_recipe(path, []).objective)).__name__ == "ZLoss"
    monkeypatch.delitem(sys.modules, "beside_it")


def test_callbacks_are_names_or_mappings(package, tmp_path):
    recipe = build(train__callbacks=[f"{package}:Diary", {"name": f"{package}:Diary", "options": {"path": "x"}}])
    assert recipe == build(train__callbacks=[{"name": f"{package}:Diary"}, recipe.train.callbacks[1].model_dump()])
    assert load_recipe_text(recipe) == recipe and build(train__callbacks=f"{package}:Diary").train.callbacks[0].name
    assert build_callbacks(recipe.train.callbacks[1:])[0].path.name == "x"
    with pytest.raises(ConfigError, match=r"^train.callbacks.0.options=\{\} does not fit .*argument: 'path'\)"):
        check_extensions(recipe)
    with pytest.raises(ConfigError, match=r"train.callbacks=tqdm must be package.module:Name; use"):
        build(train__callbacks="tqdm")
    assert not blocking_differences(build(), recipe), "a run may go on with others"


def test_table_rows_exist():
    from echelon.learn.data.readers import find_reader
    from echelon.learn.data.readers.record import Reader, SourceFile
    from echelon.recipe.names import FORMATS, OBJECTIVES, OPTIMIZERS, SYNCHRONIZERS

    for name in OPTIMIZERS:
        choose_rule(OptimConfig(name=name, learning_rate=1.0), True)
    for name in FORMATS:
        assert isinstance(find_reader(SourceFile(None, "", name, 0, 0, True)), Reader)
    for table in ({name: row.place for name, row in OBJECTIVES.items()}, SYNCHRONIZERS):
        for name in table:
            assert callable(find_named("key", name, table))
