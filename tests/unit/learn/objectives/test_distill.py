"""Distillation compared with its formulas, on plain `transformers` models and their logits."""

import json
from unittest import mock

import pytest
import torch
from torch import log_softmax

from echelon.ground.errors import ConfigError
from echelon.learn.data.taught import SCORES, TOKENS
from echelon.learn.engines.module_evaluation import ModuleEvaluation
from echelon.learn.objectives import loss_function
from echelon.learn.objectives.distill import Distill, DistillationLoss, top_scores
from echelon.learn.objectives.outputs import ObjectiveModule
from tests.families import small_model
from tests.unit.learn.objectives.pair_samples import module_of
from tests.unit.learn.objectives.test_grpo import answers_batch
from tests.unit.recipe_samples import SMALL, load_text


def kl(left, right):
    """KL(left || right) of log-probabilities, summed over the last dim."""
    return (left.exp() * (left - right)).sum(-1)


def jsd(p, q, beta):
    mixture = (beta * p.exp() + (1 - beta) * q.exp()).log()
    return beta * kl(p, mixture) + (1 - beta) * kl(q, mixture)


FORMULAS = {
    "forward": (DistillationLoss("forward"), lambda p, q: kl(p, q)),
    "reverse": (DistillationLoss("reverse"), lambda p, q: kl(q, p)),
    "jsd": (DistillationLoss("jsd", 0.3), lambda p, q: jsd(p, q, 0.3)),
    "warm": (DistillationLoss("jsd", 0.9, temperature=2.0), lambda p, q: jsd(p, q, 0.9)),
    "with labels": (DistillationLoss("forward", sft_weight=0.5), lambda p, q: kl(p, q)),
}


def logits_at_labels(model, batch):
    """The logits of a plain model at every labelled token, [tokens, vocabulary]."""
    return model(input_ids=batch.input_ids, use_cache=False).logits.float()[batch.labels != -100]


def build_teacher(family="llama"):
    """A model of other weights, whose predictions are far from even."""
    teacher = small_model(family, seed=1)
    with torch.no_grad():
        teacher.get_output_embeddings().weight.mul_(20)
    return teacher


def by_hand(name, model, teacher, batch):
    function, formula = FORMULAS[name]
    with torch.no_grad():
        theirs = logits_at_labels(teacher, batch).double()
    ours = logits_at_labels(model, batch).double()
    p, q = (log_softmax(logits / function.temperature, -1) for logits in (theirs, ours))
    picked = log_softmax(ours, -1).gather(1, batch.labels[batch.labels != -100][:, None]).sum()
    return formula(p, q).sum() - function.sft_weight * picked


def plain_batch():
    batch = answers_batch()
    return batch.__class__(batch.input_ids, batch.labels, batch.sample_ids, batch.batch_indices)


@pytest.mark.parametrize("chunk", [None, 5], ids=["whole", "in chunks"])
@pytest.mark.parametrize("name", FORMULAS)
def test_loss_and_gradient_are_those_of_the_formula(name, chunk):
    """The teacher is of another family and width; its head is applied a chunk at a time."""
    model, teacher, batch = small_model("llama"), build_teacher("gpt2"), plain_batch()
    expected = by_hand(name, model, teacher, batch)
    gradients = torch.autograd.grad(expected, list(model.parameters()))
    module, objective = module_of(model, teacher), Distill(FORMULAS[name][0])
    limit = loss_function.logits_chunk_tokens if chunk is None else lambda *_: chunk
    with mock.patch.object(loss_function, "logits_chunk_tokens", limit):
        loss = module(batch, objective.loss_sum)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-5 * max(1, gradient.abs().max().item()))
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_evaluation_measures_by_hand():
    model, teacher, batch = small_model("llama"), build_teacher(), plain_batch()
    with torch.no_grad():
        p, q = (log_softmax(logits_at_labels(one, batch), -1) for one in (teacher, model))
        evaluation = ModuleEvaluation(module_of(model, teacher), Distill(DistillationLoss("reverse")))
        found = evaluation.sums(batch)
    labels = batch.labels[batch.labels != -100]
    expected = [
        kl(q, p).sum(),
        -q.gather(1, labels[:, None]).sum(),
        kl(p, q).sum(),
        -(q.exp() * q).sum(),
        (p.argmax(-1) == q.argmax(-1)).sum().float(),
    ]
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-5, atol=1e-4)


def prepared(batch, teacher, top_k, temperature=1.0):
    """The batch with what a teacher said before, zeros where there is no label."""
    with torch.no_grad():
        logits = teacher(input_ids=batch.input_ids, use_cache=False).logits.float() / temperature
        tokens, scores = top_scores(logits.flatten(0, 1), top_k)
    shape, labelled = batch.labels.shape, (batch.labels != -100).unsqueeze(-1)
    return batch.with_extra(**{TOKENS: tokens.view(*shape, -1) * labelled, SCORES: scores.view(*shape, -1) * labelled})


@pytest.mark.parametrize("name", FORMULAS)
def test_all_tokens_prepared_are_the_teacher_in_memory(name):
    function = FORMULAS[name][0]
    model, teacher, batch = small_model("llama"), build_teacher(), plain_batch()
    known = prepared(batch, teacher, 256, function.temperature)
    found = []
    for module, given in ((module_of(model, teacher), batch), (ObjectiveModule(model), known)):
        loss = module(given, Distill(function).loss_sum)
        found.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * max(1, theirs.abs().max().item()))


@pytest.mark.parametrize("name", ["forward", "reverse", "jsd"])
def test_other_tokens_are_one_outcome(name):
    """With k tokens, the formula is of k + 1 probabilities, and smaller than that of all tokens."""
    function, formula = FORMULAS[name]
    model, teacher, batch = small_model("llama"), build_teacher(), plain_batch()
    with torch.no_grad():
        p, q = (log_softmax(logits_at_labels(one, batch), -1).exp() for one in (teacher, model))
        top = p.topk(9, -1).indices
        merged = [torch.cat([x.gather(1, top), 1 - x.gather(1, top).sum(1, keepdim=True)], 1).log() for x in (p, q)]
        loss = ObjectiveModule(model)(prepared(batch, teacher, 9), Distill(function).loss_sum)
        whole = by_hand(name, model, teacher, batch)
    assert loss.item() == pytest.approx(formula(*merged).sum().item(), rel=1e-4)
    assert 0 < loss < whole


def test_vocabularies_that_are_padded_differently_share_their_tokens():
    torch.manual_seed(0)
    logits, theirs, labels = torch.randn(4, 30), torch.randn(4, 40), torch.zeros(4, dtype=torch.long)
    expected = kl(log_softmax(theirs[:, :30], -1), log_softmax(logits, -1)).sum()
    torch.testing.assert_close(DistillationLoss()(logits, labels, {"teacher_logits": theirs}), expected)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"name": "distill"}, "objective.name=distill needs a teacher; set objective.teacher"),
        ({"name": "distill", "teacher": "big", "beta": 0.3}, "objective.beta=0.3 has no effect with objective.loss"),
        ({"name": "distill", "teacher": "big", "loss": "jsd", "beta": 1.0}, "use a value between 0 and 1"),
        ({"name": "distill", "teacher": "big", "loss": "ipo"}, "has other losses; use objective.loss=forward, re"),
        ({"teacher": "big"}, "objective.teacher=big has no effect with objective.name=causal_lm"),
    ],
)
def test_what_means_nothing_is_refused(tmp_path, section, message):
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, section)


def load(folder, section):
    return load_text(folder, SMALL, f"objective={json.dumps(section)}")[0]


def test_a_mixture_is_of_equal_parts_by_default(tmp_path):
    def read(**keys):
        return load(tmp_path, {"name": "distill", "teacher": "big", **keys}).objective

    assert read(loss="jsd").beta == 0.5 and read(loss="jsd", beta=0.2).beta == 0.2
    assert read().loss_name == "forward"
