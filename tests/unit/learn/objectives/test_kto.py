"""KTO from records to the loss: its formula by hand on plain `transformers` models, and its data."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from echelon.ground.errors import ConfigError
from echelon.learn.data.loader import BatchLoader, BatchPlace
from echelon.learn.data.mixture import build_order
from echelon.learn.data.prepare import prepare_data
from echelon.learn.data.shards import GOOD, NO_LABEL
from echelon.learn.engines.module_evaluation import ModuleEvaluation
from echelon.learn.evaluation import read_in_order, sum_up
from echelon.learn.objectives.kto import KTO
from echelon.learn.objectives.objective import build_objective, with_batch_means
from tests.families import small_model
from tests.unit.learn.objectives.pair_samples import module_of
from tests.unit.recipe_samples import SMALL, load_text

RECORDS = [
    ("one plus one is", " two", True),
    ("two plus", " two or so, who knows it", False),
    ("three", " six", True),
    ("the capital of France is", " Paris, of course", True),
    ("hello", " go away", False),
]
LENGTH = 40
BATCH = len(RECORDS)


@pytest.fixture
def recipe(tmp_path):
    lines = [json.dumps({"prompt": p, "completion": c, "label": label}) for p, c, label in RECORDS]
    (tmp_path / "answers.jsonl").write_text("\n".join(lines))
    return load_text(
        tmp_path, SMALL, f"data.train={tmp_path / 'answers.jsonl'}", f"data.prepared_dir={tmp_path / 'prepared'}",
        "data.document_separator=null", f"data.sequence_len={LENGTH}", "data.validation_fraction=0.0",
        "data.prepare_workers=1", "objective={name: kto, beta: 0.5, desirable_weight: 1.5}",
        f"train.global_batch_size={BATCH}",
    )[0]  # fmt: skip


def load_batches(recipe, size=1, micro_batch_size=BATCH):
    """The batch of the first step on each of so many ranks."""
    dataset = prepare_data(recipe).train
    order = build_order(recipe, dataset)
    places = [BatchPlace(micro_batch_size, rank, size) for rank in range(size)]
    return [BatchLoader(dataset, order, recipe.batches, place).batch(0) for place in places]


def read_texts(microbatch):
    """Each row as (text, its targets) in the order of the batch; the bytes tokenizer's ids are bytes."""
    rows = {}
    for row, index in enumerate(microbatch.batch_indices.tolist()):
        learned = microbatch.labels[row][microbatch.labels[row] != NO_LABEL].tolist()
        filled = microbatch.filled[row]
        rows[index] = bytes(microbatch.input_ids[row][filled].tolist() + learned[-1:]).decode(), bytes(learned).decode()
    return [rows[index] for index in sorted(rows)]


def test_each_prompt_meets_the_answer_before_it(recipe):
    [batch] = load_batches(recipe)
    [microbatch] = batch.microbatches
    known = {completion: (prompt, label) for prompt, completion, label in RECORDS}
    pairs = [(known[learned][0], learned) for _, learned in read_texts(microbatch)]
    assert sorted(pairs) == sorted((prompt, completion) for prompt, completion, _ in RECORDS)
    assert [text for text, _ in read_texts(microbatch)] == [prompt + answer for prompt, answer in pairs]
    order = np.argsort(microbatch.batch_indices)
    assert microbatch.extra[GOOD][order].tolist() == [known[answer][1] for _, answer in pairs]
    expected = []
    for place, (prompt, _) in enumerate(pairs):
        answer = pairs[place - 1][1]
        expected.append(((prompt + answer)[: LENGTH + 1], answer[: LENGTH + 1 - len(prompt)]))
    assert read_texts(microbatch.mismatched) == expected


@pytest.mark.parametrize(("size", "micro_batch_size"), [(2, 2), (3, 1), (4, 2)])
def test_the_batch_does_not_depend_on_its_division(recipe, size, micro_batch_size):
    [whole] = load_batches(recipe)
    parts = [each for batch in load_batches(recipe, size, micro_batch_size) for each in batch.microbatches]
    found = {}
    for part in parts:
        for row, index in enumerate(part.batch_indices.tolist()):
            if part.sample_ids[row] >= 0:
                labels = part.mismatched.labels[row]
                found[index] = labels[labels != NO_LABEL].tolist(), bool(part.extra[GOOD][row])
            else:
                assert not (part.mismatched.labels[row] != NO_LABEL).any()
    [microbatch] = whole.microbatches
    for row, index in enumerate(microbatch.batch_indices.tolist()):
        labels = microbatch.mismatched.labels[row]
        assert found[index] == (labels[labels != NO_LABEL].tolist(), bool(microbatch.extra[GOOD][row]))


def scores_by_hand(model, microbatch):
    """log p of the answer of each row, [batch]."""
    scores = []
    for ids, labels, places in zip(microbatch.input_ids, microbatch.labels, microbatch.filled, strict=True):
        filled = int(places.sum())
        every = model(input_ids=ids[None, :filled], use_cache=False).logits[0].float().log_softmax(-1)
        picked = every.gather(1, labels[:filled, None].clamp(min=0))[:, 0]
        scores.append((picked * (labels[:filled] != NO_LABEL)).sum())
    return torch.stack(scores)


def loss_by_hand(objective, growth, baseline, good):
    """Equation 7 of Ethayarajh et al.; equation 7 of D'Oosterlinck et al. for single answers."""
    z = baseline.clamp(min=0) if objective.loss == "kto" else 0.0
    wanted = objective.desirable_weight * (1 - torch.sigmoid(objective.beta * (growth - z)))
    unwanted = objective.undesirable_weight * (1 - torch.sigmoid(objective.beta * (z - growth)))
    return torch.where(good, wanted, unwanted).mean()


@pytest.mark.parametrize("seed", [2, 4], ids=["baseline 0", "baseline above 0"])
@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
def test_loss_and_gradients_equal_the_formula(recipe, loss, seed):
    objective = replace(build_objective(recipe.objective), loss=loss)
    assert objective == KTO(0.5, loss, 1.5, 1.0)
    model, reference = small_model("llama"), small_model("llama", seed=seed)
    [batch] = load_batches(recipe)
    module = module_of(model, reference)

    @torch.no_grad()
    def run(microbatch, compute):
        return module(microbatch, compute)

    [microbatch] = with_batch_means(objective, batch.microbatches, torch.tensor(BATCH), run, lambda sums: None)
    assert int(objective.count(microbatch)) == BATCH
    total = module(microbatch, objective.loss_sum)
    total.backward()
    ours = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    model.zero_grad()
    with torch.no_grad():
        before = scores_by_hand(reference, microbatch)
        others = microbatch.mismatched
        baseline = (scores_by_hand(model, others) - scores_by_hand(reference, others)).mean()
    assert (baseline > 0) == (seed == 4), "a mean below 0, which counts as 0, and one above"
    growth = scores_by_hand(model, microbatch) - before
    expected = loss_by_hand(objective, growth, baseline, microbatch.extra[GOOD])
    expected.backward()
    assert total.item() / BATCH == pytest.approx(expected.item(), rel=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name] / BATCH, parameter.grad, rtol=2e-4, atol=2e-5, msg=name)


def test_evaluation_compares_with_the_whole_set(recipe):
    """In microbatches of two, of which the last is filled up; the rewards of good answers less those of bad ones."""
    objective, dataset = build_objective(recipe.objective), prepare_data(recipe).train
    model, reference = small_model("llama"), small_model("llama", seed=1)
    evaluation = ModuleEvaluation(module_of(model, reference), objective)
    parts = [read_in_order(dataset, first, 2, BATCH) for first in range(0, BATCH, 2)]
    whole = read_in_order(dataset, 0, BATCH, BATCH)
    with torch.no_grad():
        result = sum_up(evaluation, objective, parts, lambda sums: None, torch.device("cpu"))
        growth, baseline = (
            scores_by_hand(model, given) - scores_by_hand(reference, given) for given in (whole, whole.mismatched)
        )
    good, rewards = whole.extra[GOOD], 0.5 * growth
    assert (result.unit, result.count) == ("answers", BATCH) and result.perplexity is None
    assert result.loss == pytest.approx(loss_by_hand(objective, growth, baseline.mean(), good).item(), rel=1e-5)
    margin = (rewards[good].mean() - rewards[~good].mean()).item()
    assert result.measures["reward_margin"] == pytest.approx(margin, rel=1e-4)
    right = torch.where(good, growth > baseline.mean().clamp(min=0), growth < baseline.mean().clamp(min=0))
    assert result.measures["reward_accuracy"] == pytest.approx(right.float().mean().item())
    only = [read_in_order(dataset, int(row), 1, BATCH) for row in good.nonzero()]
    with torch.no_grad():
        found = sum_up(evaluation, objective, only, lambda sums: None, torch.device("cpu"))
        assert found.measures["reward_margin"] is None


MESSAGES = {"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}], "label": False}


def test_messages_with_a_label_are_judged_if_the_recipe_says_so(recipe, tmp_path):
    (tmp_path / "chats.jsonl").write_text("\n".join([json.dumps(MESSAGES)] * 3))
    overrides = [
        f"data.train=[{{path: {tmp_path / 'chats.jsonl'}, format: unpaired_messages}}]", "objective.name=kto",
        f"data.prepared_dir={tmp_path / 'prepared'}", "tokenizer={train: {vocab_size: 300}}", "data.prepare_workers=1",
        "data.chat_template=chatml", "model.new_tokens=['<|im_start|>', '<|im_end|>']", "data.validation_fraction=0.0",
    ]  # fmt: skip
    named, _ = load_text(tmp_path, SMALL, *overrides)
    dataset = prepare_data(named).train
    samples = dataset.read_samples(np.arange(3))
    assert dataset.num_samples == 3 and not samples.extra[GOOD].any()
    plain, _ = load_text(tmp_path, SMALL, *overrides, f"data.train={tmp_path / 'chats.jsonl'}")
    with pytest.raises(ConfigError, match=r"has messages; .*format: unpaired_messages for messages with a label"):
        prepare_data(plain)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.packing=true", r"data.packing=true: objective.name=kto needs one answer in a sequence"),
        ("train.global_batch_size=1", r"train.global_batch_size=1 is one sequence, and objective.name=kto needs an"),
    ],
)
def test_a_batch_that_cannot_be_compared_is_refused(tmp_path, override, message):
    with pytest.raises(ConfigError, match=message):
        load_text(tmp_path, SMALL, "objective.name=kto", override)


def test_a_batch_without_what_it_compares_with_is_refused(recipe):
    objective = build_objective(recipe.objective)
    [batch] = load_batches(recipe)
    [microbatch] = batch.microbatches
    with pytest.raises(ConfigError, match=r"give them in Microbatch.mismatched"):
        objective.batch_sums(replace(microbatch, mismatched=None), None)
    with pytest.raises(ConfigError, match=r"Microbatch.extra\['good'\], one boolean per sequence"):
        objective.count(replace(microbatch, extra={}))
