"""A summary of prepared data: counts and lengths of each source, and the first sequences as the model sees them."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from echelon.data.catalog import LENGTHS_DTYPE, TARGETS_DTYPE, SourceRecord
from echelon.data.order import DataOrder
from echelon.data.packing import CONTINUES
from echelon.data.prepared import PreparedData
from echelon.data.shards import NO_LABEL, Samples, TokenStore

PERCENTILES = (10, 50, 90, 99)

_CHUNK = 2**22


@dataclass(frozen=True)
class SourceCounts:
    """The counts of a source in a stream. `lengths` `[documents]`: tokens per document; `learned`: number of targets.

    Both are None for plain text, in which every token is a target.
    """

    source: str
    name: str
    stream: str
    documents: int
    samples: int
    tokens: int
    broken: int
    lengths: npt.NDArray[np.int64] | None = None
    learned: int | None = None


@dataclass(frozen=True)
class FedDocument:
    """A document as the model sees it: its tokens, and whether each is a target, both `[n]`.

    `number` is its index in the sequence `sequence`. The last token is missing if it is not a target, because it is
    then neither input nor target.
    """

    sequence: int
    number: int
    ids: npt.NDArray[np.int64]
    learned: npt.NDArray[np.bool_]


def count_sources(prepared: PreparedData) -> list[SourceCounts]:
    """Count each source with documents or broken records, in recipe order. Reads all lengths and targets."""
    return [
        _count_source(prepared, stream, record)
        for stream, records in prepared.manifest.streams.items()
        for record in records
        if record.documents or record.num_broken
    ]


def _count_source(prepared: PreparedData, stream: str, record: SourceRecord) -> SourceCounts:
    names = (record.source, record.name, stream, record.documents)
    labelled = record.labelled
    if labelled is None:
        return SourceCounts(*names, 0, record.tokens, record.num_broken)
    words = TokenStore(prepared.path, labelled.lengths, LENGTHS_DTYPE)
    targets = TokenStore(prepared.path, labelled.targets, TARGETS_DTYPE)
    chunks = range(0, targets.num_tokens, _CHUNK)
    learned = sum(int(targets.read(first, min(first + _CHUNK, targets.num_tokens)).sum()) for first in chunks)
    lengths = (words.read(0, words.num_tokens) & np.uint32(CONTINUES - 1)).astype(np.int64)
    return SourceCounts(*names, labelled.samples, record.tokens, record.num_broken, lengths, learned)


def bucket_lengths(lengths: npt.NDArray[np.int64], num_buckets: int = 8) -> list[tuple[int, int, int]]:
    """Compute a histogram (shortest, longest, documents) with buckets of equal width, a round number."""
    step = max(1, -(-int(lengths.max()) // num_buckets))
    digit = 10 ** (len(str(step)) - 1)
    width = -(-step // digit) * digit
    counts = np.bincount((lengths - 1) // width)
    return [(1 + index * width, (index + 1) * width, int(count)) for index, count in enumerate(counts)]


def first_documents(prepared: PreparedData, order: DataOrder, count: int) -> Iterator[FedDocument]:
    """Yield the first `count` documents of a run in its order; for plain text, the first sequences."""
    position, shown = 0, 0
    while shown < count:
        sequence = int(order.sample_ids(position, position + 1)[0])
        for document in _split(sequence, prepared.train.read_samples(np.array([sequence]))):
            if shown < count:
                yield document
            shown += 1
        position += 1


def _split(sequence: int, samples: Samples) -> Iterator[FedDocument]:
    """Yield the documents of one sequence."""
    inputs, labels = samples.inputs[0], samples.labels[0]
    numbers = np.where(labels == NO_LABEL, -1, 0) if samples.documents is None else samples.documents[0]
    for number in range(int(numbers.max()) + 1):
        own = numbers == number
        ids, asked = inputs[own], labels[own]
        learned = np.concatenate([[False], asked != NO_LABEL])
        last = asked[-1:] if asked[-1] != NO_LABEL else asked[:0]
        yield FedDocument(sequence, number, np.concatenate([ids, last]), learned[: len(ids) + len(last)])
