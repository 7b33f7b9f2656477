"""Puts the answers of sequences behind the prompts of others, for an objective that compares with chance."""

import numpy as np

from echelon.learn.data.shards import NO_LABEL, Samples


def mismatch(prompts: Samples, answers: Samples) -> Samples:
    """Return the prompts of some sequences with the answers of as many others, cut at the sequence length.

    A sequence is one document. Its answer begins with its first label; one without labels is all prompt.
    """
    inputs, labels = np.zeros_like(prompts.inputs), np.full_like(prompts.labels, NO_LABEL)
    documents = np.full(inputs.shape, -1, dtype=np.int32)
    length = inputs.shape[1]
    for row in range(len(inputs)):
        start, first, stop = _find_answer(prompts, row)[0], *_find_answer(answers, row)
        count = min(stop - first, length - start)
        inputs[row, : start + 1] = prompts.inputs[row, : start + 1]
        inputs[row, start + 1 : start + count] = answers.inputs[row, first + 1 : first + count]
        labels[row, start : start + count] = answers.labels[row, first : first + count]
        documents[row, : start + max(1, count)] = 0
    return Samples(inputs, labels, documents, prompts.apart)


def _find_answer(samples: Samples, row: int) -> tuple[int, int]:
    """Return the first position with a label, and the end of the sequence; twice the last position without labels."""
    labelled = np.flatnonzero(samples.labels[row] != NO_LABEL)
    filled = samples.inputs.shape[1] if samples.documents is None else int((samples.documents[row] >= 0).sum())
    return (int(labelled[0]), filled) if labelled.size else (max(0, filled - 1), max(0, filled - 1))
