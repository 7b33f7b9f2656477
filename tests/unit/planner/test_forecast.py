"""Hours and dollars of a run, and what `echelon plan` says about them."""

import subprocess
import sys
from dataclasses import replace

import pytest

from echelon.cli.api.planning import plan
from echelon.ground.errors import PlanError
from echelon.planner.choose import resolve_plan
from echelon.planner.forecast import Forecast, HourlyPrice, describe_estimate, forecast_run
from echelon.planner.hardware.accelerators import parse_devices
from echelon.planner.measured_runs import NO_HISTORY
from echelon.planner.plan import ParallelPlan
from echelon.planner.time import TimeEstimate, estimate_time
from tests.unit.planner.axes.test_stages import build_recipe, shape_of

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
    found = plan(recipe, instance="ml.p5.48xlarge", count=2)
    assert found.forecast is not None and found.forecast.num_devices == 16
    assert [line for line in found.lines if line.startswith(("time:", "run:", "cost:"))] == [
        line for line in found.forecast.describe() if not line.startswith("  ")
    ]
    assert any(line.startswith("cost:") and "2026-09-01" in line for line in found.lines)
    unknown = plan(recipe, devices="2xcpu")
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
