"""Drawn answers follow the distribution of the model, and continued prompts are those of `transformers`."""

import math
from collections import Counter

import pytest
import torch
from typing_extensions import override

from echelon.learn.answers.rollouts import draw_seed
from echelon.learn.answers.sampling import ForwardPasses, Sampling, continue_prompts, draw_tokens, log_uniform
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
    kept = sorted(range(VOCABULARY), key=lambda token: -weights[token])[: sampling.top_k or VOCABULARY]
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
    assert fit(draw(model, sampling, max_num_seqs), expected_shares(model, sampling)) > 0.01


def test_another_distribution_is_told_apart(model):
    counts = draw(model, Sampling(max_tokens=LENGTH, temperature=1.0, top_k=0), 200)
    assert fit(counts, expected_shares(model, Sampling(temperature=1.3, top_k=0))) < 1e-5


def lowbias32(word):
    """Wellons' hash of a 32-bit word, in Python's integers."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
        word = (word ^ word >> shift) * factor % 2**32
    return word


@pytest.mark.parametrize(("seed", "number", "place"), [(5, 0, 0), (2**62 + 3, 7, 99_999), (2**33 - 1, 512, 31)])
def test_noise_is_the_hash_of_seed_number_and_place(seed, number, place):
    keys = [1, 2, 3]
    for word in (seed % 2**32, seed >> 32, number):
        keys = [lowbias32((key + word) % 2**32) for key in keys]
    high = lowbias32((lowbias32(place) + keys[0]) * (keys[1] | 1) % 2**32)
    low = lowbias32((high + keys[2]) % 2**32)
    uniform = (high % 2**31) / 2**31 + (low % 2**31) / 2**62
    noise = log_uniform(torch.tensor([1, seed]), torch.tensor([1, number]), place + 1)
    assert noise[1, place].item() == pytest.approx(math.log1p(-uniform), rel=1e-6)


def test_noise_is_exponential_in_its_tail_and_never_zero():
    seeds = torch.arange(40)
    noise = -log_uniform(seeds, seeds % 3, 1_000_000)
    count = noise.numel()
    assert 0 < noise.min() < 1e-6 and noise.max() < 17  # 24 bits would have steps of 6e-8, and zeros
    for limit in (2**-22, 2**-18, 2**-10, 0.5, 3.0, 12.0):
        share = -math.expm1(-limit)
        assert int((noise < limit).sum()) == pytest.approx(count * share, abs=4 * (count * share * (1 - share)) ** 0.5)
    for one, other in ((noise[:-1], noise[1:]), (noise[:, :-1], noise[:, 1:])):  # rows, and places
        assert abs(float(((one - 1) * (other - 1)).mean())) < 4 * count**-0.5


def test_a_row_is_drawn_alone_as_in_a_batch():
    scores, seeds = torch.randn(9, 50_000), torch.arange(9) << 40
    together = draw_tokens(scores, seeds, seeds % 4)
    alone = [draw_tokens(*(each[row : row + 1] for each in (scores, seeds, seeds % 4))) for row in range(9)]
    assert together.tolist() == torch.cat(alone).tolist()


CPU = torch.device("cpu")
PROMPTS = [[5, 6, 7], [9], [11, 12, 13, 14, 15, 16, 17, 18], [9], [20, 21], [5, 6, 7], [9], [30, 31, 32, 33, 34]]
GREEDY = Sampling(max_tokens=20, temperature=0.0)
LENGTHS = [3, 20, 1, 7, 12, 2, 20, 5]  # where each row is said to end


class Recorded(ForwardPasses):
    """The passes of a model on the CPU. Keeps the shape of each, with a cache or without."""

    def __init__(self, model, has_cache=True):
        self.model, self.has_cache, self.shapes = model, has_cache, []

    @override
    def next_token_logits(self, input_ids, places):
        self.shapes.append(tuple(input_ids.shape))
        return self.model(input_ids=input_ids, use_cache=False).logits[torch.arange(len(places)), places].float()

    @override
    def start_cached(self):
        return start_cache(self.model, run=self.run) if self.has_cache else None

    def run(self, input_ids, run):
        self.shapes.append(tuple(input_ids.shape))
        return run()


def far_from_ties(family, **fields):
    model = small_model(family, **fields).eval()
    for parameter in model.parameters():
        parameter.data.mul_(3)
    return model


@torch.no_grad()
def answer(passes, prompts, sampling, **options):
    """The tokens of each row, which ends after LENGTHS; and the log-probabilities."""

    def has_ended(number, tokens):
        return len(tokens) == LENGTHS[number]

    found = continue_prompts(passes, prompts, sampling, range(len(prompts)), CPU, has_ended, **options)
    return [each.tokens for each in found], [each.log_probabilities for each in found]


@pytest.mark.parametrize(("max_num_seqs", "every"), [(None, 1), (1, 1), (3, 1), (3, 8)])
@pytest.mark.parametrize(
    ("family", "fields"),
    [("llama", {}), ("gpt2", {}), ("gemma3_text", {"sliding_window": 6}), ("mamba", {})],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_greedy_answers_are_those_of_transformers(family, fields, max_num_seqs, every):
    model = far_from_ties(family, **fields)
    answers, scores = answer(Recorded(model), PROMPTS, GREEDY, max_num_seqs=max_num_seqs, every=every)
    for prompt, tokens, score, length in zip(PROMPTS, answers, scores, LENGTHS, strict=True):
        ids = torch.tensor([prompt])
        options = {"do_sample": False, "max_new_tokens": length, "pad_token_id": 0}
        assert tokens == model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        own = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert score == pytest.approx(own.tolist(), abs=1e-3)


@pytest.mark.parametrize("has_cache", [True, False])
def test_draws_do_not_depend_on_the_batch(has_cache):
    passes = Recorded(far_from_ties("llama"), has_cache)
    sampling = Sampling(max_tokens=20, temperature=0.7, top_p=0.95, repetition_penalty=1.2)
    together, scores = answer(passes, PROMPTS, sampling)
    for max_num_seqs in (1, 2, 5):
        tokens, others = answer(passes, PROMPTS, sampling, max_num_seqs=max_num_seqs)
        assert tokens == together
        for one, other in zip(scores, others, strict=True):
            assert one == pytest.approx(other, abs=1e-5)
    assert together[1] != together[6]  # the same prompt, and another seed


def test_draws_do_not_depend_on_how_often_the_host_reads():
    passes, sampling = Recorded(far_from_ties("llama")), Sampling(max_tokens=20, temperature=0.7)
    each_token = answer(passes, PROMPTS, sampling, max_num_seqs=3)[0]
    for every in (3, 8, 50):
        passes.shapes.clear()
        assert answer(passes, PROMPTS, sampling, max_num_seqs=3, every=every)[0] == each_token
    assert len(passes.shapes) == 3 * 20  # reads of 20 passes, not of 50


@torch.no_grad()
def test_a_row_that_has_ended_reads_no_position_beyond_its_last():
    model = small_model("gpt2", max_position_embeddings=16).eval()  # a table
    prompts, sampling = [[1] * 12, *[[2]] * 30], Sampling(max_tokens=4)
    for every in (1, 8):  # the first row stays with 15 others, which come when it has three tokens
        found = continue_prompts(
            Recorded(model), prompts, sampling, range(31), CPU, lambda number, new: 1 <= number <= 15 and len(new) == 3,
            max_num_seqs=16, every=every,
        )  # fmt: skip
        assert [len(answer.tokens) for answer in found] == [4] + [3] * 15 + [4] * 15


def test_equal_prompts_are_read_once_and_ended_rows_leave():
    passes = Recorded(far_from_ties("llama"))
    answer(passes, PROMPTS, GREEDY)
    # Five different prompts. After it each row is read once for each of its tokens but the last, and rows that have
    # ended leave as soon as they are an eighth of the batch: here at once.
    assert passes.shapes[0] == (5, 8)
    assert [rows for rows, _ in passes.shapes[1:]] == [
        sum(length > place for length in LENGTHS) for place in range(1, 20)
    ]


def test_no_batch_has_more_rows_than_said():
    passes = Recorded(far_from_ties("llama"))
    answer(passes, PROMPTS, GREEDY, max_num_seqs=3)
    rows = [rows for rows, width in passes.shapes]
    assert max(rows) == 3
    # As many reads as tokens: no row is read after its end, although rows end and join in the middle of others.
    assert sum(rows for rows, width in passes.shapes) <= sum(LENGTHS)
    assert len(passes.shapes) < 5 + 20 + 20  # the longest of each three, the longest prompts first


def test_rows_that_cannot_leave_are_answered_in_turns():
    passes = Recorded(far_from_ties("mamba"))
    answer(passes, PROMPTS, GREEDY, max_num_seqs=3)
    assert {rows for rows, width in passes.shapes} == {3, 2}
    assert Counter(width for rows, width in passes.shapes)[8] == 3  # three batches of prompts, the last with two rows


def test_a_rank_without_rows_takes_part_in_the_passes_of_others():
    passes, more = Recorded(far_from_ties("llama")), iter([True] * 6 + [False])
    told = []

    def agree(goes_on):
        told.append(goes_on)
        return next(more)

    answer(passes, [[9], [5, 6]], Sampling(max_tokens=3, temperature=0.0), agree=agree)
    assert told == [True, True, False, False, False, False, False]
    assert passes.shapes == [(2, 2), (2, 1), (2, 1), (1, 1), (1, 1), (1, 1), (1, 1)]
