"""A summary of prepared data: of each source, counts, lengths and epochs; the first sequences as a model sees them."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from echelon.learn.data.catalog import LENGTHS_DTYPE, TARGETS_DTYPE, SourceRecord
from echelon.learn.data.mixture import MixtureOrder, build_order
from echelon.learn.data.order import DataOrder
from echelon.learn.data.packing import CONTINUES
from echelon.learn.data.prepared import PreparedData
from echelon.learn.data.shards import NO_LABEL, Samples, TokenStore
from echelon.recipe.document import Recipe

PERCENTILES = (10, 50, 90, 99)

MANY_EPOCHS = 20
"""Conversations and other examples that are repeated more often than this are reported."""

MANY_EPOCHS_OF_TEXT = 4
"""Plain text that is repeated more often than this is reported: up to 4 epochs are nearly as good as new text
(Muennighoff et al. 2023, https://arxiv.org/abs/2305.16264)."""

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
    if (labelled := record.labelled) is None:
        return SourceCounts(*names, 0, record.tokens, record.num_broken)
    words = TokenStore(prepared.path, labelled.lengths, LENGTHS_DTYPE)
    targets = TokenStore(prepared.path, labelled.targets, TARGETS_DTYPE)
    chunks = range(0, targets.num_tokens, _CHUNK)
    learned = sum(
        int(np.count_nonzero(targets.read(first, min(first + _CHUNK, targets.num_tokens)))) for first in chunks
    )
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
    sequences = (int(order.sample_ids(position, position + 1)[0]) for position in itertools.count())
    documents = (_split(sequence, prepared.train.read_samples(np.array([sequence]))) for sequence in sequences)
    return itertools.islice(itertools.chain.from_iterable(documents), count)


def _split(sequence: int, samples: Samples) -> Iterator[FedDocument]:
    """Yield the documents of one sequence."""
    inputs, labels = samples.inputs[0], samples.labels[0]
    numbers = np.where(labels == NO_LABEL, -1, 0) if samples.documents is None else samples.documents[0]
    for number in range(int(numbers.max()) + 1):
        mask = numbers == number
        ids, asked = inputs[mask], labels[mask]
        learned = np.concatenate([[False], asked != NO_LABEL])
        last = asked[-1:] if asked[-1] != NO_LABEL else asked[:0]
        yield FedDocument(sequence, number, np.concatenate([ids, last]), learned[: len(ids) + len(last)])


def describe_repeats(recipe: Recipe, data: PreparedData) -> list[str]:
    """Return a line for each source that the run reads more than MANY_EPOCHS, or MANY_EPOCHS_OF_TEXT, times."""
    order = build_order(recipe, data.train)
    num_sequences = recipe.batches.first_sequence(recipe.num_steps(order.num_samples))
    texts = [("data.train", order.num_samples, num_sequences)]
    if isinstance(order, MixtureOrder):
        names = (f"data.train ({split.name})" for split in data.manifest.train)
        texts = list(zip(names, order.sizes, order.uses_before(num_sequences), strict=True))
    num_steps = recipe.num_steps(order.num_samples)
    limit = MANY_EPOCHS_OF_TEXT if data.manifest.samples is None else MANY_EPOCHS
    return [
        f"{name}: each token is seen about {uses / size:,.0f} times in the run's {num_steps:,} steps, so the model may "
        f"memorize the text ({size:,} sequences): use more text, or train for fewer steps"
        for name, size, uses in texts
        if uses > limit * size
    ]


def describe_order(recipe: Recipe, data: PreparedData) -> list[str]:
    """Return what an order gives up, and a line for each source of a mixture: its share, its epoch, its epochs here."""
    order = build_order(recipe, data.train)
    if recipe.data.stream is not None:
        window = recipe.data.stream.window
        return [f"order: shuffled only within windows of {window:,} sequences in reading order (data.stream.window)"]
    if not isinstance(order, MixtureOrder):
        return []
    num_sequences = recipe.batches.first_sequence(recipe.num_steps(order.num_samples))
    weights = [Fraction(str(weight)) for weight in recipe.data.weights]
    lines = []
    for source, uses in enumerate(order.uses_before(num_sequences)):
        share, asked = Fraction(order.slots[source], sum(order.slots)), weights[source] / sum(weights)
        rounded = "" if share == asked else f" (weight {float(asked):.6%})"
        digits = 2 if share == asked and share >= Fraction(1, 100) else 4
        lines.append(
            f"mixture: {data.manifest.train[source].name} {float(share):.{digits}%}{rounded}; "
            f"{order.sizes[source]:,} sequences per epoch, {uses:,} in the run: {uses / order.sizes[source]:.2f} epochs"
        )
    return lines
