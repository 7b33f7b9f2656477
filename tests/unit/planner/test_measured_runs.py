"""Measured runs that correct later predictions: what is kept, which run counts, and what a plan says."""

import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from echelon.cli.api.planning import plan as plan_again
from echelon.cli.api.searching import search
from echelon.planner.forecast import describe_estimate
from echelon.planner.hardware.accelerators import parse_devices
from echelon.planner.hardware.detection import calibrated_cluster
from echelon.planner.measured_runs import MeasuredRun, describe_plan, read_history, record_run
from echelon.planner.plan import ParallelPlan
from echelon.planner.shape import build_shape
from echelon.planner.time import estimate_time
from echelon.recipe.document import Recipe
from echelon.recipe.load import load_recipe
from echelon.run.folder.reckoning import reckon, sharpen_later_plans
from tests.unit.planner.hardware.test_calibration import CALIBRATION, SHAPE, write_recipe
from tests.unit.planner.test_search import LLAMA, fields
from tests.unit.run.folder.test_reckoning import write_run

CLUSTER = calibrated_cluster(CALIBRATION, 2, 2)
DDP = ParallelPlan("ddp", dp_replicate=2, micro_batch_size=2, num_microbatches=2)
FSDP = ParallelPlan("fsdp", dp_shard=2, reshard_after_forward=True, reduce_gradients="each", micro_batch_size=2)


def predict(cache, plan=DDP, shape=SHAPE, cluster=CLUSTER):
    return describe_estimate(shape, replace(plan, sequence_len=128), cluster, read_history(cache, shape, cluster))


def measure(cache, path, factor, plan=DDP, steps=300, uneven=(1.0,)):
    """A run whose steps take `factor` times what the formulas predict, as its end records it.

    `uneven`: multiples of that, which the times of its steps repeat.
    """
    estimate = predict(cache, plan)
    plain = estimate_time(SHAPE, replace(plan, sequence_len=128), CLUSTER).total
    times = [factor * plain * uneven[step % len(uneven)] for step in range(steps)]
    folder = write_run(path, times, estimate["seconds"])
    stored = json.loads(folder.estimate_path.read_text()) | estimate
    folder.estimate_path.write_text(json.dumps(stored))
    folder.plan_path.write_text(json.dumps(plan.to_dict()))
    found = reckon(folder)
    assert found is not None
    return sharpen_later_plans(folder, found, cache)


def test_a_measured_run_corrects_the_next_plan_of_its_model_and_device(tmp_path):
    plain = predict(tmp_path)
    assert plain["history"]["factor"] == 1.0
    line = measure(tmp_path, tmp_path / "first", 1.5)
    assert line is not None and "corrected by a factor of 1.50" in line
    found = predict(tmp_path)
    assert found["history"] == {"key": plain["history"]["key"], "factor": pytest.approx(1.5)}
    assert found["seconds"] == pytest.approx({name: 1.5 * each for name, each in plain["seconds"].items()})
    step = (
        read_history(tmp_path, SHAPE, CLUSTER)
        .correct(DDP)
        .apply(estimate_time(SHAPE, replace(DDP, sequence_len=128), CLUSTER))
    )
    assert step.assumptions[-1].startswith(f"corrected by a factor of 1.50: run {tmp_path / 'first'} of this plan took")


def test_corrections_do_not_add_up(tmp_path):
    """The second run was predicted with the factor of the first one; what is kept refers to the plain prediction."""
    measure(tmp_path, tmp_path / "first", 1.5)
    measure(tmp_path, tmp_path / "second", 1.8)
    assert predict(tmp_path)["history"]["factor"] == pytest.approx(1.8)
    measure(tmp_path, tmp_path / "first", 1.2)  # the same run again, which replaces its own measurement
    history = read_history(tmp_path, SHAPE, CLUSTER)
    assert [round(each.factor, 6) for each in history.runs] == [1.8, 1.2]


def test_the_run_that_is_most_like_a_plan_counts(tmp_path):
    measure(tmp_path, tmp_path / "fsdp", 2.0, FSDP)
    assert predict(tmp_path, DDP)["history"]["factor"] == pytest.approx(2.0)  # better than none
    measure(tmp_path, tmp_path / "ddp", 1.1, DDP)
    assert predict(tmp_path, FSDP)["history"]["factor"] == pytest.approx(2.0)
    assert predict(tmp_path, replace(DDP, micro_batch_size=4))["history"]["factor"] == pytest.approx(1.1)


def test_degrees_that_were_not_measured_get_the_mean_of_those_that_were(tmp_path):
    """The newest run of each: 2 and 8 of them are 4 in the geometric mean, whichever was last."""
    zero1 = ParallelPlan("zero1", dp_shard=2, reduce_gradients="last", micro_batch_size=2, num_microbatches=2)
    for name, plan, factor in (("old", FSDP, 5.0), ("ddp", DDP, 8.0), ("fsdp", FSDP, 2.0)):
        measure(tmp_path, tmp_path / name, factor, plan)
    correction = read_history(tmp_path, SHAPE, CLUSTER).correct(zero1)
    assert correction.factor == pytest.approx(4.0) and correction.by == "model"
    assert "the mean of runs of other plans of this model" in correction.reason
    assert f"{tmp_path / 'fsdp'} with fsdp on 2 processes" in correction.reason and "old" not in correction.reason


def test_a_search_is_ranked_by_what_was_measured(tmp_path, monkeypatch):
    """A run of one strategy changes all seconds, and the order of no two plans: its error may be that of all.

    Runs of two strategies change the order: plans with the degrees of either are corrected by its run, all others by
    the mean of the two factors, 3 and 1/3, which is 1.
    """
    monkeypatch.setenv("ECHELON_CACHE", str(tmp_path))
    recipe = Recipe.model_validate(fields(micro_batch_size=1, activation_checkpointing="full"))
    key = read_history(tmp_path, build_shape(LLAMA), parse_devices("8xH100")).key

    def rank():
        report = search(recipe, "8xH100")
        assert len({each.name() for each in report.candidates}) == len(report.candidates)
        return str(report), {each.name(): each for each in report.candidates}

    text, plain = rank()
    seconds = {name: each.forecast.step.total for name, each in plain.items()}
    best, second = list(plain)[:2]
    assert "corrected" not in text
    record_run(tmp_path, key, "first", plain[best].plan, seconds[best], 3 * seconds[best])
    text, once = rank()
    assert list(once) == list(plain)
    for name, each in once.items():
        assert each.forecast.step.total == pytest.approx(3 * seconds[name])
        assert each.to_dict()["correction"] == pytest.approx(3.0)
    assert "  1: corrected by a factor of 3.00: run first of this plan took" in text
    assert "corrected by a factor of 3.00, run of other plans of this model: first with" in text

    record_run(tmp_path, key, "second", plain[second].plan, seconds[second], seconds[second] / 3)
    _, twice = rank()
    degrees = {name: (each.plan.strategy, each.plan.degrees()) for name, each in plain.items()}
    factors = {
        name: 3 if like == degrees[best] else 1 / 3 if like == degrees[second] else 1 for name, like in degrees.items()
    }
    assert set(factors.values()) == {3, 1 / 3, 1}
    assert list(twice) == sorted(seconds, key=lambda name: seconds[name] * factors[name])
    assert next(iter(twice)) == second and list(twice).index(best) > 10


def test_other_models_and_devices_are_not_corrected(tmp_path):
    measure(tmp_path, tmp_path / "run", 1.5)
    wider = replace(SHAPE, hidden_size=512)
    assert predict(tmp_path, shape=wider)["history"]["factor"] == 1.0
    assert predict(tmp_path, cluster=parse_devices("2xH100"))["history"]["factor"] == 1.0


@pytest.mark.parametrize(
    ("steps", "factor", "uneven", "reason"),
    [
        (22, 20.0, (1.0,), "19 steps were measured, at least 20 are needed"),  # the first three do not count
        (28, 1.5, (1.0,), "s, at least 20 s are needed"),
        # quartiles 1, 2 and 4 of a machine that another program uses at times
        (303, 1.5, (1.0, 1.0, 2.0, 4.0, 4.0), "the middle half differ by 150% of the median, at most 15% are allowed"),
        (303, 1.5, (1.0, 1.08, 1.18), "those of the middle half differ by 17% of the median"),
    ],
)
def test_a_short_or_uneven_run_corrects_nothing_and_says_why(tmp_path, steps, factor, uneven, reason):
    line = measure(tmp_path, tmp_path / "run", factor, steps=steps, uneven=uneven)
    assert line is not None and line.startswith("later plans: not corrected by this run: ") and reason in line
    assert predict(tmp_path)["history"]["factor"] == 1.0


def test_a_run_with_few_slow_steps_corrects_later_plans(tmp_path):
    """A tenth of the steps waits for a save or an evaluation: the middle half of them is even."""
    line = measure(tmp_path, tmp_path / "run", 1.5, uneven=(1.0, 1.02, 0.98, 1.0, 1.01, 0.99, 1.0, 1.0, 1.0, 5.0))
    assert line is not None and "corrected by a factor of 1.50, measured in this run" in line
    assert predict(tmp_path)["history"]["factor"] == pytest.approx(1.5)


def test_damaged_files_correct_nothing(tmp_path):
    key = predict(tmp_path)["history"]["key"]
    record_run(tmp_path, key, "run", DDP, 1.0, 2.0)
    assert predict(tmp_path)["history"]["factor"] == 2.0
    path = tmp_path / "measured-runs" / f"{key}.json"
    content = path.read_text()
    path.write_text(content[:-9])
    assert predict(tmp_path)["history"]["factor"] == 1.0
    path.write_text(content.replace('"predicted": 1.0', '"predicted": 0.0'))
    assert predict(tmp_path)["history"]["factor"] == 1.0


def test_only_the_newest_runs_are_kept(tmp_path):
    for number in range(40):
        record_run(tmp_path, "key", f"run-{number}", DDP, 1.0, 2.0)
    kept = json.loads((tmp_path / "measured-runs" / "key.json").read_text())
    assert [each["name"] for each in kept] == [f"run-{number}" for number in range(8, 40)]
    assert MeasuredRun(**kept[-1]).plan == describe_plan(DDP)


@pytest.mark.slow
def test_a_real_run_corrects_the_next_plan_of_its_recipe(tmp_path, monkeypatch):
    """A run on one process of this CPU; its folder, the cache and the next plan agree about the factor."""
    monkeypatch.setenv("ECHELON_CACHE", str(tmp_path / "cache"))
    recipe = write_recipe(tmp_path)
    (tmp_path / "text.txt").write_text("a few words of text that is long enough\n" * 400)
    more = ("train.steps=120", "train.global_batch_size=256")  # half a minute of steps
    command = [sys.executable, "-m", "echelon", "train", recipe.name, *more, "--nproc", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    shown = done.stdout + done.stderr
    estimate = json.loads((tmp_path / "runs" / "small" / "estimate.json").read_text())
    measured, predicted = (estimate["reckoning"][side]["step_seconds"] for side in ("measured", "predicted"))
    monkeypatch.chdir(tmp_path)
    report = plan_again(recipe, "1xcpu")
    assert report.forecast is None  # no rate of an uncalibrated CPU is known without its processes
    here = str(plan_again(load_recipe(recipe, list(more))[0]))
    factor = re.search(r"corrected by a factor of ([\d.]+), measured in this run", shown)
    if factor is None:  # another program used the machine: then the next plan is not corrected either
        assert "later plans: not corrected by this run: " in shown and "corrected by a factor" not in here
        return
    assert float(factor[1]) == pytest.approx(measured / predicted, abs=0.006)
    assert f"corrected by a factor of {factor[1]}: run runs/small" in here
