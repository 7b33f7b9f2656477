"""Gradients before the update: the norm by hand, the loss scale compared with torch.amp.GradScaler."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from echelon.learn.model.parts import HeadArithmetic
from echelon.learn.objectives.loss import chunked_loss_sum, gradient_factor
from echelon.learn.optimizer import clip_gradients, global_norm
from echelon.learn.optimizer.norm import GROWTH_STEPS, INITIAL, LossScale


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


def test_grows_and_backs_off_like_torch():
    ours, theirs = LossScale(torch.device("cpu")), torch.amp.GradScaler("cpu")
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    bad = {0, 5, 6, 2100, 2101}
    for step in range(2 * GROWTH_STEPS + 200):
        theirs.scale(torch.ones(1))  # creates its state
        weight.grad = torch.full((1,), float("inf") if step in bad else 1.0)
        theirs.step(optimizer)
        theirs.update()
        ours.update(torch.tensor(step not in bad))
        if step % 100 < 8 or step % GROWTH_STEPS < 8:
            assert ours.value.item() == theirs.get_scale(), step
    # halved five times, doubled after steps 2006 and 4101
    assert ours.value.item() == theirs.get_scale() == INITIAL / 8


def test_unscales_gradients_and_keeps_overflows():
    scale = LossScale(torch.device("cpu"))
    gradients = [torch.tensor([3 * INITIAL, -INITIAL]), torch.tensor([float("inf")])]
    scale.unscale(gradients)
    assert gradients[0].tolist() == [3.0, -1.0]
    assert gradients[1].item() == float("inf")


@pytest.mark.parametrize(("rows", "factor"), [(1, 1024.0), (512, 2.0), (513, 1.0), (1024, 1.0), (262144, 1 / 256)])
def test_the_factor_by_hand(rows, factor):
    assert gradient_factor(torch.float16, rows) == factor
    assert gradient_factor(torch.bfloat16, rows) == gradient_factor(torch.float32, rows) == 1.0


def test_the_heads_gradient_does_not_overflow_in_fp16():
    """16000 rows that all miss the same token by nearly 1: their sum, 64000 and more, is beyond fp16's 65504 as it is
    and within it after the division by the number of targets."""
    rows, hidden = 16_000, torch.full((1, 16_000, 8), 5.0)
    weight = torch.zeros(64, 8, requires_grad=True)
    labels = torch.zeros(1, rows, dtype=torch.long)
    with torch.autocast("cpu", torch.float16):
        loss = chunked_loss_sum(hidden.requires_grad_(), labels, weight, None, HeadArithmetic())
    loss.backward(torch.tensor(1.0 / rows))
    # the gradient of token 0 is (1/64 - 1) * 5
    assert weight.grad[0].tolist() == pytest.approx([(1 / 64 - 1) * 5] * 8, rel=2e-3)


class DevicesOfScaling(TorchDispatchMode):
    """Records the devices of the tensors that each scaling of a list of tensors works on."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._foreach_mul_.Tensor:
            self.seen.append({tensor.device.type for tensor in (*args[0], args[1])})
        return func(*args, **(kwargs or {}))


def test_offloaded_gradients_are_unscaled_on_the_cpu():
    # fake tensors have a device without its hardware; a real CPU tensor cannot be multiplied by a scalar on a GPU
    with FakeTensorMode():
        scale = LossScale(torch.device("cuda"))
        with DevicesOfScaling() as devices:
            scale.unscale([torch.ones(4), torch.ones(2, 3)])
    assert devices.seen == [{"cpu"}]
