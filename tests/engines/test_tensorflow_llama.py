"""The model of engine=tensorflow has the logits and gradients of transformers."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from echelon.foreign.tensorflow.llama import Decoder
from echelon.foreign.tensorflow.placement import import_tensorflow
from tests.families import random_batch, small_model

pytest.importorskip("keras_hub")
LLAMA3 = {
    "rope_theta": 500000.0, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
CASES: dict[str, tuple[bool, dict[str, Any]]] = {
    "untied": (False, {}),
    "tied, wide epsilon": (True, {"rms_norm_eps": 0.1}),
    "scaled positions": (False, {"rope_parameters": LLAMA3}),
    "all heads, padding": (
        False, {"num_key_value_heads": 4, "pad_token_id": 3, "rope_parameters": {"rope_theta": 77.0}}
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def library() -> Any:
    return import_tensorflow()


def spread_out(model: PreTrainedModel) -> PreTrainedModel:
    """Make norms matter: their initial values hide a mistake, and so do small weights."""
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
    tied, fields = CASES[case]
    model = spread_out(small_model("llama", tied, **fields))
    decoder = build(library, model)
    ids, _ = random_batch()
    weights = torch.randn(*ids.shape, 256, generator=torch.Generator().manual_seed(2)) / ids.numel()
    logits = model(ids).logits
    (logits * weights).sum().backward()
    tf = library.tf
    with tf.GradientTape() as tape:
        found = decoder.logits(decoder.hidden_states(tf.constant(ids.numpy(), tf.int32)))
        total = tf.reduce_sum(found * weights.numpy())
    gradients = tape.gradient(total, decoder.variables)
    size = logits.abs().max().item()
    assert size > 0.5  # else the comparison says little
    np.testing.assert_allclose(found.numpy(), logits.detach().numpy(), rtol=0, atol=1e-4 * size)
    # An embedding's gradient is sparse.
    stored = {name: tf.convert_to_tensor(gradient) for name, gradient in gradients.items()}
    for name, value in decoder.read(stored).items():
        expected = model.get_parameter(name).grad.numpy()
        np.testing.assert_allclose(value, expected, rtol=0, atol=1e-4 * np.abs(expected).max(), err_msg=name)


@pytest.mark.parametrize("tied", [True, False])
def test_weights_survive_the_way_there_and_back(library, tied):
    model = small_model("llama", tied)
    found = build(library, model)
    for name, value in found.read(found.variables).items():
        np.testing.assert_array_equal(value, model.get_parameter(name).detach().numpy(), err_msg=name)
