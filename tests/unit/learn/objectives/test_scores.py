"""Losses on the scores of texts compared with their formulas, on the models of `transformers`."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from echelon.ground.errors import ConfigError
from echelon.learn.data.score_labels import split_margin
from echelon.learn.engines.module_evaluation import ModuleEvaluation
from echelon.learn.evaluation import sum_up
from echelon.learn.objectives.loss import IGNORE
from echelon.learn.objectives.objective import build_objective
from echelon.learn.objectives.outputs import ObjectiveModule
from echelon.learn.objectives.scores import Reward, join_margins
from echelon.recipe import ObjectiveConfig
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
    assert result.num_pairs == 3 and result.perplexity is None
    assert result.reward_accuracy == pytest.approx((good > bad).float().mean().item())
    assert result.reward_margin == pytest.approx((good - bad).mean().item(), rel=1e-4, abs=1e-6)


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
