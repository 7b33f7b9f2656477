"""`echelon plan --scaling`: throughput, bytes and goodput of a recipe on more and more devices."""

import json
import random
import statistics
import subprocess
import sys
from dataclasses import replace
from xml.etree import ElementTree

import pytest
import yaml

from echelon.cli.api.plan_scaling import plan_scaling
from echelon.cli.commands.plan import plan as plan_command
from echelon.ground.errors import ConfigError, PlanError
from echelon.planner import reliability
from echelon.planner.choose import resolve_plan
from echelon.planner.hardware.accelerators import parse_devices
from echelon.planner.more_devices import Scaling, count_step_bytes
from echelon.planner.shape import build_shape
from echelon.planner.time import estimate_time
from echelon.recipe.document import Recipe
from tests.unit.planner.test_search import LLAMA, fields

GIGA = 1e9
# recipes/pretrain-1.3b.yaml with a Llama vocabulary: the worked example of docs/memory-and-traffic.md.
SMALL = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5504, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 32000, "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
}  # fmt: skip


def plan_of(parallel, config=None, devices="8xH100", batch=512, length=2048, **train):
    given = fields(parallel, config or SMALL, **{"global_batch_size": batch, "micro_batch_size": 8, **train})
    given["data"]["sequence_len"] = length
    return resolve_plan(Recipe.model_validate(given), build_shape(config or SMALL), parse_devices(devices))


@pytest.mark.parametrize(
    ("parallel", "gigabytes"),
    [("ddp", 9.4), ("zero1", 7.1), ("zero2", 40.0), ("fsdp", 73.5), ({"dp_replicate": 2, "dp_shard": 4}, 64.4)],
)
def test_data_parallel_bytes_are_those_of_the_worked_example(parallel, gigabytes):
    """docs/memory-and-traffic.md, whose formulas are counted in real processes by tests/parity/test_traffic.py."""
    shape = build_shape(SMALL)
    assert shape.num_parameters == pytest.approx(1.345e9, rel=1e-3)
    sent = count_step_bytes(shape, plan_of(parallel))
    assert sum(sent.values()) / GIGA == pytest.approx(gigabytes, abs=0.06)


def test_layers_that_are_gathered_in_float8_send_a_byte_less_for_each_weight():
    shape = build_shape(SMALL)
    plain, tensorwise, rowwise = (
        sum(count_step_bytes(shape, plan_of("fsdp", **options)).values())
        for options in ({}, {"precision": "fp8"}, {"precision": "fp8_rowwise"})
    )
    layers = 24 * (4 * 2048**2 + 3 * 2048 * 5504 + 2 * 2048)
    assert plain - tensorwise == pytest.approx(8 * 2 * 7 / 8 * layers)  # 8 microbatches, forward and backward
    assert rowwise == plain


def test_bytes_of_other_axes_are_those_of_their_pages():
    shape, hidden = build_shape(SMALL), 2048 * 2048 * 2  # one sequence, bf16
    tensor = plan_of({"tp": 8}, batch=8, micro_batch_size=1)
    tensor_bytes = 8 * (8 * 24 + 4) * 7 / 8 * hidden
    assert count_step_bytes(shape, tensor)["tp"] == pytest.approx(tensor_bytes)
    # Half of them are reduce-scatters under sequence parallelism, of which gloo sends twice the bytes.
    sequence = replace(tensor, sequence_parallel=True)
    on_gpus, on_cpus = (count_step_bytes(shape, sequence, kind)["tp"] for kind in ("cuda", "cpu"))
    assert (on_gpus, on_cpus) == pytest.approx((1.0 * tensor_bytes, 1.5 * tensor_bytes))
    stages = plan_of({"pp": 8}, batch=8, micro_batch_size=1)
    assert count_step_bytes(shape, stages)["pp"] == 8 * 2 * hidden  # of a stage between two others
    context = plan_of({"cp": 2, "dp_shard": 4}, batch=8, micro_batch_size=1)
    keys = 2 * 16 * 128 * 2048 * 2  # keys and values of a whole sequence
    assert count_step_bytes(shape, context)["cp"] == pytest.approx(2 * 24 * 2 * keys / 2)
    ulysses = plan_of({"cp": 2, "dp_shard": 4, "cp_method": "ulysses"}, batch=8, micro_batch_size=1)
    assert count_step_bytes(shape, ulysses)["cp"] == pytest.approx(2 * 24 * 2 * 2048 * 64 * 128 * 2 / 2 / 2)
    full = plan_of({"tp": 8}, batch=8, micro_batch_size=1, activation_checkpointing="full")
    # PyTorch stops before the last sum over ranks of a layer that it computes again.
    assert count_step_bytes(shape, full)["tp"] == pytest.approx(8 * (10 * 24 + 4) * 7 / 8 * hidden)


def scaling(counts=(8, 16, 64), devices="1xH100", **options):
    given = fields("fsdp", SMALL, global_batch_size=512, activation_checkpointing="none")
    return plan_scaling(given, counts, devices, **options)


def test_each_point_is_the_plan_of_that_many_devices():
    report = scaling()
    for each, sequences in zip(report.strong.points, (512, 512, 512), strict=True):
        assert each.ranked.plan.global_batch_size == sequences and each.ranked.plan.dp_shard == each.num_devices
        cluster = parse_devices(f"{each.num_devices}xH100")
        seconds = estimate_time(build_shape(SMALL), each.ranked.plan, cluster).total
        assert each.tokens_per_second == pytest.approx(512 * 4096 / seconds)
    assert [each.ranked.plan.global_batch_size for each in report.weak.points] == [512, 1024, 4096]
    strong, weak = report.strong, report.weak
    assert strong.speedup(strong.points[0]) == strong.efficiency(strong.points[0]) == 1
    assert strong.efficiency(strong.points[2]) < weak.efficiency(weak.points[2]) <= 1
    last = strong.points[2]
    assert strong.speedup(last) == pytest.approx(last.tokens_per_second / strong.points[0].tokens_per_second)


def test_more_devices_pay_until_each_adds_less_than_half_of_one_before():
    slow = scaling((8, 16, 32, 64, 128), "1xH100@nvlink,tcp25").strong
    end = slow.last_that_pays()
    assert end is not None
    speeds = {each.num_devices: each.tokens_per_second for each in slow.points}
    gains = {count: speeds[count] / speeds[count // 2] - 1 for count in (16, 32, 64, 128)}
    assert end.num_devices == next(count for count in (16, 32, 64, 128) if gains[count] < 0.5) // 2
    assert scaling((8, 16)).strong.last_that_pays() is None


def test_a_number_of_devices_without_a_plan_is_answered_with_the_reason():
    report = scaling((8, 24, 64))
    reasons = [each.reason for each in report.strong.points]
    assert reasons[0] == reasons[2] == "" and "does not divide by the 24 ranks" in reasons[1]
    assert len(report.strong.known) == 2 and "does not divide" in str(report)
    large = fields("ddp", LLAMA, global_batch_size=64)
    with pytest.raises(PlanError, match="no plan fits in memory"):
        plan_scaling(large, [8, 16], "1xT4")


@pytest.mark.parametrize(
    ("counts", "options", "words"),
    [
        ([], {"devices": "1xH100"}, "needs numbers of devices"),
        ([8], {}, "needs the kind of device"),
        ([8, 12], {"instance": "ml.p5.48xlarge"}, "use multiples of 8"),
    ],
)
def test_a_scaling_that_makes_no_sense_is_refused(counts, options, words):
    with pytest.raises(ConfigError, match=words):
        plan_scaling(fields("fsdp", SMALL), counts, **options)


def simulate_failures(interval, save, restart, failure, chance):
    """The part of the time that trains, of a job that fails at random moments, also while it restarts."""
    clock = done = 0.0
    next_failure = chance.expovariate(1 / failure)
    while done < 4000 * interval:
        if clock + interval + save <= next_failure:
            clock, done = clock + interval + save, done + interval
            continue
        clock = next_failure
        next_failure = clock + chance.expovariate(1 / failure)
        while clock + restart > next_failure:
            clock = next_failure
            next_failure = clock + chance.expovariate(1 / failure)
        clock += restart
    return done / clock


@pytest.mark.parametrize(("save", "restart", "failure"), [(10, 300, 7200), (60, 600, 3600), (2, 30, 600)])
def test_the_goodput_is_that_of_a_simulated_job(save, restart, failure):
    interval = reliability.best_interval_seconds(save, failure)
    chance = random.Random(3)
    found = statistics.mean(simulate_failures(interval, save, restart, failure, chance) for _ in range(4))
    assert reliability.training_share(interval, save, restart, failure) == pytest.approx(found, rel=0.015)
    for other in (0.5, 2.0):  # the interval is the best one
        assert reliability.training_share(other * interval, save, restart, failure) < reliability.training_share(
            interval, save, restart, failure
        )


@pytest.mark.parametrize("count", [2, 16, 512])
def test_a_step_waits_for_the_slowest_machine(count):
    chance = random.Random(5)
    found = statistics.mean(max(chance.gauss(1, 0.05) for _ in range(count)) for _ in range(1500))
    assert reliability.expect_slowest(count, 0.05) == pytest.approx(found, abs=0.003)
    assert reliability.expect_slowest(1, 0.05) == reliability.expect_slowest(count, 0.0) == 1


def test_more_machines_fail_more_often():
    shape, plan = build_shape(SMALL), plan_of("fsdp", devices="64xH100")
    one, many = (
        reliability.estimate_goodput(shape, plan, count, reliability.Reliability(1000.0)) for count in (1, 100)
    )
    assert (one.failure_hours, many.failure_hours) == (1000.0, 10.0)
    assert many.interval_seconds < one.interval_seconds and many.share < one.share < 1
    # Each of 64 ranks copies its part of 4 bytes of weights and 8 of moments per parameter to host memory at 24 GB/s.
    assert one.save_seconds == pytest.approx(12 * shape.num_parameters / 64 / 24e9, rel=1e-3)
    assert reliability.estimate_goodput(shape, plan, 100, reliability.Reliability(0.001)).share < 0.01


@pytest.mark.parametrize("num_spares", [0, 1, 2])
def test_spare_machines_stand_in_for_those_that_are_replaced(num_spares):
    """Machines fail at any time, every 10 hours, and are back after 2 to 18: on average one is missing."""
    chance = random.Random(7)
    clock, ends, complete = 0.0, [], 0.0
    for _ in range(40_000):
        until = clock + chance.expovariate(1 / 10)
        while clock < until:
            ends = [end for end in ends if end > clock]
            change = min([until, *ends])
            complete += (change - clock) * (len(ends) <= num_spares)
            clock = change
        ends.append(clock + chance.uniform(2, 18))
    assert reliability.complete_share(1.0, num_spares) == pytest.approx(complete / clock, abs=0.01)
    assert reliability.complete_share(1.0, num_spares) == pytest.approx([0.3679, 0.7358, 0.9197][num_spares], abs=1e-4)


def write(tmp_path, **given):
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump({**fields("fsdp", SMALL, global_batch_size=512), **given}))
    return path


def test_the_command_prints_tables_json_and_a_picture(tmp_path, capsys):
    path, picture = write(tmp_path), tmp_path / "scaling.svg"
    plan_command(path, devices="8xH100", scaling="16,8,64", mtbf_hours=500.0, step_spread=0.02, plot=picture)
    text = capsys.readouterr().out
    assert text.count("goodput") == 2 and "speed-up" in text and f"picture: {picture}" in text
    root = ElementTree.fromstring(picture.read_text())
    words = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"8", "16", "64", "strong scaling", "weak scaling"} <= set(words)
    plan_command(path, devices="8xH100", scaling="8,16", as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert [(each["scaling"], each["num_devices"]) for each in found["points"]] == [
        ("strong", 8), ("strong", 16), ("weak", 8), ("weak", 16),
    ]  # fmt: skip
    assert found["points"][1]["plan"]["parallel"]["dp_shard"] == 16
    assert found["pays_up_to"] == {"strong": None, "weak": None}
    with pytest.raises(ConfigError, match="not a list of numbers"):
        plan_command(path, devices="8xH100", scaling="8-64")
    with pytest.raises(ConfigError, match=r"^--scaling --plot is .* \(--plot was taken for its value\); write it like"):
        plan_command(path, ["scaling.html"], devices="8xH100", scaling="--plot")
    with pytest.raises(ConfigError, match="needs --mtbf-hours"):
        plan_command(path, devices="8xH100", restart_seconds=60.0)
    with pytest.raises(ConfigError, match="cannot be written"):
        plan_command(path, devices="8xH100", scaling="8,16", plot=tmp_path / "no" / "folder.svg")


def test_goodput_and_both_prices_are_part_of_a_plan(tmp_path, capsys):
    path = write(tmp_path, budget={"spot_usd_per_hour": 20.0})
    plan_command(path, instance="ml.p5.48xlarge", count=2, mtbf_hours=100.0)
    text = capsys.readouterr().out
    assert "useful time (goodput): 9" in text and "failures: one in 2d02h of the job, 300 s each to restart" in text
    assert "at $63.296/h x 2 machines on demand (us-west-2, 2026-09-01)" in text
    assert "at $20/h x 2 machines on spot machines" in text
    plan_command(path, instance="ml.p5.48xlarge", count=2, mtbf_hours=100.0, replace_hours=50.0)
    lines = capsys.readouterr().out.splitlines()
    [line] = [line for line in lines if "machines: replaced after 2d02h; " in line]
    shares = [float(word.rstrip(",%")) for word in line.split() if "%" in word]
    # On average one of the two is missing; without failures of that kind the goodput is above 99 %.
    assert shares[0] == pytest.approx(36.8, abs=0.5) and shares[1] == pytest.approx(73.6, abs=0.8) and len(shares) == 4
    plan_command(path, instance="ml.p5.48xlarge", as_json=True, step_spread=0.1)
    best = json.loads(capsys.readouterr().out)["candidates"][0]
    assert best["spot_usd"] == pytest.approx(20 * best["hours"])
    assert best["usd"] == pytest.approx(63.296 * best["hours"])


def test_planning_imports_no_torch(tmp_path):
    """The whole command with PyTorch out of reach: a search over 64 GPUs, its picture, and a scaling."""
    path = write(tmp_path, parallel="auto")
    for options in (["--by", "time", "--plot", str(tmp_path / "a.svg")], ["--scaling", "8,16", "parallel=fsdp"]):
        arguments = ["echelon", "plan", str(path), "--devices", "64xH100", *options]
        run = "import runpy; runpy.run_module('echelon', run_name='__main__', alter_sys=True)"
        code = f"import sys; sys.modules['torch'] = None; sys.argv = {arguments}; {run}"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 0 and len(done.stdout.splitlines()) > 8, done.stderr
    assert ElementTree.parse(tmp_path / "a.svg").getroot().tag.endswith("svg")


def test_points_without_a_plan_have_no_speed():
    assert Scaling(scaling((8, 24)).strong.points).points[1].tokens_per_second == 0
