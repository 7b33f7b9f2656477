"""Training from rewards compared with TRL's trainers, on the same answers: advantages, loss and every gradient."""

import math

import pytest
import torch

from echelon.learn.objectives.grpo import GRPO, advantages_of, spread_of
from echelon.learn.objectives.outputs import ObjectiveModule
from tests.families import small_model
from tests.peer.trl_trainers import build, gradients_of
from tests.unit.learn.objectives.answer_samples import LENGTHS, PROMPT, answers_batch

trl = pytest.importorskip("trl", exc_type=ImportError)
pytestmark = pytest.mark.slow

COUNT, WIDTH = len(LENGTHS), max(LENGTHS)
PROMPTS = {"prompt": ["a b", "b a"]}
REWARDS = (0.0, 1.0, 1.0, 5.0, 2.0, 2.0, 2.0, 2.0)
KL = {"beta": 0.3, "use_bias_correction_kl": False}
CASES = {
    "grpo": (GRPO(), {"loss_type": "grpo"}),
    "dr grpo": (GRPO(normalize="constant", max_tokens=16), {"loss_type": "dr_grpo", "max_completion_length": 16}),
    "dapo": (GRPO(clip_high=0.28, normalize="token"), {"loss_type": "dapo", "epsilon_high": 0.28}),
    "asymmetric clip": (GRPO(clip_low=0.1, clip_high=0.5), {"loss_type": "grpo", "epsilon": 0.1, "epsilon_high": 0.5}),
    "gspo": (
        GRPO(clip_low=3e-2, clip_high=4e-2, ratio="sequence"),
        {"loss_type": "grpo", "epsilon": 3e-2, "epsilon_high": 4e-2, "importance_sampling_level": "sequence"},
    ),
    "kl": (GRPO(kl_weight=0.3, needs_reference=True), {"loss_type": "grpo", **KL}),
    "unbiased kl": (
        GRPO(kl_weight=0.3, kl_unbiased=True, needs_reference=True),
        {"loss_type": "grpo", "beta": 0.3, "use_bias_correction_kl": True},
    ),
    "dapo with kl": (GRPO(normalize="token", kl_weight=0.3, needs_reference=True), {"loss_type": "dapo", **KL}),
    "temperature": (GRPO(temperature=0.7), {"loss_type": "grpo", "temperature": 0.7}),
    "truncated importance": (GRPO(importance_cap=1.1), {"loss_type": "grpo"}),
    "truncated importance and kl": (
        GRPO(importance_cap=1.1, kl_weight=0.3, needs_reference=True),
        {"loss_type": "grpo", **KL},
    ),
}


def rewards_of(prompts, **_):
    """A reward function of TRL."""
    return list(REWARDS[: len(prompts)])


def trainer_of(folder, model, kind="GRPO", **settings):
    """A trainer of TRL whose batch is one microbatch. It loads no reference: the test has its log-probabilities."""
    beta = settings.pop("beta", 0.0)
    settings = {"max_completion_length": 4, "num_generations": 4, "per_device_train_batch_size": 4, **settings}
    classes = getattr(trl, f"{kind}Trainer"), getattr(trl, f"{kind}Config")
    trainer = build(*classes, folder, model, PROMPTS, reward_funcs=rewards_of, beta=0.0, **settings)
    trainer.beta = beta
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def inputs_of(batch, objective, reference):
    """The answers as `_compute_loss` of TRL takes them."""
    ids = batch.input_ids[:COUNT, PROMPT : PROMPT + WIDTH]
    lengths = torch.tensor(LENGTHS)
    mask = (torch.arange(WIDTH) < lengths[:, None]).long()
    old, sampled = (
        batch.extra[name][:COUNT, PROMPT - 1 : PROMPT - 1 + WIDTH]
        for name in ("old_log_probabilities", "sampled_log_probabilities")
    )
    given = {
        "prompt_ids": batch.input_ids[:COUNT, :PROMPT],
        "prompt_mask": torch.ones(COUNT, PROMPT, dtype=torch.long),
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": batch.extra["advantages"][:COUNT],
        "old_per_token_logps": old,
        "num_items_in_batch": mask.sum(),
    }
    if objective.importance_cap is not None:
        given["importance_sampling_ratio"] = (old - sampled).exp().clamp(max=objective.importance_cap)
    if objective.kl_weight:
        with torch.no_grad():
            logits = reference(input_ids=batch.input_ids[:COUNT]).logits / objective.temperature
        scores = torch.log_softmax(logits[:, PROMPT - 1 : PROMPT - 1 + WIDTH], -1).gather(2, ids[..., None])[..., 0]
        given["ref_per_token_logps"] = scores
    return given


def loss_of(module, objective, batch):
    """The loss of echelon in one process."""
    return module(batch, objective.loss_sum) / objective.count(batch)


def check_gradients(found, expected):
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        size = max(1.0, gradient.abs().max().item())
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5 * size, msg=name)


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients(tmp_path, name):
    objective, settings = CASES[name]
    model, reference, batch = small_model("llama"), small_model("llama", seed=1), answers_batch()
    trainer = trainer_of(tmp_path, small_model("llama"), **settings)
    # TRL has this correction only for answers sampled by vLLM, which runs on GPUs.
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = objective.importance_cap is not None
    expected = trainer._compute_loss(trainer.model, inputs_of(batch, objective, reference))
    module = ObjectiveModule(model)
    module.refer_to(ObjectiveModule(reference).eval())
    loss = loss_of(module, objective, batch)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    check_gradients(gradients_of(model, loss), gradients_of(trainer.model, expected))


def test_several_updates_on_the_same_answers(tmp_path):
    """From the second update on the ratios differ from 1, and some are clipped."""
    objective, batch = GRPO(clip_high=0.28, normalize="token"), answers_batch()
    model, other = small_model("llama"), small_model("llama")
    trainer = trainer_of(tmp_path, other, loss_type="dapo", epsilon_high=0.28, num_iterations=4)
    module = ObjectiveModule(model)
    with torch.no_grad():  # of the model itself before the first update
        logits = model(input_ids=batch.input_ids).logits
    scores = torch.log_softmax(logits, -1).gather(2, batch.labels.clamp(min=0)[..., None])[..., 0]
    batch.extra["old_log_probabilities"] = scores
    updates = [torch.optim.SGD(each.parameters(), lr=0.02) for each in (model, trainer.model)]
    losses = []
    for _ in range(4):
        pair = (
            loss_of(module, objective, batch),
            trainer._compute_loss(trainer.model, inputs_of(batch, objective, None)),
        )
        for loss, update in zip(pair, updates, strict=True):
            update.zero_grad()
            loss.backward()
            update.step()
        losses.append(pair[0].item())
        assert losses[-1] == pytest.approx(pair[1].item(), abs=1e-5)
    assert losses[0] > losses[1] > losses[2] > losses[3], losses
    weights = dict(trainer.model.named_parameters())
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight, weights[name], rtol=1e-4, atol=1e-5, msg=name)


def test_the_gradient_of_rloo(tmp_path):
    """TRL's ratio is that of a whole answer. Where it is 1, its gradient is that of the sum over an answer's tokens."""
    objective, batch = GRPO(normalize="constant", max_tokens=1), answers_batch()
    del batch.extra["old_log_probabilities"]
    model = small_model("llama")
    trainer = trainer_of(tmp_path, small_model("llama"), "RLOO")
    given = inputs_of(answers_batch(), objective, None)
    with torch.no_grad():
        ids = torch.cat([given["prompt_ids"], given["completion_ids"]], 1)
        logits = model(input_ids=ids).logits[:, PROMPT - 1 : -1]
    scores = torch.log_softmax(logits, -1).gather(2, given["completion_ids"][..., None])[..., 0]
    given["old_logps"] = (scores * given["completion_mask"]).sum(1)
    expected = trainer._compute_loss(trainer.model, given)
    check_gradients(
        gradients_of(model, loss_of(ObjectiveModule(model), objective, batch)), gradients_of(trainer.model, expected)
    )


ADVANTAGES = {
    "normalized": ("GRPO", {"scale_rewards": "group"}),
    "centered": ("GRPO", {"scale_rewards": "none"}),
    "leave_one_out": ("RLOO", {"normalize_advantages": False}),
}


@pytest.mark.parametrize(
    ("advantage", "left_out"),
    [*((name, None) for name in ADVANTAGES), ("normalized", 2), ("centered", 2)],  # its RLOO counts a missing one as 0
)
def test_advantages(tmp_path, monkeypatch, advantage, left_out):
    """Of answers that TRL itself draws and has judged."""
    kind, settings = ADVANTAGES[advantage]
    rewards = [None if number == left_out else value for number, value in enumerate(REWARDS)]
    monkeypatch.setitem(globals(), "REWARDS", tuple(rewards))
    few = {"suppress_tokens": list(range(4, 256))}
    trainer = trainer_of(
        tmp_path, small_model("llama"), kind, per_device_train_batch_size=8, generation_kwargs=few, **settings
    )
    found = trainer._generate_and_score_completions([{"prompt": text} for text in PROMPTS["prompt"] for _ in range(4)])
    expected = advantages_of(
        torch.tensor([math.nan if value is None else value for value in rewards]).view(2, 4), advantage
    )
    torch.testing.assert_close(expected.flatten(), found["advantages"], rtol=1e-5, atol=1e-5)


def test_the_spread_is_what_trl_divides_by():
    from trl.trainer.utils import nanstd

    rewards = torch.tensor([[1.0, 0.0, math.nan, 0.5], [0.1, 0.7, 0.3, 0.9], [2.0, 2.0, 2.0, 2.0]])
    torch.testing.assert_close(spread_of(rewards)[:, 0], nanstd(rewards, dim=1))
