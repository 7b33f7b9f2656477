"""Linear layers in float8: which ones, what they compute, and that the weights stay what they are."""

import pytest
import torch
from torch import nn

from echelon.ground import extras
from echelon.ground.errors import ConfigError
from echelon.learn.model.build import build_on_meta, load_config
from echelon.learn.model.quantization import apply_float8, find_float8_layers
from tests.families import random_batch, small_config, small_model

pytest.importorskip("torchao")
pytestmark = pytest.mark.slow  # with torchao installed, every test that imports transformers takes a second more
PROJECTIONS = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
MLP = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]


def names(family, **changes):
    model = build_on_meta(load_config({**small_config(family), **changes}))
    return {name.partition("layers.0.")[2] for name in find_float8_layers(model) if "layers.0." in name}


def test_the_linear_layers_of_decoder_layers_compute_in_float8():
    assert names("llama") == {*PROJECTIONS, *MLP}
    assert names("llama", intermediate_size=100) == set(PROJECTIONS)
    assert names("mixtral", num_local_experts=16) == set(PROJECTIONS)  # without its router
    with pytest.raises(ConfigError, match=r"train.precision=fp8: .*GPT2LMHeadModel.*use train.precision=bf16"):
        names("gpt2")


def test_weights_and_names_stay():
    model = build_on_meta(load_config(small_config("llama")))
    before = dict(model.named_parameters())
    apply_float8(model, emulate=True)
    after = dict(model.named_parameters())
    assert after.keys() == before.keys() and all(after[name] is before[name] for name in before)


def test_a_product_is_that_of_rounded_values():
    """By hand: both factors scaled so that their largest value is 448, the largest of e4m3, and rounded."""

    def rounded(tensor):
        scale = 448 / tensor.abs().max().double()
        return (tensor.double() * scale).float().to(torch.float8_e4m3fn).double() / scale

    torch.manual_seed(0)
    model = small_model("llama")
    apply_float8(model, emulate=True)
    layer = model.model.layers[0].mlp.up_proj
    inputs = torch.randn(32, layer.in_features)
    expected = rounded(inputs) @ rounded(layer.weight.detach()).T
    found = layer(inputs).double()
    assert (found - expected).norm() < 0.005 * expected.norm()
    exact = nn.functional.linear(inputs, layer.weight).double()
    assert (found - exact).norm() > 0.02 * exact.norm()


def test_a_product_with_rowwise_scales_is_that_of_rounded_rows():
    """By hand: each row of the input and of the weight is scaled to 448 at most; scales are powers of two."""

    def rounded(tensor):
        scale = torch.exp2((448 / tensor.abs().amax(1, keepdim=True).double()).log2().floor())
        return (tensor.double() * scale).float().to(torch.float8_e4m3fn).double() / scale

    torch.manual_seed(0)
    model = small_model("llama")
    layer = model.model.layers[0].mlp.up_proj
    with torch.no_grad():
        layer.weight[0] *= 1000  # with one scale for all, the other rows would be rounded to nothing
    apply_float8(model, emulate=True, scaling="rowwise")
    layer = model.model.layers[0].mlp.up_proj
    inputs = torch.randn(32, layer.in_features)
    expected = rounded(inputs) @ rounded(layer.weight.detach()).T
    assert (layer(inputs).double() - expected)[:, 1:].norm() < 0.005 * expected[:, 1:].norm()


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_gradients_are_close_to_those_in_bf16(family):
    inputs, labels = random_batch(length=48)

    def gradients(change):
        model = small_model(family)
        change(model)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=inputs, use_cache=False).logits
        nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten().clamp(min=0)).backward()
        return torch.cat([each.grad.flatten() for each in model.parameters()])

    plain, found = gradients(lambda model: None), gradients(lambda model: apply_float8(model, emulate=True))
    assert 0.005 < (found - plain).norm() / plain.norm() < 0.2


def test_a_missing_package_is_refused(monkeypatch):
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"requires the package torchao.*pip install 'torchao>="):
        apply_float8(small_model("llama"), emulate=True)
