# ruff: noqa: E501
"""A sweep file becomes values that are checked against the recipe before anything runs, or one error."""

from pathlib import Path

import pytest

from echelon.ground.errors import ConfigError
from echelon.tools.sweep.conduct import check_sweep
from echelon.tools.sweep.space import Space
from echelon.tools.sweep.sweep_file import load_sweep
from tests.unit.recipe_samples import SMALL

HEAD = "sweep: {name: lr, trials: 4}\nrecipe: recipe.yaml\n"
LR = "search: {optim.learning_rate: {low: 1e-4, high: 1e-2, log: true}}\n"


def write(folder: Path, text: str) -> Path:
    (folder / "recipe.yaml").write_text(SMALL)
    (folder / "sweep.yaml").write_text(text)
    return folder / "sweep.yaml"


def message_of(folder: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check_sweep(write(folder, text))
    return str(caught.value).replace(f"{folder}/", "")


def space_of(folder: Path, search: str, sampler: str = "tpe") -> Space:
    path = write(folder, f"sweep: {{name: s, trials: 3, sampler: {sampler}}}\nrecipe: recipe.yaml\nsearch: {search}\n")
    return Space(load_sweep(path), path)


def test_defaults(tmp_path: Path) -> None:
    checked = check_sweep(write(tmp_path, HEAD + LR))
    settings = checked.sweep.sweep
    assert (settings.dir, settings.sampler, settings.pruner, settings.parallel) == (Path("sweeps/lr"), "tpe", "none", 1)
    assert (settings.metric, settings.better, settings.seed, checked.num_trials) == ("eval_loss", "minimize", 0, 4)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (LR + "sweep: {name: lr, trails: 4}\nrecipe: recipe.yaml", "line 2: sweep.trails is not a key of a sweep file; did you mean sweep.trials?"),
        (HEAD + LR + "serach: {}", "line 4: serach is not a key of a sweep file; did you mean search?"),
        (HEAD + "search: {optim.learning_rate: {low: 1, hihg: 2}}", "search.optim.learning_rate.hihg is not a key of a sweep file; did you mean high?"),
        (HEAD + "search: {optim.learning_rat: [1]}", "optim.learning_rat is not a recipe key; did you mean optim.learning_rate?"),
        (HEAD + "search: {lr: [1]}", "search.lr: lr is not a recipe key; did you mean optim.learning_rate?"),
        (HEAD + "search: {optim.learning_rate: 3}", "search.optim.learning_rate=3 must be a list of values or {low: , high: }"),
        (HEAD + "search: {optim.learning_rate: [1, 1.0]}", "has 1.0 twice"),
        (HEAD + "search: {optim.learning_rate: {low: 2, high: 1}}", "low=2 must be less than high=1"),
        (HEAD + "search: {optim.learning_rate: {low: 0, high: 1, log: true}}", "low=0 must be more than 0"),
        (HEAD + "search: {optim.learning_rate: {low: 0.1, high: 1, step: 0.4}}", "use high=0.9"),
        (HEAD + "search: {optim.schedule: {low: 1, high: 2}}", "optim.schedule is not a number"),
        (HEAD + "search: {train.global_batch_size: {low: 1, high: 2.5}}", "high=2.5: train.global_batch_size must be a whole number"),
        (HEAD + "search: {run.name: [a, b]}", "the sweep gives every trial its own name and folder"),
        (HEAD + "search: {launch.to: [local]}", "all trials use one target"),
        (HEAD + "search: {train.steps: [1, 2], train.tokens: [100]}", "search.train.steps and search.train.tokens exclude each other"),
        (HEAD + "search: {optim: [{learning_rate: 1}], optim.betas: [[0.9, 0.9]]}", "overlap"),
        (HEAD + LR + "set: {optim.learning_rate: 1}", "optim.learning_rate is in both set and search"),
        (HEAD + "search: {optim.learning_rate: [0.1, -1]}", "the trial with optim.learning_rate=-1 is refused: optim.learning_rate=-1 must be more than 0"),
        (HEAD + "search: {optim.weight_decay: {low: -0.5, high: 1}}", "optim.weight_decay=-0.5 must be at least 0"),
        (HEAD.replace(", trials: 4", "") + LR, "sweep.trials is missing"),
        (HEAD.replace("4", "4, sampler: grid") + LR, "is a range without a step"),
        (HEAD.replace("4", "4, sampler: grid") + "search: {optim.learning_rate: [1, 2]}", "more than the 2 points of the grid"),
        (HEAD.replace("4", "4, sampler: cmaes") + LR, "sweep.sampler=cmaes needs two or more keys"),
        (HEAD.replace("4", "4, sampler: qmc") + "search: {optim.schedule: [cosine]}", "sweep.sampler=qmc searches only ranges of numbers"),
        (HEAD.replace("4", "4, pruner: asha, metric: train_loss") + LR, "use metric: eval_loss or pruner: none"),
        (HEAD + LR + "set: {launch.to: sagemaker, launch.sagemaker.instance_type: auto}", "instance_type=auto is chosen at a launch"),
        (HEAD + LR + "set: {launch.to: skypilot}", "the results of trials are deleted with their machines"),
        (SMALL, "is a recipe; a sweep file is a YAML file with the keys sweep, recipe and search"),
    ],
)  # fmt: skip
def test_refusals(tmp_path: Path, text: str, words: str) -> None:
    assert words in message_of(tmp_path, text)


def test_a_grid_is_every_combination(tmp_path: Path) -> None:
    search = "{optim.learning_rate: [0.1, 0.2], train.global_batch_size: {low: 8, high: 12, step: 2}}"
    assert [tuple(values.values()) for values in space_of(tmp_path, search, "grid").grid()] == [
        (0.1, 8), (0.1, 10), (0.1, 12), (0.2, 8), (0.2, 10), (0.2, 12),
    ]  # fmt: skip


def test_steps_are_exact_decimals(tmp_path: Path) -> None:
    space = space_of(tmp_path, "{optim.weight_decay: {low: 0.1, high: 0.4, step: 0.1}}", "grid")
    assert [values["optim.weight_decay"] for values in space.grid()] == [0.1, 0.2, 0.3, 0.4]


@pytest.mark.parametrize(
    ("key", "values", "whole"),
    [
        ("optim.weight_decay", "{low: 0, high: 1}", False),
        ("train.global_batch_size", "{low: 1e0, high: 1e3}", True),
        ("data.train.0.weight", "{low: 1, high: 2}", False),
        ("model.config.hidden_size", "{low: 8, high: 64}", True),
        ("model.config.rope_theta", "{low: 0.5, high: 64}", False),
    ],
)
def test_ranges_of_whole_number_keys_are_whole_numbers(tmp_path: Path, key: str, values: str, whole: bool) -> None:
    [dimension] = space_of(tmp_path, f"{{{key}: {values}}}").dimensions
    assert dimension.whole is whole


def test_values_with_any_characters_reach_the_recipe(tmp_path: Path) -> None:
    path = 'it\'s $HOME "and"\n: more'
    space = space_of(tmp_path, "{optim.betas: [[0.9, 0.95]], optim.learning_rate: [1e-5]}")
    recipe = space.recipe({"optim.betas": [0.8, 0.9], "optim.learning_rate": 1e-5, "data.train.0.path": path})
    assert recipe.optim.betas == (0.8, 0.9)
    assert recipe.optim.learning_rate == 1e-5
    assert recipe.data.train[0].path == path
