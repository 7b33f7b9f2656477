"""Samples of a stream: the packs of a chunk, stored as the model receives them, in rows of one length.

A row of a sequence of L positions is 3 L + 1 numbers of 32 bits: inputs, labels and documents as in `Samples`, and
whether the answer is judged good (1), bad (0), or not at all (-1). So a chunk is one file, whose size tells how many
sequences it has.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from echelon.learn.data.catalog import INDEX_DTYPE, TARGETS_DTYPE, PackRecord, SampleRule
from echelon.learn.data.packing import PackedDataset, write_packs
from echelon.learn.data.resume import SinkState
from echelon.learn.data.shards import GOOD, Samples, ShardRecord, ShardWriter, TokenStore

ROW_DTYPE = "uint32"

MAX_CHUNK_TOKENS = 2**62
"""A chunk of a stream is one shard, whatever its size."""

_ROWS_AT_ONCE = 64


def row_size(sequence_len: int) -> int:
    """Return the numbers in a row."""
    return 3 * sequence_len + 1


def write_rows(folder: Path, prefix: str, state: SinkState, rule: SampleRule, dtype: str) -> tuple[ShardRecord, ...]:
    """Pack the samples that a finished sink wrote with `dtype`, and write a row for each pack.

    The rows are in the order in which the longest sample of each was read. So rows near each other do not have samples
    of the same length, although the longest samples are packed first.
    """
    if not state.counts.samples:
        return ()
    parts = {name: part.shards for name, part in state.parts.items()}
    span = (0, state.counts.samples)
    packs = write_packs(folder, f"{prefix}.packs", parts["lengths"], span, rule, MAX_CHUNK_TOKENS)
    tokens, targets = TokenStore(folder, parts["tokens"], dtype), TokenStore(folder, parts["targets"], TARGETS_DTYPE)
    packed = PackedDataset(folder, tokens, targets, packs, rule.sequence_len, rule.padding, apart=True)
    order = _find_reading_order(folder, packs)
    with ShardWriter(folder, f"{prefix}.rows", ROW_DTYPE, MAX_CHUNK_TOKENS) as writer:
        for first in range(0, order.size, _ROWS_AT_ONCE):
            writer.append(_as_rows(packed.read_samples(order[first : first + _ROWS_AT_ONCE])).reshape(-1))
        return writer.finish()


def _find_reading_order(folder: Path, packs: PackRecord) -> npt.NDArray[np.int64]:
    """Return the packs `[n]` in the order in which the longest document of each was read."""
    stops, index = (TokenStore(folder, shards, INDEX_DTYPE) for shards in (packs.stops, packs.documents))
    bounds = np.concatenate([[0], stops.read(0, packs.packs).astype(np.int64)])
    firsts, lengths = index.read(0, index.num_tokens).astype(np.int64).reshape(-1, 2).T
    longest_first = np.lexsort((firsts, -lengths, np.repeat(np.arange(packs.packs), np.diff(bounds))))
    return np.argsort(firsts[longest_first[bounds[:-1]]], kind="stable")


def _as_rows(samples: Samples) -> npt.NDArray[np.uint32]:
    count = len(samples.inputs)
    judged = samples.extra.get(GOOD, np.full(count, -1)).reshape(count, 1)
    assert samples.documents is not None
    parts = (samples.inputs, samples.labels, samples.documents, judged)
    return np.concatenate([part.astype(np.int32) for part in parts], axis=1).view(np.uint32)


def read_rows(rows: npt.NDArray[np.uint32], apart: bool) -> Samples:
    """Return rows `[n, row_size]` as samples."""
    length = rows.shape[1] // 3
    inputs, labels, documents, judged = np.split(rows.view(np.int32), [length, 2 * length, 3 * length], axis=1)
    extra = {GOOD: judged[:, 0] == 1} if (judged >= 0).any() else {}
    return Samples(inputs.astype(np.int64), labels.astype(np.int64), documents, apart, extra)
