"""Losses given as one function of logits, compared with the same formulas on the whole logits of the model."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from echelon.foreign.tensorflow.tensorflow_engine import TensorflowEngine
from echelon.ground.errors import ConfigError
from echelon.learn.model.parts import HeadArithmetic
from echelon.learn.model.traits import find_traits
from echelon.learn.objectives import loss as cross_entropy
from echelon.learn.objectives import loss_function
from echelon.learn.objectives.causal_lm import CausalLM
from echelon.learn.objectives.loss import IGNORE, chunked_loss_sum, gradient_factor
from echelon.learn.objectives.loss_function import chunked_function_sum
from echelon.learn.objectives.objective import Objective, as_objective
from echelon.learn.objectives.outputs import ObjectiveModule
from tests.families import microbatch_of, random_batch, small_model
from tests.unit.learn.objectives.test_loss import measure_peak
from tests.unit.tools.report.watch import Watch

SMOOTHING, Z_WEIGHT, GAMMA = 0.1, 0.01, 2.0


def label_smoothing(logits, labels, extra):
    return F.cross_entropy(logits, labels, reduction="sum", label_smoothing=SMOOTHING)


def z_loss(logits, labels, extra):
    squares = logits.logsumexp(-1).square() * (labels != IGNORE)
    return F.cross_entropy(logits, labels, reduction="sum") + Z_WEIGHT * squares.sum()


def focal(logits, labels, extra):
    scores = -F.cross_entropy(logits, labels, reduction="none")
    return -((1 - scores.exp()) ** GAMMA * scores).sum()


def distillation(logits, labels, extra):
    """KL(teacher || model), times a weight of each sequence."""
    teacher = extra["teacher"].log_softmax(-1)
    kl = (teacher.exp() * (teacher - logits.log_softmax(-1))).sum(-1)
    return (kl * extra["weight"] * (labels != IGNORE)).sum()


def by_formula(name, logits, labels, teacher, weight):
    """The losses in fp64, one labelled token at a time, from the definitions of the papers."""
    total = logits.new_zeros(())
    for row, token in (labels != IGNORE).nonzero().tolist():
        scores, label = logits[row, token], labels[row, token]
        probabilities = scores.exp() / scores.exp().sum()
        cross_entropy = -probabilities[label].log()
        if name == "label_smoothing":  # the target distribution is (1 - s) one-hot + s uniform
            total = total + (1 - SMOOTHING) * cross_entropy - SMOOTHING * probabilities.log().mean()
        elif name == "z_loss":
            total = total + cross_entropy + Z_WEIGHT * scores.exp().sum().log() ** 2
        elif name == "focal":
            total = total + (1 - probabilities[label]) ** GAMMA * cross_entropy
        else:
            given = teacher[row, token].exp() / teacher[row, token].exp().sum()
            total = total + weight[row] * (given * (given / probabilities).log()).sum()
    return total


FUNCTIONS = [label_smoothing, z_loss, focal, distillation]


def make_batch(seed=0):
    return microbatch_of(*random_batch(length=20, seed=seed))


def make_extra():
    teacher = torch.randn(2, 20, 256, generator=torch.Generator().manual_seed(7))
    return {"teacher": teacher, "weight": torch.tensor([0.5, 2.0])}


def read(function, extra):
    return lambda outputs, batch: outputs.logits_loss_sum(function, batch.labels, extra)


def gradients(model):
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    return found


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda each: each.__name__)
@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("gemma2", False), ("gpt2", False)])
@pytest.mark.parametrize("chunk", [7, 10_000], ids=["chunks of 7 tokens", "one chunk"])
def test_it_is_the_formula_on_whole_logits(function, family, tied, chunk, monkeypatch):
    """Gemma 2 caps its logits. Nothing of the gradient is computed by echelon's own formula."""
    monkeypatch.setattr(loss_function, "logits_chunk_tokens", lambda *_: chunk)
    model, batch, extra = small_model(family, tied), make_batch(), make_extra()
    loss = ObjectiveModule(model)(batch, read(function, extra))
    loss.backward()
    ours = gradients(model)

    logits = model(input_ids=batch.input_ids).logits.double()
    expected = by_formula(function.__name__, logits, batch.labels, extra["teacher"].double(), extra["weight"].double())
    expected.backward()
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(ours[name], gradient, rtol=2e-5, atol=5e-6, msg=name)


def test_label_smoothing_is_that_of_torch():
    model, batch = small_model("llama"), make_batch()
    loss = ObjectiveModule(model)(batch, as_objective(label_smoothing).loss_sum)
    logits = model(input_ids=batch.input_ids).logits.flatten(0, 1)
    whole = F.cross_entropy(logits, batch.labels.flatten(), reduction="sum", label_smoothing=SMOOTHING)
    assert loss.item() == pytest.approx(whole.item(), rel=1e-6)


def test_cross_entropy_as_a_function_is_the_derivative_by_hand():
    def by_autograd(logits, labels, extra):
        return F.cross_entropy(logits, labels, reduction="sum")

    model, batch = small_model("gemma2"), make_batch()
    module, found = ObjectiveModule(model), []
    for objective in (CausalLM(), as_objective(by_autograd)):
        loss = module(batch, objective.loss_sum)
        (loss / 3).backward()
        found.append((loss, gradients(model)))
        assert int(objective.count(batch)) == int((batch.labels != IGNORE).sum())
    assert found[0][0].item() == pytest.approx(found[1][0].item(), rel=1e-6)
    for name, gradient in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], gradient, rtol=2e-5, atol=1e-6, msg=name)


def test_models_with_an_unknown_head_and_evaluation_give_the_same():
    model, batch, extra = small_model("gemma2"), make_batch(), make_extra()
    known = find_traits(model)
    losses = []
    for traits in (known, replace(known, arithmetic=None)):
        module = ObjectiveModule(model, traits=traits)
        losses.append(module(batch, read(distillation, extra)))
        losses[-1].backward()
        losses.append(sum(each.abs().sum() for each in gradients(model).values()))
        with torch.no_grad():
            losses.append(module(batch, read(distillation, extra)))
    assert not losses[2].requires_grad
    assert losses[0].item() == losses[2].item()
    assert [each.item() for each in losses[3:]] == pytest.approx([each.item() for each in losses[:3]], rel=1e-5)


def test_no_labels_give_zero_and_reach_every_parameter():
    model, batch = small_model("llama"), make_batch()
    batch = replace(batch, labels=torch.full_like(batch.labels, IGNORE))
    loss = ObjectiveModule(model)(batch, as_objective(z_loss).loss_sum)
    loss.backward()
    assert loss.item() == 0.0
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


def make_head(tokens=512, size=4096):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, tokens, 2, generator=generator, requires_grad=True)
    weight = torch.randn(size, 2, generator=generator, requires_grad=True)
    return hidden, torch.randint(0, size, (1, tokens), generator=generator), weight


def test_whole_logits_never_exist(monkeypatch):
    """512 tokens, a vocabulary of 4096: no tensor is larger than the logits of a chunk of 64 tokens."""
    monkeypatch.setattr(loss_function, "logits_chunk_tokens", lambda *_: 64)
    hidden, labels, weight = make_head()
    with Watch() as watch:
        chunked_function_sum(z_loss, hidden, labels, {}, weight, None, HeadArithmetic()).backward()
    assert watch.largest == 64 * 4096


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_peak_is_at_most_that_of_cross_entropy(dtype, monkeypatch):
    """Chunks of 512 tokens, of 256 by autograd, which keeps more copies of a chunk. All logits are 32 MiB in fp32."""
    for module in (cross_entropy, loss_function):
        monkeypatch.setattr(module, "logits_chunk_tokens", lambda vocab_size, *_: 512 * 4096 // vocab_size)
    hidden, labels, weight = make_head(tokens=2048)
    peaks = []
    for compute in (
        lambda: chunked_loss_sum(hidden, labels, weight, None, HeadArithmetic()),
        lambda: chunked_function_sum(label_smoothing, hidden, labels, {}, weight, None, HeadArithmetic()),
    ):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            peaks.append(measure_peak(lambda compute=compute: compute().backward()))
    assert 0.5 * peaks[0] < peaks[1] < 1.05 * peaks[0] < 4 * 2048 * 4096


def test_in_fp16_the_gradient_is_multiplied_before_it_is_rounded():
    """A head's gradient of 16000 tokens that miss the same label overflows in fp16 without the factor."""
    rows = 16_000
    assert gradient_factor(torch.float16, rows) < 1
    hidden, weight = torch.full((1, rows, 8), 5.0, requires_grad=True), torch.zeros(64, 8, requires_grad=True)
    labels = torch.zeros(1, rows, dtype=torch.long)

    def doubled(logits, labels, extra):
        assert logits.dtype == torch.float32
        return 2 * F.cross_entropy(logits, labels, reduction="sum")

    with torch.autocast("cpu", torch.float16):
        loss = chunked_function_sum(doubled, hidden, labels, {}, weight, None, HeadArithmetic())
    loss.backward(torch.tensor(1.0 / rows))
    assert weight.grad[0].tolist() == pytest.approx([2 * (1 / 64 - 1) * 5] * 8, rel=2e-3)


def test_a_compiled_loss_is_the_same():
    model, batch, extra = small_model("llama"), make_batch(), make_extra()
    module, found = ObjectiveModule(model), []
    function = partial(scaled_distillation, scale=2.0)
    for compiles in (False, True):
        if compiles:
            module.compile_loss("aot_eager")
            assert module.prepare_loss(function) is module.prepare_loss(function) is not function
        loss = module(batch, read(function, extra))
        loss.backward()
        found.append((loss.item(), gradients(model)))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    for name, gradient in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], gradient, rtol=1e-5, atol=1e-6, msg=name)


def scaled_distillation(logits, labels, extra, scale):
    return scale * distillation(logits, labels, extra)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda logits, labels, extra: F.cross_entropy(logits, labels, reduction="none"), r"shape \[40\].*\.sum\(\)"),
        (lambda logits, labels, extra: 0.0, r"returned a float, and a loss is one number"),
        (lambda logits, labels, extra: logits.detach().sum(), r"does not depend on its logits.*detach"),
        (lambda logits, labels, extra: (logits * extra["reward"]).sum(), r"reads 'reward'.*extra=\['teacher', 'wei"),
    ],
)  # fmt: skip
def test_a_function_that_is_no_loss_is_refused(function, message):
    model, batch = small_model("llama"), make_batch()
    with pytest.raises(ConfigError, match=rf"^the loss {__name__}:<lambda> .*{message}"):
        ObjectiveModule(model)(batch, read(function, make_extra()))


def test_an_objective_is_what_has_the_members_of_one():
    class Own(Objective):
        def loss_sum(self, outputs, batch):
            return 2 * outputs.token_loss_sum(batch.labels)

    class Duck:
        needs_reference, unit, measures, batch_means = False, "target_tokens", (), ()
        batch_sums = Own.batch_sums
        count, token_weights, evaluation_sums = Own.count, Own.token_weights, Own.evaluation_sums
        loss_sum = Own.loss_sum

    class Half:
        def loss_sum(self, outputs, batch):
            return outputs.token_loss_sum(batch.labels)

    model, batch = small_model("llama"), make_batch()
    expected = 2 * ObjectiveModule(model)(batch, CausalLM().loss_sum)
    for given in (Own(), Duck()):
        objective = as_objective(given)
        assert objective is given
        assert torch.equal(ObjectiveModule(model)(batch, objective.evaluation_sums), expected.reshape(1))
        assert torch.equal(objective.token_weights(batch).sum().long(), objective.count(batch))
    with pytest.raises(
        TypeError, match=r"Half has no needs_reference; derive it from echelon\.learn\.objectives\.objective"
    ):
        as_objective(Half())
    for wrong in (CausalLM, 3, "causal_lm"):
        with pytest.raises(TypeError, match=r"is not a loss; use an Objective, or a function of \(logits, labels,"):
            as_objective(wrong)


def test_tensorflow_refuses_what_it_would_not_compute():
    """It computes the cross-entropy by itself, so another loss must not be ignored, nor that of a subclass."""

    class Doubled(CausalLM):
        def loss_sum(self, outputs, batch):
            return 2 * super().loss_sum(outputs, batch)

    engine = TensorflowEngine(steps=None, evaluation=None, lines=())
    for loss, name in ((z_loss, f"{__name__}:z_loss"), (Doubled(), ".*Doubled object")):
        with pytest.raises(
            ConfigError, match=rf"cannot run a loss in PyTorch, and the loss is {name}.*; use engine=nat"
        ):
            engine.forward_backward(0, [make_batch()], torch.ones(()), as_objective(loss))
        with pytest.raises(ConfigError, match="engine=tensorflow"), engine.evaluation(as_objective(loss)):
            pass
