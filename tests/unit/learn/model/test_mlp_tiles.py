"""The MLP in tiles of the sequence: what it computes, what it draws, how it rounds, and in which models it is found."""

import pytest
import torch
from torch import nn

from echelon.ground.errors import ConfigError
from echelon.learn.model.build import build_on_meta, load_config
from echelon.learn.model.mlp_tiles import apply_tiles, find_mlps
from echelon.learn.model.parts import find_layers
from echelon.learn.parallel.kept_activations import checkpoint_activations
from tests.families import small_config, small_model

TILES = 5
MLP = frozenset(["mlp"])


def differentiate(model, tokens):
    torch.manual_seed(7)
    model.zero_grad()
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    return [loss, *(parameter.grad for parameter in model.parameters() if parameter.requires_grad)]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("is_recomputed", [False, True])
def test_loss_and_gradients_are_those_without_tiles(family, is_recomputed):
    model = small_model(family).double().train()
    tokens = torch.randint(0, 256, (2, 33), generator=torch.Generator().manual_seed(1))
    expected = [found.clone() for found in differentiate(model, tokens)]
    layers = find_layers(model)
    apply_tiles(layers, find_mlps(model), TILES)
    if is_recomputed:
        checkpoint_activations(layers, "full")
    # Gradients of weights are added up in fp32, as wide as those of any training.
    for found, wanted in zip(differentiate(model, tokens), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)


def test_frozen_weights_get_no_gradient_and_an_input_without_one_is_no_obstacle():
    model = small_model("llama").train().requires_grad_(False)
    model.model.layers[0].mlp.down_proj.weight.requires_grad_()
    tokens = torch.arange(40)[None]
    expected = [found.clone() for found in differentiate(model, tokens)]
    apply_tiles(find_layers(model), MLP, TILES)
    found = differentiate(model, tokens)
    assert len(found) == 2 and model.model.layers[1].mlp.up_proj.weight.grad is None
    torch.testing.assert_close(found, expected)


class Dropping(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 32), nn.Dropout(0.5), nn.GELU(), nn.Linear(32, 8))


def test_the_backward_pass_draws_the_same_dropout():
    torch.manual_seed(0)
    layer, states = nn.ModuleDict({"mlp": Dropping()}), torch.randn(2, 11, 8)
    torch.manual_seed(3)
    torch.cat([layer["mlp"](tile) for tile in states.tensor_split(TILES, 1)], 1).pow(2).sum().backward()
    expected = [parameter.grad.clone() for parameter in layer.parameters()]
    layer.zero_grad()
    apply_tiles([layer], MLP, TILES)
    torch.manual_seed(3)
    total = layer["mlp"](states).pow(2).sum()
    after = torch.get_rng_state()
    total.backward()
    torch.testing.assert_close([parameter.grad for parameter in layer.parameters()], expected)
    assert torch.get_rng_state().equal(after), "later draws are as without a backward pass"


@pytest.mark.parametrize("autocasts", [False, True])
def test_gradients_of_many_tiles_are_rounded_once(autocasts):
    torch.manual_seed(0)
    mlp, states = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)), torch.randn(1, 512, 8)
    exact = torch.autograd.grad(mlp(states).sum(), mlp.parameters())
    if not autocasts:
        mlp, states = mlp.bfloat16(), states.bfloat16()
    errors = []
    for tiles in (1, 128):
        layer = nn.ModuleDict({"mlp": nn.Sequential(*mlp)})
        apply_tiles([layer], MLP, tiles)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
            output = layer["mlp"](states)
        found = torch.autograd.grad(output.float().sum(), mlp.parameters())
        assert output.dtype == torch.bfloat16 and found[0].dtype == mlp[0].weight.dtype
        errors.append(max(float((one - other).norm() / other.norm()) for one, other in zip(found, exact, strict=True)))
    assert errors[1] < 1.5 * errors[0] < 0.05


class Watch(torch.utils._python_dispatch.TorchDispatchMode):
    """Remembers the largest number of numbers in a result."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor):
            self.largest = max(self.largest, found.numel())
        return found


def test_nothing_is_as_wide_as_the_mlp_and_as_long_as_the_sequence():
    model = small_model("llama", intermediate_size=4096, vocab_size=64).train()
    tokens, runs = torch.randint(0, 64, (1, 256)), []
    model.model.layers[0].mlp.act_fn.register_forward_hook(lambda *_: runs.append(1))
    with Watch() as watch:
        differentiate(model, tokens)
    assert (watch.largest, len(runs)) == (256 * 4096, 1)
    apply_tiles(find_layers(model), MLP, 16)
    checkpoint_activations(find_layers(model), "full")
    with Watch() as watch:
        differentiate(model, tokens)
    assert watch.largest == 64 * 4096, "the weights of the MLP are what is left"
    assert len(runs) == 1 + 2 * 16, "a recomputed layer stops before its MLP, whose tiles run again one by one"


@pytest.mark.parametrize(
    ("family", "names"),
    [("llama", {"mlp"}), ("gpt2", {"mlp"}), ("cohere", {"mlp"}), ("qwen3", {"mlp"}), ("granite", {"mlp"})],
)
def test_mlps_are_found_by_what_they_compute(family, names):
    assert find_mlps(build_on_meta(load_config(small_config(family)))) == names


def test_experts_are_refused():
    with pytest.raises(ConfigError, match=r"mlp_tiles: this mixtral model has no MLP .* its layers have experts"):
        find_mlps(build_on_meta(load_config(small_config("mixtral"))))
