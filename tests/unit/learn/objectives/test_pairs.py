"""The losses on pairs compared with the formulas of their papers, on plain `transformers` models."""

import math
from typing import get_args

import pytest
import torch
from torch import sigmoid
from torch.nn.functional import relu

import echelon.learn.objectives.loss
from echelon.ground.errors import ConfigError
from echelon.learn.engines.module_evaluation import ModuleEvaluation
from echelon.learn.evaluation import sum_up
from echelon.learn.objectives.objective import build_objective, with_batch_means
from echelon.learn.objectives.pairs import CPO, DPO, LOSSES, ORPO, Answers, SimPO
from echelon.recipe.names import OBJECTIVES
from echelon.recipe.objective import ObjectiveConfig
from tests.families import small_model
from tests.unit.learn.objectives.pair_samples import PAIRS, module_of, pair_batch, scores_by_hand
from tests.unit.recipe_samples import SMALL, load_text

CHOSEN, REJECTED = (torch.tensor([float(lengths[side]) for lengths in PAIRS.values()]) for side in (0, 1))
"""The tokens of the answers, [3]."""


def odds(score):
    return score.exp() / (1 - score.exp())


FORMULAS = {
    # g and b: the log-ratios of the chosen (good) and the rejected (bad) answer to the reference.
    "sigmoid": (DPO(0.5), lambda g, b: -sigmoid(0.5 * (g - b)).log()),
    "smoothed": (
        DPO(0.1, label_smoothing=0.2),
        lambda g, b: -0.8 * sigmoid(0.1 * (g - b)).log() - 0.2 * (1 - sigmoid(0.1 * (g - b))).log(),
    ),
    "sigmoid_norm": (DPO(2.0, "sigmoid_norm"), lambda g, b: -sigmoid(2 * (g / CHOSEN - b / REJECTED)).log()),
    "hinge": (DPO(0.3, "hinge"), lambda g, b: relu(1 - 0.3 * (g - b))),
    "ipo": (DPO(0.3, "ipo"), lambda g, b: (g / CHOSEN - b / REJECTED - 1 / 0.6) ** 2),
    "robust": (
        DPO(0.4, "robust", 0.1),
        lambda g, b: (-0.9 * sigmoid(0.4 * (g - b)).log() + 0.1 * sigmoid(-0.4 * (g - b)).log()) / 0.8,
    ),
    "exo_pair": (
        DPO(0.4, "exo_pair", 0.01),
        lambda g, b: (
            sigmoid(0.4 * (g - b)) * (sigmoid(0.4 * (g - b)) / 0.99).log()
            + sigmoid(0.4 * (b - g)) * (sigmoid(0.4 * (b - g)) / 0.01).log()
        ),
    ),
    "nca_pair": (
        DPO(0.4, "nca_pair"),
        lambda g, b: -sigmoid(0.4 * g).log() - 0.5 * sigmoid(-0.4 * g).log() - 0.5 * sigmoid(-0.4 * b).log(),
    ),
    "sppo_hard": (DPO(0.4, "sppo_hard"), lambda g, b: (g - 1 / 0.8) ** 2 + (b + 1 / 0.8) ** 2),
    "apo_zero": (DPO(0.4, "apo_zero"), lambda g, b: 1 - sigmoid(0.4 * g) + sigmoid(0.4 * b)),
    "apo_down": (DPO(0.4, "apo_down"), lambda g, b: sigmoid(0.4 * g) + 1 - sigmoid(0.4 * (g - b))),
    # Without a reference g and b are log-probabilities.
    "orpo": (ORPO(0.2), lambda g, b: -0.2 * sigmoid((odds(g / CHOSEN) / odds(b / REJECTED)).log()).log()),
    "simpo": (SimPO(2.0, 0.7), lambda g, b: -sigmoid(2 * g / CHOSEN - 2 * b / REJECTED - 0.7).log()),
    "cpo": (CPO(0.1, sft_weight=0.0), lambda g, b: -sigmoid(0.1 * (g - b)).log()),
    "cpo smoothed": (
        CPO(0.1, label_smoothing=0.1),
        lambda g, b: -0.9 * sigmoid(0.1 * (g - b)).log() - 0.1 * sigmoid(0.1 * (b - g)).log(),
    ),
    "cpo hinge": (CPO(0.1, "hinge"), lambda g, b: relu(1 - 0.1 * (g - b))),
    "cpo ipo": (CPO(0.1, "ipo"), lambda g, b: (g / CHOSEN - b / REJECTED - 5) ** 2),
    "cpo-simpo": (
        SimPO(2.0, 0.7, sft_weight=0.5),
        lambda g, b: -sigmoid(2 * g / CHOSEN - 2 * b / REJECTED - 0.7).log(),
    ),
    "rpo": (DPO(0.5, sft_weight=0.25), lambda g, b: -sigmoid(0.5 * (g - b)).log()),
}


def with_means(objective, batch, module):
    [batch] = with_batch_means(objective, [batch], objective.count(batch), module, lambda sums: None)
    return batch


@pytest.mark.parametrize("name", FORMULAS)
def test_loss_and_gradients_equal_the_formula(name, monkeypatch):
    monkeypatch.setattr(echelon.learn.objectives.loss, "logits_chunk_tokens", lambda *_: 7)
    objective, formula = FORMULAS[name]
    model, reference, batch = small_model("llama"), small_model("llama", seed=1), pair_batch()
    module = module_of(model, reference)
    batch = with_means(objective, batch, module)
    loss = module(batch, objective.loss_sum)
    loss.backward()
    ours = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    assert int(objective.count(batch)) == 3 and objective.count(batch).dtype == torch.int64
    assert all(parameter.grad is None for parameter in reference.parameters())

    model.zero_grad()
    good, bad = scores_by_hand(model, batch)
    crossed = -good.sum() / CHOSEN.sum()
    if objective.needs_reference:
        with torch.no_grad():
            before = scores_by_hand(reference, batch)
        good, bad = good - before[0], bad - before[1]
    expected = formula(good, bad).mean() + objective.sft_weight * crossed
    expected.backward()
    assert loss.item() / 3 == pytest.approx(expected.item(), rel=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name] / 3, parameter.grad, rtol=2e-4, atol=2e-5, msg=name)


@pytest.mark.parametrize(
    "objective", [ORPO(0.5), SimPO(2.0, 0.5, sft_weight=1.0), CPO(0.5, "ipo"), DPO(0.5, "ipo")], ids=str
)
def test_evaluation_reports_rewards(objective):
    model, reference, batch = small_model("llama"), small_model("llama", seed=6), pair_batch()
    evaluation = ModuleEvaluation(module_of(model, reference), objective)
    with torch.no_grad():
        result = sum_up(evaluation, objective, [batch], lambda sums: None, torch.device("cpu"))
        good, bad = scores_by_hand(model, batch)
        loss = module_of(model, reference)(with_means(objective, batch, None), objective.loss_sum)
        if objective.needs_reference:
            good, bad = (now - then for now, then in zip((good, bad), scores_by_hand(reference, batch), strict=True))
    rewards = objective.beta * (good - bad if objective.needs_reference else good / CHOSEN - bad / REJECTED)
    assert 0 < int((rewards > 0).sum()) < 3, "an accuracy that says something"
    assert result.row()["pairs"] == 3 and result.loss == pytest.approx(loss.item() / 3, rel=1e-5)
    assert result.measures["reward_accuracy"] == pytest.approx((rewards > 0).float().mean().item())
    assert result.measures["reward_margin"] == pytest.approx(rewards.mean().item(), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    "objective", [ORPO(0.5), SimPO(2.0, 0.5, sft_weight=1.0), CPO(0.5), DPO(0.5, "sppo_hard")], ids=str
)
def test_pairs_without_labels_count_zero_and_reach_every_parameter(objective):
    model, batch = small_model("llama"), pair_batch()
    batch.labels.fill_(-100)
    batch = with_means(objective, batch, None) if objective.count(batch) else batch
    means = {name: torch.zeros(2) for name in objective.batch_means}
    loss = module_of(model, small_model("llama", seed=1))(batch.with_extra(**means), objective.loss_sum)
    loss.backward()
    assert loss.item() == 0.0 and int(objective.count(batch)) == 0
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize("score", [-1e-4, -0.3, -math.log(2), -2.0, -60.0])
def test_odds_are_exact_for_likely_and_unlikely_answers(score):
    """The log-odds of a mean log-probability, in double precision as p / (1 - p), and their gradient 1 / (1 - p)."""
    given = torch.tensor([[score]], requires_grad=True)
    one, zero = torch.ones(1, 1), torch.zeros(1, 1)
    loss = ORPO(1.0).losses(Answers(given, zero, one), Answers(torch.full((1, 1), -math.log(2)), zero, one)).sum()
    loss.backward()
    exact = math.exp(score) / -math.expm1(score)
    assert loss.item() == pytest.approx(math.log1p(1 / exact) if exact > 1e-9 else -math.log(exact), rel=1e-5)
    slope = -1 / (1 + exact) / -math.expm1(score)
    assert given.grad.item() == pytest.approx(slope, rel=1e-4)


def test_the_recipe_names_every_loss():
    known = [loss for row in OBJECTIVES.values() for loss in row.losses]
    annotated = get_args(ObjectiveConfig.model_fields["loss"].annotation)
    assert {*known} == {*get_args(annotated[0])}
    assert {*OBJECTIVES["dpo"].losses} == {*LOSSES}


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ("{name: dpo}", DPO(0.1)),
        ("{name: dpo, beta: 0.2, loss: robust, label_smoothing: 0.1, sft_weight: 1.0}", DPO(0.2, "robust", 0.1, 1.0)),
        ("{name: orpo, beta: 0.2}", ORPO(0.2)),
        ("{name: simpo, beta: 2.0, gamma: 1.0}", SimPO(2.0, 1.0)),
        ("{name: simpo}", SimPO(0.1, 0.5)),
        ("{name: cpo}", CPO(0.1, "sigmoid", 0.0, 1.0)),
        ("{name: cpo, loss: hinge, sft_weight: 0.0}", CPO(0.1, "hinge", 0.0, 0.0)),
    ],
)  # fmt: skip
def test_a_recipe_builds_the_objective(tmp_path, section, expected):
    recipe, _ = load_text(tmp_path, SMALL, f"objective={section}")
    assert build_objective(recipe.objective) == expected


REFUSED = {
    "{name: dpo, gamma: 1.0}": r"gamma=1 has no effect with objective.name=dpo; set objective.name: simpo, or remove",
    "{name: orpo, sft_weight: 1.0}": r"sft_weight=1 has no effect .* objective.name: dpo, simpo, cpo or distill, or",
    "{beta: 1.0}": r"beta=1 has no effect with objective.name=causal_lm; set objective.name: dpo, orpo, simpo, cpo, k",
    "{name: cpo, loss: robust}": r"loss=robust: objective.name=cpo has other losses; use .*=sigmoid, hinge or ipo",
    "{name: dpo, loss: ipo, label_smoothing: 0.1}": r"no effect with objective.loss=ipo; .*sigmoid, robust or e",
    "{name: dpo, loss: exo_pair}": r"label_smoothing=0 makes it infinite; set objective.label_smoothing, for example",
}


@pytest.mark.parametrize("section", REFUSED)
def test_keys_without_a_meaning_are_refused(tmp_path, section):
    with pytest.raises(ConfigError, match=REFUSED[section]):
        load_text(tmp_path, SMALL, f"objective={section}")
