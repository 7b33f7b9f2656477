"""The global norm, against values worked out by hand."""

import pytest
import torch

from echelon.optimizer import global_norm


def test_global_norm_is_the_norm_of_everything_joined():
    tensors = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]]), torch.tensor([12.0])]
    assert global_norm(tensors).item() == pytest.approx(13.0)
