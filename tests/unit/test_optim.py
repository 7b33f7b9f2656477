"""Schedules and the global norm, against values worked out by hand."""

import pytest
import torch

from echelon.optim import build_schedule, global_norm
from echelon.recipe import OptimConfig


def test_schedule_values_worked_out_by_hand():
    config = OptimConfig(learning_rate=1.0, warmup_steps=4, min_learning_rate_fraction=0.1)
    rate = build_schedule(config, num_steps=11)
    assert [rate(step) for step in range(4)] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert rate(4) == pytest.approx(1.0)  # the cosine begins at the peak
    assert rate(7) == pytest.approx(0.55)  # half way: the mean of peak and floor
    assert rate(10) == pytest.approx(0.1)  # the last step: the floor
    assert rate(99) == pytest.approx(0.1)


def test_no_warmup_starts_at_the_peak():
    assert build_schedule(OptimConfig(learning_rate=2.0, warmup_steps=0), 10)(0) == 2.0


def test_global_norm_is_the_norm_of_everything_joined():
    tensors = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]]), torch.tensor([12.0])]
    assert global_norm(tensors).item() == pytest.approx(13.0)
