"""Drawn answers follow the model's own distribution: chi-squared tests on a small vocabulary."""

from collections import Counter

import pytest
import torch
from typing_extensions import override

from echelon.learn.answers.generation import ForwardPasses, continue_prompts
from echelon.learn.answers.rollouts import draw_seed
from echelon.learn.answers.sampling import Sampling
from echelon.learn.model.kv_cache import start_cache
from tests.families import small_model

PROMPT, STOP, VOCABULARY = [3, 1, 4], 0, 8
DRAWS = 3000
LENGTH = 2


class Whole(ForwardPasses):
    def __init__(self, model):
        self.model = model

    @override
    def next_token_logits(self, input_ids, places):
        raise AssertionError("the model has a cache")

    @override
    def start_cached(self):
        return start_cache(self.model)


@pytest.fixture(scope="module")
def model():
    made = small_model("llama", vocab_size=VOCABULARY).eval()
    for parameter in made.parameters():  # a distribution that is far from uniform
        parameter.data.mul_(2.5)
    return made


def draw(model, sampling, max_num_seqs):
    """How often each answer to the prompt was drawn; other prompts of other lengths are answered beside it."""
    prompts = [PROMPT] * DRAWS + [[5, 2], [7, 7, 7, 7, 1, 2]] * 50
    seeds = [draw_seed(9, prompt, number) for number, prompt in enumerate(prompts)]
    with torch.no_grad():
        found = continue_prompts(
            Whole(model), prompts, sampling, seeds, torch.device("cpu"), lambda number, tokens: tokens[-1] == STOP,
            max_num_seqs=max_num_seqs,
        )  # fmt: skip
    return Counter(tuple(answer.tokens) for answer in found[:DRAWS])


def expected_shares(model, sampling):
    """The probability of each answer, from passes over whole sequences and the definitions of the three options."""
    shares, waiting = {}, [((), 1.0)]
    while waiting:
        answer, share = waiting.pop()
        if len(answer) == LENGTH or STOP in answer:
            shares[answer] = share
            continue
        with torch.no_grad():
            logits = model(torch.tensor([[*PROMPT, *answer]])).logits[0, -1].double()
        for token, probability in enumerate(allowed(logits, sampling)):
            if probability > 0:
                waiting.append(((*answer, token), share * probability))
    return shares


def allowed(logits, sampling):
    """Temperature, then the likeliest top_k, then the fewest of them with a share of top_p (Holtzman et al. 2020)."""
    weights = (logits / sampling.temperature).exp().tolist()
    order = sorted(range(VOCABULARY), key=lambda token: -weights[token])
    kept = order[: sampling.top_k or VOCABULARY]
    total, before, nucleus = sum(weights[token] for token in kept), 0.0, []
    for token in kept:
        if before < sampling.top_p:
            nucleus.append(token)
        before += weights[token] / total
    total = sum(weights[token] for token in nucleus)
    return [weights[token] / total if token in nucleus else 0.0 for token in range(VOCABULARY)]


def fit(counts, shares):
    """The probability of a chi-squared statistic at least as large. Answers expected less than five times are one."""
    assert counts.keys() <= shares.keys()
    common = [answer for answer, share in shares.items() if share * DRAWS >= 5]
    cells = [(counts[answer], shares[answer] * DRAWS) for answer in common]
    rest = DRAWS - sum(count for count, _ in cells), DRAWS - sum(share for _, share in cells)
    cells += [rest] if rest[1] >= 5 else []
    assert len(cells) >= 6
    statistic = sum((count - share) ** 2 / share for count, share in cells)
    return float(torch.special.gammaincc(torch.tensor((len(cells) - 1) / 2), torch.tensor(statistic / 2)))


@pytest.mark.parametrize("max_num_seqs", [None, 200])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 1.5},
        {"top_k": 3},
        {"top_p": 0.8},
        {"temperature": 1.3, "top_k": 6, "top_p": 0.9},
    ],
    ids=str,
)
def test_answers_follow_the_models_distribution(model, options, max_num_seqs):
    sampling = Sampling(**{"max_tokens": LENGTH, "temperature": 1.0, "top_k": 0, **options})
    counts = draw(model, sampling, max_num_seqs)
    assert fit(counts, expected_shares(model, sampling)) > 0.01


def test_another_distribution_is_told_apart(model):
    sampling = Sampling(max_tokens=LENGTH, temperature=1.0, top_k=0)
    counts = draw(model, sampling, 200)
    assert fit(counts, expected_shares(model, Sampling(temperature=1.15, top_k=0))) < 1e-5
