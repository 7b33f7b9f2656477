"""What is stored of a parameter: moments in 8 bits like torchao, and bf16 weights that learn where plain ones stall."""

import numpy as np
import pytest
import torch

from echelon.learn.model.sharding import local_places
from echelon.learn.optimizer import build_optimizer
from echelon.learn.optimizer.slot import BLOCK, code_values, num_blocks, pack, random_bits, round_stochastically, unpack
from echelon.recipe.training import OptimConfig
from tests.unit.learn.optimizer.test_optimizer import YES, one_layer


@pytest.fixture
def torchao_codes():
    return pytest.importorskip("torchao.optim.quant_utils")


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.slow
@pytest.mark.parametrize("signed", [True, False])
def test_the_code_equals_that_of_the_paper(torchao_codes, signed):
    assert code_values(signed) == pytest.approx(torchao_codes.create_dynamic_map(signed))
    assert len(set(code_values(signed))) == 256


@pytest.mark.slow
@pytest.mark.parametrize("signed", [True, False])
def test_codes_and_scales_equal_torchao(torchao_codes, signed):
    values = random(32, 2 * BLOCK) if signed else random(32, 2 * BLOCK).square()
    codes, scales = pack(values, signed)
    scaled, expected_scales = torchao_codes.scale_tensor(values, BLOCK)
    expected = torchao_codes.quantize_8bit_with_qmap(scaled, torch.tensor(code_values(signed)))
    assert torch.equal(scales.flatten(), expected_scales)
    differing = codes != expected
    if not signed:
        differing &= (values == 0) | (expected > 0)
    assert differing.sum() <= 2, "but for ties, which rounding decides, and squares that torchao rounds to 0"


@pytest.mark.parametrize("width", [3, BLOCK - 1, BLOCK, BLOCK + 1, 700])
@pytest.mark.parametrize("signed", [True, False])
def test_a_value_decodes_to_the_nearest_code_of_its_block(width, signed):
    values = random(5, width, seed=width) if signed else random(5, width, seed=width).square()
    codes, scales = pack(values, signed)
    assert codes.dtype == torch.uint8 and codes.shape == values.shape and scales.shape == (5, num_blocks(width))
    back, table = unpack(codes, scales, signed).numpy(), np.array(code_values(signed), dtype=np.float32)
    for row in range(5):
        for start in range(0, width, BLOCK):
            block = values[row, start : start + BLOCK].numpy()
            scale = np.abs(block).max()
            choices = table if signed else table[1:]  # a square above 0 does not become 0, and none is 0 here
            nearest = choices[np.abs(block[:, None] / scale - choices[None]).argmin(1)] * scale
            assert np.allclose(back[row, start : start + BLOCK], nearest, rtol=2e-2, atol=1e-7 * scale)


def test_zeros_are_kept_without_division_by_zero():
    codes, scales = pack(torch.zeros(2, 300), signed=True)
    assert torch.equal(unpack(codes, scales, signed=True), torch.zeros(2, 300))


def test_rows_are_packed_separately_so_sharding_has_no_effect():
    values = random(7, 300)
    whole, parts = pack(values, signed=True), [pack(values[:3], signed=True), pack(values[3:], signed=True)]
    for index in (0, 1):
        assert torch.equal(whole[index], torch.cat([part[index] for part in parts]))


@pytest.mark.slow
def test_a_matrix_updates_like_torchaos_adamw8bit():
    single_param_adam = pytest.importorskip("torchao.optim.adam").single_param_adam
    from torchao.optim.subclass_8bit import OptimState8bit

    shape = (16, 2 * BLOCK)
    theirs, moments = random(*shape), [OptimState8bit.zeros(shape, signed=signed) for signed in (True, False)]
    model = one_layer(theirs.clone())
    optimizer = build_optimizer(model, OptimConfig(name="adamw_8bit", learning_rate=1.0), "fp32", seed=0)
    for step in range(1, 6):
        gradient, rate = random(*shape, seed=step), torch.tensor(1e-2)
        # The function that AdamW8bit.step() compiles for each parameter.
        arguments = (torch.tensor(float(step)), *moments, None, rate, 0.9, 0.95, 0.1, 1e-8, True, False)
        single_param_adam(theirs, gradient, *arguments)
        model.layers[0].weight.grad = gradient
        optimizer.step(step, 1e-2, YES)
    assert torch.allclose(model.layers[0].weight, theirs, atol=1e-5)
    state = dict(optimizer.tensors())
    assert state["layers.0.weight.exp_avg.codes"].element_size() == 1
    assert sorted(name.removeprefix("layers.0.weight.") for name in state) == [
        "exp_avg.codes", "exp_avg.scales", "exp_avg_sq.codes", "exp_avg_sq.scales", "step",
    ]  # fmt: skip


def bits_of(tensor, name, seed, step):
    return random_bits(local_places(tensor), tensor.device, name, seed, step)


def test_rounds_to_a_neighbour_with_probability_by_distance():
    low, high = 1.0, 1.0 + 2**-7  # adjacent bf16 numbers
    for share in (0.1, 0.5, 0.9):
        values = torch.full((100, 400), low + share * (high - low))
        rounded = round_stochastically(values, bits_of(values, "w", seed=0, step=3)).float()
        assert set(rounded.unique().tolist()) == {low, high}
        # 40000 draws: a standard deviation of at most 0.0025
        assert (rounded == high).float().mean().item() == pytest.approx(share, abs=0.01)


def test_bf16_numbers_are_unchanged():
    values = torch.randn(50, 50).bfloat16().float()
    assert torch.equal(round_stochastically(values, bits_of(values, "w", 0, 0)).float(), values)


def test_bits_are_spread_and_differ_by_step_parameter_and_seed():
    draws = [bits_of(torch.empty(64, 96), *which) for which in (("w", 0, 0), ("w", 0, 1), ("w", 1, 0), ("v", 0, 0))]
    for index, bits in enumerate(draws):
        assert bits.min() >= 0 and bits.max() < 2**16
        counts = np.bincount(bits.flatten().numpy() >> 12, minlength=16)
        assert np.abs(counts - 384).max() < 100, "16 bins of 384 each, a standard deviation of 19"
        # neighbours along each dim, and other draws, are uncorrelated
        others = [bits.roll(1, 0), bits.roll(1, 1), *draws[:index]]
        for other in others:
            correlation = np.corrcoef(bits.flatten().numpy(), other.flatten().numpy())[0, 1]
            assert abs(correlation) < 0.06, "6144 numbers: a standard deviation of 0.013"


def distance_after(master_weights, steps=300, dtype=torch.bfloat16):
    """The change of weights of 1 by steps of 1e-4, far below half the spacing of bf16 at 1 (2^-9)."""
    model = one_layer(torch.ones(8, 64, dtype=dtype))
    optimizer = build_optimizer(
        model, OptimConfig(name="lion", learning_rate=1.0, weight_decay=0.0), master_weights, seed=0
    )
    for step in range(steps):
        model.layers[0].weight.grad = torch.ones(8, 64, dtype=dtype)
        optimizer.step(step, 1e-4, YES)
    return 1 - model.layers[0].weight.detach().float()


def test_small_updates_count_where_plain_bf16_stalls():
    exact = distance_after("fp32", dtype=torch.float32)
    assert exact.mean().item() == pytest.approx(0.03, rel=1e-3)
    stalled = torch.nn.Parameter(torch.ones(8, 64, dtype=torch.bfloat16))
    for _ in range(300):
        stalled.data.add_(-1e-4)
    assert torch.equal(stalled.data, torch.ones(8, 64, dtype=torch.bfloat16))
    assert (distance_after("bf16_kahan") - exact).abs().max() <= 2**-9, "each as near as bf16 can be"
    stochastic = distance_after("bf16_stochastic")
    # each number is a random walk with steps of 2^-8; the mean of 512 of them is right
    assert stochastic.mean().item() == pytest.approx(0.03, abs=0.003)
