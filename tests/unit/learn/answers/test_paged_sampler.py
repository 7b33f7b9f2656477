"""Answers of transformers' continuous batching: their distribution, their log-probabilities, and the plans it takes."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from echelon.ground.errors import ConfigError
from echelon.learn.answers.paged_sampler import PagedSampler
from echelon.learn.answers.sampling import Sampling
from tests.unit.learn.answers.test_sampling import (  # noqa: F401
    DRAWS,
    LENGTH,
    PROMPT,
    STOP,
    expected_shares,
    fit,
    model,
)


def learner_of(trained, world_size=1):
    """What the sampler reads of a learner. It samples at most 250 answers at once."""
    plan = SimpleNamespace(
        dp_replicate=1, world_size=world_size, precision=SimpleNamespace(compute="float32"),
        rollout=SimpleNamespace(max_num_seqs=250), show_degrees=lambda: "dp_shard 2",
    )  # fmt: skip
    state = {f"model.{name}": parameter.detach() for name, parameter in trained.named_parameters()}
    return SimpleNamespace(
        plan=plan, device=torch.device("cpu"), config=trained.config, stops=frozenset({STOP}),
        engine=SimpleNamespace(state_dict=lambda: state), recipe=SimpleNamespace(global_batch_size=DRAWS),
        place=SimpleNamespace(rank=0, count=lambda count: count),
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 1.5])
def test_answers_follow_the_models_distribution(model, temperature):  # noqa: F811
    sampling = Sampling(max_tokens=LENGTH, temperature=temperature, top_k=0, num_samples=DRAWS)
    found = PagedSampler(learner_of(model)).answer([PROMPT], sampling)
    assert len(found.answers) == found.most == DRAWS and set(found.prompts) == {tuple(PROMPT)}
    counts = Counter(found.answers)
    # Which answers share a batch, and so what is drawn, may depend on time: a bound that no fair draws exceed.
    assert fit(counts, expected_shares(model, sampling)) > 1e-6
    other = Sampling(max_tokens=LENGTH, temperature=2 * temperature, top_k=0)
    assert fit(counts, expected_shares(model, other)) < 1e-9
    assert all(ended == (answer[-1] == STOP) for answer, ended in zip(found.answers, found.ended, strict=True))
    for number in range(0, DRAWS, 500):
        ids, scores = torch.tensor([[*PROMPT, *found.answers[number]]]), found.at_temperature[number]
        with torch.no_grad():
            logits = model(ids).logits[0, len(PROMPT) - 1 : -1] / temperature
        expected = logits.log_softmax(-1).gather(1, ids[0, len(PROMPT) :, None])[:, 0]
        torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-5)


def test_a_divided_model_is_refused(model):  # noqa: F811
    with pytest.raises(ConfigError, match=r"needs the whole model on each process, and the plan divides it \(dp_shard"):
        PagedSampler(learner_of(model, world_size=2))
