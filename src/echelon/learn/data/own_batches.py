"""Batches from lists of token ids, for sources of batches and training loops of one's own."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from echelon.ground.errors import DataError
from echelon.learn.data.loader import BatchPlace, Ids, StepBatch, divide_samples, hash_sequences
from echelon.learn.data.shards import NO_LABEL, Samples


def build_step_batch(
    step: int,
    sequences: Sequence[Sequence[int]],
    labels: Sequence[Sequence[int]],
    place: BatchPlace,
    extra: Mapping[str, Sequence[Any]] | None = None,
    num_sequences: int | None = None,
) -> StepBatch:
    """Build a rank's batch of a step from lists.

    Args:
        step: from 0.
        sequences: the token ids of this rank's sequences.
        labels: of each sequence as many: the target of each position, usually the next token, or -100.
        place: which of the sequences of all ranks these are.
        extra: see Microbatch. Of each name one value per sequence: a number, or an array `[len(sequence), ...]` or
            `[1, ...]`. Floats become fp32, whole numbers int64.
        num_sequences: in the batch on all ranks, of which `sequences` are those of `place.share(num_sequences)`. None:
            every rank gives as many. It is then up to the caller that they do.

    Raises:
        DataError: for lists of other lengths, and for sequences longer than `place.sequence_len`.
    """
    total = len(sequences) * place.size if num_sequences is None else num_sequences
    lengths = [len(sequence) for sequence in sequences]
    _check_lists(lengths, labels, place, total)
    if extra and (place.size - 1) * place.count(total) >= total:
        raise DataError(
            f"a batch of {total} sequences leaves a rank of {place.size} without any, and extra={sorted(extra)} "
            "without a shape there; use more sequences per step."
        )
    width = place.sequence_len or max(lengths, default=1)
    samples = Samples(
        _stack_rows(sequences, lengths, width),
        _stack_rows(labels, lengths, width, NO_LABEL),
        _stack_rows([[0] * length for length in lengths], lengths, width, -1).astype(np.int32),
        apart=False,
        extra={name: _stack_extra(name, values, lengths, width) for name, values in (extra or {}).items()},
    )
    return divide_samples(step, samples, np.array(place.share(total), dtype=np.int64), place, total)


def hash_lists(
    sequences: Sequence[Sequence[int]], labels: Sequence[Sequence[int]], place: BatchPlace, first: int
) -> int:
    """Return the hash of lists as in `build_step_batch`, those with the indices from `first` on of a batch."""
    lengths, ids = [len(sequence) for sequence in sequences], np.arange(first, first + len(sequences))
    width = place.sequence_len or max(lengths, default=1)
    rows = _stack_rows(sequences, lengths, width), _stack_rows(labels, lengths, width, NO_LABEL)
    return hash_sequences(ids, ids, *rows)


def _check_lists(lengths: Sequence[int], labels: Sequence[Sequence[int]], place: BatchPlace, total: int) -> None:
    share, longest = place.share(total), max(lengths, default=0)
    if len(lengths) != len(share):
        raise DataError(
            f"rank {place.rank} of {place.size} was given {len(lengths)} sequences of a batch of {total}, but its "
            f"share has {len(share)}; give those with the indices place.share({total})."
        )
    if [len(row) for row in labels] != list(lengths):
        raise DataError(
            f"the labels have the lengths {[len(row) for row in labels]}, and the sequences {list(lengths)}; give a "
            "label for each token, -100 where there is no target."
        )
    if 0 in lengths:
        raise DataError(f"sequence {lengths.index(0)} has no token; leave it out.")
    if place.sequence_len is not None and longest > place.sequence_len:
        raise DataError(
            f"a sequence has {longest} tokens, more than data.sequence_len={place.sequence_len}; shorten it, or raise "
            "data.sequence_len."
        )


def _stack_rows(rows: Sequence[Sequence[int]], lengths: Sequence[int], width: int, filling: int = 0) -> Ids:
    stacked = np.full((len(rows), width), filling, dtype=np.int64)
    for row, values, length in zip(stacked, rows, lengths, strict=True):
        row[:length] = values
    return stacked


def _stack_extra(name: str, values: Sequence[Any], lengths: Sequence[int], width: int) -> npt.NDArray[Any]:
    """Stack one value per sequence to `[n]`, `[n, 1, ...]` or, padded with zeros, `[n, width, ...]`."""
    tensors = [torch.as_tensor(value).detach().cpu() for value in values]
    arrays = [(tensor.float() if tensor.is_floating_point() else tensor).numpy() for tensor in tensors]
    firsts = [array.shape[0] if array.ndim else 0 for array in arrays]
    if firsts == list(lengths):
        padded = [np.pad(array, [(0, width - len(array)), *[(0, 0)] * (array.ndim - 1)]) for array in arrays]
    elif set(firsts) in ({0}, {1}):
        padded = arrays
    else:
        raise DataError(
            f"extra[{name!r}] has {firsts} values for sequences of {list(lengths)} tokens; give one value per token of "
            "each sequence, or one per sequence."
        )
    return np.stack(padded)
