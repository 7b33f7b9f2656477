"""The calibration of a machine: what is fitted, kept, found again, and used by a plan."""

import itertools
import math
import random
import re
import statistics
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from echelon.cli.commands.plan import plan
from echelon.ground.errors import ConfigError
from echelon.planner.axes.axis import find_group
from echelon.planner.calibration import fit_calibration
from echelon.planner.choose import resolve_plan
from echelon.planner.hardware import calibration_store
from echelon.planner.hardware.accelerators import parse_devices
from echelon.planner.hardware.detection import calibrated_cluster, detect_cluster, use_calibration
from echelon.planner.plan import ParallelPlan, Precision
from echelon.planner.rates import expect_wait
from echelon.planner.shape import build_shape
from echelon.planner.time import estimate_time
from echelon.recipe.load import load_recipe

CALIBRATION = calibration_store.Calibration(
    machine=calibration_store.describe_machine() | {"gpus": ""}, date="2026-01-02", device="cpu", num_devices=2,
    product_flops={"float32": 80e9, "bfloat16": 4e9}, small_dim=0.0, attention_flops=25e9, attention_backward=0.9,
    stream_bandwidth=16e9, pointwise_bandwidth=8e9, logit_seconds=3e-9, launch_seconds=1.5e-3, latency=150e-6,
    bandwidth=2e9,
)  # fmt: skip
SHAPE = build_shape(
    {
        "model_type": "llama", "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 2048, "tie_word_embeddings": False,
    }
)  # fmt: skip
LAYER = 4 * 256**2 + 3 * 256 * 704
RECIPE = """\
run: {name: small}
model:
  config: {model_type: llama, hidden_size: 64, intermediate_size: 192, num_hidden_layers: 2, num_attention_heads: 4,
           vocab_size: 256}
tokenizer: bytes
data: {train: [{path: text.txt}], sequence_len: 64}
train: {steps: 5, global_batch_size: 8, compile: false, precision: fp32}
optim: {learning_rate: 1.0e-3}
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ECHELON_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write_recipe(folder):
    path = folder / "recipe.yaml"
    path.write_text(RECIPE)
    (folder / "text.txt").write_text("a few words\n")
    return path


@pytest.fixture
def recipe(tmp_path):
    return write_recipe(tmp_path)


def test_the_constants_of_a_machine_are_found_again_in_its_times():
    """Rows of a machine whose times follow the formulas of docs/planner-accuracy.md exactly."""
    flops, small, attention, backward, bandwidth, launch = 70e9, 41.0, 20e9, 0.8, 6e9, 1e-3

    def product(rows, inner, outer):
        slow = 1 + small / 2 * (1 / rows + 1 / inner + 1 / outer)
        return 2 * rows * inner * outer / flops * slow

    def layers(sequences, tokens, width, inner):
        rows = sequences * tokens
        matrices = ((width, 3 * width), (width, width), (width, 2 * inner), (inner, width))
        scores = 2 * sequences * tokens**2 * width / attention
        moved = 3 * rows * 4 * 1.74 * (14 * width + 3 * inner)
        seconds = launch + 3 * sum(product(rows, *each) for each in matrices) + scores * (1 + 2.5 / backward)
        sizes = {"sequences": sequences, "tokens": tokens, "width": width, "inner": inner}
        return "layers", {**sizes, "seconds": seconds + moved / bandwidth}

    # 25 times 0.04 s of work, each with a standard deviation of 0.05 * sqrt(0.04) s; the larger of two numbers is
    # expected 0.589 standard deviations above the mean.
    waited = 0.589456 * 0.05 * 0.2

    def collectives(name, size, seconds):
        return name, {"bytes": size, "processes": 2.0, "seconds": seconds, "processor": 1e-4, "work": 0.04}

    rows = [
        *(("product float32", {"rows": a, "inner": b, "outer": c, "seconds": 3 * product(a, b, c)})
          for a, b, c in ((64, 64, 64), (256, 256, 704), (512, 1024, 1024), (128, 128, 128))),
        ("attention float32", {"tokens": 256, "heads": 4, "head_dim": 32,
                               "seconds": 2 * 4 * 256**2 * 32 / attention,
                               "backward": 5 * 4 * 256**2 * 32 / attention / backward}),
        ("layer", {"seconds": launch}),
        layers(8, 256, 128, 352),
        layers(2, 256, 512, 1376),
        ("whole", {"seconds": 1e-3}),
        ("wrapped", {"seconds": 2.5e-3}),
        ("sharded", {"seconds": 3.5e-3}),
        ("copy", {"bytes": 1e8, "seconds": 0.01}),
        ("loss", {"logits": 1e6, "seconds": 0.004}),
        # Two passes of 1 ms and of half of the payload each; one of 1 ms.
        *(collectives("all_reduce", size, 2e-3 + size / 2e9 + waited) for size in (1e5, 1e6, 1e7)),
        *(collectives("all_gather", size, 1e-3 + size / 2 / 1e9 + waited) for size in (1e5, 1e6, 1e7)),
        *(collectives("reduce_scatter", size, 1e-3 + size / 2 / 4e9 + waited) for size in (1e5, 1e6, 1e7)),
        *(collectives(name, 4.0, 2e-4) for name in ("all_reduce", "all_gather", "reduce_scatter")),
        ("waits", {"times": 25.0, "processes": 2.0, "work": 1.0, "seconds": 1.0 + 25 * (2e-4 + waited)}),
    ]  # fmt: skip
    found = fit_calibration(rows, "cpu", 2, "float32")
    assert found.small_dim == pytest.approx(small, abs=1e-6)
    assert found.product_flops == pytest.approx({"float32": flops})
    assert (found.attention_flops, found.attention_backward) == pytest.approx((attention, backward))
    assert found.pointwise_bandwidth == pytest.approx(bandwidth, rel=1e-6)
    assert (found.stream_bandwidth, found.logit_seconds) == pytest.approx((1e10, 4e-9))
    assert (found.latency, found.bandwidth) == pytest.approx((1e-3, 2e9))
    assert (found.gather_bandwidth, found.scatter_bandwidth) == pytest.approx((1e9, 4e9))
    assert found.wrapper_seconds == pytest.approx(1.5e-3)
    assert found.hook_seconds == pytest.approx(2.5e-3 - 3e-4)
    assert found.jitter == pytest.approx(0.05, rel=1e-5)
    with pytest.raises(ValueError, match="no product in bfloat16"):
        fit_calibration(rows, "cpu", 2, "bfloat16")
    # The plan of such a machine says the same: an all-reduce of 1 MB between its two devices.
    known = replace(found, product_flops=CALIBRATION.product_flops)
    group = find_group(ParallelPlan("ddp", dp_replicate=2), calibrated_cluster(known, 2, 2), ("dp_replicate",))
    assert group.all_reduce(1e6) == pytest.approx(2e-3 + 5e-4)
    assert group.all_gather(1e6, group.links.inside.gather) == pytest.approx(1e-3 + 5e-4)


def test_it_is_found_again_on_this_machine_with_these_versions_only(cache, monkeypatch):
    assert calibration_store.find_calibration(cache) is None
    path = calibration_store.store_calibration(cache, CALIBRATION)
    assert calibration_store.find_calibration(cache) == CALIBRATION
    monkeypatch.setattr("echelon.planner.hardware.calibration_store._find_version", lambda package: "another")
    assert calibration_store.find_calibration(cache) is None
    monkeypatch.undo()
    path.write_text(path.read_text()[:-20])
    assert calibration_store.find_calibration(cache) is None
    assert calibration_store.calibration_path(cache) == path


def test_processes_that_share_cores_share_their_rates_and_links():
    two, four = (calibrated_cluster(CALIBRATION, count, count) for count in (2, 4))
    assert (two.accelerator.fp32_flops, four.accelerator.fp32_flops) == (80e9, 40e9)
    # A message takes longer, since its receiver gets a core later; the bytes of a large one are copied as fast.
    assert four.known_links.inside.latency == 2 * two.known_links.inside.latency
    assert (two.known_links.inside.bandwidth, four.known_links.inside.bandwidth) == (2e9, 2e9)
    one = calibrated_cluster(CALIBRATION, 1, 1)  # with two threads
    assert one.accelerator.fp32_flops == 160e9 and one.known_links.inside.bandwidth == 2e9


def test_a_step_takes_what_the_measured_rates_say():
    """One process with both cores, 4 microbatches of 256 tokens."""
    plan = ParallelPlan("ddp", micro_batch_size=2, num_microbatches=4)
    found = estimate_time(SHAPE, replace(plan, sequence_len=128), calibrated_cluster(CALIBRATION, 1, 1))
    assert found.matmul == pytest.approx(6 * 1024 * (4 * LAYER + 256 * 2048) / 160e9, rel=1e-3)
    forward = 4 * 1024 * 256 * 128 * 4 / 2 / 50e9
    assert found.attention == pytest.approx(forward * (1 + 2.5 / 0.9))
    moved = 3 * 1024 * 4 * 4 * 1.74 * (14 * 256 + 3 * 704)
    assert found.memory_bound == pytest.approx(moved / 16e9 + 1024 * 2048 * 1.5e-9)
    # A CPU computes nothing while it launches 4 layers, and what is outside of them.
    assert found.overhead == pytest.approx(4 * (4 + 1.8) * 1.5e-3 + 0.01)
    assert found.optimizer == pytest.approx(36 * SHAPE.num_parameters / 32e9)
    assert any("measured on this machine on 2026-01-02" in line for line in found.assumptions)
    assert "kernels: PyTorch's attention on the CPU, pointwise operations not fused" in found.assumptions
    half = replace(plan, precision=Precision(compute="bfloat16"))
    step = estimate_time(SHAPE, replace(half, sequence_len=128), calibrated_cluster(CALIBRATION, 1, 1))
    assert any("attention on the CPU in blocks of queries" in line for line in step.assumptions)


def test_tensor_and_pipeline_parallelism_pay_for_fully_shard_on_one_rank():
    """It wraps every layer of a rank and its root, whose hooks the host runs for each of 4 microbatches."""
    wrapped = replace(CALIBRATION, wrapper_seconds=0.002, hook_seconds=0.005)
    for fields, hooks in (
        ({"strategy": "ddp", "dp_replicate": 2}, 0.0),
        ({"strategy": "tp", "tp": 2}, 5 * 0.002),
        ({"strategy": "pp", "pp": 2, "schedule": "1f1b", "stages": (2, 2)}, 3 * 0.002),
        ({"strategy": "fsdp", "dp_shard": 2}, 5 * 0.005),
    ):
        plan = ParallelPlan(micro_batch_size=2, num_microbatches=4, **fields)
        bare, found = (
            estimate_time(SHAPE, replace(plan, sequence_len=128), calibrated_cluster(each, 2, 2))
            for each in (CALIBRATION, wrapped)
        )
        assert found.overhead - bare.overhead == pytest.approx(4 * hooks), fields
        assert (found.bubble > bare.bubble) == (plan.pp > 1)


def test_ranks_wait_for_the_last_of_them_as_often_as_they_meet():
    """Against random numbers: 4 ranks that meet 32 times, whose time for 0.1 s of work deviates by 0.05 * sqrt(0.1)."""
    rng = random.Random(0)
    deviation = 0.05 * math.sqrt(0.1)
    drawn = [max(rng.gauss(0.1, deviation) for _ in range(4)) - 0.1 for _ in range(32 * 500)]
    assert expect_wait(4, 0.05, 3.2, 32) == pytest.approx(32 * statistics.fmean(drawn), rel=0.03)
    assert expect_wait(1, 0.05, 3.2, 32) == 0


def test_an_uneven_speed_makes_more_of_the_axes_that_meet_more_often():
    """Of 4 layers and 4 microbatches: 2 all-reduces forward and backward under tp, one all-reduce in a step under ddp,
    and under fsdp, which gathers each layer twice and reduces its gradients once in a step, 3 times 4."""
    uneven = replace(CALIBRATION, jitter=0.05)
    for fields, axis, times in (
        ({"strategy": "tp", "tp": 2}, "tp", 4 * 4 * 4),
        ({"strategy": "tp", "tp": 2, "sequence_parallel": True}, "tp", 4 * 4 * 8),
        ({"strategy": "ddp", "dp_replicate": 2}, "dp", 1),
        ({"strategy": "fsdp", "dp_shard": 2, "reshard_after_forward": True}, "shard", 4 * (2 * 4 + 1)),
    ):
        plan = ParallelPlan(micro_batch_size=2, num_microbatches=4, **fields)
        even, other = (
            estimate_time(SHAPE, replace(plan, sequence_len=128), calibrated_cluster(each, 2, 2))
            for each in (CALIBRATION, uneven)
        )
        work = even.compute + even.overhead
        more = other.exposed_communication[axis] - even.exposed_communication[axis]
        assert more == pytest.approx(0.589456 * 0.05 * math.sqrt(work * times), rel=1e-5), fields
        assert other.total - even.total == pytest.approx(more)


def test_processes_that_wait_in_a_pipeline_leave_their_cores_to_others():
    """Four stages of one layer on two cores: one microbatch takes the way through the pipeline, of many the work of all
    stages on both cores decides, with what only one of them can do at the beginning and the end."""

    def step(count, cores):
        plan = ParallelPlan(
            "pp", pp=4, schedule="1f1b", stages=(1, 1, 1, 1), micro_batch_size=2, num_microbatches=count
        )  # fmt: skip
        known = replace(CALIBRATION, num_devices=cores, latency=0.0, bandwidth=1e15, launch_seconds=0.0)
        found = estimate_time(SHAPE, replace(plan, sequence_len=128), calibrated_cluster(known, 4, 4))
        assert sum(found.to_dict().values()) == pytest.approx(found.total)
        return found.compute + found.bubble

    alone = {count: step(count, 4) for count in (1, 4, 64)}  # a core for each
    layer = (alone[64] - alone[4]) / 60  # and the head, of the last stage
    first = (alone[1] - layer) / 3
    for count in (1, 4, 64):
        together = (3 * first + layer) * count / 2
        # Copies between cores are as fast as before.
        assert 0.98 * max(alone[count], together) < step(count, 2) < together + alone[1]
    assert step(1, 2) == pytest.approx(alone[1], rel=0.02)


def test_a_plan_says_that_it_uses_the_calibration_and_imports_no_torch(cache, recipe):
    calibration_store.store_calibration(cache, CALIBRATION)
    program = (
        "import sys; from echelon.cli.api.planning import plan; "
        "found = [str(plan(sys.argv[1], each)) for each in (None, '2xcpu')]; "
        "assert not {'torch', 'transformers'} & {*sys.modules}; print('\\n'.join(found))"
    )
    done = subprocess.run([sys.executable, "-c", program, recipe], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("rates: measured on this machine on 2026-01-02 by echelon plan --calibrate") == 2
    assert "calibrated with 2 GB/s per device inside a machine" in done.stdout


def test_a_cluster_of_other_devices_is_not_calibrated(cache):
    calibration_store.store_calibration(cache, CALIBRATION)
    assert detect_cluster(2).calibration == CALIBRATION
    assert use_calibration(parse_devices("8xH100")).calibration is None
    gpus = replace(CALIBRATION, device="NVIDIA H100 80GB HBM3", num_devices=8)
    calibration_store.store_calibration(cache, gpus)
    found = use_calibration(parse_devices("16xH100"))
    assert found.calibration == gpus and found.known_links.inside.bandwidth == 2e9
    assert use_calibration(parse_devices("16xH100@nvlink,efa")).known_links.inside.name == "nvlink4"
    assert use_calibration(parse_devices("8xA100-80")).calibration is None


def test_auto_takes_the_fastest_strategy_on_a_calibrated_device_only(cache, tmp_path):
    """Where gathering layers is cheap and all-reduces are slow, ZeRO beats DDP, which an uncalibrated CPU takes."""
    recipe, _ = load_recipe(write_recipe(tmp_path), [])
    shape = build_shape(recipe.model.config)

    def choose(known):
        cluster = detect_cluster(2) if known is None else calibrated_cluster(known, 2, 2)
        found = resolve_plan(recipe, shape, cluster)
        return found.strategy, next(line for line in found.why if line.startswith("parallel auto"))

    assert choose(None) == ("ddp", "parallel auto: ddp, the first that fits")
    slow = replace(CALIBRATION, bandwidth=1e5, latency=0.0, gather_bandwidth=1e12, scatter_bandwidth=1e12)
    strategy, line = choose(slow)
    assert strategy == "zero1" and "zero1, the fastest of those that fit, by the predicted time" in line
    assert re.search(r": ddp [\d.]+ s, zero1 [\d.e-]+ s, zero2 [\d.e-]+ s, fsdp [\d.e-]+ s; the best of", line)
    fast = replace(CALIBRATION, bandwidth=1e12, latency=0.0, gather_bandwidth=1e12, scatter_bandwidth=1e12)
    strategy, line = choose(fast)
    assert strategy == "ddp" and ("the fastest" in line or "and simpler" in line)


def test_processor_time_does_not_pass_while_a_process_waits():
    import torch

    from echelon.planner.hardware.timed_work import Timer

    timer = Timer(torch.device("cpu"))
    assert timer.measure(lambda: time.sleep(0.05)) < 0.025


def test_the_median_of_the_calls_counts_and_of_the_rounds():
    import torch

    from echelon.planner.hardware.timed_work import Timer, take_medians

    ends = itertools.accumulate([0.0, 0.02, 0.0, 0.05, 0.0, 0.03])  # three calls of so many seconds
    timer = Timer(torch.device("cpu"))
    timer.read = lambda: next(ends)
    assert timer.measure(lambda: None) == pytest.approx(0.03)
    rounds = [
        ("all_reduce", {"bytes": size, "processes": 2.0, "seconds": seconds, "processor": 2 * seconds})
        for seconds in (0.5, 0.2, 0.3)
        for size in (4.0, 8.0)
    ]
    expected = [
        ("all_reduce", {"bytes": size, "processes": 2.0, "seconds": 0.3, "processor": 0.6}) for size in (4.0, 8.0)
    ]
    assert take_medians(rounds) == expected


def test_a_recipe_is_needed_except_to_calibrate():
    with pytest.raises(ConfigError, match="echelon plan RECIPE, or echelon plan --calibrate"):
        plan()


@pytest.mark.slow
def test_this_machine_is_calibrated_and_the_next_plan_uses_it(cache, recipe, capsys):
    began = time.process_time()
    plan(recipe, calibrate=True, devices="2xcpu")
    shown = capsys.readouterr().out
    assert "matrix products in float32" in shown and "gathering sharded layers" in shown
    assert "rates: measured on this machine" in shown
    found = calibration_store.find_calibration(cache)
    assert found is not None
    # The best product of this process, in the same units: within a factor of two under any load.
    import torch

    left = torch.randn(512, 512)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    seconds = []
    for _ in range(9):
        began = time.process_time()
        left @ left
        seconds.append(time.process_time() - began)
    torch.set_num_threads(threads)
    assert found.product_flops["float32"] == pytest.approx(2 * 512**3 / min(seconds), rel=0.5)
    assert 1e7 < found.bandwidth < 1e11 and 1e-6 < found.latency < 0.1
