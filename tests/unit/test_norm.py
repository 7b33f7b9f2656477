"""The global norm, against values worked out by hand."""

import pytest
import torch

from echelon.optimizer import global_norm


def test_global_norm_is_the_norm_of_everything_joined():
    tensors = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]]), torch.tensor([12.0])]
    assert global_norm(tensors).item() == pytest.approx(13.0)


def test_a_large_gradient_is_not_off():
    """GPT-2's embedding, 50257 by 768: against fp64. The norm that PyTorch takes of it on a CPU is off by 1e-4."""
    gradient = torch.randn(50257, 768, generator=torch.Generator().manual_seed(0))
    exact = torch.linalg.vector_norm(gradient.double()).item()
    assert global_norm([gradient]).item() == pytest.approx(exact, rel=2e-6)
