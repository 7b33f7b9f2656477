"""Continued prompts: those of `transformers`, whatever else is in the batch, with few rows and few prompts read."""

from collections import Counter

import pytest
import torch
from typing_extensions import override

from echelon.learn.answers.generation import ForwardPasses, continue_prompts
from echelon.learn.answers.sampling import Sampling
from echelon.learn.model.kv_cache import start_cache
from tests.families import small_model

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
        logits = self.model(input_ids=input_ids, use_cache=False).logits
        return logits[torch.arange(len(places)), places].float()

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


@pytest.mark.parametrize("max_num_seqs", [None, 1, 3])
@pytest.mark.parametrize(
    ("family", "fields"),
    [("llama", {}), ("gpt2", {}), ("gemma3_text", {"sliding_window": 6}), ("mamba", {})],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_greedy_answers_are_those_of_transformers(family, fields, max_num_seqs):
    model = far_from_ties(family, **fields)
    answers, scores = answer(Recorded(model), PROMPTS, GREEDY, max_num_seqs=max_num_seqs)
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
    reads = sum(rows for rows, width in passes.shapes)
    assert reads <= sum(LENGTHS)
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
