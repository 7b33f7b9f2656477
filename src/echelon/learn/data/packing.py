"""Samples packed into sequences: `prepare` computes the packs once and stores them as an index.

A pack consists of the samples of one sequence. The index of a split has two files of uint64: `documents`, the first
token and the length of each document, pack by pack, and `stops`, the cumulative number of documents at the end of each
pack. So any pack is read in O(1), nothing is kept in memory, and the order of a run is an order of packs.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from echelon.learn.data.catalog import INDEX_DTYPE, LENGTHS_DTYPE, PackRecord, SampleRule
from echelon.learn.data.shards import GOOD, GOOD_TARGET, NO_LABEL, TARGET, Samples, ShardRecord, ShardWriter, TokenStore

CONTINUES = 2**31
"""Set in the word of a document's length where the document is of the same sample as the one before it."""


def best_fit(sizes: npt.NDArray[np.int64], room: int) -> npt.NDArray[np.int64]:
    """The pack of each sample, `[n]`: best fit, the largest samples first.

    Each goes where the least room is left that it fits in, else into a new pack; `sizes` `[n]` are 1 to `room`. It
    takes at most 11/9 OPT + 4 packs (Johnson et al., "Worst-case performance bounds for simple one-dimensional packing
    algorithms", 1974). Samples of a size are placed together: O(n log n) for the sort, then array operations.
    """
    assert sizes.size == 0 or (sizes.min() > 0 and sizes.max() <= room), "a sample does not fit"
    packs = np.empty(sizes.size, dtype=np.int64)
    order = np.argsort(-sizes, kind="stable")
    distinct, counts = np.unique(-sizes, return_counts=True)
    rooms: list[int] = []  # that some pack has left, ascending
    open_packs: dict[int, npt.NDArray[np.int64]] = {}
    num_packs = first = 0
    for size, count in zip((-distinct).tolist(), counts.tolist(), strict=True):
        stop = first + count
        while first < stop:
            index = bisect_left(rooms, size)
            if index < len(rooms):
                left = rooms.pop(index)
                candidates = open_packs.pop(left)
            else:
                left = room
                candidates = np.arange(num_packs, num_packs + -(-(stop - first) // (room // size)))
                num_packs += candidates.size
            per_pack = left // size  # a pack that took one sample is the best fit for the next
            chosen = candidates[: -(-(stop - first) // per_pack)]
            taken = np.repeat(chosen, per_pack)[: stop - first]
            packs[order[first : first + taken.size]] = taken
            first += taken.size
            last = taken.size - per_pack * (chosen.size - 1)
            for rest, group in (
                (left - per_pack * size, chosen[:-1]),
                (left - last * size, chosen[-1:]),
                (left, candidates[chosen.size :]),
            ):
                if group.size and rest:
                    if rest not in open_packs:
                        insort(rooms, rest)
                    open_packs[rest] = np.concatenate([open_packs.get(rest, group[:0]), group])
    return packs


def write_packs(
    folder: Path,
    prefix: str,
    stream: Sequence[ShardRecord],
    span: tuple[int, int],
    rule: SampleRule,
    max_shard_tokens: int,
) -> PackRecord:
    """Pack the samples [start, stop) of a stream, given the shards of all its lengths, and write the index."""
    store = TokenStore(folder, stream, LENGTHS_DTYPE)
    words = store.read(0, store.num_tokens)
    lengths = (words & np.uint32(CONTINUES - 1)).astype(np.int64)
    sample_of = np.cumsum(words < CONTINUES) - 1
    firsts = np.cumsum(lengths) - lengths
    inside = (sample_of >= span[0]) & (sample_of < span[1])
    lengths, firsts, sample_of = lengths[inside], firsts[inside], sample_of[inside] - span[0]
    sizes = np.bincount(sample_of, lengths - 1, span[1] - span[0]).astype(np.int64)
    packs = best_fit(sizes, rule.sequence_len) if rule.packing else np.arange(sizes.size)
    pack_of = packs[sample_of]
    order = np.argsort(pack_of, kind="stable")
    num_packs = int(packs.max()) + 1
    stops = np.cumsum(np.bincount(pack_of, minlength=num_packs))
    documents = np.stack([firsts[order], lengths[order]], axis=1).reshape(-1)
    return PackRecord(
        packs=num_packs,
        positions=int(sizes.sum()),
        first_token=int(firsts[0]),
        last_token=int(firsts[-1] + lengths[-1]),
        stops=_write_index(folder, f"{prefix}.stops", stops, max_shard_tokens),
        documents=_write_index(folder, f"{prefix}.documents", documents, max_shard_tokens),
    )


def _write_index(
    folder: Path, prefix: str, values: npt.NDArray[np.int64], max_shard_tokens: int
) -> tuple[ShardRecord, ...]:
    with ShardWriter(folder, prefix, INDEX_DTYPE, max_shard_tokens) as writer:
        writer.append(values)
        return writer.finish()


class PackedDataset:
    """The packs of a split as samples of `sequence_len`.

    A document t_0 .. t_{n-1} takes n - 1 positions: inputs t_0 .. t_{n-2}, labels t_1 .. t_{n-1}, -100 for tokens that
    are not targets. So an input and its label always belong to the same document. Documents follow each other, and the
    rest of the sequence is padded: inputs with `pad_id`, labels with -100, documents with -1.
    """

    def __init__(
        self,
        folder: Path,
        tokens: TokenStore,
        targets: TokenStore,
        packs: PackRecord,
        sequence_len: int,
        pad_id: int,
        apart: bool,
    ) -> None:
        self.sequence_len = sequence_len
        self.pad_id = pad_id
        self._apart = apart
        self._tokens, self._targets = tokens, targets
        self._packs = packs
        self._stops = TokenStore(folder, packs.stops, INDEX_DTYPE)
        self._documents = TokenStore(folder, packs.documents, INDEX_DTYPE)

    @property
    def num_tokens(self) -> int:
        """The tokens of all documents."""
        return self._packs.last_token - self._packs.first_token

    @property
    def num_samples(self) -> int:
        """The packs."""
        return self._packs.packs

    def read_samples(self, sample_ids: npt.NDArray[np.int64]) -> Samples:
        """The packs `[n]`."""
        shape = (sample_ids.size, self.sequence_len)
        inputs = np.full(shape, self.pad_id, dtype=np.int64)
        labels = np.full(shape, NO_LABEL, dtype=np.int64)
        documents = np.full(shape, -1, dtype=np.int32)
        good = np.zeros(sample_ids.size, dtype=np.bool_)
        for row, pack in enumerate(sample_ids.tolist()):
            start = 0
            for number, (first, length) in enumerate(self._find_documents(pack)):
                ids, learned = (store.read(first, first + length) for store in (self._tokens, self._targets))
                positions = slice(start, start + length - 1)
                inputs[row, positions] = ids[:-1]
                labels[row, positions] = np.where(learned[1:], ids[1:].astype(np.int64), NO_LABEL)
                documents[row, positions] = number
                if self._is_judged:
                    good[row] = learned.max() == GOOD_TARGET
                start += length - 1
        return Samples(inputs, labels, documents, self._apart, {GOOD: good} if self._is_judged else {})

    @cached_property
    def _is_judged(self) -> bool:
        """Whether each sequence is an answer that is judged; all are, or none."""
        first, length = self._find_documents(0)[0]
        return bool((self._targets.read(first, first + length) > TARGET).any())

    def iter_tokens(self, chunk_tokens: int = 2**22) -> Iterator[npt.NDArray[Any]]:
        """Yield the target tokens in reading order, in chunks."""
        for first in range(self._packs.first_token, self._packs.last_token, chunk_tokens):
            stop = min(first + chunk_tokens, self._packs.last_token)
            yield self._tokens.read(first, stop)[self._targets.read(first, stop) != 0]

    def _find_documents(self, pack: int) -> list[list[int]]:
        """Return the first token and the length of each document of a pack."""
        assert 0 <= pack < self.num_samples, f"pack {pack} of {self.num_samples}"
        first = int(self._stops.read(pack - 1, pack)[0]) if pack else 0
        stop = int(self._stops.read(pack, pack + 1)[0])
        documents: list[list[int]] = self._documents.read(2 * first, 2 * stop).reshape(-1, 2).tolist()
        return documents
