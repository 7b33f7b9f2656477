"""Tokens on disk: shard files, the manifest that describes them, and the windows cut from them.

A shard is a bare array of little-endian uint16 or uint32; all that is known of it stands in manifest.json. Shards of a
stream (train, validation) follow each other as one long sequence of tokens, memory-mapped, so a corpus may be larger
than memory and counts go beyond 2^32.
"""

import hashlib
import itertools
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol, Self

import numpy as np
import numpy.typing as npt

from echelon.errors import DataError
from echelon.manifest import file_digest, read_json

FORMAT_VERSION = 4
MANIFEST_NAME = "manifest.json"
MAX_SHARD_TOKENS = 2**30
BLOCK_BYTES = 2**17
"""What one checksum of a shard covers: as much as the system reads around a page of a file that is touched first."""
NO_LABEL = -100
"""The label of a position that is no target."""

_DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


@dataclass(frozen=True)
class ShardRecord:
    """A shard file: its name, and what it must hold. `blocks` has the CRC-32 of each BLOCK_BYTES, 8 hex digits each."""

    file: str
    tokens: int
    bytes: int
    sha256: str
    blocks: str


@dataclass(frozen=True)
class SourceRecord:
    """What one source gave to one stream.

    `source` is its key in the recipe; `text_bytes` the UTF-8 bytes of its documents, None when it was given as tokens.
    Of the source as a whole: `broken` names at most the first 20 of `num_broken` records and files that were left out,
    `num_duplicates` counts the documents left out as copies.
    """

    source: str
    name: str
    path: str
    documents: int
    tokens: int
    text_bytes: int | None
    shards: tuple[ShardRecord, ...]
    num_broken: int = 0
    broken: tuple[str, ...] = ()
    num_duplicates: int = 0


@dataclass(frozen=True)
class Split:
    """A text to train on: tokens [start, stop) of a stream, under a name."""

    name: str
    stream: str
    start: int
    stop: int


@dataclass(frozen=True)
class HeldOut(Split):
    """A named set to validate on, and how its text was chosen: given, by a hash of each document, or the end of one.

    `bytes_per_token` is None where the text was given as tokens; `documents` 0 for an end.
    """

    bytes_per_token: float | None
    method: Literal["sources", "hash", "tail"]
    documents: int


@dataclass(frozen=True)
class Manifest:
    """manifest.json: what a prepared folder holds and how it came to be.

    `train` has one split, or one for each source of a mixture; `validation` a set for each name.
    """

    format_version: int
    dtype: str
    tokenizer_fingerprint: str
    vocab_size: int
    separator: int | None
    streams: dict[str, tuple[SourceRecord, ...]]
    train: tuple[Split, ...]
    validation: tuple[HeldOut, ...]

    def shards(self, stream: str) -> list[ShardRecord]:
        """The shards of a stream in order."""
        return [shard for source in self.streams[stream] for shard in source.shards]


def save_manifest(folder: Path, manifest: Manifest) -> None:
    """Write manifest.json, with a checksum of what it says."""
    content = asdict(manifest)
    with (folder / MANIFEST_NAME).open("w", encoding="utf-8") as stream:
        json.dump({**content, "sha256": _digest(content)}, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def load_manifest(folder: Path) -> Manifest:
    """Read manifest.json. Raises DataError when it is absent, damaged or of another version."""
    path = folder / MANIFEST_NAME
    remedy = f"delete {folder} and prepare again"
    try:
        content = read_json(path)
        version = content["format_version"]
        if version == FORMAT_VERSION:
            if content.pop("sha256") != _digest(content):
                raise ValueError("it changed after it was written")
            return _parse_manifest(content)
    except FileNotFoundError as error:
        raise DataError(f"{folder} holds no prepared data: {MANIFEST_NAME} is missing.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is damaged ({type(error).__name__}: {error}); {remedy}.") from error
    raise DataError(f"{path} is of format {version!r:.40}, this version reads {FORMAT_VERSION}; {remedy}.")


def _parse_manifest(content: dict[str, Any]) -> Manifest:
    """Raises ValueError, KeyError, TypeError or AttributeError for what is no manifest."""
    streams = {}
    for name, sources in content["streams"].items():
        records = [
            {**source, "shards": tuple(map(_parse_shard, source["shards"])), "broken": tuple(source["broken"])}
            for source in sources
        ]
        streams[name] = tuple(SourceRecord(**record) for record in records)
    train = tuple(Split(**split) for split in content["train"])
    validation = tuple(HeldOut(**split) for split in content["validation"])
    manifest = Manifest(**{**content, "streams": streams, "train": train, "validation": validation})
    itemsize = _DTYPES[manifest.dtype].itemsize
    for name in streams:
        for shard in manifest.shards(name):
            if shard.bytes != shard.tokens * itemsize or len(shard.blocks) != 8 * -(-shard.bytes // BLOCK_BYTES):
                raise ValueError("counts of tokens and bytes disagree")
    for split in (*train, *validation):
        if not 0 <= split.start <= split.stop <= sum(shard.tokens for shard in manifest.shards(split.stream)):
            raise ValueError("a split reaches beyond its stream")
    return manifest


def _parse_shard(content: dict[str, Any]) -> ShardRecord:
    shard = ShardRecord(**content)
    if Path(shard.file).name != shard.file:
        raise ValueError(f"{shard.file} is no plain file name")
    return shard


def check_shards(folder: Path, manifest: Manifest, *, verify: bool = False) -> None:
    """Raise DataError for a shard that is missing, truncated or grown; with `verify`, also for one that was altered."""
    for stream in manifest.streams:
        for shard in manifest.shards(stream):
            path = folder / shard.file
            size = path.stat().st_size if path.is_file() else None
            if size is None or size != shard.bytes:
                found = "is missing" if size is None else f"has {size} bytes"
                raise DataError(
                    f"{path} {found}, the manifest says {shard.bytes} bytes; delete {folder} and prepare again."
                )
            if verify and file_digest(path) != shard.sha256:
                raise DataError(
                    f"{path} was altered: its sha256 is not the manifest's; delete {folder} and prepare again."
                )


class _Checksums:
    """The SHA-256 of a shard and the CRC-32 of each of its blocks, from its bytes in order."""

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
        """(sha256, blocks) of a ShardRecord; nothing can be added any more."""
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
        """To go on with what an earlier writer left: its `finished` shards, and the tokens of the one after them.

        What that one holds beyond `open_tokens` is cut off.
        """
        self._folder = folder
        self._prefix = prefix
        self._dtype = _DTYPES[dtype]
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
        """Bring everything to the disk; the records of the finished shards, and the tokens in the open one."""
        if self._stream is not None:
            self._stream.flush()
            os.fsync(self._stream.fileno())
        return tuple(self._records), self._tokens_in_shard

    def finish(self) -> tuple[ShardRecord, ...]:
        """Bring everything to the disk and return the record of each shard."""
        self._end_shard()
        return tuple(self._records)

    def _reopen(self, num_bytes: int) -> None:
        self._stream = (self._folder / self._shard_name()).open("r+b")
        left = num_bytes
        while left and (block := self._stream.read(min(left, 2**20))):
            self._checksums.update(block)
            left -= len(block)
        if left:
            raise OSError(f"{self._stream.name} is shorter than what was written to it")
        self._stream.truncate(num_bytes)
        self._stream.seek(num_bytes)

    def _shard_name(self) -> str:
        return f"{self._prefix}-{len(self._records):05d}.bin"

    def _end_shard(self) -> None:
        if self._stream is None:
            return
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        num_bytes = self._tokens_in_shard * self._dtype.itemsize
        sha256, blocks = self._checksums.describe()
        self._records.append(ShardRecord(self._shard_name(), self._tokens_in_shard, num_bytes, sha256, blocks))
        self._stream, self._checksums, self._tokens_in_shard = None, _Checksums(), 0


class TokenStore:
    """Shard files read as one sequence of tokens, memory-mapped when first touched.

    A block is compared with its checksum when something of it is first read: so whatever is read is what was written,
    and a corpus of any size is opened at once.
    """

    def __init__(self, folder: Path, shards: Sequence[ShardRecord], dtype: str) -> None:
        self.dtype = _DTYPES[dtype]
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
        """Tokens [start, stop), `[stop - start]`: a view of the file where they lie in one shard.

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
        """Tokens [start, stop) of a shard, checked."""
        shard = self._shards[index]
        if index not in self._maps:
            self._maps[index] = np.memmap(self._folder / shard.file, self.dtype, mode="r", shape=(shard.tokens,))
        tokens, unchecked, size = self._maps[index], self._unchecked[index], BLOCK_BYTES // self.dtype.itemsize
        for block in range(start // size, -(-stop // size)):
            if unchecked[block]:
                found = zlib.crc32(tokens[block * size : (block + 1) * size].data)
                if f"{found:08x}" != shard.blocks[8 * block : 8 * block + 8]:
                    raise DataError(
                        f"{self._folder / shard.file} was altered: its tokens from {block * size} on are not what was "
                        f"written; delete {self._folder} and prepare again."
                    )
                unchecked[block] = False
        return tokens[start:stop]


@dataclass(frozen=True)
class Samples:
    """Sequences as they are fed.

    inputs and labels are int64 `[n, sequence_len]`, labels -100 where there is no target. `documents`, int32 of the
    same shape, numbers each token's document within its sequence, from 0, and is -1 for padding; None where documents
    are not kept apart. A preference pair is two documents, chosen (even) and rejected (odd).
    """

    inputs: npt.NDArray[np.int64]
    labels: npt.NDArray[np.int64]
    documents: npt.NDArray[np.int32] | None = None


class Dataset(Protocol):
    """Samples of `sequence_len` tokens, numbered from 0."""

    sequence_len: int

    @property
    def num_tokens(self) -> int:
        """The tokens that the samples are cut from."""
        ...

    @property
    def num_samples(self) -> int:
        """How many samples there are."""
        ...

    def read_samples(self, sample_ids: npt.NDArray[np.int64]) -> Samples:
        """The samples `[n]`."""
        ...

    def iter_tokens(self, chunk_tokens: int = 2**22) -> Iterator[npt.NDArray[Any]]:
        """All tokens in order, a chunk at a time."""
        ...


class TokenDataset:
    """Tokens [start, stop) of stores that follow each other, cut into samples of `sequence_len`.

    Of N tokens, sample k has inputs kL .. kL+L-1 and labels one further, so every token but the first is a target
    exactly once and every token but the last an input exactly once. The last of the ceil((N-1)/L) samples is filled up:
    inputs with `pad_id`, labels with -100. Windows run across documents and shards.
    """

    def __init__(
        self,
        stores: Sequence[TokenStore],
        sequence_len: int,
        pad_id: int = 0,
        start: int = 0,
        stop: int | None = None,
    ) -> None:
        assert sequence_len > 0, f"sequence_len={sequence_len}"
        self.sequence_len = sequence_len
        self.pad_id = pad_id
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
        """The windows it is cut into; 0 with fewer than two tokens."""
        return max(0, -(-(self.num_tokens - 1) // self.sequence_len))

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Tokens [start, stop) of this dataset, `[stop - start]`."""
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
        return Samples(inputs, labels)

    def iter_tokens(self, chunk_tokens: int = 2**22) -> Iterator[npt.NDArray[Any]]:
        """All tokens in order, a chunk at a time."""
        for start in range(0, self.num_tokens, chunk_tokens):
            yield self.read(start, min(start + chunk_tokens, self.num_tokens))


def unigram_entropy(datasets: Sequence[Dataset]) -> float:
    """The entropy in nats of the tokens' frequencies: the loss of a model that knows these and nothing else.

    -sum(p log p) over the tokens that occur; Shannon, 1948. 0.0 for no tokens.
    """
    counts = np.zeros(0, dtype=np.int64)
    for chunk in itertools.chain.from_iterable(dataset.iter_tokens() for dataset in datasets):
        found = np.bincount(chunk)
        counts = np.pad(counts, (0, max(0, found.size - counts.size)))
        counts[: found.size] += found
    shares = counts[counts > 0] / max(1, counts.sum())
    return abs(float(-(shares * np.log(shares)).sum()))
