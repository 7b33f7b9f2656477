"""Preference pairs in two sequences, and the log-probabilities of their answers from a model's logits."""

import numpy as np
import torch

from echelon.learn.data.loader import Microbatch, build_rows, mismatch, positions_in_documents
from echelon.learn.data.shards import GOOD, Samples
from echelon.learn.objectives.loss import IGNORE
from echelon.learn.objectives.outputs import ObjectiveModule

LENGTH = 40
PROMPT = 3
PAIRS = {(0, 0): (8, 6), (0, 2): (5, 9), (1, 0): (11, 10)}  # (row, document of the chosen one): lengths of both


def pair_batch(num_prompt=PROMPT):
    """Three pairs in two sequences, each answer after a prompt of some tokens; padding at the end."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.zeros(2, LENGTH, dtype=torch.long)
    labels = torch.full((2, LENGTH), IGNORE)
    documents = torch.full((2, LENGTH), -1, dtype=torch.int32)
    starts = [0, 0]
    for (row, chosen), lengths in PAIRS.items():
        prompt = torch.randint(1, 256, (num_prompt,), generator=generator)
        for document, length in enumerate(lengths, start=chosen):
            start, stop = starts[row], starts[row] + num_prompt + length
            tokens[row, start:stop] = torch.cat([prompt, torch.randint(1, 256, (length,), generator=generator)])
            labels[row, start + num_prompt - 1 : stop - 1] = tokens[row, start + num_prompt : stop]
            documents[row, start:stop] = document
            starts[row] = stop
    ids = np.arange(2)
    positions = torch.from_numpy(positions_in_documents(documents.numpy()))
    return Microbatch(tokens, labels, ids, ids, documents, positions, documents >= 0, document_shape=(4, 16))


def answer_score(model, batch, row, document):
    """The reference: log p(answer | prompt) of a single answer, from the model's logits."""
    tokens = batch.input_ids[row][batch.documents[row] == document]
    logits = model(input_ids=tokens[None], use_cache=False).logits[0].float()
    return torch.log_softmax(logits, -1)[:-1].gather(1, tokens[1:, None])[:, 0][PROMPT - 1 :].sum()


def module_of(model, reference):
    module = ObjectiveModule(model)
    module.refer_to(ObjectiveModule(reference).eval())
    return module


def scores_by_hand(model, batch):
    """log p of each pair's chosen and rejected answer: two tensors [3]."""
    rows = [[answer_score(model, batch, row, number) for number in (chosen, chosen + 1)] for row, chosen in PAIRS]
    return [torch.stack(side) for side in zip(*rows, strict=True)]


def judged_batch():
    """Four answers in sequences of their own, two of them good, with the answers before them as `mismatched`."""
    generator = torch.Generator().manual_seed(7)
    inputs, labels = np.zeros((4, LENGTH), dtype=np.int64), np.full((4, LENGTH), IGNORE)
    documents = np.full((4, LENGTH), -1, dtype=np.int32)
    for row, (prompt, answer) in enumerate(((3, 8), (5, 4), (2, 11), (7, 6))):
        ids = torch.randint(1, 256, (prompt + answer,), generator=generator).numpy()
        inputs[row, : len(ids)], documents[row, : len(ids)] = ids, 0
        labels[row, prompt - 1 : len(ids) - 1] = ids[prompt:]
    samples = Samples(inputs, labels, documents, True, {GOOD: np.array([True, False, False, True])})
    before = Samples(*(np.roll(values, 1, axis=0) for values in (inputs, labels, documents)))
    ids = np.arange(4)
    return build_rows(samples, slice(None), ids, ids, mismatched=mismatch(samples, before))
