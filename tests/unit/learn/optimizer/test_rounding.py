"""bf16 master weights: stochastic rounding and Kahan summation learn where plain rounding stalls."""

import numpy as np
import pytest
import torch

from echelon.learn.model.sharding import local_places
from echelon.learn.optimizer import build_optimizer
from echelon.learn.optimizer.rounding import random_bits, round_stochastically
from echelon.recipe.training import OptimConfig
from tests.unit.learn.optimizer.test_optimizer import YES, one_layer


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
    kahan = distance_after("bf16_kahan")
    assert (kahan - exact).abs().max() <= 2**-9, "each as near as bf16 can be"
    stochastic = distance_after("bf16_stochastic")
    # each number is a random walk with steps of 2^-8; the mean of 512 of them is right
    assert stochastic.mean().item() == pytest.approx(0.03, abs=0.003)
