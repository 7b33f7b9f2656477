"""Tokens on disk: shard files, and the windows cut from them.

A shard is a plain array of little-endian numbers; manifest.json describes it (see `catalog`). The shards of a stream
(train, validation) form one long sequence of tokens, memory-mapped, so a corpus can be larger than memory and counts
can exceed 2^32. Targets and lengths of samples are stored in shards too: in this module, a token can also be one of
these values.
"""

import hashlib
import itertools
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol, Self

import numpy as np
import numpy.typing as npt

from echelon.ground.errors import DataError

MAX_SHARD_TOKENS = 2**30
BLOCK_BYTES = 2**17
"""The bytes that one checksum of a shard covers: the usual readahead of the system around a page fault."""
NO_LABEL = -100
"""The label of a position without a target."""
TARGET, GOOD_TARGET, BAD_TARGET = 1, 2, 3
"""The marks of targets: of a text, of an answer judged good, and of one judged bad; 0 is none."""
GOOD = "good"
"""The key of `Samples.extra` with whether an answer is judged good, boolean `[n]`; only judged answers have it."""

DTYPES: dict[str, np.dtype[Any]] = {
    "uint8": np.dtype("u1"), "uint16": np.dtype("<u2"), "uint32": np.dtype("<u4"), "uint64": np.dtype("<u8")
}  # fmt: skip
"""The dtypes of shards."""


@dataclass(frozen=True)
class ShardRecord:
    """A shard file: its name, size and checksums. `blocks` has the CRC-32 of each BLOCK_BYTES, 8 hex digits each."""

    file: str
    tokens: int
    bytes: int
    sha256: str
    blocks: str


class _Checksums:
    """Computes the SHA-256 of a shard and the CRC-32 of each block from its bytes in order."""

    def __init__(self) -> None:
        self._whole = hashlib.sha256()
        self._blocks: list[str] = []
        self._crc = self._num_open = 0

    def update(self, data: bytes) -> None:
        self._whole.update(data)
        rest = memoryview(data)
        while rest:
            head = rest[: BLOCK_BYTES - self._num_open]
            self._crc, self._num_open, rest = zlib.crc32(head, self._crc), self._num_open + len(head), rest[len(head) :]
            if self._num_open == BLOCK_BYTES:
                self._end_block()

    def describe(self) -> tuple[str, str]:
        """Return (sha256, blocks) of a ShardRecord. Nothing can be added afterwards."""
        if self._num_open:
            self._end_block()
        return self._whole.hexdigest(), "".join(self._blocks)

    def _end_block(self) -> None:
        self._blocks.append(f"{self._crc:08x}")
        self._crc = self._num_open = 0


class ShardWriter:
    """Writes tokens to `folder/prefix-00000.bin` and so on, each of at most `max_tokens`. A context manager."""

    def __init__(
        self,
        folder: Path,
        prefix: str,
        dtype: str,
        max_tokens: int = MAX_SHARD_TOKENS,
        finished: Sequence[ShardRecord] = (),
        open_tokens: int = 0,
    ) -> None:
        """To resume an earlier writer, give its `finished` shards and the number of tokens in the open one.

        The open shard is truncated to `open_tokens`.
        """
        self._folder = folder
        self._prefix = prefix
        self._dtype = DTYPES[dtype]
        self._max_tokens = max_tokens
        self._records: list[ShardRecord] = list(finished)
        self._stream: BinaryIO | None = None
        self._checksums = _Checksums()
        self._tokens_in_shard = open_tokens
        self.num_tokens = sum(shard.tokens for shard in finished) + open_tokens
        if open_tokens:
            self._reopen(open_tokens * self._dtype.itemsize)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            self._stream.close()

    def append(self, tokens: npt.NDArray[Any]) -> None:
        """Add tokens `[n]` at the end."""
        while tokens.size:
            if self._stream is None:
                self._stream = (self._folder / self._shard_name()).open("wb")
            head = tokens[: self._max_tokens - self._tokens_in_shard]
            data = head.astype(self._dtype, copy=False).tobytes()
            self._stream.write(data)
            self._checksums.update(data)
            self._tokens_in_shard += head.size
            self.num_tokens += head.size
            tokens = tokens[head.size :]
            if self._tokens_in_shard == self._max_tokens:
                self._end_shard()

    def sync(self) -> tuple[tuple[ShardRecord, ...], int]:
        """Flush everything to disk. Returns the records of the finished shards and the tokens in the open one."""
        if self._stream is not None:
            self._stream.flush()
            os.fsync(self._stream.fileno())
        return tuple(self._records), self._tokens_in_shard

    def finish(self) -> tuple[ShardRecord, ...]:
        """Flush everything to disk and return the record of each shard."""
        self._end_shard()
        return tuple(self._records)

    def _reopen(self, num_bytes: int) -> None:
        self._stream = (self._folder / self._shard_name()).open("r+b")
        left = num_bytes
        while left and (block := self._stream.read(min(left, 2**20))):
            self._checksums.update(block)
            left -= len(block)
        if left:
            raise OSError(f"{self._stream.name} is shorter than the saved progress")
        self._stream.truncate(num_bytes)
        self._stream.seek(num_bytes)

    def _shard_name(self) -> str:
        return f"{self._prefix}-{len(self._records):05d}.bin"

    def _end_shard(self) -> None:
        if self._stream is None:
            return
        self.sync()
        self._stream.close()
        num_bytes = self._tokens_in_shard * self._dtype.itemsize
        sha256, blocks = self._checksums.describe()
        self._records.append(ShardRecord(self._shard_name(), self._tokens_in_shard, num_bytes, sha256, blocks))
        self._stream, self._checksums, self._tokens_in_shard = None, _Checksums(), 0


class TokenStore:
    """Shard files read as one sequence of tokens, memory-mapped on first access.

    A block is checked against its checksum when it is first read. So all data that is read is verified, and opening is
    fast for any size of corpus.
    """

    def __init__(self, folder: Path, shards: Sequence[ShardRecord], dtype: str) -> None:
        self.dtype = DTYPES[dtype]
        self._folder = folder
        self._shards = list(shards)
        self._stops = np.cumsum([0, *(shard.tokens for shard in shards)], dtype=np.int64)
        self._maps: dict[int, npt.NDArray[Any]] = {}
        self._unchecked = [np.ones(len(shard.blocks) // 8, dtype=np.bool_) for shard in shards]

    @property
    def num_tokens(self) -> int:
        """The tokens of all shards."""
        return int(self._stops[-1])

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Read tokens [start, stop), `[stop - start]`: a view of the file if they are in one shard.

        Raises DataError for tokens that were altered.
        """
        assert 0 <= start <= stop <= self.num_tokens, f"tokens {start}:{stop} of {self.num_tokens}"
        index = int(np.searchsorted(self._stops, start, side="right")) - 1
        parts = []
        while start < stop:
            offset, end = int(self._stops[index]), min(stop, int(self._stops[index + 1]))
            parts.append(self._view(index, start - offset, end - offset))
            start, index = end, index + 1
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, dtype=self.dtype)

    def _view(self, index: int, start: int, stop: int) -> npt.NDArray[Any]:
        """Return tokens [start, stop) of a shard after checking their blocks."""
        shard = self._shards[index]
        if index not in self._maps:
            mapped = np.memmap(self._folder / shard.file, self.dtype, mode="r", shape=(shard.tokens,))
            self._maps[index] = np.asarray(mapped)  # a plain array, which is cut in a tenth of the time
        tokens, unchecked, size = self._maps[index], self._unchecked[index], BLOCK_BYTES // self.dtype.itemsize
        for block in range(start // size, -(-stop // size)):
            if unchecked[block]:
                checksum = zlib.crc32(tokens[block * size : (block + 1) * size].data)
                if f"{checksum:08x}" != shard.blocks[8 * block : 8 * block + 8]:
                    raise DataError(
                        f"{self._folder / shard.file} was altered: its tokens from {block * size} on do not match the "
                        f"checksum; delete {self._folder} and prepare again."
                    )
                unchecked[block] = False
        return tokens[start:stop]


@dataclass(frozen=True)
class Samples:
    """Sequences as the model receives them."""

    inputs: npt.NDArray[np.int64]
    """`[n, sequence_len]`."""
    labels: npt.NDArray[np.int64]
    """`[n, sequence_len]`: the target of each position, -100 where there is none."""
    documents: npt.NDArray[np.int32] | None = None
    """`[n, sequence_len]`: the index of each token's document within its sequence, from 0, and -1 for padding.

    None if a sequence is plain text, in which positions without a label are padding. A preference pair is two
    documents, chosen (even) and rejected (odd).
    """
    apart: bool = True
    """Whether documents must not attend to each other."""
    extra: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    """What an objective needs besides, by name: `[n, sequence_len, ...]`, `[n]` or `[n, 1, ...]`. See Microbatch."""


class Dataset(Protocol):
    """Samples of `sequence_len` tokens, numbered from 0."""

    sequence_len: int

    @property
    def num_tokens(self) -> int:
        """The tokens that the samples are cut from."""

    @property
    def num_samples(self) -> int:
        """The number of samples."""

    def read_samples(self, sample_ids: npt.NDArray[np.int64]) -> Samples:
        """The samples `[n]`."""

    def iter_tokens(self, chunk_tokens: int = 2**22) -> Iterator[npt.NDArray[Any]]:
        """Yield all tokens in order, in chunks; for documents with targets, only the targets."""


class TokenDataset:
    """Tokens [start, stop) of consecutive stores, cut into samples of `sequence_len`.

    Of N tokens, sample k has inputs kL .. kL+L-1 and labels shifted by one, so every token but the first is a target
    exactly once and every token but the last an input exactly once. The last of the ceil((N-1)/L) samples is padded:
    inputs with `pad_id`, labels with -100. Windows cross documents and shards.

    With a `separator`, documents are kept apart: a document ends with a separator or with its window. The first token
    of a document is then not a target, because the token before it belongs to another document.
    """

    def __init__(
        self,
        stores: Sequence[TokenStore],
        sequence_len: int,
        pad_id: int = 0,
        start: int = 0,
        stop: int | None = None,
        separator: int | None = None,
    ) -> None:
        assert sequence_len > 0, f"sequence_len={sequence_len}"
        self.sequence_len = sequence_len
        self.pad_id = pad_id
        self.separator = separator
        self._stores = list(stores)
        self._stops = [0, *itertools.accumulate(store.num_tokens for store in stores)]
        self._start = start
        self._stop = self._stops[-1] if stop is None else stop
        assert 0 <= start <= self._stop <= self._stops[-1], f"tokens {start}:{self._stop} of {self._stops[-1]}"

    @property
    def num_tokens(self) -> int:
        """The tokens of this dataset."""
        return self._stop - self._start

    @property
    def num_samples(self) -> int:
        """The number of windows; 0 with fewer than two tokens."""
        return max(0, -(-(self.num_tokens - 1) // self.sequence_len))

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Read tokens [start, stop) of this dataset, `[stop - start]`."""
        start, stop = start + self._start, stop + self._start
        parts = [
            store.read(max(start, first) - first, min(stop, last) - first)
            for store, (first, last) in zip(self._stores, itertools.pairwise(self._stops), strict=True)
            if max(start, first) < min(stop, last)
        ]
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, dtype=np.uint16), *parts])

    def read_samples(self, sample_ids: npt.NDArray[np.int64]) -> Samples:
        """The samples `[n]`."""
        length = self.sequence_len
        inputs = np.full((sample_ids.size, length), self.pad_id, dtype=np.int64)
        labels = np.full((sample_ids.size, length), NO_LABEL, dtype=np.int64)
        for row, sample in enumerate(sample_ids.tolist()):
            assert 0 <= sample < self.num_samples, f"sample {sample} of {self.num_samples}"
            window = self.read(sample * length, min((sample + 1) * length + 1, self.num_tokens))
            inputs[row, : window.size - 1] = window[:-1]
            labels[row, : window.size - 1] = window[1:]
        if self.separator is None:
            return Samples(inputs, labels)
        ends = inputs == self.separator
        # The number of separators before a token in its window; -1 for padding.
        documents = np.where(labels == NO_LABEL, -1, np.cumsum(ends, axis=1) - ends).astype(np.int32)
        labels[ends] = NO_LABEL
        return Samples(inputs, labels, documents)

    def iter_tokens(self, chunk_tokens: int = 2**22) -> Iterator[npt.NDArray[Any]]:
        """Yield all tokens in order, in chunks."""
        for start in range(0, self.num_tokens, chunk_tokens):
            yield self.read(start, min(start + chunk_tokens, self.num_tokens))


def unigram_entropy(datasets: Sequence[Dataset]) -> float:
    """Return the entropy of the token frequencies in nats: the loss of a unigram model.

    -sum(p log p) over the tokens that occur; Shannon, 1948. 0.0 for no tokens.
    """
    counts = np.zeros(0, dtype=np.int64)
    for chunk in itertools.chain.from_iterable(dataset.iter_tokens() for dataset in datasets):
        chunk_counts = np.bincount(chunk)
        counts = np.pad(counts, (0, max(0, chunk_counts.size - counts.size)))
        counts[: chunk_counts.size] += chunk_counts
    shares = counts[counts > 0] / max(1, counts.sum())
    return abs(float(-(shares * np.log(shares)).sum()))
