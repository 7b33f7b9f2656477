"""What engine=tensorflow refuses, by the key, before TensorFlow is imported."""

import re

import pytest

from echelon.ground.errors import ConfigError, PlanError
from echelon.planner.choose import resolve_plan
from echelon.planner.hardware.accelerators import parse_devices
from echelon.planner.shape import build_shape
from tests.unit.recipe_samples import SMALL, load_text

ENGINE = ("engine=tensorflow", "train.precision=fp32")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("adapter={method: lora, r: 4, alpha: 8}", "adapter.method=lora: engine=tensorflow trains all weights"),
        ("data.document_mask=true", "data.document_mask=true: engine=tensorflow cannot keep the documents"),
        ("optim.name=lion", "optim.name=lion: engine=tensorflow has no kernel"),
        ("train.precision=bf16", "train.precision=bf16: engine=tensorflow computes in fp32"),
        ("train.activation_checkpointing=full", "train.activation_checkpointing=full: engine=tensorflow keeps"),
        ("sync={name: local_sgd, replicas: 2}", "sync.name=local_sgd: engine=tensorflow sums the gradients"),
        ("tensorflow.tpu=local", "tensorflow.tpu=local has no effect with tensorflow.strategy=multi_worker; set"),
        ("tensorflow.strategy=horovod", "does not compile against TensorFlow 2.21; use engine=horovod"),
        ("tensorflow.strategy=parameter_server", "use sync.name=parameter_server with engine=native."),
    ],
)
def test_what_a_backbone_cannot_do_is_refused(tmp_path, override: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_text(tmp_path, SMALL, *ENGINE, override)


def test_preference_pairs_are_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"objective\.name=dpo: engine=tensorflow computes the loss of next tokens"):
        load_text(tmp_path, SMALL, *ENGINE, "objective.name=dpo")


def test_settings_without_the_engine_are_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="tensorflow has settings of engine=tensorflow, and the recipe has"):
        load_text(tmp_path, SMALL, "tensorflow.strategy=mirrored")


def test_copies_in_one_process_are_refused_in_several(tmp_path) -> None:
    recipe, _ = load_text(tmp_path, SMALL, *ENGINE, "tensorflow.strategy=mirrored")
    shape = build_shape({**recipe.model.config, "vocab_size": 256})
    assert resolve_plan(recipe, shape, parse_devices("1xcpu")).strategy == "ddp"
    with pytest.raises(PlanError, match=r"tensorflow\.strategy=mirrored is for one process, and the plan has 2"):
        resolve_plan(recipe, shape, parse_devices("2xcpu"))


def test_sharded_plans_are_refused(tmp_path) -> None:
    recipe, _ = load_text(tmp_path, SMALL, *ENGINE, "parallel=fsdp")
    shape = build_shape({**recipe.model.config, "vocab_size": 256})
    with pytest.raises(PlanError, match="the plan is fsdp, and engine=tensorflow runs ddp"):
        resolve_plan(recipe, shape, parse_devices("2xcpu"))
