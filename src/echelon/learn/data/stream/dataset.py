"""Samples of a text that is prepared while the run trains: the windows or packs of its chunks, in reading order."""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from echelon.ground.errors import DataError, EchelonError
from echelon.ground.sizes import render_bytes
from echelon.learn.data.shards import NO_LABEL, Dataset, Samples, TokenDataset, TokenStore
from echelon.learn.data.stream.chunks import ChunkKeeper, StreamPlan, digest_plan, read_rows, row_size
from echelon.learn.data.stream.options import StreamOptions

logger = logging.getLogger(__name__)

UNKNOWN = 2**62
"""More samples than there are."""

_OPEN_CHUNKS = 1024
_CHUNKS_AHEAD = 8
_POLL_SECONDS = 0.2


class StreamDataset(Dataset):
    """The samples of a stream: those that `TokenDataset` cuts from the tokens of all chunks, or the rows of all chunks.

    `num_samples` is UNKNOWN. What is read is prepared first, if it is not there. A thread prepares what `expect` names.
    """

    num_samples = UNKNOWN

    def __init__(self, folder: Path, plan: StreamPlan, sequence_len: int, apart: bool, options: StreamOptions) -> None:
        """`folder`: the prepared folder of the plan; chunks are kept beside it. `apart`: documents are kept apart."""
        self.plan = plan
        self.sequence_len = sequence_len
        self.digest = digest_plan(plan)
        """A hash of what decides the tokens."""
        self._keeper = ChunkKeeper(folder.absolute().with_name(f"{folder.name}.chunks"), plan, options)
        # The numbers that each sample adds to those before it, and those that the last one needs beyond.
        self._step, self._beyond = (sequence_len, 1) if plan.samples is None else (row_size(sequence_len), 0)
        self.apart = apart
        self._stops = [0]  # of the tokens of the chunks whose size is known
        self._open = OrderedDict[int, TokenStore]()
        self._growing = threading.Lock()
        self._expected = (-1, 1)
        self._starting = threading.Lock()
        self._is_preparing = False

    def describe(self) -> str:
        """A clause for the start of a run."""
        plan, size = self.plan, render_bytes(self.plan.num_bytes)
        packed = "" if plan.samples is None or not plan.samples.packing else "; samples are packed within each chunk"
        return f"{size} of training text in {len(plan.chunks):,} chunks, prepared while the run trains{packed}"

    @property
    @override
    def num_tokens(self) -> int:
        """The tokens that are known so far, from the start of the text on; of samples, the positions of their rows."""
        return self._stops[-1] if self.plan.samples is None else self._stops[-1] // self._step * self.sequence_len

    @property
    def _is_whole(self) -> bool:
        return len(self._stops) > len(self.plan.chunks)

    def _count_known(self) -> int:
        """Count the samples whose size is known by now. The last one is whole, unless the text ends there."""
        with self._growing:
            while not self._is_whole and (record := self._keeper.find(len(self._stops) - 1)) is not None:
                self._stops.append(self._stops[-1] + record.tokens)
            more = max(0, self._stops[-1] - self._beyond)
            return -(-more // self._step) if self._is_whole else more // self._step

    def reach(self, count: int) -> int:
        """Wait until `count` samples are known, or all. Raises DataError, or EchelonError if chunks cannot be had."""
        while (num_known := self._count_known()) < count and not self._is_whole:
            self._keeper.describe(len(self._stops) - 1)
        if not num_known and self.plan.samples is not None:
            raise DataError(
                "data.train: none of its samples can be used; the lines above have the reason: increase "
                "data.sequence_len, or change data.train_on."
            )
        if not num_known:
            raise DataError(
                f"data.train has {self.num_tokens} tokens, but a sample needs at least two; give more text, or mend "
                "the records that were dropped."
            )
        return num_known

    def expect(self, position: int, window: int) -> None:
        """Tell which window of the run is read next, and that the next one follows: a thread prepares both."""
        sample = position % num_known if self._is_whole and (num_known := self._count_known()) else position
        expected = (sample // window * window, window)
        with self._starting:
            if expected != self._expected:
                self._expected = expected
                if not self._is_preparing:
                    self._is_preparing = True
                    threading.Thread(target=self._prepare_ahead, name="data-ahead", daemon=True).start()

    @override
    def read_samples(self, sample_ids: npt.NDArray[np.int64]) -> Samples:
        """The samples `[n]`."""
        self.reach(int(sample_ids.max()) + 1 if sample_ids.size else 0)
        if self.plan.samples is None:
            separator = self.plan.encoding.separator if self.apart else None
            return TokenDataset([_Joined(self)], self.sequence_len, separator=separator).read_samples(sample_ids)
        firsts = (sample_ids * self._step).tolist()
        rows = [self.read_tokens(first, first + self._step) for first in firsts]
        return read_rows(np.array(rows, dtype=np.uint32).reshape(-1, self._step), self.apart)

    @override
    def iter_tokens(self, chunk_tokens: int = 2**22) -> Iterator[npt.NDArray[Any]]:
        """Yield all tokens in order, in chunks; of samples, the targets, a sequence at a time."""
        num_known = self.reach(UNKNOWN)
        if self.plan.samples is not None:
            labels = (self.read_samples(np.array([sample])).labels for sample in range(num_known))
            yield from (row[row != NO_LABEL] for row in labels)
            return
        yield from TokenDataset([_Joined(self)], self.sequence_len).iter_tokens(chunk_tokens)

    def read_tokens(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Read tokens, or numbers of rows, [start, stop), which are known, `[stop - start]`."""
        parts = [np.empty(0, dtype=self._keeper.dtype)]
        index = int(np.searchsorted(self._stops, start, side="right")) - 1
        while start < stop:
            first, end = self._stops[index], min(stop, self._stops[index + 1])
            if start < end:
                parts.append(self._open_chunk(index).read(start - first, end - first))
            start, index = end, index + 1
        return parts[1] if len(parts) == 2 else np.concatenate(parts)

    def _open_chunk(self, index: int) -> TokenStore:
        if index not in self._open:
            self._open[index] = self._keeper.open(index)
            while len(self._open) > _OPEN_CHUNKS:
                self._open.popitem(last=False)
        self._open.move_to_end(index)
        return self._open[index]

    def _prepare_ahead(self) -> None:
        """Prepare the expected chunks, one after another, while other processes prepare other ones of them."""
        while True:
            expected = self._expected
            try:
                is_done = self._prepare_next()
            except EchelonError:  # the batch that needs the chunk raises it again
                is_done = True
            with self._starting:
                if is_done and expected == self._expected:
                    self._is_preparing = False
                    return

    def _prepare_next(self) -> bool:
        """Prepare one of the next expected chunks that are not there; returns whether all are."""
        expected, is_known = self._find_expected()
        missing = [index for index in expected if not self._keeper.has_tokens(index)]
        for index in missing[:_CHUNKS_AHEAD]:
            if self._keeper.prepare(index):
                return False
        time.sleep(_POLL_SECONDS if missing or not is_known else 0)
        return is_known and not missing

    def _find_expected(self) -> tuple[list[int], bool]:
        """The chunks of the expected windows in reading order, and whether these are all.

        They are not while the windows reach into chunks of unknown size: then only the next ones are named.
        """
        self._count_known()
        stops, count = list(self._stops), len(self.plan.chunks)
        position, window = self._expected
        first, last = position * self._step, (position + 2 * window) * self._step + self._beyond
        start = max(0, int(np.searchsorted(stops, first, side="right")) - 1)
        is_known = last <= stops[-1] or len(stops) > count
        if last <= stops[-1]:
            chunks = list(range(start, int(np.searchsorted(stops, last, side="left"))))
        elif not is_known:
            chunks = list(range(start, min(count, len(stops) - 1 + _CHUNKS_AHEAD)))
        else:
            rest = int(np.searchsorted(stops, last - stops[-1], side="left"))
            chunks = [*range(start, count), *range(min(rest, start))]
        self._keeper.needed = frozenset(chunks)
        return chunks, is_known


class _Joined(TokenStore):
    """The tokens of a stream that are known, as one store."""

    def __init__(self, dataset: StreamDataset) -> None:
        self.dtype = dataset._keeper.dtype
        self._dataset = dataset

    @property
    @override
    def num_tokens(self) -> int:
        return self._dataset.num_tokens

    @override
    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        return self._dataset.read_tokens(start, stop)
