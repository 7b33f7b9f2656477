"""Batches for one rank: selected by the order, read from the shards, hashed, and divided into microbatches."""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from typing_extensions import override

from echelon.ground.errors import DataError
from echelon.learn.data.order import DataOrder, OrderAhead, Words, mix
from echelon.learn.data.shards import GOOD, NO_LABEL, Dataset, Samples
from echelon.learn.distributed.sequence_part import SequencePart
from echelon.planner.plan import ParallelPlan

if TYPE_CHECKING:
    from echelon.recipe.batches import BatchSchedule


_TRIM_TO = 8

_FULL_SHARE = 15 / 16
"""A microbatch that is filled to more than this share keeps its full width: packed ones then have one width, and
compiled layers know it. The padding costs less than a layer that is compiled for any width."""

_LOW_32_BITS = np.uint64(2**32 - 1)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_SAMPLE_SALT = np.uint64(0xD1B54A32D192ED03)
_BATCH_INDEX_SALT = np.uint64(0x8CB92BA72F3D8DD7)
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Microbatch:
    """The sequences of one forward pass."""

    input_ids: Tensor
    """int64 `[batch, seq]`."""
    labels: Tensor
    """int64 `[batch, seq]`: the target of each position, -100 where there is none."""
    sample_ids: Ids
    """`[batch]`: the ids of the samples; -1 for a sequence that only fills the batch, and has no target."""
    batch_indices: Ids
    """`[batch]`: the index of each sequence in the batch of the step on all ranks."""
    documents: Tensor | None = None
    """int32 `[batch, seq]`, see Samples; None without a document mask."""
    position_ids: Tensor | None = None
    """int64 `[batch, seq]`, from 0 in each document; None without a document mask."""
    filled: Tensor | None = None
    """boolean `[batch, seq]`: the positions other than padding. None: those with a label."""
    document_shape: tuple[int, int] | None = None
    """The most documents of a sequence, and a width that every document fits in; None without a document mask."""
    mismatched: "Microbatch | None" = None
    """The prompts of these sequences with the answers of the sequences before them in the batch of the step, the first
    with that of the last. For judged answers; else None."""
    part: SequencePart | None = None
    """What input_ids, labels, `filled` and `extra` hold of each sequence; None for all of it."""
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    """What an objective needs besides labels, by name, for example advantages or a teacher's logits.

    `[batch, seq, ...]` has a value per token, `[batch]` or `[batch, 1, ...]` one per sequence. Padding and sequences
    that only fill the batch have zeros.
    """

    def __post_init__(self) -> None:
        """Raises DataError for an extra of another shape."""
        batch, seq = self.input_ids.shape
        for name, tensor in self.extra.items():
            if tensor.shape[:1] != (batch,) or (tensor.dim() > 1 and tensor.shape[1] not in (1, seq)):
                raise DataError(
                    f"extra[{name!r}] has the shape {list(tensor.shape)}, but the microbatch has {batch} sequences of "
                    f"{seq} tokens; give [{batch}, {seq}, ...] for a value per token, or [{batch}] or "
                    f"[{batch}, 1, ...] for one per sequence."
                )

    def with_extra(self, **extra: Tensor) -> "Microbatch":
        """Return the same microbatch with more tensors in `extra`, of this rank's part of each sequence."""
        return replace(self, extra={**self.extra, **extra})

    def cut(self, part: SequencePart) -> "Microbatch":
        """Return this rank's part of every sequence. Documents and positions stay those of whole sequences."""
        if part.size == 1:
            return self
        return replace(
            self,
            mismatched=None if self.mismatched is None else self.mismatched.cut(part),
            input_ids=part.take(self.input_ids),
            labels=part.take(self.labels),
            filled=None if self.filled is None else part.take(self.filled),
            part=part,
            extra={
                name: part.take(tensor, 1) if is_per_token(tensor.shape) else tensor
                for name, tensor in self.extra.items()
            },
        )

    def to(self, device: torch.device) -> "Microbatch":
        """Return the same microbatch with its tensors on a device."""
        return self._with_tensors(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "Microbatch":
        """Return the same microbatch in pinned memory, which a GPU copies asynchronously."""
        return self._with_tensors(lambda tensor: tensor.pin_memory())

    def _with_tensors(self, change: Callable[[Tensor], Tensor]) -> "Microbatch":
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        changed: dict[str, Any] = {name: change(value) for name, value in values.items() if isinstance(value, Tensor)}
        if self.mismatched is not None:
            changed["mismatched"] = self.mismatched._with_tensors(change)
        extra = {name: change(tensor) for name, tensor in self.extra.items()}
        return Microbatch(**{**values, **changed, "extra": extra})


@dataclass(frozen=True)
class StepBatch:
    """The batch of one rank in one step."""

    step: int
    """From 0."""
    microbatches: list[Microbatch]
    """As many on every rank."""
    hash: int
    """This rank's term of `batch_hash`, which is the sum of the terms of all ranks modulo 2^64."""
    num_tokens: int
    """This rank's positions other than padding."""
    num_labels: int
    """This rank's positions with a label."""

    def to(self, device: torch.device) -> "StepBatch":
        """Return the same batch with its tensors on a device. Copies from pinned memory are asynchronous."""
        return replace(self, microbatches=[microbatch.to(device) for microbatch in self.microbatches])

    def with_extra(self, **extra: Sequence[Tensor]) -> "StepBatch":
        """Return the same batch with more tensors in `extra`: of each name one tensor per microbatch.

        They are not part of `hash`.
        """
        rows = [dict(zip(extra, tensors, strict=True)) for tensors in zip(*extra.values(), strict=True)]
        pairs = zip(self.microbatches, rows, strict=True)
        return replace(self, microbatches=[microbatch.with_extra(**row) for microbatch, row in pairs])


class BatchSource(Protocol):
    """Where the batches of a run come from. A recipe names its own with `data.source`."""

    @property
    def is_pure(self) -> bool:
        """Whether a batch depends on nothing but its step, the recipe and this rank's place.

        Then batches are read ahead in a thread, so `batch` must not use torch.distributed, and a resumed run equals
        an uninterrupted one bit for bit. Otherwise `batch` is called once per step, when the step begins, and may be
        collective; a resumed run goes on with whatever `batch` returns then.
        """

    def batch(self, step: int) -> StepBatch:
        """Return this rank's batch of a step, from 0. A pure source is asked for any step, in any order."""

    def close(self) -> None:
        """Release what the source holds. It is not used afterwards."""


def hash_sequences(
    sample_ids: Ids, batch_indices: Ids, inputs: Ids, labels: Ids, extra: Mapping[str, npt.NDArray[Any]] | None = None
) -> int:
    """Return the sum modulo 2^64 of a 64-bit hash of each sequence: its sample id, batch index and content.

    sample_ids and batch_indices `[n]`, inputs and labels `[n, seq]`, with ids below 2^32; extra: as in Samples. A sum
    does not depend on the order, so any division of a global batch among ranks and microbatches gives the same result.
    Every bit of the input matters; it guards against mistakes, not against an adversary.
    """
    if not len(inputs):
        return 0
    pairs = (inputs.astype(np.uint64) << np.uint64(32)) | (labels.astype(np.uint64) & _LOW_32_BITS)
    content = _hash_rows(pairs)
    for name, values in (extra or {}).items():
        octets = np.ascontiguousarray(values).view(np.uint8).reshape(len(values), -1)
        content = content + mix(_hash_rows(octets.astype(np.uint64)) ^ np.uint64(zlib.crc32(name.encode())))
    sample_words = mix(sample_ids.astype(np.uint64) ^ _SAMPLE_SALT)
    index_words = mix(batch_indices.astype(np.uint64) ^ _BATCH_INDEX_SALT)
    return int(mix(content + mix(sample_words + index_words)).sum(dtype=np.uint64))


def _hash_rows(words: Words) -> Words:
    """Hash each row of words `[n, length]` with the place of each word, `[n]`."""
    places = mix((np.arange(words.shape[1], dtype=np.uint64) + np.uint64(1)) * _GOLDEN)
    hashed: Words = mix(words ^ places).sum(axis=1, dtype=np.uint64)
    return hashed


@dataclass(frozen=True)
class Padding:
    """The width of microbatches."""

    is_equal: bool = False
    """Whether every microbatch has the full sequence length, on every rank and at every step, so that one schedule or
    one graph fits all; else each is as wide as its longest sequence."""
    multiple: int = 1
    """The width is a multiple of this, for example of the number of ranks that share a sequence."""


LONGEST = Padding()
WHOLE = SequencePart(rank=0, size=1)


def choose_padding(plan: ParallelPlan) -> Padding:
    """The width of microbatches that the ranks of a plan can divide.

    It is always the same where the schedule of a pipeline is for one shape, or ranks send each other rows for experts.
    """
    multiple = (2 * plan.cp if plan.cp > 1 else 1) * (plan.tp if plan.sequence_parallel else 1)
    return Padding(is_equal=plan.pp > 1 or plan.ep > 1, multiple=multiple)


@dataclass(frozen=True)
class BatchPlace:
    """Which sequences of every batch a rank feeds, and in which form.

    Of B sequences, each of R ranks takes n = ceil(B / R) indices, rank r [r * n, (r + 1) * n). Indices from B on are
    filled with sequences without targets; the loss is a sum over targets, so they do not change it.
    """

    micro_batch_size: int
    """The sequences of a microbatch; the last one of a step has fewer if this does not divide them."""
    rank: int = 0
    """The index of this rank among those that feed different sequences."""
    size: int = 1
    """The number of ranks that feed different sequences."""
    padding: Padding = LONGEST
    part: SequencePart = WHOLE
    """What this rank keeps of each sequence. Hash and counts are those of whole sequences."""
    pin_memory: bool = False
    """Whether tensors are in pinned memory, for asynchronous copies to a GPU."""
    sequence_len: int | None = None
    """The length that no sequence exceeds; None: that of the longest one."""

    def __post_init__(self) -> None:
        assert self.micro_batch_size > 0 and 0 <= self.rank < self.size, "no such microbatch or rank"

    def share(self, num_sequences: int) -> range:
        """The indices of this rank's sequences in a batch of `num_sequences`, without those that only fill it."""
        count = self.count(num_sequences)
        return range(*(min(num_sequences, rank * count) for rank in (self.rank, self.rank + 1)))

    def count(self, num_sequences: int) -> int:
        """How many sequences each rank feeds of a batch of `num_sequences`, with those that only fill it."""
        return -(-num_sequences // self.size)


class BatchLoader(BatchSource):
    """The batches of one rank from a dataset, in an order that is a function of the step. It keeps no state."""

    is_pure = True

    def __init__(self, dataset: Dataset, order: DataOrder, batches: "BatchSchedule", place: BatchPlace) -> None:
        """Raises DataError for a dataset without samples."""
        if dataset.num_samples == 0:
            raise DataError(
                f"data.train has {dataset.num_tokens} tokens, but a sample needs at least two; give more text."
            )
        assert order.num_samples == dataset.num_samples, "the order is of another dataset"
        self.dataset = dataset
        self.place = place
        self._order = OrderAhead(order)
        self._batches = batches

    @override
    def batch(self, step: int) -> StepBatch:
        size, first = self._batches.sequences(step), self._batches.first_sequence(step)
        share = self.place.share(size)
        sample_ids = self._order.sample_ids(first + share.start, len(share))
        samples = self.dataset.read_samples(sample_ids)
        mismatched = None
        if GOOD in samples.extra:
            before = np.roll(self._order.sample_ids(first, size), 1)[share.start : share.stop]
            mismatched = mismatch(samples, self.dataset.read_samples(before))
        return divide_samples(step, samples, sample_ids, self.place, size, mismatched)

    @override
    def close(self) -> None:
        pass


def divide_samples(
    step: int,
    samples: Samples,
    sample_ids: Ids,
    place: BatchPlace,
    num_sequences: int,
    mismatched: Samples | None = None,
) -> StepBatch:
    """Build a rank's batch of a step from samples, those of `place.share(num_sequences)`, and their ids `[n]`.

    `mismatched`: see Microbatch; not part of the hash, because it follows from the samples of all ranks. Sequences that
    are not full are sorted by length, the longest first, to reduce padding.
    """
    count = place.count(num_sequences)
    fill, indices = count - len(sample_ids), place.rank * count + np.arange(count)
    # Whole rows, before splitting and trimming, which do not affect the sum.
    digest = hash_sequences(sample_ids, indices[: len(sample_ids)], samples.inputs, samples.labels, samples.extra)
    if fill:
        sample_ids = np.pad(sample_ids, (0, fill), constant_values=-1)
        samples = fill_up(samples, fill)
        mismatched = None if mismatched is None else fill_up(mismatched, fill)
    microbatches, by_length = [], order_by_length(samples)
    for first in range(0, count, place.micro_batch_size):
        rows = by_length[first : first + place.micro_batch_size]
        microbatch = build_rows(samples, rows, sample_ids, indices, place.padding, mismatched).cut(place.part)
        microbatches.append(microbatch.pin_memory() if place.pin_memory else microbatch)
    return StepBatch(step, microbatches, digest, num_fed(samples), int((samples.labels != NO_LABEL).sum()))


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


def order_by_length(samples: Samples) -> Ids:
    """Return the row indices `[n]` from the longest to the shortest row. The sort is stable.

    Plain text fills its sequences, so its rows keep their order.
    """
    if samples.documents is None:
        return np.arange(len(samples.inputs))
    return np.argsort(-(samples.documents >= 0).sum(axis=1), kind="stable")


def set_width(samples: Samples, rows: slice | Ids = slice(None), padding: Padding = LONGEST) -> Samples:
    """Select rows and set their width to `padding`, by removing columns of padding at the end or adding some.

    Plain text fills its sequences, so all rows keep one shape. For other samples, the width is rounded up to a multiple
    of 8, or to the full width if little is missing.
    """
    documents = None if samples.documents is None else samples.documents[rows]
    width = _round_up(samples.inputs.shape[1], padding.multiple)
    if documents is not None and not padding.is_equal:
        filled = int((documents >= 0).any(axis=0).sum())
        trimmed = _round_up(max(1, filled), math.lcm(_TRIM_TO, padding.multiple))
        width = trimmed if trimmed <= _FULL_SHARE * width else width
    return Samples(
        _widen(samples.inputs[rows], width, 0),
        _widen(samples.labels[rows], width, NO_LABEL),
        None if documents is None else _widen(documents, width, -1),
        samples.apart,
        {
            name: _widen(values[rows], width, 0) if is_per_token(values.shape) else values[rows]
            for name, values in samples.extra.items()
        },
    )


def is_per_token(shape: Sequence[int]) -> bool:
    """Whether an extra of this shape has a value per token. See Microbatch."""
    return len(shape) > 1 and shape[1] != 1


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _widen(rows: npt.NDArray[Any], width: int, filling: int) -> npt.NDArray[Any]:
    """Cut or pad rows `[n, seq, ...]` to a contiguous `[n, width, ...]`."""
    missing = [(0, 0), (0, max(0, width - rows.shape[1])), *[(0, 0)] * (rows.ndim - 2)]
    widened = np.pad(rows, missing, constant_values=filling) if width > rows.shape[1] else rows[:, :width]
    return np.ascontiguousarray(widened)


def build_microbatch(samples: Samples, sample_ids: Ids, batch_indices: Ids, padding: Padding = LONGEST) -> Microbatch:
    """Convert samples, whose width is set, to tensors on the CPU."""
    documents = samples.documents if samples.apart else None
    positions = None if documents is None else positions_in_documents(documents)
    return Microbatch(
        torch.from_numpy(samples.inputs),
        torch.from_numpy(samples.labels),
        sample_ids,
        batch_indices,
        None if documents is None else torch.from_numpy(documents),
        None if positions is None else torch.from_numpy(positions),
        None if samples.documents is None else torch.from_numpy(samples.documents >= 0),
        None if documents is None or positions is None else _measure_documents(documents, positions, padding),
        extra={name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in samples.extra.items()},
    )


def build_rows(
    samples: Samples,
    rows: slice | Ids,
    sample_ids: Ids,
    batch_indices: Ids,
    padding: Padding = LONGEST,
    mismatched: Samples | None = None,
) -> Microbatch:
    """Build the microbatch of some rows of samples. `sample_ids` and `batch_indices` `[n]` are those of all rows."""
    arguments = sample_ids[rows], batch_indices[rows], padding
    microbatch = build_microbatch(set_width(samples, rows, padding), *arguments)
    if mismatched is None:
        return microbatch
    return replace(microbatch, mismatched=build_microbatch(set_width(mismatched, rows, padding), *arguments))


def _measure_documents(
    documents: npt.NDArray[np.int32], positions: npt.NDArray[np.int64], padding: Padding
) -> tuple[int, int]:
    """Return the most documents of a row, and the width of the longest one, rounded up as set_width does."""
    width, count = documents.shape[1], max(1, int(documents.max()) + 1)
    if padding.is_equal:
        return count, width
    longest = int(positions[documents >= 0].max(initial=0)) + 1
    return count, min(width, _round_up(longest, _TRIM_TO))


def positions_in_documents(documents: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """Return the position of each token in its document, `[n, seq]`. Padding counts as a document."""
    places = np.broadcast_to(np.arange(documents.shape[1], dtype=np.int64), documents.shape)
    starts = np.ones(documents.shape, dtype=np.bool_)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return places - np.maximum.accumulate(np.where(starts, places, 0), axis=1)


def fill_up(samples: Samples, count: int) -> Samples:
    """Append `count` sequences of padding to the samples."""
    rows = ((0, count), (0, 0))
    documents = samples.documents
    return Samples(
        np.pad(samples.inputs, rows),
        np.pad(samples.labels, rows, constant_values=NO_LABEL),
        None if documents is None else np.pad(documents, rows, constant_values=-1),
        samples.apart,
        {name: np.pad(values, [(0, count), *[(0, 0)] * (values.ndim - 1)]) for name, values in samples.extra.items()},
    )


def num_fed(samples: Samples) -> int:
    """Count the positions other than padding (without `documents`, those with a target): see Samples."""
    fed = samples.labels != NO_LABEL if samples.documents is None else samples.documents >= 0
    return int(fed.sum())
