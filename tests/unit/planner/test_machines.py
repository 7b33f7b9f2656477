"""`--instance auto`, on a model whose needs are known from its plan alone."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from echelon.cli.main import app
from echelon.ground.errors import PlanError
from echelon.launch.job_checks import find_target_cluster, settle_instance
from echelon.planner import machines
from echelon.planner.choose import resolve_plan
from echelon.planner.hardware import instances
from echelon.planner.hardware.instances import INSTANCES, cluster_of
from echelon.planner.machines import choose_instance
from echelon.planner.shape import build_shape
from echelon.recipe.load import load_recipe
from echelon.recipe.training import ParallelConfig

RECIPE = Path(__file__).parents[3] / "recipes" / "pretrain-1.3b.yaml"
# 1,345,423,360 parameters with 16 bytes each: 21.5 GB of states, too much for a T4 (16) or, with the rest, an L4 (24).


@pytest.fixture(scope="module")
def recipe():
    return load_recipe(RECIPE, ["launch.to=sagemaker", "launch.sagemaker.instance_type=auto"])[0]


@pytest.fixture(scope="module")
def shape(recipe):
    return build_shape({**recipe.model.config, "vocab_size": 32000})


@pytest.mark.slow
def test_the_type_on_which_the_whole_run_costs_least(recipe, shape):
    one = choose_instance(recipe, shape, 1)
    # The cheapest per hour that fits is one L40S at 2.80; eight H100 at 63.296 finish 22.6 times sooner or more.
    assert (one.instance.name, one.count, one.best.usd_per_hour) == ("ml.p5.48xlarge", 1, 63.296)
    [small] = [each for each in one.candidates if each.instance.name == "ml.g6e.2xlarge"]
    assert small.usd_per_hour == 2.80 and small.forecast.hours / one.best.forecast.hours > 63.296 / 2.80
    assert one.best.forecast.usd == pytest.approx(63.296 * one.best.forecast.hours)
    costs = [each.forecast.usd for each in one.candidates if each.fits and each.instance.price is not None]
    assert min(costs) == one.best.forecast.usd
    first, prices, *rows = one.describe()
    assert first == (
        "instance auto: 1 x ml.p5.48xlarge, of the 14 priced types on which the plan fits, the cheapest for the whole "
        "run at the predicted speed"
    )
    # Regions and dates stand once, above the table.
    assert prices == (
        "  prices on demand: us-west-2, 2026-09-01; * us-east-1, 2026-08; prices differ between regions, so rows with "
        "another mark may rank otherwise in yours"
    )
    shown = [re.match(r"  1 x (\S+) +\$([\d,.]+) in (\d+d\d\dh) +\$([\d.]+)/h(\*?) ", row) for row in rows[:8]]
    dollars = [float(match[2].replace(",", "")) for match in shown]
    assert dollars == sorted(dollars) and dollars[0] == pytest.approx(one.best.forecast.usd, abs=0.01)
    marks = {match[1]: match[5] for match in shown}
    assert marks["ml.p5.48xlarge"] == "" and marks["ml.g6e.2xlarge"] == "*"
    assert rows[8] == "  and 6 more that cost more"
    text = "\n".join(rows[9:])
    assert "fit, but were not considered because their price is unknown" in text and "ml.p5.4xlarge" in text
    left_out = text.split("do not fit: ")[1]
    assert "ml.g4dn.xlarge" in left_out and left_out.endswith(" and 12 more")
    assert max(line.count(" ml.") for line in one.describe()) <= 9, "no list of more than eight"
    # Two machines with one L4 each could shard the optimizer over 10 Gbit/s.
    [pair] = [each for each in choose_instance(recipe, shape).candidates if each.instance.name == "ml.g6.xlarge"]
    assert pair.fits and (pair.count, pair.usd_per_hour) == (2, pytest.approx(2.254))
    assert "10 Gbit/s between machines" in pair.describe()


def test_prices_of_another_region_are_marked(recipe, shape, monkeypatch):
    def prices(region: str | None, *names: str) -> str:
        monkeypatch.setattr(instances, "INSTANCES", {name: INSTANCES[name] for name in names})
        settings = recipe.launch.sagemaker.model_copy(update={"region": region})
        there = recipe.model_copy(update={"launch": recipe.launch.model_copy(update={"sagemaker": settings})})
        return choose_instance(there, shape, 1).describe()[1]

    both = ("ml.p5.48xlarge", "ml.g6e.2xlarge", "ml.p4d.24xlarge")
    assert prices("us-east-1", *both).startswith("  prices on demand: us-east-1, 2026-08; * us-west-2, 2026-09-01; ")
    assert prices(None, both[0]) == prices("us-west-2", both[0]) == "  prices on demand: us-west-2, 2026-09-01"
    assert prices("eu-west-1", both[0]) == (
        "  prices on demand: us-west-2, 2026-09-01; not those of eu-west-1, where the job runs"
    )


def test_without_a_number_of_tokens_types_rank_by_the_cost_of_tokens(recipe, shape):
    train = recipe.train.model_copy(update={"tokens": None, "epochs": 2})
    choice = choose_instance(recipe.model_copy(update={"train": train}), shape, 1)
    assert choice.instance.name == choose_instance(recipe, shape, 1).instance.name
    assert "the cheapest for 10^9 tokens at the predicted speed" in choice.describe()[0]
    assert "for 10^9 tokens" in choice.describe()[2]


def test_of_nearly_equal_costs_the_fewest_machines_are_taken(recipe, shape, monkeypatch):
    # Two RTX PRO 6000 in one machine for 10.36, or in two machines connected with 50 Gbit/s for 8.41.
    pair = ("ml.g7e.2xlarge", "ml.g7e.12xlarge", "ml.p5en.48xlarge")
    monkeypatch.setattr(instances, "INSTANCES", {name: instances.INSTANCES[name] for name in pair})
    large = build_shape({**recipe.model.config, "vocab_size": 32000, "num_hidden_layers": 120})
    zero = recipe.model_copy(update={"parallel": "fsdp"})
    assert not machines.plan_on(zero, large, INSTANCES["ml.g7e.2xlarge"], 1).fits
    assert machines.plan_on(zero, large, INSTANCES["ml.g7e.2xlarge"], 2).fits
    choice = choose_instance(zero, large)
    two, one = (next(each for each in choice.candidates if each.instance.name == name) for name in pair[:2])
    assert (two.count, one.count) == (2, 1)
    assert choice.best is (one if one.cost <= 1.05 * two.cost else two)
    equal = [replace(each, forecast=one.forecast) for each in (two, one)]
    assert machines.choose_cheapest(equal).count == 1
    # If only a type without a price fits on one machine, it is named but not chosen.
    monkeypatch.setattr(instances, "INSTANCES", {name: instances.INSTANCES[name] for name in pair[::2]})
    choice = choose_instance(zero, large)
    assert (choice.instance.name, choice.count) == ("ml.g7e.2xlarge", 2)
    assert "  of these, need fewer machines: ml.p5en.48xlarge" in choice.describe()


def test_memory_of_the_machine_itself(recipe, shape):
    # 8 GiB for 21.5 GB of states.
    with pytest.raises(PlanError, match=r"ddp needs .* available"):
        resolve_plan(recipe, shape, cluster_of(INSTANCES["ml.m5.large"], 1))
    # 1,345,423,360 parameters: 16 bytes each offloaded, 12 in the copy that a checkpoint is written from: 35.08 GiB.
    offload = recipe.model_copy(update={"parallel": ParallelConfig(dp_shard=1, cpu_offload=True)})
    with pytest.raises(
        PlanError, match=r"cpu_offload=true: .* 35\.1 GiB in total, but a machine has 32\.0 GiB; use more"
    ):
        resolve_plan(offload, shape, cluster_of(INSTANCES["ml.g5.2xlarge"], 1))
    assert resolve_plan(offload, shape, cluster_of(INSTANCES["ml.g5.4xlarge"], 1)).cpu_offload
    both = offload.model_copy(update={"train": recipe.train.model_copy(update={"activation_offloading": True})})
    with pytest.raises(PlanError, match=r"and train\.activation_offloading=true: .* state; activations; copies that"):
        resolve_plan(both, shape, cluster_of(INSTANCES["ml.g5.xlarge"], 1))


def test_without_a_price_none_is_chosen(recipe, shape, monkeypatch):
    known = instances.INSTANCES
    monkeypatch.setattr(instances, "INSTANCES", {name: replace(each, price=None) for name, each in known.items()})
    with pytest.raises(PlanError, match=r"no type with a known price fits on .*; set one of: .*ml\.p5\.48xlarge"):
        choose_instance(recipe, shape, 1)


def test_a_plan_that_fits_nowhere_is_refused_with_the_largest_type(recipe, monkeypatch, shape):
    small = {name: each for name, each in instances.INSTANCES.items() if name.startswith("ml.g4dn.")}
    monkeypatch.setattr(instances, "INSTANCES", small)
    with pytest.raises(PlanError, match=r"does not fit on 1 machine\(s\) of any type; the largest, ml\.g4dn\.12xlarge"):
        choose_instance(recipe, shape, 1)


def test_launching_replaces_auto_by_the_type(recipe, caplog):
    settled = settle_instance(recipe)
    assert settled.launch.sagemaker.instance_type == "ml.p5.48xlarge"
    assert "instance auto: 1 x ml.p5.48xlarge" in caplog.text
    cluster = find_target_cluster(settled)
    assert (cluster.accelerator.name, cluster.num_devices) == ("H100", 8)
    assert settle_instance(settled) is settled


def test_plan_for_named_machines():
    run = CliRunner().invoke
    named = run(app, ["plan", str(RECIPE), "--instance", "ml.p5.48xlarge", "--count", "8"])
    assert named.exit_code == 0, named.output
    assert "8 x ml.p5.48xlarge, $63.296/h (us-west-2, 2026-09-01) each on demand, $506.37/h in all" in named.output
    assert "cluster: 64 x H100 on 8 machine(s)" in named.output
    both = run(app, ["plan", str(RECIPE), "--instance", "auto", "--devices", "8xH100"])
    assert "different clusters" in str(both.exception)
    assert "requires --instance" in str(run(app, ["plan", str(RECIPE), "--count", "2"]).exception)
