"""GRPO and its variants compared with their formulas on a plain `transformers` model, one answer at a time."""

import math

import pytest
import torch

from echelon.learn.objectives.grpo import GRPO, advantages_of
from echelon.learn.objectives.objective import training_sums
from echelon.learn.objectives.outputs import ObjectiveModule
from tests.families import small_model
from tests.unit.learn.objectives.answer_samples import ADVANTAGES, LENGTHS, PROMPT, answers_batch


def scores_of(model, batch, row, temperature):
    """The log-probability of each token of an answer, from the model's logits."""
    tokens = batch.input_ids[row, : PROMPT + LENGTHS[row]]
    logits = model(input_ids=tokens[None], use_cache=False).logits[0].float() / temperature
    return torch.log_softmax(logits, -1)[PROMPT - 1 : -1].gather(1, tokens[PROMPT:, None])[:, 0]


def loss_by_hand(objective, model, reference, batch):
    """The summed loss, and the number of tokens that each side of the clip held back."""
    total, num_clipped = 0.0, [0, 0]
    for row, length in enumerate(LENGTHS):
        span = slice(PROMPT - 1, PROMPT + length - 1)
        new = scores_of(model, batch, row, objective.temperature)
        old, drawn = (
            batch.extra["old_log_probabilities"][row, span],
            batch.extra["sampled_log_probabilities"][row, span],
        )
        ratio = (new - old).exp()
        if objective.ratio == "sequence":
            ratio = ratio.log().mean().exp().expand(length)
        losses = []
        for each in ratio:
            advantage, least, most = float(ADVANTAGES[row]), 1 - objective.clip_low, 1 + objective.clip_high
            free, held = each * advantage, min(max(each, torch.tensor(least)), torch.tensor(most)) * advantage
            num_clipped[bool(each > most)] += bool(held < free)
            losses.append(-min(free, held))
        losses = torch.stack(losses)
        if objective.importance_cap is not None:
            losses = losses * (old - drawn).exp().clamp(max=objective.importance_cap)
        if objective.kl_weight:
            with torch.no_grad():
                before = scores_of(reference, batch, row, objective.temperature)
            q = (before - new).exp()
            losses = losses + objective.kl_weight * (q - q.log() - 1)
        total = total + (losses.mean() if objective.normalize == "sequence" else losses.sum())
    return total, num_clipped


@pytest.mark.parametrize(
    ("family", "objective", "count"),
    [
        ("llama", GRPO(), 4),
        ("llama", GRPO(clip_high=0.28, normalize="token"), sum(LENGTHS)),
        ("llama", GRPO(normalize="constant", max_tokens=16), 64),
        ("llama", GRPO(clip_low=3e-2, clip_high=4e-2, ratio="sequence"), 4),
        ("llama", GRPO(kl_weight=0.3, needs_reference=True), 4),
        ("llama", GRPO(importance_cap=1.1), 4),
        ("gemma2", GRPO(temperature=0.7, kl_weight=0.1, needs_reference=True), 4),
    ],
    ids=["grpo", "dapo", "dr grpo", "gspo", "kl", "importance", "temperature, soft-capped"],
)
def test_loss_and_gradients_equal_the_formula(family, objective, count):
    model, reference, batch = small_model(family), small_model(family, seed=1), answers_batch()
    module = ObjectiveModule(model)
    module.refer_to(ObjectiveModule(reference).eval())
    sums = module(batch, training_sums(objective))
    loss, _, *clipped, _ = sums
    sums.backward(torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0]))
    ours = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()

    expected, num_clipped = loss_by_hand(objective, model, reference, batch)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    assert [int(number) for number in clipped] == num_clipped
    assert 0 < sum(num_clipped) < sum(LENGTHS), "the case tells nothing about the clip"
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            ours[name], parameter.grad, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: name + text
        )
    assert int(objective.count(batch)) == count
    assert float(objective.token_weights(batch).sum()) == pytest.approx(count, rel=1e-6)


def test_without_old_log_probabilities_it_is_the_policy_gradient():
    model, batch = small_model("llama"), answers_batch()
    batch.extra.pop("old_log_probabilities")
    module, objective = ObjectiveModule(model), GRPO(normalize="token")
    module(batch, objective.loss_sum).backward()
    ours = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    pairs = zip(range(len(LENGTHS)), ADVANTAGES, strict=True)
    sum(-advantage * scores_of(model, batch, row, 1.0).sum() for row, advantage in pairs).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-4, atol=1e-5)


def test_an_advantage_of_each_token_is_that_of_its_answer():
    model, batch = small_model("llama"), answers_batch()
    module, objective = ObjectiveModule(model), GRPO()
    losses = []
    for advantages in (batch.extra["advantages"], batch.extra["advantages"][:, None].expand(batch.labels.shape)):
        batch.extra["advantages"] = advantages
        losses.append(module(batch, objective.loss_sum).item())
    assert losses[0] == losses[1]


NAN = math.nan


def test_advantages_are_relative_to_the_group():
    """By hand, with the mean 1 of a group and its deviation over n - 1, as in the papers and in TRL."""
    rewards = torch.tensor([[0.0, 1.0, 2.0], [5.0, 5.0, 5.0], [NAN, 0.0, 1.0]])
    torch.testing.assert_close(
        advantages_of(rewards, "centered"), torch.tensor([[-1.0, 0.0, 1.0], [0, 0, 0], [0, -0.5, 0.5]])
    )
    torch.testing.assert_close(
        advantages_of(rewards, "leave_one_out"), torch.tensor([[-1.5, 0.0, 1.5], [0, 0, 0], [0, -1.0, 1.0]])
    )
    half = 0.5 / (math.sqrt(0.5) + 1e-4)
    torch.testing.assert_close(
        advantages_of(rewards, "normalized"),
        torch.tensor([[-1 / 1.0001, 0.0, 1 / 1.0001], [0, 0, 0], [0, -half, half]]),
    )


def test_a_group_without_rewards_has_no_advantage():
    assert advantages_of(torch.full((1, 3), NAN)).tolist() == [[0.0, 0.0, 0.0]]
