"""Batches for one rank: cut by the order, read from the shards, hashed, made ready by a background thread."""

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

from echelon.data.order import DataOrder, Words, mix
from echelon.data.shards import NO_LABEL, Dataset, Samples
from echelon.errors import DataError
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
    int64 `[batch]`: which samples these are, and their places in the global batch of the step. A sequence that only
    fills up the batch has no target and the sample id -1. `documents` (see Samples) and `position_ids`, which start
    again with each document, int64 `[batch, seq]`, are None where documents are not kept apart. `filled`, boolean
    `[batch, seq]`, marks the positions other than padding; None where those without a target are padding.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    sample_ids: npt.NDArray[np.int64]
    batch_indices: npt.NDArray[np.int64]
    documents: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    filled: torch.Tensor | None = None

    def to(self, device: torch.device) -> "Microbatch":
        """The same microbatch with its tensors on a device."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "Microbatch":
        """The same microbatch where a GPU can fetch it while the host goes on."""
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Microbatch":
        tensors = {name: getattr(self, name) for name in ("input_ids", "labels", "documents", "position_ids", "filled")}
        changed: dict[str, Any] = {name: change(each) for name, each in tensors.items() if each is not None}
        return replace(self, **changed)


@dataclass(frozen=True)
class StepBatch:
    """What one rank feeds in one step.

    `hash` is this rank's term of `batch_hash`: terms of all ranks add up to it modulo 2^64. `num_tokens` counts this
    rank's positions other than padding, `num_labels` those with a label.
    """

    step: int
    microbatches: list[Microbatch]
    hash: int
    num_tokens: int
    num_labels: int

    def to(self, device: torch.device) -> "StepBatch":
        """The same batch with its tensors on a device; from pinned memory the host does not wait for the copy."""
        return replace(self, microbatches=[microbatch.to(device) for microbatch in self.microbatches])


def hash_sequences(
    sample_ids: npt.NDArray[np.int64],
    batch_indices: npt.NDArray[np.int64],
    inputs: npt.NDArray[np.int64],
    labels: npt.NDArray[np.int64],
) -> int:
    """The sum modulo 2^64 of a 64-bit hash of each sequence: its sample id, batch index, inputs and labels.

    sample_ids and batch_indices `[n]`, inputs and labels `[n, seq]`, of ids below 2^32. A sum does not depend on its
    order, so any division of a global batch among ranks and microbatches gives the same. Sensitive to every bit of its
    input; it guards against mistakes, not against an adversary.
    """
    places = mix((np.arange(inputs.shape[1], dtype=np.uint64) + np.uint64(1)) * _GOLDEN)
    pairs = (inputs.astype(np.uint64) << np.uint64(32)) | (labels.astype(np.uint64) & _LOW_32_BITS)
    content: Words = mix(pairs ^ places).sum(axis=1, dtype=np.uint64)
    sample_words = mix(sample_ids.astype(np.uint64) ^ _SAMPLE_SALT)
    index_words = mix(batch_indices.astype(np.uint64) ^ _BATCH_INDEX_SALT)
    return int(mix(content + mix(sample_words + index_words)).sum(dtype=np.uint64))


@dataclass(frozen=True)
class Padding:
    """How wide microbatches are.

    Attributes:
        is_equal: whether all of them are as wide as a whole sequence, on every rank and at every step, so that one
            schedule or one graph serves all; else each is as wide as its longest sequence.
        multiple: what divides the width, as the number of ranks does that share a sequence.
    """

    is_equal: bool = False
    multiple: int = 1


LONGEST = Padding()


class BatchLoader(Iterator[StepBatch]):
    """The batches of one data-parallel rank from `start_step` on, without end.

    Of a step that feeds B sequences, each of R ranks takes n = ceil(B/R) places, rank r [r*n, (r+1)*n), in microbatches
    of `micro_batch_size` (the last one smaller if that does not divide). Sequences that are not full go into them by
    their length, the longest first, so that little padding is fed. Places from B on are filled with sequences that have
    no target: the loss is a sum over targets, so they change nothing. No state: starting at any step costs nothing. A
    background thread keeps two steps ready; an error in it is raised by `next`. Use as a context manager or call
    `close`. `pin_memory` puts tensors where a GPU can fetch them while the host goes on; `padding` says how
    wide they are.
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
    ) -> None:
        """Raises DataError for a dataset without samples."""
        if dataset.num_samples == 0:
            raise DataError(
                f"data.train holds {dataset.num_tokens} tokens: a sample takes at least two; give more text."
            )
        assert order.num_samples == dataset.num_samples, "the order is of another dataset"
        assert micro_batch_size > 0 and 0 <= dp_rank < dp_size, "no such microbatch or rank"
        self._dataset = dataset
        self._order = order
        self._batches = batches
        self._micro_batch_size = micro_batch_size
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self._pin_memory = pin_memory
        self._padding = padding
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batch-loader")
        self._ready: deque[Future[StepBatch]] = deque()
        self.wait_seconds = 0.0
        """How long the last `next` waited for the thread."""
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

    def seek(self, step: int) -> None:
        """Go on from another step."""
        for ready in self._ready:
            ready.cancel()
        self._ready.clear()
        self._next_step = step
        for _ in range(_PREFETCH):
            self._request()

    def reshare(self, dp_rank: int, dp_size: int) -> None:
        """From the next step on read this part of every batch; costs nothing where it is the part that is read now."""
        if (dp_rank, dp_size) != (self._dp_rank, self._dp_size):
            self._dp_rank, self._dp_size = dp_rank, dp_size
            self.seek(self._next_step - len(self._ready))

    def batch(self, step: int) -> StepBatch:
        """The batch of any step; `next` goes on as if it had not been asked for."""
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
        # Whole rows, before they are divided and trimmed: the sum depends on neither.
        digest = hash_sequences(sample_ids, batch_indices[: count - fill], samples.inputs, samples.labels)
        if fill:
            sample_ids = np.pad(sample_ids, (0, fill), constant_values=-1)
            samples = fill_up(samples, fill)
        microbatches = []
        by_length = order_by_length(samples)
        for first in range(0, count, self._micro_batch_size):
            rows = by_length[first : first + self._micro_batch_size]
            microbatch = build_microbatch(
                set_width(samples, rows, self._padding), sample_ids[rows], batch_indices[rows]
            )
            microbatches.append(microbatch.pin_memory() if self._pin_memory else microbatch)
        return StepBatch(step, microbatches, digest, num_fed(samples), int((samples.labels != NO_LABEL).sum()))


def order_by_length(samples: Samples) -> npt.NDArray[np.int64]:
    """The rows from the longest to the shortest, `[n]`, rows of one length in the order they have.

    A text fills its sequences, and its rows stay in order.
    """
    if samples.documents is None:
        return np.arange(len(samples.inputs))
    return np.argsort(-(samples.documents >= 0).sum(axis=1), kind="stable")


def set_width(
    samples: Samples, rows: slice | npt.NDArray[np.int64] = slice(None), padding: Padding = LONGEST
) -> Samples:
    """Some rows, as wide as `padding` says: columns at their end are left out that are padding in all, or added.

    A text fills its sequences, and all stay of one shape. Other samples number their documents; of these a multiple of
    8 columns is kept, where there are as many.
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
    """Rows `[n, seq]` cut or filled up to `[n, width]`, in one piece."""
    missing = max(0, width - rows.shape[1])
    widened = np.pad(rows, ((0, 0), (0, missing)), constant_values=filling) if missing else rows[:, :width]
    return np.ascontiguousarray(widened)


def build_microbatch(
    samples: Samples, sample_ids: npt.NDArray[np.int64], batch_indices: npt.NDArray[np.int64]
) -> Microbatch:
    """Samples as tensors on the CPU."""
    documents = samples.documents if samples.apart else None
    return Microbatch(
        torch.from_numpy(samples.inputs),
        torch.from_numpy(samples.labels),
        sample_ids,
        batch_indices,
        None if documents is None else torch.from_numpy(documents),
        None if documents is None else torch.from_numpy(positions_in_documents(documents)),
        None if samples.documents is None else torch.from_numpy(samples.documents >= 0),
    )


def positions_in_documents(documents: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """The place of each token in its document, `[n, seq]`; padding counts as one more document."""
    places = np.broadcast_to(np.arange(documents.shape[1], dtype=np.int64), documents.shape)
    starts = np.ones(documents.shape, dtype=np.bool_)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return places - np.maximum.accumulate(np.where(starts, places, 0), axis=1)


def fill_up(samples: Samples, count: int) -> Samples:
    """The samples and `count` sequences of padding."""
    rows = ((0, count), (0, 0))
    documents = samples.documents
    return Samples(
        np.pad(samples.inputs, rows),
        np.pad(samples.labels, rows, constant_values=NO_LABEL),
        None if documents is None else np.pad(documents, rows, constant_values=-1),
        samples.apart,
    )


def num_fed(samples: Samples) -> int:
    """Positions other than padding. Without documents one that has no target is padding: see Samples."""
    fed = samples.labels != NO_LABEL if samples.documents is None else samples.documents >= 0
    return int(fed.sum())
