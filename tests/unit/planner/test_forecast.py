"""Hours and dollars of a run, what `echelon plan` says about them, and the measured runs that correct later plans."""

import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from echelon.cli.api.planning import plan as plan_again
from echelon.cli.api.searching import search
from echelon.ground.errors import PlanError
from echelon.planner.choose import resolve_plan
from echelon.planner.forecast import (
    NO_HISTORY,
    Forecast,
    HourlyPrice,
    MeasuredRun,
    describe_estimate,
    describe_plan,
    forecast_run,
    read_history,
    record_run,
)
from echelon.planner.hardware.accelerators import parse_devices
from echelon.planner.hardware.detection import calibrated_cluster
from echelon.planner.plan import ParallelPlan
from echelon.planner.shape import build_shape
from echelon.planner.time import TimeEstimate, estimate_time
from echelon.recipe.document import Recipe
from echelon.recipe.load import load_recipe
from echelon.run.folder.reckoning import reckon, sharpen_later_plans
from tests.unit.planner.axes.test_stages import build_recipe, shape_of
from tests.unit.planner.hardware.test_calibration import CALIBRATION, SHAPE, write_recipe
from tests.unit.planner.test_search import LLAMA, fields
from tests.unit.run.folder.test_reckoning import write_run

STEP = TimeEstimate(
    matmul=1.0, attention=0.25, memory_bound=0.25, recompute=0.0, exposed_communication={"dp": 0.4, "tp": 0.0},
    bubble=0.0, optimizer=0.05, offload=0.0, overhead=0.05,
)  # fmt: skip
RUN = Forecast(STEP, tokens_per_step=2_000_000, tokens=7_200_000_000, num_steps=3600, mfu=0.4, num_devices=16,
               num_machines=2, price=HourlyPrice(60.0, "us-west-2, 2026-09-01"))  # fmt: skip


def test_hours_and_dollars_are_those_of_the_tokens_at_the_predicted_speed():
    assert RUN.tokens_per_second == pytest.approx(1e6)
    assert RUN.hours == pytest.approx(2.0)  # 3600 steps of 2 s
    assert RUN.usd == pytest.approx(2 * 2 * 60)
    assert RUN.usd_per_billion_tokens == pytest.approx(120 * 1000 / 3600)


def test_the_lines_name_the_step_its_parts_the_run_and_the_price_with_its_date():
    lines = list(RUN.describe())
    assert lines[0] == (
        "time: 2 s per step of 2,000,000 tokens, 1,000,000 tokens/s (62,500 per device), MFU 40.0%; limited by compute"
    )
    assert lines[1:4] == [
        "  matrix products          1.0000 s  50.0%",
        "  communication dp         0.4000 s  20.0%",
        "  attention                0.2500 s  12.5%",
    ]
    assert not any("tp" in line for line in lines)
    assert lines[-2].startswith("run: 3,600 steps of 7,200,000,000 tokens in all take 2h00m")
    assert lines[-1] == (
        "cost: $240.00 for the run, $33.33 for a billion tokens, "
        "at $60/h x 2 machines on demand (us-west-2, 2026-09-01)"
    )


def test_without_a_price_or_a_number_of_steps_nothing_is_guessed():
    free, endless = replace(RUN, price=None), replace(RUN, tokens=None, num_steps=None)
    assert (free.usd, free.usd_per_billion_tokens, endless.hours, endless.usd) == (None, None, None, None)
    assert not any(line.startswith("cost") for line in free.describe())
    assert [line[:5] for line in endless.describe()][-1] == "cost:"
    assert "for the run" not in list(endless.describe())[-1]


def test_a_price_of_the_recipe_takes_precedence():
    recipe, cluster = build_recipe("fsdp", budget={"usd_per_hour": 7.0}), parse_devices("8xH100")
    chosen = resolve_plan(recipe, shape_of(), cluster)
    found = forecast_run(recipe, shape_of(), chosen, cluster, HourlyPrice(60.0, "us-west-2"))
    assert found.price == HourlyPrice(7.0, "budget.usd_per_hour")
    assert (found.tokens, found.num_steps) == (4 * 64 * 64, 4)


def test_the_seconds_of_a_run_folder_add_up():
    recipe, cluster = build_recipe("fsdp"), parse_devices("8xH100")
    found = describe_estimate(shape_of(), resolve_plan(recipe, shape_of(), cluster), cluster, NO_HISTORY)["seconds"]
    assert found is not None
    assert sum(found.values()) == pytest.approx(2 * found["step"])
    unknown = parse_devices("8xcpu")
    plan = resolve_plan(recipe, shape_of(), unknown)
    assert describe_estimate(shape_of(), plan, unknown, NO_HISTORY) == {"seconds": None}
    with pytest.raises(PlanError, match="the speed of cpu is unknown"):
        forecast_run(recipe, shape_of(), resolve_plan(recipe, shape_of(), unknown), unknown)


def test_a_plan_has_its_forecast_and_prints_it():
    recipe = build_recipe("fsdp")
    found = plan_again(recipe, instance="ml.p5.48xlarge", count=2)
    assert found.forecast is not None and found.forecast.num_devices == 16
    assert [line for line in found.lines if line.startswith(("time:", "run:", "cost:"))] == [
        line for line in found.forecast.describe() if not line.startswith("  ")
    ]
    assert any(line.startswith("cost:") and "2026-09-01" in line for line in found.lines)
    unknown = plan_again(recipe, devices="2xcpu")
    assert unknown.forecast is None
    assert unknown.lines[-1].startswith("time: the speed of cpu is unknown")


def test_planning_imports_no_torch():
    code = (
        "import sys; from echelon.cli.api.planning import plan; "
        "found = plan({'run': {'name': 'r'}, 'model': {'config': {'model_type': 'llama', 'vocab_size': 32000}}, "
        "'tokenizer': 'bytes', 'data': {'train': 'x.txt', 'sequence_len': 2048}, 'optim': {'learning_rate': 1e-3}, "
        "'train': {'steps': 9, 'global_batch_size': 512}, 'parallel': 'fsdp'}, devices='64xH100@nvlink,efa'); "
        "assert found.forecast is not None; assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_warning_about_a_cpu_that_is_not_calibrated_names_both_directions():
    """Steps may take longer than predicted, or less: 0.141 s were measured for 0.313 s."""
    cluster = parse_devices("1xcpu")
    cluster = replace(cluster, accelerator=replace(cluster.accelerator, fp32_flops=1e11, memory_bandwidth=1e10))
    step = estimate_time(shape_of(2), ParallelPlan("ddp", sequence_len=128), cluster)
    assert [line for line in step.assumptions if line.startswith("on CPUs")] == [
        "on CPUs only matrix products are measured: this time may be several times too short or too long"
    ]


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
    assert predict(tmp_path, shape=replace(SHAPE, hidden_size=512))["history"]["factor"] == 1.0
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
