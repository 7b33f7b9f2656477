"""The global norm, compared with values by hand."""

import pytest
import torch

from echelon.learn.optimizer import clip_gradients, global_norm


def test_global_norm_equals_the_norm_of_the_concatenation():
    tensors = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]]), torch.tensor([12.0])]
    assert global_norm(tensors).item() == pytest.approx(13.0)


def test_the_norm_of_a_large_gradient_is_exact():
    """GPT-2's embedding, 50257 by 768, compared with fp64. PyTorch's norm of it on a CPU has an error of 1e-4."""
    gradient = torch.randn(50257, 768, generator=torch.Generator().manual_seed(0))
    exact = torch.linalg.vector_norm(gradient.double()).item()
    assert global_norm([gradient]).item() == pytest.approx(exact, rel=2e-6)


@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_clipping_equals_torch(max_norm):
    generator = torch.Generator().manual_seed(0)
    ours = [torch.randn(shape, generator=generator) for shape in ((3, 4), (5,), (2, 2, 2))]
    theirs = [torch.nn.Parameter(torch.zeros_like(each)) for each in ours]
    for parameter, gradient in zip(theirs, ours, strict=True):
        parameter.grad = gradient.clone()
    norm = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    clip_gradients(ours, max_norm, global_norm(ours))
    assert global_norm(ours).item() == pytest.approx(min(max_norm, norm.item()), rel=1e-6)
    for gradient, parameter in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-6, atol=0)


def test_bf16_gradients_are_summed_in_higher_precision():
    """In bf16, adding one more 1 to so many would have no effect."""
    assert global_norm([torch.ones(400, 400, dtype=torch.bfloat16)]).item() == 400.0
