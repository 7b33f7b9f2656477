"""The cost of a run and the end of its budget, compared with sums by hand, with a fake clock."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from echelon.cli.main import app
from echelon.ground.errors import ConfigError, StoppedError
from echelon.ground.stop_request import StopRequest
from echelon.planner.hardware.instances import Price
from echelon.recipe.batches import constant_batch
from echelon.recipe.load import load_recipe
from echelon.run.folder.cost import (
    Rate,
    Spending,
    check_budget,
    describe_cost,
    find_price_at_target,
    find_price_here,
    read_spending,
    refuse_used_up,
    write_spending,
)
from echelon.run.folder.run_folder import RunFolder
from echelon.run.journal import budget as budget_module
from echelon.run.journal.budget import CostMeter
from echelon.run.journal.journal import Journal
from tests.waiting import wait_until

DEMO = Path(__file__).parents[4] / "recipes" / "demo.yaml"


def load(*overrides):
    return load_recipe(DEMO, ["train.steps=100", *overrides])[0]


@pytest.fixture
def folder(tmp_path):
    made = RunFolder(tmp_path / "run")
    made.create()
    return made


@pytest.fixture
def clock(monkeypatch):
    """Replace both clocks of the meter; the command of this start began at 1000 by default."""

    class Clock:
        now = began = 1000.0

        def monotonic(self):
            return self.now

    made = Clock()
    monkeypatch.setattr(budget_module, "time", made)
    monkeypatch.setattr(budget_module, "read_clock", made.monotonic)
    monkeypatch.setattr(budget_module, "find_start", lambda earlier: made.began)
    monkeypatch.setattr(budget_module, "find_last_end", lambda path: None)
    return made


def test_hours_times_price_times_machines():
    rate = Rate(7.2, "test")
    # half an hour on 2 machines at 7.20 each
    spent = Spending().grown(1800, 2, rate)
    assert (spent.seconds, spent.usd) == (1800, pytest.approx(7.2))
    # an hour without a price gets the price of the next start with one: 2 x 7.20, and its own 1 x 7.20
    later = spent.grown(3600, 2, None)
    assert later.usd == spent.usd and later.unpriced_machine_seconds == 7200
    assert later.grown(3600, 1, rate).usd == pytest.approx(7.2 + 14.4 + 7.2)
    assert later.grown(3600, 1, rate).seconds == 9000


def test_the_limits():
    both = load("budget.max_hours=2", "budget.max_usd=10", "budget.usd_per_hour=4").budget
    assert Spending(seconds=7199, usd=9.99).exceeds(both) is None
    assert Spending(seconds=7200, usd=0).exceeds(both) == "budget.max_hours"
    assert Spending(seconds=0, usd=10).exceeds(both) == "budget.max_usd"


def test_where_a_price_comes_from():
    typed = ("launch.to=sagemaker", "launch.sagemaker.instance_type=ml.g5.12xlarge")
    assert find_price_at_target(load(*typed)).usd_per_hour == 7.09
    assert find_price_at_target(load(*typed, "budget.usd_per_hour=5")).usd_per_hour == 5
    assert find_price_at_target(load("launch.to=slurm", typed[1])) is None
    assert find_price_here(load(*typed), {}) is None  # a laptop is no ml.g5.12xlarge
    inside = find_price_here(load(*typed), {"TRAINING_JOB_NAME": "job"})
    assert inside.source == "ml.g5.12xlarge on demand, us-east-1, 2026-08"
    assert find_price_here(load(*typed), {"SM_CURRENT_INSTANCE_TYPE": "ml.p5.48xlarge"}).usd_per_hour == 63.296
    assert find_price_here(load(), {"SM_CURRENT_INSTANCE_TYPE": "ml.p5e.48xlarge"}) is None
    own = load(*typed[:1], "launch.sagemaker.instance_type=ml.x9.huge")  # of a file that the job does not have
    assert find_price_here(own, {"TRAINING_JOB_NAME": "job", "SM_CURRENT_INSTANCE_TYPE": "ml.x9.huge"}) is None
    # (2 x 7.09 + 1 x 5.752) / 3
    groups = "[{name: a, instance_type: ml.g5.12xlarge, nodes: 2}, {name: b, instance_type: ml.g6.12xlarge}]"
    mixed = load("launch.to=sagemaker", f"launch.sagemaker.instance_groups={groups}")
    mean = find_price_here(mixed, {"TRAINING_JOB_NAME": "job", "SM_CURRENT_INSTANCE_TYPE": "ml.g5.12xlarge"})
    assert mean == find_price_at_target(mixed) and mean.usd_per_hour == pytest.approx(6.644)
    assert mean.source == "ml.g5.12xlarge and ml.g6.12xlarge on demand, their mean; us-east-1, 2026-08"
    with pytest.raises(ConfigError, match=r"budget\.max_usd=50: the price .* budget\.usd_per_hour.*budget\.max_hours"):
        check_budget(load("budget.max_usd=50"), None)
    check_budget(load("budget.max_hours=5"), None)


def test_the_price_on_demand_is_an_upper_bound_on_spot(folder, clock):
    spot = ("launch.to=sagemaker", "launch.sagemaker.instance_type=ml.g5.12xlarge", "launch.sagemaker.region=us-west-2",
            "launch.sagemaker.spot={max_wait_hours: 30}")  # fmt: skip
    recipe = load(*spot)
    rate = find_price_at_target(recipe)
    elsewhere = "ml.g5.12xlarge on demand, us-east-1, 2026-08; not the price in us-west-2, where the job runs"
    assert rate == Rate(7.09, elsewhere, at_most=True)
    assert rate == find_price_here(recipe, {"TRAINING_JOB_NAME": "job"})
    assert describe_cost(recipe, folder, rate, 2, 100) == [
        f"cost: at most $7.09/h x 2 machines ({elsewhere}); spot machines cost less: echelon plan --prices spot finds "
        "their price; the duration is unknown until steps are measured"
    ]
    lately = replace(rate, spot=Price(2.8, "us-west-2", "2026-11-20", "EC2"))
    assert describe_cost(recipe, folder, lately, 2, 100)[0].startswith(
        f"cost: at most $7.09/h x 2 machines ({elsewhere}); a spot machine cost $2.8/h (us-west-2, 2026-11-20); "
        "budget.spot_usd_per_hour counts that; the duration"
    )
    limited = load(*spot, "budget.max_usd=50")
    assert describe_cost(limited, folder, rate, 2, 100)[1].endswith(
        "; budget.max_usd counts the price on demand, so less than that is paid"
    )
    clock.now = 1000.0 + 3600
    used = CostMeter(recipe, folder, rate, 1).describe()
    assert CostMeter(recipe, folder, rate, 1).describe_usd() == "at most $7.09"
    assert used == f"cost: 1h00m, at most $7.09 at $7.09/h ({elsewhere}), all starts together"
    known = find_price_at_target(load(*spot, "budget.spot_usd_per_hour=2.5"))
    assert known == Rate(2.5, f"budget.spot_usd_per_hour; at most $7.09/h, {elsewhere}")
    # A price of the user's own is what is paid, on spot machines too.
    assert find_price_at_target(load(*spot, "budget.usd_per_hour=3")) == Rate(3, "budget.usd_per_hour")
    both = find_price_at_target(load(*spot, "budget.usd_per_hour=8", "budget.spot_usd_per_hour=2.5"))
    assert both == Rate(2.5, "budget.spot_usd_per_hour; at most $8/h, budget.usd_per_hour")
    # Of the region of the job, and on demand.
    assert find_price_at_target(load(*spot[:2], "launch.sagemaker.region=us-east-1")).source == (
        "ml.g5.12xlarge on demand, us-east-1, 2026-08"
    )
    assert find_price_here(load("launch.sagemaker.spot={max_wait_hours: 3}", "budget.spot_usd_per_hour=2"), {}) is None


def test_the_stop_leaves_time_for_a_save(folder, clock):
    """Budget 100 s, save 8 s, steps 2 s: 1.5 x 8 + 2 x 2 + 0.2 s are reserved, so 83.8 s remain for training."""
    clock.began = 990.0
    meter, stop = CostMeter(load("budget.max_hours=0.027777777777777776"), folder, None, 1), StopRequest()
    meter.saw_step(2.0)
    clock.now = 990 + 83.7
    meter.check(stop, save_seconds=8.0)
    assert stop.limit is None
    clock.now = 990 + 83.9
    meter.check(stop, save_seconds=8.0)
    assert stop.limit == "budget.max_hours" and meter.usd is None


@pytest.mark.parametrize(("notice", "trained"), [(60, 89.8), (4, 95.8)])
def test_before_a_save_is_measured(folder, clock, notice, trained):
    """The notice time is reserved, but at most a tenth of the budget: $1 per second, $100, and 0.2 s of polling."""
    recipe = load("budget.max_usd=100", "budget.usd_per_hour=1800", f"fault.notice_seconds={notice}")
    meter, stop = CostMeter(recipe, folder, Rate(1800, "test"), 2), StopRequest()
    clock.now = 1000 + trained - 0.1
    meter.check(stop, None)
    assert stop.limit is None and meter.usd == pytest.approx(trained - 0.1)
    clock.now += 0.2
    meter.check(stop, None)
    assert stop.limit == "budget.max_usd"


def test_all_starts_count_together(folder, clock, monkeypatch):
    """60 s; an hour nobody paid for; 30 s that were killed 5 s after they were written down last; 20 s until it went on
    by itself, then 10 s."""
    recipe = load("budget.max_hours=1")
    first = CostMeter(recipe, folder, None, 1)
    clock.now += 60
    first.close()
    clock.now += 3600
    clock.began = clock.now
    second = CostMeter(recipe, folder, None, 1)
    clock.now += 25
    second.close()  # the thread writes this every ten seconds
    clock.now += 5 + 20
    monkeypatch.setattr(budget_module, "find_last_end", lambda path: budget_module_end(clock.now - 20))
    third = CostMeter(recipe, folder, None, 1)
    clock.now += 10
    assert third.spending().seconds == pytest.approx(60 + 25 + 5 + 20 + 10)


def budget_module_end(when):
    from echelon.ground.launch_environment import LastEnd

    return LastEnd(when, detection_seconds=1.0)


def test_an_exhausted_budget_is_refused_immediately(folder):
    recipe = load("budget.max_hours=1")
    refuse_used_up(recipe, folder, None, 1)  # a run that has not started
    write_spending(folder, Spending(seconds=3500, reserve_seconds=110, until=5.0))
    with pytest.raises(
        StoppedError, match=r"^stopped by budget\.max_hours=1: .*used 58m20s.*raise it to continue$"
    ) as told:
        refuse_used_up(recipe, folder, None, 1)
    assert told.value.exit_code == 3
    refuse_used_up(load("budget.max_hours=1.1"), folder, None, 1)
    dollars = load("budget.max_usd=20", "budget.usd_per_hour=10")
    write_spending(folder, Spending(seconds=3500, usd=19.9, reserve_seconds=90))  # 90 s on 2 machines are $0.50
    with pytest.raises(StoppedError, match=r"budget\.max_usd=20: .* 58m20s and \$19\.90"):
        refuse_used_up(dollars, folder, Rate(10, "test"), 2)
    folder.spending_path.write_text('{"seconds": "many"}')
    with pytest.raises(ConfigError, match=r"spending\.json: cannot read what"):
        read_spending(folder)


def test_messages_before_the_start(folder):
    recipe, rate = load("budget.max_hours=3"), Rate(36, "test")
    assert describe_cost(load(), folder, None, 1, 100) == []
    unknown, budget = describe_cost(recipe, folder, rate, 2, 100)
    assert unknown == "cost: $36/h x 2 machines (test); the duration is unknown until steps are measured"
    assert budget == "budget: stops with a checkpoint before budget.max_hours=3, all starts counted together"
    rows = [{"kind": "train", "step": step, "step_seconds": 10.0} for step in range(1, 11)]
    folder.metrics_path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_spending(folder, Spending(seconds=720, usd=14.4))
    known, budget = describe_cost(recipe, folder, rate, 2, 100)
    # 90 steps of 10 s are 0.25 h: at 2 x 36 dollars, 18
    assert known == (
        "cost: $36/h x 2 machines (test); the remaining steps take 15m00s at this run's speed, $18.00; $14.40 "
        "in 12m00s so far"
    )
    assert "of which 12m00s are used" in budget


def test_the_console_and_the_rows_show_the_cost(folder, clock, monkeypatch, caplog):
    from echelon.run.journal import journal as journal_module

    monkeypatch.setattr(journal_module, "time", clock)
    journal = Journal(folder, num_steps=4, log_every=2, batches=constant_batch(8, 64))
    journal.meter = CostMeter(load(), folder, Rate(3600, "test"), 1)
    row = dict.fromkeys(("loss", "grad_norm", "tokens_per_second", "mfu", "memory_peak_bytes", "cost_usd"))
    for step in (1, 2):
        clock.now += 2
        more = {"step": step, "step_seconds": 2.0, "data_wait_seconds": 0.0, "learning_rate": 1.0, "skipped": False}
        journal.train({"kind": "train", **row, **more})
    journal.close()
    assert [json.loads(line)["cost_usd"] for line in folder.metrics_path.read_text().splitlines()] == [2.0, 4.0]
    # two of four steps are left, 2 s and $2 each
    first, second = caplog.messages
    assert first.endswith("eta -  cost $2.00") and second.endswith("eta 4s  cost $4.00 of ~$8.00")


def test_the_thread_requests_the_stop_and_writes_the_spending(folder):
    meter, stop = CostMeter(load("budget.max_hours=0.0000001"), folder, None, 1), StopRequest()
    meter.watch(stop, lambda: None)
    wait_until(lambda: stop.limit is not None)
    meter.close()
    assert stop.limit == "budget.max_hours" and read_spending(folder).seconds > 0


def test_a_launch_without_a_price_is_refused_before_anything_is_created(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["launch", str(DEMO), "--to", "local", "budget.max_usd=5"])
    assert isinstance(result.exception, ConfigError) and "budget.max_usd=5: the price" in str(result.exception)
    assert not list(tmp_path.iterdir())
    (tmp_path / "text.txt").write_text("a few words\n" * 50)
    priced = ["--dry-run", "data.train=text.txt", "budget.max_usd=5", "budget.usd_per_hour=2"]
    result = CliRunner().invoke(app, ["launch", str(DEMO), "--to", "local", *priced])
    assert result.exit_code == 0, result.output
    assert "cost: $2/h (budget.usd_per_hour); the duration is unknown until steps are measured" in result.output
    assert "budget: stops with a checkpoint before budget.max_usd=5" in result.output
