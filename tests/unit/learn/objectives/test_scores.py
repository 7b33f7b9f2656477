"""Losses on the scores of texts compared with their formulas, on the models of `transformers`."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from echelon.ground.errors import ConfigError
from echelon.learn.data.instruction import find_label, split_margin
from echelon.learn.engines.module_evaluation import ModuleEvaluation
from echelon.learn.evaluation import EvalResults, sum_up
from echelon.learn.objectives.loss import IGNORE
from echelon.learn.objectives.objective import build_objective
from echelon.learn.objectives.outputs import ObjectiveModule
from echelon.learn.objectives.scores import Classification, Reward, join_margins
from echelon.recipe.objective import ObjectiveConfig
from tests.families import small_scorer
from tests.unit.learn.objectives.pair_samples import PAIRS, pair_batch

MARGINS = {(0, 0): 0.3, (0, 2): -1.7, (1, 0): 2.5e-3}


def scored_batch(margins=MARGINS):
    """The pairs of `pair_batch`, with a label at the last token of each answer alone: half of the margin."""
    batch = pair_batch()
    batch.labels.fill_(IGNORE)
    for (row, chosen), margin in margins.items():
        for number, half in enumerate(split_margin(margin)):
            last = int((batch.documents[row] == chosen + number).nonzero().max())
            batch.labels[row, last] = half
    return batch


def scores_by_hand(model, batch):
    """The score of each answer alone, by the model's own forward pass: chosen and rejected, [3] each."""

    def score(row, document):
        return model(input_ids=batch.input_ids[row][batch.documents[row] == document][None], use_cache=False).logits[0]

    return [torch.cat([score(row, chosen + side) for row, chosen in PAIRS]) for side in (0, 1)]


@pytest.mark.parametrize("margin", [0.0, 1.0, -0.1, 3.4e-5, -1e30])
def test_a_margin_is_two_labels(margin):
    """An fp32 number comes back bit for bit."""
    halves = split_margin(margin)
    assert all(0 <= half < 2**16 for half in halves)
    high, low = (torch.tensor([[half]]) for half in halves)
    assert torch.equal(join_margins(high, low), torch.tensor([[margin]]))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("weight", [0.0, 0.05])
def test_loss_and_gradients_equal_the_formula(family, weight):
    model, batch, objective = small_scorer(family), scored_batch(), Reward(weight)
    loss = ObjectiveModule(model)(batch, objective.loss_sum)
    loss.backward()
    ours = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    assert int(objective.count(batch)) == 3

    model.zero_grad()
    good, bad = scores_by_hand(model, batch)
    margins = torch.tensor(list(MARGINS.values()))
    expected = (-torch.sigmoid(good - bad - margins).log() + weight * (good + bad) ** 2).mean()
    expected.backward()
    assert loss.item() / 3 == pytest.approx(expected.item(), rel=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name] / 3, parameter.grad, rtol=2e-4, atol=2e-5, msg=name)


def test_evaluation_counts_the_pairs_in_their_order():
    model, batch, objective = small_scorer("llama"), scored_batch(), Reward()
    with torch.no_grad():
        evaluation = ModuleEvaluation(ObjectiveModule(model), objective)
        result = sum_up(evaluation, objective, [batch], lambda sums: None, torch.device("cpu"))
        good, bad = scores_by_hand(model, batch)
    assert result.row()["pairs"] == 3 and result.perplexity is None
    assert result.measures["reward_accuracy"] == pytest.approx((good > bad).float().mean().item())
    assert result.measures["reward_margin"] == pytest.approx((good - bad).mean().item(), rel=1e-4, abs=1e-6)


NAMES = ("no", "yes", "both")
CLASSES = {(0, 0): 2, (0, 1): 0, (0, 2): 2, (1, 0): 1, (1, 1): 2}  # by row and document; one has no label


def labelled_batch():
    """The texts of `pair_batch`, with a label at the last token of each."""
    batch = pair_batch()
    batch.labels.fill_(IGNORE)
    for (row, document), label in CLASSES.items():
        batch.labels[row, int((batch.documents[row] == document).nonzero().max())] = label
    return batch


def padded_texts(batch):
    """The same texts as `transformers` takes them: ids and mask with padding at the end, and labels."""
    texts = [batch.input_ids[row][batch.documents[row] == document] for row, document in CLASSES]
    ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=0)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": torch.tensor(list(CLASSES.values()))}


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "gemma2"])
def test_classification_equals_the_loss_and_gradients_of_transformers(family):
    model, batch, objective = small_scorer(family, NAMES), labelled_batch(), Classification(NAMES)
    loss = ObjectiveModule(model)(batch, objective.loss_sum) / len(CLASSES)
    loss.backward()
    ours = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    assert int(objective.count(batch)) == len(CLASSES)

    model.zero_grad()
    assert model.config.problem_type == "single_label_classification"
    expected = model(**padded_texts(batch)).loss
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_evaluation_counts_labels():
    """Compared with the predictions of `transformers`, and the definition of F1 by precision and recall."""
    model, batch, objective = small_scorer("llama", NAMES), labelled_batch(), Classification(NAMES)
    with torch.no_grad():
        evaluation = ModuleEvaluation(ObjectiveModule(model), objective)
        result = sum_up(evaluation, objective, [batch, batch], lambda sums: None, torch.device("cpu"))
        given = padded_texts(batch)
        found = model(**given)
    predicted, labels, row = found.logits.argmax(-1).tolist(), given["labels"].tolist(), result.row()
    assert row["loss"] == pytest.approx(found.loss.item(), rel=1e-5)
    assert row["texts"] == 10 and row["perplexity"] is None and row["target_tokens"] == 10
    assert row["accuracy"] == sum(map(int.__eq__, predicted, labels)) / 5
    scores = []
    for number, name in enumerate(NAMES):
        right = sum(pair == (number, number) for pair in zip(predicted, labels, strict=True))
        counts = {"texts": labels.count(number), "predicted": predicted.count(number), "right": right}
        assert row["labels"][name] == {key: 2 * count for key, count in counts.items()}
        precision, recall = right / max(1, counts["predicted"]), right / max(1, counts["texts"])
        scores.append(2 * precision * recall / (precision + recall) if right else 0.0)
    assert row["macro_f1"] == pytest.approx(sum(scores) / 3)
    whole = EvalResults({"one": result, "two": result}).whole.row()
    assert whole["texts"] == 20 and whole["accuracy"] == row["accuracy"] and whole["macro_f1"] == row["macro_f1"]


def test_pairs_without_labels_count_zero_and_reach_every_parameter():
    model, batch, objective = small_scorer("llama"), scored_batch({}), Reward(0.1)
    loss = ObjectiveModule(model)(batch, objective.loss_sum)
    loss.backward()
    assert loss.item() == 0.0 and int(objective.count(batch)) == 0
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


def test_the_recipe_builds_it():
    assert build_objective(ObjectiveConfig(name="reward", center_weight=0.01)) == Reward(0.01)
    with pytest.raises(ValueError, match=r"objective.center_weight=0.1 has no effect with objective.name=dpo"):
        ObjectiveConfig(name="dpo", center_weight=0.1)


def test_a_model_type_without_scores_is_refused():
    with pytest.raises(ConfigError, match="transformers has no sequence-classification model of type granite"):
        small_scorer("granite")


def test_the_model_is_that_of_transformers():
    model = small_scorer("qwen3")
    assert isinstance(model, type(AutoModelForSequenceClassification.from_config(model.config)))
    assert model.config.problem_type == "regression" and model.config.num_labels == 1


def test_labels_in_the_recipe():
    config = ObjectiveConfig(name="classification", labels=["no", "yes"])
    assert build_objective(config) == Classification(("no", "yes")) and config.num_scores == 2
    for labels, message in (
        ([], r"objective.labels has 0 names, and objective.name=classification needs 2 to 65,536; list the labels"),
        (["no"], r"has 1 names.*\(regression\) and several labels of one text are not trained"),
        (["no", "no"], r"objective.labels has 'no' twice"),
    ):
        with pytest.raises(ValueError, match=message):
            ObjectiveConfig(name="classification", labels=labels)
    with pytest.raises(ValueError, match=r"has no effect with objective.name=reward; set objective.name: classific"):
        ObjectiveConfig(name="reward", labels=["no", "yes"])


@pytest.mark.parametrize(
    ("label", "labels", "number"),
    [
        ("yes", ("no", "yes"), 1), (1, ("no", "yes"), 1), ("0", ("no", "yes"), 0),
        (1, ("1", "2", "3"), 0), ("3", ("1", "2", "3"), 2), (-1, ("-1", "1"), 0),
    ],
)  # fmt: skip
def test_a_label_is_a_name_or_a_position(label, labels, number):
    assert find_label(label, labels) == number


@pytest.mark.parametrize(
    ("label", "labels"),
    [
        ("maybe", ("no", "yes")), (2, ("no", "yes")), (-1, ("no", "yes")), (True, ("no", "yes")), (1.0, ("no", "yes")),
        (["yes"], ("no", "yes")), (0, ("1", "2", "3")), ("", ("no", "yes")), ("01", ("no", "yes")),
    ],
)  # fmt: skip
def test_other_labels_are_refused(label, labels):
    with pytest.raises(ConfigError, match=r"label=.* is none of objective.labels \(.*\), nor a position in that list"):
        find_label(label, labels)
