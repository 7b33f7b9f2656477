"""Which configs engine=tensorflow can give to keras-hub's Llama."""

import pytest
from transformers import AutoConfig

from echelon.foreign.tensorflow.llama import find_arguments
from echelon.ground.errors import ConfigError
from tests.families import small_config

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
