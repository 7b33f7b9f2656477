"""8-bit moments compared with torchao, and the optimizer compared with torchao's AdamW8bit."""

import numpy as np
import pytest
import torch

from echelon.learn.optimizer import build_optimizer
from echelon.learn.optimizer.eight_bit import BLOCK, code_values, num_blocks, pack, unpack
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
