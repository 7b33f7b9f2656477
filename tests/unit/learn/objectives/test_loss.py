"""The chunked loss compared with each model's own logits."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from packaging.version import Version
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import echelon.learn.objectives.loss
from echelon.learn.model.parts import HeadArithmetic
from echelon.learn.model.traits import find_traits
from echelon.learn.objectives.causal_lm import CausalLM
from echelon.learn.objectives.loss import (
    IGNORE,
    add_product,
    chunked_log_probabilities,
    chunked_loss_sum,
    loss_and_gradient,
)
from echelon.learn.objectives.outputs import ObjectiveModule
from tests.families import EXTRA, microbatch_of, random_batch, small_model
from tests.unit.tools.report.watch import Watch

ARITHMETICS = [HeadArithmetic(), HeadArithmetic(0.5), HeadArithmetic(softcap=3.0), HeadArithmetic(0.5, 3.0)]


def gradients(model):
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", EXTRA)
@pytest.mark.parametrize("chunk", [10, 10_000], ids=["chunks of 10 tokens", "one chunk"])
def test_chunked_loss_equals_the_models_own_logits(family, tied, chunk, monkeypatch):
    monkeypatch.setattr(echelon.learn.objectives.loss, "logits_chunk_tokens", lambda *_: chunk)
    model = small_model(family, tied)
    inputs, labels = random_batch()
    loss = ObjectiveModule(model)(microbatch_of(inputs, labels), CausalLM().loss_sum)
    loss.backward()
    ours = gradients(model)

    model.zero_grad()
    logits = model(input_ids=inputs).logits
    reference = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100, reduction="sum")
    reference.backward()

    assert loss.item() == pytest.approx(reference.item(), rel=1e-6)
    for name, expected in gradients(model).items():
        torch.testing.assert_close(ours[name], expected, rtol=2e-5, atol=5e-6, msg=name)


def test_without_a_known_head_the_models_own_logits_give_the_loss():
    model, (inputs, labels) = small_model("gemma2"), random_batch()
    known = find_traits(model)
    assert known.arithmetic is not None
    chunked, whole = (ObjectiveModule(model, traits=each) for each in (known, replace(known, arithmetic=None)))
    batch, read = microbatch_of(inputs, labels), CausalLM().loss_sum
    assert whole(batch, read).item() == pytest.approx(chunked(batch, read).item(), rel=1e-6)


def test_a_microbatch_without_targets_gives_zero_and_reaches_every_parameter():
    model = small_model("llama")
    inputs, labels = random_batch()
    loss = ObjectiveModule(model)(microbatch_of(inputs, torch.full_like(labels, -100)), CausalLM().loss_sum)
    loss.backward()
    assert loss.item() == 0.0
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


def test_full_fp32_logits_never_exist(monkeypatch):
    """Vocabulary 4096, 512 tokens, chunks of 64: the largest tensor created by the loss stays below 1/4 of that."""
    monkeypatch.setattr(echelon.learn.objectives.loss, "logits_chunk_tokens", lambda *_: 64)
    hidden = torch.randn(2, 256, 16, requires_grad=True)
    weight = torch.randn(4096, 16, requires_grad=True)
    labels = torch.randint(0, 4096, (2, 256))
    with Watch() as watch:
        echelon.learn.objectives.loss.chunked_loss_sum(hidden, labels, weight, None, HeadArithmetic()).backward()
    assert watch.largest == 64 * 4096


def autograd(logits, labels, arithmetic, factors):
    """The loss and its gradient, each token's times its factor, as autograd computes them."""
    raw = logits.detach().clone().requires_grad_()
    losses = F.cross_entropy(arithmetic.apply(raw).float(), labels, ignore_index=IGNORE, reduction="none")
    [gradient] = torch.autograd.grad((losses * factors).sum(), [raw])
    return losses.sum().detach(), gradient


def draw_logits(dtype):
    """Logits of 24 tokens, and labels, a third of them IGNORE."""
    logits = 3 * torch.randn(24, 50, generator=torch.Generator().manual_seed(0))
    return logits.to(dtype), (2 * torch.arange(24)).where(torch.arange(24) % 3 > 0, IGNORE)


@pytest.mark.parametrize("arithmetic", ARITHMETICS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_gradient_by_hand_is_that_of_autograd(dtype, arithmetic):
    logits, labels = draw_logits(dtype)
    near = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 0, "atol": 4 * torch.finfo(dtype).eps}
    for given in (labels, torch.full_like(labels, IGNORE)):
        for factor in (2.0, torch.linspace(-1, 1, 24)):
            loss, gradient = loss_and_gradient(logits.clone(), given, arithmetic, factor)
            expected = autograd(logits, given, arithmetic, factor)
            assert loss.dtype == torch.float32 and gradient.dtype == dtype
            torch.testing.assert_close(loss, expected[0], rtol=1e-6, atol=0)
            torch.testing.assert_close(gradient, expected[1], **near)
            assert not gradient[given == IGNORE].any()


@pytest.mark.parametrize("arithmetic", ARITHMETICS, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("label", [0, 1])
def test_logits_that_are_not_finite_give_no_finite_result(label, value, arithmetic):
    """As autograd: of a label with probability 0 the loss is infinite, and its gradient -1; a cap makes all finite."""
    logits, labels = draw_logits(torch.float32)
    logits[0, 0], labels[0] = value, label
    loss, gradient = loss_and_gradient(logits.clone(), labels, arithmetic, 1.0)
    expected = autograd(logits, labels, arithmetic, 1.0)
    assert bool(loss.isfinite()) == bool(expected[0].isfinite())
    assert bool(gradient.isfinite().all()) == bool(expected[1].isfinite().all())
    if math.isnan(value):
        assert loss.isnan() and gradient[0].isnan().all()


def measure_peak(function):
    """The most bytes that tensors made by a function held at once."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    held = peak = 0
    events = [each for each in profile.profiler.kineto_results.events() if each.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


@pytest.mark.parametrize("compute", [chunked_loss_sum, chunked_log_probabilities])
@pytest.mark.parametrize(
    ("dtype", "arithmetic", "each"),
    [
        *((torch.float32, arithmetic, 4 + 4) for arithmetic in ARITHMETICS[:2]),
        (torch.float32, ARITHMETICS[2], 4 + 4 + 4),
        *((torch.bfloat16, arithmetic, 4 + 4 + 2) for arithmetic in ARITHMETICS[:3]),
    ],
    ids=str,
)
def test_at_most_two_fp32_copies_of_a_chunk_exist(dtype, arithmetic, each, compute, monkeypatch):
    """The logits and their gradient; in bf16 also the logits before a cast, and in fp32 the slope of a soft cap."""
    monkeypatch.setattr(echelon.learn.objectives.loss, "logits_chunk_tokens", lambda *_: 512)
    hidden = torch.randn(3, 512, 2, requires_grad=True)
    weight = torch.randn(4096, 2, requires_grad=True)
    labels = torch.randint(0, 4096, (3, 512))

    def run():
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            compute(hidden, labels, weight, None, arithmetic).sum().backward()

    assert measure_peak(run) == pytest.approx(each * 512 * 4096, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("arithmetic", [HeadArithmetic(), HeadArithmetic(0.5, 3.0)], ids=str)
def test_compiled_it_is_that_of_the_whole_logits(arithmetic):
    """And nothing of their size is allocated but the gradient."""
    compiled = torch.compile(loss_and_gradient, fullgraph=True)
    logits = 3 * torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(64).where(torch.arange(64) % 3 > 0, -100)
    loss, gradient = compiled(logits.bfloat16(), labels, arithmetic, 2.0)
    whole = logits.bfloat16().double().requires_grad_()
    expected = F.cross_entropy(arithmetic.apply(whole), labels, reduction="sum")
    expected.backward()
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(expected.item(), rel=2e-3)
    assert gradient.dtype == torch.bfloat16
    torch.testing.assert_close(gradient.double(), 2 * whole.grad, rtol=2e-2, atol=2e-3)
    low = logits.bfloat16()
    assert measure_peak(lambda: compiled(low, labels, arithmetic, 2.0)) == pytest.approx(low.nbytes, rel=0.1)


class Passes(TorchDispatchMode):
    """Names the operations that write a tensor of a shape."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.names = torch.Size(shape), []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        is_view = any(given.alias_info and not given.alias_info.is_write for given in operation._schema.returns)
        if isinstance(result, torch.Tensor) and result.shape == self.shape and not is_view:
            self.names.append(operation.name().removeprefix("aten::"))
        return result


def test_of_each_chunk_the_head_gradient_takes_one_pass(monkeypatch):
    """Three chunks: the sum is made, added to by three products, and multiplied by the factor of the backward pass."""
    monkeypatch.setattr(echelon.learn.objectives.loss, "logits_chunk_tokens", lambda *_: 8)
    hidden, weight = torch.randn(1, 24, 16, requires_grad=True), torch.randn(64, 16, requires_grad=True)
    with Passes(weight.shape) as passes:
        loss = chunked_loss_sum(hidden, torch.arange(24)[None], weight, None, HeadArithmetic())
        loss.backward()
    assert passes.names == ["zeros_like", *["addmm_"] * 3, "mul_.Tensor"]


@pytest.mark.parametrize(
    ("device", "names"), [("meta", ["addmm.dtype_out"]), ("cpu", ["mm", "add_.Tensor"])], ids=["as a GPU", "cpu"]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_product_of_low_precision_adds_to_fp32(device, names, dtype):
    """By itself where torch can, whatever fake tensors take; in both ways the sum stays in fp32, in place."""
    if device == "meta" and Version(torch.__version__) < Version("2.12"):
        pytest.skip("before torch 2.12 no tensor on meta takes addmm's out_dtype")
    with FakeTensorMode():
        add_product(torch.zeros(6, 5), torch.zeros(6, 4, dtype=dtype), torch.zeros(4, 5, dtype=dtype))
    left, right = (torch.randn(*shape, device=device, dtype=dtype) for shape in ((6, 4), (4, 5)))
    total = torch.full((6, 5), 1.0, device=device)
    add_product(total, left, right)  # the first call of a device tries what is possible there
    with Passes((6, 5)) as passes:
        add_product(total, left, right)
    assert passes.names == names and total.dtype == torch.float32
    if device == "cpu":
        torch.testing.assert_close(total, 1 + 2 * (left.float() @ right.float()), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("evaluates", [False, True], ids=["frozen", "evaluating"])
def test_a_head_that_is_not_trained_gets_no_gradient(evaluates, monkeypatch):
    """No tensor of the weight's size is created: chunks of 2 tokens are smaller."""
    monkeypatch.setattr(echelon.learn.objectives.loss, "logits_chunk_tokens", lambda *_: 2)
    hidden = torch.randn(1, 8, 16, requires_grad=True)
    weight = torch.randn(512, 16, requires_grad=evaluates)
    labels = torch.randint(0, 512, (1, 8))
    with Watch() as watch, torch.set_grad_enabled(not evaluates):
        loss = echelon.learn.objectives.loss.chunked_loss_sum(hidden, labels, weight, None, HeadArithmetic())
    expected = F.cross_entropy(F.linear(hidden[0], weight), labels[0], reduction="sum")
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    if not evaluates:
        with watch:
            loss.backward()
        [gradient] = torch.autograd.grad(expected, [hidden])
        torch.testing.assert_close(hidden.grad, gradient)
    assert watch.largest <= 2 * 512


def test_bf16_autocast_runs_the_head_in_bf16_and_the_softmax_in_fp32():
    model, dtypes = small_model("llama"), []
    module = ObjectiveModule(model)
    of_chunk = module.of_chunk
    module.of_chunk = lambda logits, *others: dtypes.append(logits.dtype) or of_chunk(logits, *others)
    inputs, labels = random_batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = module(microbatch_of(inputs, labels), CausalLM().loss_sum)
        logits = model(input_ids=inputs).logits
    assert logits.dtype == torch.bfloat16
    expected = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100, reduction="sum")
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    assert dtypes == [torch.bfloat16]
