"""`train.precision: auto` on a CPU chooses the precision that is measured to be faster, and a run keeps it."""

from dataclasses import replace

import pytest
import torch

from echelon.planner.choose import resolve_plan
from echelon.planner.hardware import detection
from echelon.planner.hardware.accelerators import parse_devices
from echelon.recipe.load import load_recipe
from echelon.run.lifecycle.model_checks import check_model
from echelon.run.lifecycle.setup import prepare_run
from tests.dist.command import write_recipe


def plan_on_a_cpu(monkeypatch, tmp_path, bf16_flops, fp32_flops):
    """The plan of a recipe on this machine, with the given measured rates of a core."""
    monkeypatch.setattr(detection, "measure_core_flops", lambda: (bf16_flops, fp32_flops))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    recipe, _ = load_recipe(write_recipe(tmp_path, train={"precision": "auto"}))
    return resolve_plan(recipe, check_model(recipe).shape, detection.detect_cluster(1))


@pytest.mark.parametrize(
    ("bf16_flops", "chosen"),
    [(4.7e11, "bfloat16"), (1.5e11, "bfloat16"), (1.49e11, "float32"), (1e11, "float32"), (2e9, "float32")],
)
def test_bf16_is_chosen_if_it_is_clearly_faster(monkeypatch, tmp_path, bf16_flops, chosen):
    plan = plan_on_a_cpu(monkeypatch, tmp_path, bf16_flops, 1e11)
    assert plan.precision.compute == chosen
    [reason] = [line for line in plan.why if line.startswith("precision auto")]
    cores = torch.get_num_threads()
    assert f"compute in {chosen}" in reason
    assert f"at {cores * bf16_flops / 1e9:.0f} GFLOP/s in bf16 and {cores * 100} in fp32" in reason


def test_a_named_cpu_is_not_measured(tmp_path):
    recipe, _ = load_recipe(write_recipe(tmp_path, train={"precision": "auto"}))
    plan = resolve_plan(recipe, check_model(recipe).shape, parse_devices("2xcpu"))
    assert plan.precision.compute == "float32"
    assert any("is measured on the training machine" in line for line in plan.why)


def test_the_measurement_keeps_the_thread_count_and_runs_once():
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        rates = detection.measure_core_flops()
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)
    assert all(rate > 0 for rate in rates) and detection.measure_core_flops() is rates


@pytest.mark.parametrize("began_in_bf16", [True, False])
def test_a_resumed_run_keeps_its_precision(monkeypatch, tmp_path, began_in_bf16):
    monkeypatch.chdir(tmp_path)
    path = write_recipe(tmp_path, train={"precision": "auto"})
    slow, fast = (
        replace(parse_devices("2xcpu").accelerator, bf16_flops=rate, fp32_flops=1e11) for rate in (1e11, 4e11)
    )
    cluster = replace(parse_devices("2xcpu"), accelerator=fast if began_in_bf16 else slow)
    other = replace(cluster, accelerator=slow if began_in_bf16 else fast)

    def prepare(cluster, *overrides):
        run = prepare_run(load_recipe(path, overrides)[0], False, lambda: cluster, {})
        run.folder.unlock()
        return run.plan

    expected = "bfloat16" if began_in_bf16 else "float32"
    assert prepare(cluster).precision.compute == expected
    # The plan changes, and a new measurement would choose the other precision.
    changed = prepare(other, "parallel=zero1")
    assert changed.strategy == "zero1" and changed.precision.compute == expected
    assert prepare(other, "run.name=anew").precision.compute != expected
