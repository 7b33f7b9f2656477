"""Batches for one rank: selected by the order, read from the shards, hashed and prefetched by a background thread."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

from echelon.data.order import DataOrder, OrderAhead, Words, mix
from echelon.data.shards import NO_LABEL, Dataset, Samples
from echelon.distributed.sequence_part import SequencePart
from echelon.errors import DataError
from echelon.planner.plan import ParallelPlan
from echelon.recipe.batches import BatchSchedule

_PREFETCH = 2
_TRIM_TO = 8
_LOW_32_BITS = np.uint64(2**32 - 1)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_SAMPLE_SALT = np.uint64(0xD1B54A32D192ED03)
_BATCH_INDEX_SALT = np.uint64(0x8CB92BA72F3D8DD7)


@dataclass(frozen=True)
class Microbatch:
    """The sequences of one forward pass.

    input_ids and labels are int64 `[batch, seq]`, labels -100 where there is no target. sample_ids and batch_indices,
    int64 `[batch]`: the ids of the samples and their indices in the global batch of the step. A sequence that only
    fills the batch has no target and the sample id -1. `documents` (see Samples) and `position_ids`, which restart
    with each document, int64 `[batch, seq]`, are None without a document mask. `filled`, boolean `[batch, seq]`, marks
    the positions other than padding; None if exactly the positions without a target are padding. `document_shape`: the
    most documents of a sequence, and a width that every document fits in; None without a document mask. `part`: what
    input_ids, labels and `filled` hold of each sequence; None for all of it.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    sample_ids: npt.NDArray[np.int64]
    batch_indices: npt.NDArray[np.int64]
    documents: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    filled: torch.Tensor | None = None
    document_shape: tuple[int, int] | None = None
    part: SequencePart | None = None

    def cut(self, part: SequencePart) -> "Microbatch":
        """Return this rank's part of every sequence. Documents and positions stay those of whole sequences."""
        return replace(
            self,
            input_ids=part.take(self.input_ids),
            labels=part.take(self.labels),
            filled=None if self.filled is None else part.take(self.filled),
            part=part,
        )

    def to(self, device: torch.device) -> "Microbatch":
        """Return the same microbatch with its tensors on a device."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "Microbatch":
        """Return the same microbatch in pinned memory, which a GPU copies asynchronously."""
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Microbatch":
        tensors = {name: getattr(self, name) for name in ("input_ids", "labels", "documents", "position_ids", "filled")}
        changed: dict[str, Any] = {name: change(each) for name, each in tensors.items() if each is not None}
        return replace(self, **changed)


@dataclass(frozen=True)
class StepBatch:
    """The batch of one rank in one step.

    `hash` is this rank's term of `batch_hash`, the sum of the terms of all ranks modulo 2^64. `num_tokens` counts this
    rank's positions other than padding, `num_labels` those with a label.
    """

    step: int
    microbatches: list[Microbatch]
    hash: int
    num_tokens: int
    num_labels: int

    def to(self, device: torch.device) -> "StepBatch":
        """Return the same batch with its tensors on a device. Copies from pinned memory are asynchronous."""
        return replace(self, microbatches=[microbatch.to(device) for microbatch in self.microbatches])


def hash_sequences(
    sample_ids: npt.NDArray[np.int64],
    batch_indices: npt.NDArray[np.int64],
    inputs: npt.NDArray[np.int64],
    labels: npt.NDArray[np.int64],
) -> int:
    """Return the sum modulo 2^64 of a 64-bit hash of each sequence: its sample id, batch index, inputs and labels.

    sample_ids and batch_indices `[n]`, inputs and labels `[n, seq]`, with ids below 2^32. A sum does not depend on the
    order, so any division of a global batch among ranks and microbatches gives the same result. Every bit of the input
    matters; it guards against mistakes, not against an adversary.
    """
    places = mix((np.arange(inputs.shape[1], dtype=np.uint64) + np.uint64(1)) * _GOLDEN)
    pairs = (inputs.astype(np.uint64) << np.uint64(32)) | (labels.astype(np.uint64) & _LOW_32_BITS)
    content: Words = mix(pairs ^ places).sum(axis=1, dtype=np.uint64)
    sample_words = mix(sample_ids.astype(np.uint64) ^ _SAMPLE_SALT)
    index_words = mix(batch_indices.astype(np.uint64) ^ _BATCH_INDEX_SALT)
    return int(mix(content + mix(sample_words + index_words)).sum(dtype=np.uint64))


@dataclass(frozen=True)
class Padding:
    """The width of microbatches.

    Attributes:
        is_equal: whether every microbatch has the full sequence length, on every rank and at every step, so that one
            schedule or one graph fits all; else each is as wide as its longest sequence.
        multiple: the width is a multiple of this, for example of the number of ranks that share a sequence.
    """

    is_equal: bool = False
    multiple: int = 1


LONGEST = Padding()

Cut = Callable[[Microbatch], Microbatch]


def keep_whole(microbatch: Microbatch) -> Microbatch:
    """The cut of a rank that shares its sequences with no other."""
    return microbatch


def find_cut(part: SequencePart) -> Cut:
    """Return the cut of a rank that holds this part of every sequence."""
    return keep_whole if part.size == 1 else lambda microbatch: microbatch.cut(part)


def choose_padding(plan: ParallelPlan) -> Padding:
    """The width of microbatches that the ranks of a plan can divide.

    It is always the same where the schedule of a pipeline is for one shape, or ranks send each other rows for experts.
    """
    multiple = (2 * plan.cp if plan.cp > 1 else 1) * (plan.tp if plan.sequence_parallel else 1)
    return Padding(is_equal=plan.pp > 1 or plan.ep > 1, multiple=multiple)


class BatchLoader(Iterator[StepBatch]):
    """An endless iterator over the batches of one data-parallel rank, from `start_step` on.

    In a step with B sequences, each of R ranks takes n = ceil(B/R) indices, rank r [r*n, (r+1)*n), in microbatches of
    `micro_batch_size` (the last one smaller if that does not divide). Sequences that are not full are sorted by length,
    the longest first, to reduce padding. Indices from B on are filled with sequences without targets; the loss is a sum
    over targets, so they do not change it. The loader has no state, so it can start at any step at no cost. A
    background thread prefetches two steps; `next` raises its errors. Use it as a context manager or call `close`.
    `pin_memory` puts tensors in pinned memory for asynchronous copies; `padding` sets their width, and `cut` keeps this
    rank's part of each sequence: hash and counts are those of whole sequences.
    """

    def __init__(
        self,
        dataset: Dataset,
        order: DataOrder,
        batches: BatchSchedule,
        micro_batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        start_step: int = 0,
        pin_memory: bool = False,
        padding: Padding = LONGEST,
        cut: Cut = keep_whole,
    ) -> None:
        """Raises DataError for a dataset without samples."""
        if dataset.num_samples == 0:
            raise DataError(
                f"data.train has {dataset.num_tokens} tokens, but a sample needs at least two; give more text."
            )
        assert order.num_samples == dataset.num_samples, "the order is of another dataset"
        assert micro_batch_size > 0 and 0 <= dp_rank < dp_size, "no such microbatch or rank"
        self._dataset = dataset
        self._order = OrderAhead(order)
        self._batches = batches
        self._micro_batch_size = micro_batch_size
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self._pin_memory = pin_memory
        self._padding, self._cut = padding, cut
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batch-loader")
        self._ready: deque[Future[StepBatch]] = deque()
        self.wait_seconds = 0.0
        """How long the last `next` waited for the thread, in seconds."""
        self.seek(start_step)

    def __next__(self) -> StepBatch:
        started = time.perf_counter()
        batch = self._ready[0].result()
        self.wait_seconds = time.perf_counter() - started
        self._ready.popleft()
        self._request()
        return batch

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    @property
    def step(self) -> int:
        """The step whose batch `next` returns."""
        return self._next_step - len(self._ready)

    def seek(self, step: int) -> None:
        """Continue from another step."""
        for ready in self._ready:
            ready.cancel()
        self._ready.clear()
        self._next_step = step
        for _ in range(_PREFETCH):
            self._request()

    def reshare(self, dp_rank: int, dp_size: int) -> None:
        """Read this rank's part of every batch from the next step on. No effect if rank and size are unchanged."""
        if (dp_rank, dp_size) != (self._dp_rank, self._dp_size):
            self._dp_rank, self._dp_size = dp_rank, dp_size
            self.seek(self.step)

    def batch(self, step: int) -> StepBatch:
        """Return the batch of any step, without changing the position of `next`."""
        return self._thread.submit(self._build, step).result()

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _request(self) -> None:
        self._ready.append(self._thread.submit(self._build, self._next_step))
        self._next_step += 1

    def _build(self, step: int) -> StepBatch:
        size = self._batches.sequences(step)
        count = -(-size // self._dp_size)
        first_index = self._dp_rank * count
        fill = min(count, max(0, first_index + count - size))
        sample_ids = self._order.sample_ids(self._batches.first_sequence(step) + first_index, count - fill)
        batch_indices = np.arange(first_index, first_index + count)
        samples = self._dataset.read_samples(sample_ids)
        # Whole rows, before splitting and trimming, which do not affect the sum.
        digest = hash_sequences(sample_ids, batch_indices[: count - fill], samples.inputs, samples.labels)
        if fill:
            sample_ids = np.pad(sample_ids, (0, fill), constant_values=-1)
            samples = fill_up(samples, fill)
        microbatches = []
        by_length = order_by_length(samples)
        for first in range(0, count, self._micro_batch_size):
            rows = by_length[first : first + self._micro_batch_size]
            microbatch = self._cut(
                build_microbatch(
                    set_width(samples, rows, self._padding), sample_ids[rows], batch_indices[rows], self._padding
                )
            )
            microbatches.append(microbatch.pin_memory() if self._pin_memory else microbatch)
        return StepBatch(step, microbatches, digest, num_fed(samples), int((samples.labels != NO_LABEL).sum()))


def order_by_length(samples: Samples) -> npt.NDArray[np.int64]:
    """Return the row indices `[n]` from the longest to the shortest row. The sort is stable.

    Plain text fills its sequences, so its rows keep their order.
    """
    if samples.documents is None:
        return np.arange(len(samples.inputs))
    return np.argsort(-(samples.documents >= 0).sum(axis=1), kind="stable")


def set_width(
    samples: Samples, rows: slice | npt.NDArray[np.int64] = slice(None), padding: Padding = LONGEST
) -> Samples:
    """Select rows and set their width to `padding`, by removing columns of padding at the end or adding some.

    Plain text fills its sequences, so all rows keep one shape. For other samples, the width is rounded up to a multiple
    of 8, up to the full width.
    """
    inputs, labels, documents = samples.inputs[rows], samples.labels[rows], samples.documents
    width = _round_up(inputs.shape[1], padding.multiple)
    if documents is None:
        return Samples(_widen(inputs, width, 0), _widen(labels, width, NO_LABEL))
    documents = documents[rows]
    if not padding.is_equal:
        filled = int((documents >= 0).any(axis=0).sum())
        width = min(width, _round_up(max(1, filled), math.lcm(_TRIM_TO, padding.multiple)))
    return Samples(
        _widen(inputs, width, 0), _widen(labels, width, NO_LABEL), _widen(documents, width, -1), samples.apart
    )


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _widen(rows: npt.NDArray[Any], width: int, filling: int) -> npt.NDArray[Any]:
    """Cut or pad rows `[n, seq]` to a contiguous `[n, width]`."""
    missing = max(0, width - rows.shape[1])
    widened = np.pad(rows, ((0, 0), (0, missing)), constant_values=filling) if missing else rows[:, :width]
    return np.ascontiguousarray(widened)


def build_microbatch(
    samples: Samples,
    sample_ids: npt.NDArray[np.int64],
    batch_indices: npt.NDArray[np.int64],
    padding: Padding = LONGEST,
) -> Microbatch:
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
    )


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
    )


def num_fed(samples: Samples) -> int:
    """Count the positions other than padding (without `documents`, those with a target): see Samples."""
    fed = samples.labels != NO_LABEL if samples.documents is None else samples.documents >= 0
    return int(fed.sum())
