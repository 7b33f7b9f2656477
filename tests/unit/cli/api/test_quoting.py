"""Quotes: hours and dollars by hand, error bars, their order; the launch and the end of an accepted one."""

import json
import math
from dataclasses import replace

import pytest

from echelon.cli.api.quoting import PUBLISHED, ErrorBar, Quote, QuoteReport, find_error_bar, order_quotes, quote
from echelon.ground.errors import ConfigError
from echelon.planner.forecast import NO_HISTORY, History, MeasuredRun, describe_plan, render_usd
from echelon.recipe.load import load_recipe
from echelon.run.folder.reckoning import read_quote, reckon, store_reckoning
from echelon.run.folder.run_folder import RunFolder
from echelon.run.report.run_record import read_record
from echelon.run.report.sections import build_report

RECIPE = """
run: {name: q}
model:
  config: {model_type: llama, vocab_size: 32000, hidden_size: 512, intermediate_size: 1024, num_hidden_layers: 4,
           num_attention_heads: 8}
tokenizer: bytes
data: {train: text.txt, sequence_len: 1024}
train: {tokens: 2.0e+9, global_batch_tokens: 262144, micro_batch_size: 4, activation_checkpointing: none}
optim: {learning_rate: 3.0e-4}
parallel: ddp
"""


@pytest.fixture(scope="module")
def recipe_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("quote") / "recipe.yaml"
    path.write_text(RECIPE)
    return path


@pytest.fixture(scope="module")
def report(recipe_path):
    return quote(recipe_path, count=1)


def test_a_quote_is_a_start_and_all_steps_at_the_price_of_the_machines(report):
    first = report.quotes[0]
    forecast = first.candidate.forecast
    tokens = math.ceil(2e9 / 262144) * 262144
    steps = tokens / forecast.tokens_per_second / 3600
    assert first.hours.expected == pytest.approx(300 / 3600 + steps)
    assert first.hours.low == pytest.approx(300 / 3600 + 0.82 * steps)
    assert first.hours.high == pytest.approx(300 / 3600 + 1.39 * steps)
    assert first.usd.expected == pytest.approx(first.hours.expected * forecast.price.usd_per_hour)


PRICES = """
- region: us-west-2
  date: "2026-11-20"
  source: of a test
  spot_usd_per_hour: {g6e.12xlarge: 4.0}
- region: south
  date: "2026-11-21"
  source: of another test
  usd_per_hour: {other.8x-h100: 20.0}
  machines: {other.8x-h100: {gpus: 8, accelerator: H100, vcpus: 208, memory_gib: 1800, network_gbits: 3200}}
"""


def test_spot_machines_and_those_of_a_file_are_quoted_too(recipe_path, tmp_path, monkeypatch):
    monkeypatch.setenv("ECHELON_CACHE", str(tmp_path))
    (tmp_path / "prices").mkdir()
    (tmp_path / "prices" / "mine.yaml").write_text(PRICES)
    found = quote(recipe_path, count=1)
    by_name = {one.machines: one for one in found.quotes}
    spot, on_demand = by_name["1 x ml.g6e.12xlarge spot"], by_name["1 x ml.g6e.12xlarge"]
    assert spot.hours == on_demand.hours
    assert spot.usd.expected == pytest.approx(spot.hours.expected * 4.0)
    other = by_name["1 x other.8x-h100"]
    assert other.usd.expected == pytest.approx(other.hours.expected * 20.0)
    text = str(found)
    assert "$4/h (spot, us-west-2, 2026-11-20)" in text and "$20/h (south, 2026-11-21)" in text
    assert "prices: of 4 regions and dates, compared as they are" in text
    settings = found.accepted(found.quotes.index(spot) + 1)
    assert "budget.spot_usd_per_hour=4.0" in settings
    assert 'launch.sagemaker.spot={"max_wait_hours": 48}' in settings
    with pytest.raises(ConfigError, match="which echelon cannot rent"):
        found.accepted(found.quotes.index(other) + 1)
    (tmp_path / "prices" / "mine.yaml").write_text(PRICES.replace("4.0", "free"))
    with pytest.raises(ConfigError, match=r"mine\.yaml is not a list of prices \(spot_usd_per_hour\.g6e\.12xlarge"):
        quote(recipe_path, count=1)


def test_the_cheapest_to_the_fastest_come_first(report):
    """Against the definition: nothing is at or below one of the best in both, and something is for each other."""
    points = [(one.usd.expected, one.hours.expected) for one in report.quotes]
    count = len(report.best)
    for number, (usd, hours) in enumerate(points):
        beaten = any((u, h) != (usd, hours) and u <= usd and h <= hours for u, h in points)
        assert beaten == (number >= count)
    assert points[:count] == sorted(points[:count])
    assert points[count:] == sorted(points[count:])
    words = "go from the cheapest to the fastest, and each of the others is beaten by one of them in both"
    assert count > 1 and str(report).startswith(f"{len(points)} quotes; 1 to {count} {words}\n")
    one = replace(report, best=report.best[:1])
    assert str(one).startswith(f"{len(one.quotes)} quotes; 1 is the cheapest and the fastest\n")


def test_what_has_no_price_is_said(report):
    assert "ml.p5en.48xlarge" in report.unpriced
    words = str(report)
    assert "no price known, so not compared: " in words and "echelon plan --prices refresh looks prices up" in words
    assert "\n  with 5 min for a start; without evaluation, checkpoints, waiting for machines, storage and tr" in words
    assert "error bar: 8 of 10 published runs took between 0.82 and 1.39 times as long as predicted" in words


def test_small_amounts_have_digits(recipe_path):
    found = quote(load_recipe(recipe_path, ["train.tokens=1.0e+6"])[0], count=1)
    cheapest = found.quotes[0].usd.expected
    assert 0.01 < cheapest < 1 and f"${cheapest:.2g}" in str(found)
    assert (render_usd(0.00123), render_usd(0.0), render_usd(1234.5)) == ("$0.0012", "$0.00", "$1,234.50")


def make_history(plan, *factors, degrees=None):
    words = describe_plan(plan) | ({} if degrees is None else {"degrees": degrees})
    runs = (MeasuredRun(f"run-{number}", "2026-11-28", words, 1.0, factor) for number, factor in enumerate(factors))
    return History("key", tuple(runs))


def test_the_error_bar_is_that_of_the_own_runs_once_there_are_three(report):
    plan = report.quotes[0].candidate.plan
    assert find_error_bar(plan, NO_HISTORY) == PUBLISHED
    assert find_error_bar(plan, make_history(plan, 1.0, 1.2)) == PUBLISHED
    assert find_error_bar(plan, make_history(plan, 1.0, 2.0, 4.0, degrees="others")) == PUBLISHED
    found = find_error_bar(plan, make_history(plan, 1.0, 2.0, 4.0))  # their geometric mean is 2
    assert (found.low, found.high) == pytest.approx((0.5, 2.0))


def test_an_accepted_quote_is_launched_with_its_machines_plan_and_budget(report, recipe_path):
    first = report.quotes[0]
    recipe, _ = load_recipe(recipe_path, report.accepted(1))
    assert recipe.launch.to == "sagemaker"
    assert f"{recipe.launch.nodes} x {recipe.launch.sagemaker.instance_type}" == first.candidate.machines
    assert recipe.budget.max_usd == pytest.approx(first.usd.high, abs=0.01)
    assert recipe.budget.usd_per_hour == first.candidate.forecast.price.usd_per_hour
    assert read_quote(recipe.launch.env)["quote"]["usd"] == pytest.approx(first.usd.expected, abs=1e-4)
    assert recipe.train.micro_batch_size == first.candidate.plan.micro_batch_size
    with pytest.raises(ConfigError, match=f"--accept {len(report.quotes) + 1}: the quotes have the numbers 1 to"):
        report.accepted(len(report.quotes) + 1)


def test_a_smaller_budget_of_the_recipe_stays(report):
    recipe = report.recipe.model_copy(update={"budget": report.recipe.budget.model_copy(update={"max_usd": 0.5})})
    assert "budget.max_usd=0.5" in replace(report, recipe=recipe).accepted(1)


def test_hours_that_depend_on_the_data_are_refused(recipe_path):
    with pytest.raises(ConfigError, match="the number of steps depends on data that is not prepared"):
        quote(load_recipe(recipe_path, ["train.tokens=null", "train.epochs=1"])[0], count=1)


def test_order_keeps_the_first_of_two_that_are_equal(report):
    one = report.quotes[0]
    same = Quote(one.candidate, ErrorBar(0.9, 1.1, "another"))
    best, others = order_quotes([one, same])
    assert (best, others) == ([one], [same])


def test_the_report_is_readable_by_programs(report):
    row = json.loads(json.dumps(report.to_dict()))["quotes"][0]
    assert row["number"] == 1 and row["is_best"]
    assert row["low_hours"] < row["hours"] < row["high_hours"]
    assert row["low_usd"] < row["usd"] < row["high_usd"]
    assert isinstance(report, QuoteReport) and report.draw().startswith("<svg")


QUOTE = {"hours": 2.0, "low_hours": 1.7, "high_hours": 2.8, "usd": 10.0, "low_usd": 8.5, "high_usd": 14.0}


def write_run(path, last_step):
    folder = RunFolder(path)
    folder.create()
    estimate = {"memory": {}, "schedule": {"steps": 8}, "seconds": {"step": 2.0}, "quote": QUOTE}
    folder.estimate_path.write_text(json.dumps(estimate))
    rows = [{"kind": "train", "step": step, "loss": 1.0, "step_seconds": 2.0, "tokens_per_second": 500.0}
            for step in range(1, last_step + 1)]  # fmt: skip
    folder.metrics_path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    spent = {"seconds": 9000.0, "usd": 15.0, "unpriced_machine_seconds": 0.0, "until": 1.0, "reserve_seconds": 0.0}
    folder.spending_path.write_text(json.dumps(spent))
    return folder


def test_a_variable_that_is_no_quote_is_refused():
    assert read_quote({}) == {}
    assert read_quote({"ECHELON_QUOTE": json.dumps(QUOTE)}) == {"quote": QUOTE}
    for wrong in ("soon", "[]", '{"hours": 1}', '{"hours": "many"}'):
        with pytest.raises(ConfigError, match=r"ECHELON_QUOTE=.* is no quote; remove it from launch.env"):
            read_quote({"ECHELON_QUOTE": wrong})


def test_the_quote_is_settled_at_the_end_of_the_run(tmp_path):
    assert "quoted_usd" not in reckon(write_run(tmp_path / "half", 7)).measured
    folder = write_run(tmp_path / "done", 8)
    found = reckon(folder)
    assert found.measured["quoted_hours"] == 2.5 and found.measured["quoted_usd"] == 15.0
    lines = list(found.describe())
    assert "quote: hours             2h00m       2h30m   25 % longer" in lines
    assert "quote: cost             $10.00      $15.00   50 % more" in lines
    assert lines[-2:] == [
        "quote: the time is within its error bar, 1h42m to 2h48m",
        "quote: the cost is above its error bar, $8.50 to $14.00",
    ]
    store_reckoning(folder, found, 8)
    assert "quote: cost" in str(build_report(read_record(folder.path)))
