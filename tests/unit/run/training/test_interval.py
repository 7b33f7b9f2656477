"""The interval of saves: the formula compared with a search and with values by hand, and updates after each save."""

import math
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from echelon.planner.reliability import best_interval_seconds, lost_fractions
from echelon.recipe.load import parse_recipe
from echelon.run.training.saver import SaveInterval
from tests.unit.recipe_samples import SMALL

HOUR = 3600.0


def expected_wall(interval: float, save: float, failures: float, restart: float) -> float:
    """The exact ratio of wall time to useful time with random failures: Daly's equation 20."""
    return failures * math.exp(restart / failures) * math.expm1((interval + save) / failures) / interval


@pytest.mark.parametrize(("save", "failures"), [(5.0, HOUR), (60.0, 4 * HOUR), (300.0, 2 * HOUR), (0.2, 100 * HOUR)])
def test_no_other_interval_loses_less(save: float, failures: float) -> None:
    chosen = best_interval_seconds(save, failures)
    walls = {factor: expected_wall(chosen * factor, save, failures, 30.0) for factor in (0.8, 0.9, 1.0, 1.1, 1.25)}
    assert min(walls, key=walls.__getitem__) == 1.0, walls


def test_by_hand() -> None:
    # sqrt(2 * 5 * 3600) = 189.737; times 1 + sqrt(5/7200)/3 + 5/7200/9 = 1.0088613; minus 5
    assert best_interval_seconds(5.0, HOUR) == pytest.approx(186.418, abs=1e-2)
    assert best_interval_seconds(3 * HOUR, HOUR) == HOUR
    saving, redone = lost_fractions(95.0, 5.0, 1000.0)
    assert saving == pytest.approx(0.05) and redone == pytest.approx(0.05)


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def build(every, hours=None, devices=1, step=0) -> SaveInterval:
    recipe, _ = parse_recipe(SMALL, "recipe.yaml")
    recipe = recipe.model_copy(update={
        "checkpoint": recipe.checkpoint.model_copy(update={"every": every}),
        "fault": recipe.fault.model_copy(update={"mean_hours_between_failures": hours}),
    })  # fmt: skip
    return SaveInterval(recipe, 100, devices, step)


def test_a_number_is_that_number(group) -> None:
    interval = build(7)
    assert [step for step in range(1, 30) if interval.is_due(step)] == [7, 14, 21, 28]
    assert interval.learn(7, 100.0, 100.0, group) is None


def test_a_third_of_an_epoch(group) -> None:
    # 100 sequences an epoch, 8 a step: thirds of it are reached with steps 5 (40), 9 (72) and 13 (104), 17 (136), ...
    recipe, _ = parse_recipe(SMALL + "checkpoint: {every: 1/3 epochs}\n", "recipe.yaml")
    interval = SaveInterval(recipe, 100, num_devices=1, step=0)
    assert [step for step in range(1, 26) if interval.is_due(step)] == [5, 9, 13, 17, 21, 25]
    assert interval.learn(5, 100.0, 100.0, group) is None


def test_auto_saves_soon_and_then_at_the_best_interval(group) -> None:
    interval = build("auto", hours=1.0, step=100)
    for _ in range(10):
        interval.on_metrics(SimpleNamespace(seconds=2.0))
    assert [step for step in range(101, 111) if interval.is_due(step)] == [110]
    line = interval.learn(110, 5.0, 0.0, group)
    # 186.4 s are 94 steps of 2 s; then 5 of 193 s are 2.6 %, and half of 193 of 3600 s 2.7 %
    assert line is not None and "every 94 steps (3m08s)" in line and "a failure is expected every 1h00m" in line
    assert "expected loss of time 5.3 %: 2.6 % saving, 2.7 % repeated work" in line
    assert next(step for step in range(111, 210) if interval.is_due(step)) == 204
    assert interval.learn(204, 5.1, 3.0, group) is None, "no news"
    assert interval.learn(300, 5.0, 400.0, group) is not None, "a save takes 400 s to be written"
    assert interval.is_due(500) and not interval.is_due(499)


def test_failures_are_more_frequent_on_more_devices(group) -> None:
    lines = []
    for devices in (1, 1000):
        interval = build("auto", devices=devices)
        interval.on_metrics(SimpleNamespace(seconds=1.0))
        lines.append(interval.learn(10, 1.0, 0.0, group))
    assert "every 2083d08h" in lines[0] and "every 2d02h" in lines[1]
    # Young: sqrt(2 * 1 * 180000) = 600 s and sqrt(2 * 1 * 1.8e8) = 18973.7 s; Daly: 2/3 of a second less
    assert "every 18973 steps" in lines[0] and "every 600 steps" in lines[1]
