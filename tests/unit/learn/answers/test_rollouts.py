"""The hash of a batch of answers: of what was drawn, on any number of ranks."""

from dataclasses import replace

import torch

from echelon.learn.answers.rollouts import Rollouts
from echelon.learn.data.loader import BatchPlace

ANSWERS = [(5, 6), (7,), (8, 9, 2)]


def rollouts_of(answers, place, first, most, score=-1.0):
    scores = [torch.full((len(answer),), score) for answer in answers]
    prompts = [[3, 4 + number] for number in range(first, first + len(answers))]
    return Rollouts(prompts, answers, scores, scores, [True] * len(answers), place, most)


def hash_of(answers=ANSWERS, score=-1.0, **further):
    return rollouts_of(answers, BatchPlace(3, sequence_len=8), 0, 3, score).batch(**further).hash


def test_ranks_with_uneven_shares_have_the_hash_of_one():
    first = rollouts_of(ANSWERS[:2], BatchPlace(2, 0, 2, sequence_len=8), 0, 2)
    last = rollouts_of(ANSWERS[2:], BatchPlace(2, 1, 2, sequence_len=8), 2, 2)
    assert (first.batch().hash + last.batch().hash) % 2**64 == hash_of()
    assert last.batch().microbatches[0].input_ids.shape[0] == 2, "filled up"


def test_the_hash_is_of_tokens_and_of_which_are_trained_on():
    assert hash_of(score=-1.0 + 1e-7) == hash_of() == hash_of(advantages=[1.0, 2.0, 3.0])
    found = {hash_of(), hash_of([(5, 6), (7,), (8, 9, 3)]), hash_of(trained=[True, False, True])}
    batch = replace(rollouts_of(ANSWERS, BatchPlace(3, sequence_len=8), 0, 3), prompts=[[3, 1]] * 3).batch()
    assert len(found | {batch.hash}) == 4
