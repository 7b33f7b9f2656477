"""The models of engine=tensorflow have the logits and gradients of transformers."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, PreTrainedModel

from echelon.foreign.tensorflow.backbones import FAMILIES, find_arguments
from echelon.foreign.tensorflow.decoder import Decoder
from echelon.foreign.tensorflow.library import import_tensorflow
from echelon.ground.errors import ConfigError
from tests.families import random_batch, small_config, small_model

pytest.importorskip("keras_hub")
LLAMA3 = {
    "rope_theta": 500000.0, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
LINEAR = {"rope_theta": 10000.0, "rope_type": "linear", "factor": 4.0}
WIDE = {"rms_norm_eps": 0.1}
CASES: dict[str, tuple[str, bool, dict[str, Any]]] = {
    **{family: (family, family in ("gemma", "gpt2"), {}) for family in FAMILIES},
    "llama tied": ("llama", True, WIDE),
    "llama 3": ("llama", False, {"rope_parameters": LLAMA3}),
    "llama all heads": ("llama", False, {"num_key_value_heads": 4, "rope_parameters": {"rope_theta": 77.0}}),
    "mistral window": ("mistral", False, {"sliding_window": 5, "head_dim": 24, "rope_parameters": LINEAR, **WIDE}),
    "qwen2 tied": ("qwen2", True, {"rope_parameters": {"rope_theta": 1e6}, **WIDE}),
    "qwen3 tied": ("qwen3", True, {"head_dim": 32, "rope_parameters": LINEAR, **WIDE}),
    "gemma one key": ("gemma", True, {"num_key_value_heads": 1, "head_dim": 32, "pad_token_id": 3, **WIDE}),
    "gpt2 wide": ("gpt2", True, {"n_inner": 96, "n_positions": 40, "layer_norm_epsilon": 0.1}),
}


@pytest.fixture(scope="module")
def library() -> Any:
    return import_tensorflow()


def spread_out(model: PreTrainedModel) -> PreTrainedModel:
    """Make norms and biases matter: their initial values hide a mistake, and so do small weights."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.5 if parameter.ndim == 1 else 8 * parameter.std().item()
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
    return model


def build(library: Any, model: PreTrainedModel) -> Decoder:
    weights = {name: each.detach().numpy() for name, each in model.named_parameters()}
    decoder = Decoder(library, model.config, {name: each.shape for name, each in weights.items()})
    decoder.write(decoder.variables, weights)
    return decoder


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_are_those_of_transformers(library, case):
    family, tied, fields = CASES[case]
    model = spread_out(small_model(family, tied, **fields))
    decoder = build(library, model)
    ids, _ = random_batch()
    weights = torch.randn(*ids.shape, 256, generator=torch.Generator().manual_seed(2)) / ids.numel()
    logits = model(ids).logits
    (logits * weights).sum().backward()
    tf = library.tf
    variables = [each for group in decoder.variables.values() for each in group]
    with tf.GradientTape() as tape:
        found = decoder.logits(decoder.hidden_states(tf.constant(ids.numpy(), tf.int32)))
        total = tf.reduce_sum(found * weights.numpy())
    gradients = iter(tape.gradient(total, variables))
    size = logits.abs().max().item()
    assert size > 0.5  # else the comparison says little
    np.testing.assert_allclose(found.numpy(), logits.detach().numpy(), rtol=0, atol=1e-4 * size)
    # An embedding's gradient is sparse.
    stored = {
        name: [tf.Variable(tf.convert_to_tensor(next(gradients))) for _ in group]
        for name, group in decoder.variables.items()
    }
    for name, value in decoder.read(stored).items():
        expected = model.get_parameter(name).grad.numpy()
        np.testing.assert_allclose(value, expected, rtol=0, atol=1e-4 * np.abs(expected).max(), err_msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_survive_the_way_there_and_back(library, family):
    model = small_model(family, family in ("gemma", "gpt2"))
    found = build(library, model)
    for name, value in found.read(found.variables).items():
        np.testing.assert_array_equal(value, model.get_parameter(name).detach().numpy(), err_msg=name)


@pytest.mark.parametrize(
    ("family", "fields", "said"),
    [
        ("llama", {"attention_bias": True}, "attention_bias=True"),
        ("llama", {"mlp_bias": True}, "mlp_bias=True"),
        ("llama", {"head_dim": 32}, "head_dim=32"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout=0.1"),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 2.0}}, "rope_parameters"),
        ("llama", {"a_new_field": 3}, "a_new_field=3"),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}, "use_sliding_window"),
        ("llama", {"rope_parameters": LINEAR}, "rope_parameters"),  # its backbone ignores the argument
        ("gemma", {"rope_parameters": {"rope_theta": 5e4, "rope_type": "default"}}, "rope_theta=50000"),
        ("gpt2", {"resid_pdrop": 0.1}, "resid_pdrop=0.1"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ],
)
def test_a_config_that_the_backbone_cannot_be_is_refused(family, fields, said):
    config = AutoConfig.for_model(**small_config(family, family in ("gemma", "gpt2"), **fields))
    with pytest.raises(ConfigError, match=said):
        find_arguments(config)


def test_another_model_type_is_refused():
    with pytest.raises(ConfigError, match="model_type=gemma2: engine=tensorflow runs llama"):
        find_arguments(AutoConfig.for_model(**small_config("gemma2")))
