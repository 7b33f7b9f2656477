"""DeepSpeed's config of a recipe and a plan, and the check of a config that the user wrote. Needs no DeepSpeed."""

import json
from pathlib import Path
from typing import Any

import pytest

from echelon.ground.errors import ConfigError, PlanError
from echelon.launch.sagemaker.staging import list_requirements
from echelon.planner.choose import resolve_plan
from echelon.planner.deepspeed_settings import build_settings
from echelon.planner.hardware.accelerators import parse_devices
from echelon.planner.shape import build_shape
from echelon.recipe.document import Recipe
from tests.unit.recipe_samples import SMALL, load_text

DEVICES = "4xH100"


def settings_of(tmp_path: Path, *overrides: str, devices: str = DEVICES) -> dict[str, Any]:
    recipe, plan = planned(tmp_path, *overrides, devices=devices)
    return build_settings(recipe, plan)


def planned(tmp_path: Path, *overrides: str, devices: str = DEVICES) -> tuple[Recipe, Any]:
    recipe = load_text(tmp_path, SMALL, "engine=deepspeed", *overrides)[0]
    return recipe, resolve_plan(recipe, build_shape({**recipe.model.config, "vocab_size": 256}), parse_devices(devices))


@pytest.mark.parametrize(("parallel", "stage"), [("zero1", 1), ("zero2", 2), ("fsdp", 3)])
def test_a_strategy_is_a_stage(tmp_path, parallel, stage) -> None:
    settings = settings_of(tmp_path, f"parallel={parallel}", "train.precision=fp32")
    assert settings["zero_optimization"]["stage"] == stage


def test_the_defaults_that_would_change_results_are_never_left_to_deepspeed(tmp_path) -> None:
    settings = settings_of(tmp_path, "parallel=zero2", "train.micro_batch_size=1")
    assert settings["gradient_clipping"] == 0.0  # its default is 1.0
    assert settings["gradient_accumulation_steps"] == 2  # with 1 and offloading it drops microbatches
    assert settings["train_micro_batch_size_per_gpu"] == 1
    assert settings["bf16"]["enabled"] and not settings["fp16"]["enabled"]
    assert settings["communication_data_type"] == "fp32"


def test_a_config_file_is_read_into_the_recipe_and_its_free_keys_are_passed_on(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = {
        "train_batch_size": "auto",
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 1000,
                              "allgather_bucket_size": "auto"},
        "optimizer": {"type": "AdamW",
                      "params": {"lr": "auto", "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
        "bf16": {"enabled": "auto"},
    }  # fmt: skip
    Path("ds.json").write_text(json.dumps(config))
    recipe, plan = planned(tmp_path, "parallel=zero2", "deepspeed.config=ds.json")
    assert recipe.deepspeed.config == config
    zero = build_settings(recipe, plan)["zero_optimization"]
    assert (zero["overlap_comm"], zero["reduce_bucket_size"]) == (True, 1000)
    assert "allgather_bucket_size" not in zero and "optimizer" not in build_settings(recipe, plan)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{gradient_clipping: 0.5}", "gradient_clipping=0.5: optim.max_grad_norm makes it 1.0; change one of them"),
        ("{zero_optimization: {stage: 3}}", "zero_optimization.stage=3: parallel makes it 2;"),
        ("{train_batch_size: 16}", "train_batch_size=16: train.global_batch_size makes it 8;"),
        ("{fp16: {enabled: true}}", "fp16.enabled=true: train.precision makes it false;"),
        ("{optimizer: {type: Adam}}", "optimizer.type=Adam: optim.name makes it AdamW;"),
        ("{optimizer: {params: {lr: 1.0}}}", "optimizer.params.lr=1.0: optim.learning_rate makes it 0.0003;"),
        ("{scheduler: {type: WarmupLR}}", "scheduler.type=WarmupLR is not a key of DeepSpeed that engine=deepspeed"),
        (
            "{zero_optimization: {offload_optimizer: {device: nvme}}}",
            "offload_optimizer.device=nvme: with NVMe offload DeepSpeed moves gradients and moments to files",
        ),
        ("{zero_optimization: {offload_optimizer: {nvme_path: /x}}}", "with NVMe offload DeepSpeed moves gradients"),
        ("{gradient_predivide_factor: 2.0}", "echelon sums gradients over the targets of all processes, so it is 1.0"),
        ("{zero_quantized_weights: true}", "zero_quantized_weights=true is not a key"),
    ],
)
def test_a_config_that_contradicts_the_recipe_is_refused_by_key(tmp_path, config, message) -> None:
    with pytest.raises(ConfigError) as caught:
        planned(tmp_path, "parallel=zero2", f"deepspeed.config={config}")
    assert str(caught.value).startswith("deepspeed.config.") and message in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optim.name=muon"], "optim.name=muon: engine=deepspeed flattens parameters"),
        (["optim.name=adamw_8bit"], "use optim.name=adamw, sgd or lion"),
        (["optim.name=adafactor"], "optim.name=adafactor: engine=deepspeed"),
        (["parallel={tp: 2}"], "parallel.tp=2: engine=deepspeed runs the whole model on every process"),
        (["parallel={pp: 2}"], "parallel.pp=2: engine=deepspeed"),
        (["parallel={cp: 2}"], "parallel.cp=2: engine=deepspeed"),
        (["parallel={ep: 2}"], "parallel.ep=2: engine=deepspeed"),
        (["parallel={cpu_offload: true}"], "engine=deepspeed offloads by deepspeed.offload_optimizer"),
        (["sync={name: diloco}"], "sync.name=diloco: engine=deepspeed reduces gradients in every step"),
        (["fault.on_lost_process=continue"], "fault.on_lost_process=continue: engine=deepspeed"),
        (["sync.compress.method=powersgd"], "sync.compress.method=powersgd: engine=deepspeed"),
        (["adapter.method=qlora"], "adapter.method=qlora: engine=deepspeed"),
        (["train.precision=fp8"], "train.precision=fp8: engine=deepspeed has no float8"),
        (["train.master_weights=bf16_kahan"], "train.master_weights=bf16_kahan: engine=deepspeed"),
        (["train.compile=true"], "train.compile=true: engine=deepspeed does not compile layers"),
        (["fault.verify_replicas_every=5"], "fault.verify_replicas_every=5: engine=deepspeed"),
    ],
)
def test_what_it_cannot_run_is_refused_when_the_recipe_is_read(tmp_path, overrides, message) -> None:
    with pytest.raises(ConfigError) as caught:
        load_text(tmp_path, SMALL, "engine=deepspeed", *overrides)
    assert message in str(caught.value) and str(caught.value).endswith("engine=native.")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel=hsdp"], "parallel: the plan is hsdp, and engine=deepspeed runs ddp, zero1, zero2 or fsdp"),
        (["parallel=zero1", "train.precision=bf16"], "parallel=zero1 with compute in bfloat16: DeepSpeed runs this"),
        (["parallel=ddp", "deepspeed.offload_optimizer=true", "train.precision=fp32"], "DeepSpeed offloads what it"),
        (["parallel=zero2", "deepspeed={offload_optimizer: true, offload_parameters: true}"], "only parallel=fsdp"),
    ],
)  # fmt: skip
def test_what_it_cannot_plan_is_refused(tmp_path, overrides, message) -> None:
    with pytest.raises(PlanError) as caught:
        planned(tmp_path, *overrides)
    assert message in str(caught.value)


def test_its_settings_without_it_are_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="deepspeed has settings of engine=deepspeed, and the recipe has"):
        load_text(tmp_path, SMALL, "deepspeed.offload_optimizer=true")


def test_parameters_are_offloaded_only_with_the_optimizer(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"or deepspeed\.offload_optimizer=true"):
        load_text(tmp_path, SMALL, "engine=deepspeed", "deepspeed.offload_parameters=true")


@pytest.mark.parametrize("content", ["not json", "[1]"])
def test_a_config_file_that_is_no_config_is_refused(tmp_path, content) -> None:
    (tmp_path / "ds.json").write_text(content)
    with pytest.raises(ConfigError, match=r"deepspeed\.config=.*ds\.json"):
        load_text(tmp_path, SMALL, "engine=deepspeed", f"deepspeed.config={tmp_path / 'ds.json'}")


def test_a_job_on_sagemaker_installs_it(tmp_path) -> None:
    machine = "launch.sagemaker.instance_type=ml.g5.12xlarge"
    recipe = load_text(tmp_path, SMALL, "engine=deepspeed", machine)[0]
    assert "deepspeed>=0.19.8,<0.20\n" in list_requirements(recipe)
    assert "deepspeed" not in list_requirements(load_text(tmp_path, SMALL, machine)[0])
