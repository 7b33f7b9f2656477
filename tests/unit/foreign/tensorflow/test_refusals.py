"""What engine=tensorflow refuses before TensorFlow is needed: by the key, by the model's config, and as it starts."""

import re

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from echelon.foreign.tensorflow.llama import find_arguments
from echelon.foreign.tensorflow.tensorflow_engine import TensorflowEngine, build_tensorflow_engine
from echelon.ground.errors import ConfigError, PlanError
from echelon.learn.data.loader import Microbatch
from echelon.learn.engines import EngineSpec
from echelon.learn.objectives.causal_lm import CausalLM
from echelon.planner.choose import resolve_plan
from echelon.planner.hardware.accelerators import parse_devices
from echelon.planner.shape import build_shape
from tests.families import small_config
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


LINEAR = {"rope_theta": 10000.0, "rope_type": "linear", "factor": 4.0}


def test_a_config_becomes_arguments_of_the_backbone():
    config = small_config("llama", True, rms_norm_eps=0.1, pad_token_id=3, initializer_range=0.5)
    found = find_arguments(AutoConfig.for_model(**config))
    assert found["num_query_heads"] == config["num_attention_heads"]
    assert (found["layer_norm_epsilon"], found["tie_word_embeddings"], found["rope_max_wavelength"]) == (0.1, True, 1e4)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"attention_bias": True}, "attention_bias=True: engine=tensorflow can run false alone"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"head_dim": 32}, "head_dim=32: engine=tensorflow can run 16 alone"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu': engine=tensorflow can run silu alone"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 2.0}}, "rope_parameters"),
        ({"rope_parameters": LINEAR}, "rope_parameters"),  # its backbone ignores the argument
        ({"a_new_field": 3}, "a_new_field=3: engine=tensorflow can run null alone"),
    ],
)
def test_a_config_that_the_backbone_cannot_be_is_refused(fields, said):
    with pytest.raises(ConfigError, match=said):
        find_arguments(AutoConfig.for_model(**small_config("llama", **fields)))


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "mistral", "qwen3"])
def test_another_model_type_is_refused(family):
    with pytest.raises(ConfigError, match=f"model_type={family}: engine=tensorflow trains llama alone; use engine=nat"):
        find_arguments(AutoConfig.for_model(**small_config(family, family == "gpt2")))


def test_documents_in_one_sequence_are_refused() -> None:
    ids = torch.zeros(1, 4, dtype=torch.long)
    documents = torch.tensor([[0, 0, 1, 1]])
    packed = Microbatch(ids, ids, np.zeros(1, np.int64), np.zeros(1, np.int64), documents, documents)
    with pytest.raises(
        ConfigError, match=r"several in one; set data\.packing=false for instructions, or data\.document"
    ):
        TensorflowEngine(None, None, []).rehearse(packed, 1, CausalLM())  # type: ignore[arg-type]


def test_a_gpu_is_refused() -> None:
    spec = EngineSpec(None, None, None, None, torch.device("cuda"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="trains on CPUs only, and this process has a GPU"):
        build_tensorflow_engine(spec)
