"""Write the documents of a source and stream into shards, as text or as samples, and the progress of that beside them.

progress.json is replaced at intervals, after the shards were flushed to disk. So after a kill, it describes only bytes
that exist. Anything written later is cut off and written again, with identical content.
"""

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from echelon.ground.errors import DataError
from echelon.ground.stored import read_as, sync_path
from echelon.learn.data.catalog import LENGTHS_DTYPE, RECORDS_DTYPE, TARGETS_DTYPE, SampleRule
from echelon.learn.data.packing import CONTINUES
from echelon.learn.data.readers.record import DIGEST_BYTES
from echelon.learn.data.record_counts import CopySample, RecordCounts
from echelon.learn.data.shards import ShardRecord, ShardWriter
from echelon.learn.data.source import Source
from echelon.learn.data.tokenize import Piece


@dataclass
class PartState:
    """The progress of one part of a sink: its finished shards, and the number of tokens in the open one."""

    shards: tuple[ShardRecord, ...] = ()
    open_tokens: int = 0


@dataclass
class SampleCounts:
    """The sample counts of a sink. See SampleRecord."""

    samples: int = 0
    documents_each: int = 0
    num_overlong: int = 0
    num_dropped: int = 0
    lost_tokens: int = 0
    num_unlabelled: int = 0


@dataclass
class SinkState:
    """The contribution of one source to one stream so far: counts, and the files by part.

    `begun`: the start of a text that forms one sample and has not ended yet; it has `begun_tokens` tokens so far.
    """

    documents: int = 0
    text_bytes: int | None = 0
    parts: dict[str, PartState] = field(default_factory=dict)
    counts: SampleCounts = field(default_factory=SampleCounts)
    begun: list[int] = field(default_factory=list)
    begun_tokens: int = 0


def shard_prefix(stream: str, index: int) -> str:
    """The file name prefix of the shards of a stream and source."""
    return f"{stream}-{index:03d}"


def part_prefix(prefix: str, part: str) -> str:
    """The file name prefix of one part of a source's shards: `tokens`, `targets` or `lengths`."""
    return prefix if part == "tokens" else f"{prefix}.{part}"


class Sink(ABC):
    """Writes documents into shards, resuming from its state, which also contains the counts. A context manager."""

    def __init__(
        self, folder: Path, prefix: str, state: SinkState, dtypes: Mapping[str, str], max_shard_tokens: int
    ) -> None:
        """`dtypes`: the parts to write, each with its dtype; `tokens` comes first."""
        self._state = state
        self._open = ExitStack()
        self._writers: dict[str, ShardWriter] = {}
        for part, dtype in dtypes.items():
            left = state.parts.setdefault(part, PartState())
            writer = ShardWriter(
                folder, part_prefix(prefix, part), dtype, max_shard_tokens, left.shards, left.open_tokens
            )
            self._writers[part] = self._open.enter_context(writer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @abstractmethod
    def append(self, piece: Piece) -> None:
        """Add a document, or a piece of one. Raises DataError."""

    def sync(self) -> None:
        """Flush everything to disk and record it in the state."""
        self._state.parts.update({part: PartState(*writer.sync()) for part, writer in self._writers.items()})

    def finish(self) -> None:
        """Flush everything to disk. Nothing can be added afterwards."""
        self._state.parts.update({part: PartState(writer.finish()) for part, writer in self._writers.items()})


class TextSink(Sink):
    """Writes documents one after the other, as one long text."""

    @override
    def append(self, piece: Piece) -> None:
        """Add a document, or a piece of one."""
        self._writers["tokens"].append(piece.tokens)
        if piece.text_bytes is None:
            self._state.text_bytes = None
        elif self._state.text_bytes is not None:
            self._state.text_bytes += piece.text_bytes


class SampleSink(Sink):
    """Writes samples with their targets and document lengths. Samples that do not fit are cut or dropped."""

    def __init__(self, source: Source, rule: SampleRule, *place: Any) -> None:
        """`place`: the arguments of Sink."""
        super().__init__(*place)
        self._source = source
        self._rule = rule
        self._state.text_bytes = None

    @override
    def append(self, piece: Piece) -> None:
        """Add a sample, or a piece of a text that forms one sample."""
        if piece.is_first and piece.ends:
            targets = np.ones(piece.tokens.size, dtype=np.uint8) if piece.targets is None else piece.targets
            is_kept = self._add(piece.tokens, targets, piece.lengths or (piece.tokens.size,))
            self._state.counts.num_overlong += piece.lost_tokens > 0
            self._state.counts.lost_tokens += piece.lost_tokens
            if is_kept and piece.record is not None:
                self._writers["records"].append(np.frombuffer(piece.record, dtype=np.uint8))
                self._writers["record_lengths"].append(np.array([len(piece.record)], dtype=np.uint32))
            return
        state = self._state
        state.begun.extend(piece.tokens[: self._rule.sequence_len + 1 - len(state.begun)].tolist())
        state.begun_tokens += piece.tokens.size
        if piece.ends:
            ids = np.array(state.begun, dtype=piece.tokens.dtype)
            self._add(ids, np.ones(ids.size, dtype=np.uint8), (state.begun_tokens,))
            state.begun, state.begun_tokens = [], 0

    def _add(self, ids: npt.NDArray[Any], targets: npt.NDArray[np.uint8], lengths: Sequence[int]) -> bool:
        """Add a whole sample; return False if it is dropped. If it must be cut, `ids` may be shorter than `lengths`."""
        counts = self._state.counts
        if counts.documents_each not in (0, len(lengths)):
            raise DataError(
                f"{self._source} has both single texts and pairs of a chosen and a rejected text; use separate recipes."
            )
        counts.documents_each = len(lengths)
        fitting = fit_lengths(lengths, self._rule.sequence_len)
        if fitting != tuple(lengths):
            counts.num_overlong += 1
            if not self._may_cut(lengths, sum(lengths) - sum(fitting)):
                return False
        starts = np.cumsum([0, *lengths])[:-1].tolist()
        spans = [slice(start, start + length) for start, length in zip(starts, fitting, strict=True)]
        if not all(targets[span][1:].any() for span in spans):
            counts.num_unlabelled += 1
            return False
        counts.samples += 1
        for span in spans:
            self._writers["tokens"].append(ids[span])
            self._writers["targets"].append(targets[span])
        words = [length + CONTINUES * (number > 0) for number, length in enumerate(fitting)]
        self._writers["lengths"].append(np.array(words, dtype=np.uint32))
        return True

    def _may_cut(self, lengths: Sequence[int], num_beyond: int) -> bool:
        """Return whether a sample that is too long is cut, and count the lost tokens."""
        counts, rule = self._state.counts, self._rule
        if rule.on_overlong == "refuse":
            raise DataError(
                f"{self._source}: sample {self._state.documents} has {' + '.join(map(str, lengths))} tokens and takes "
                f"{sum(lengths) - len(lengths)} positions, more than data.sequence_len={rule.sequence_len}; increase "
                f"it, or set data.on_overlong to cut or drop."
            )
        dropped = rule.on_overlong == "drop"
        counts.num_dropped += dropped
        counts.lost_tokens += sum(lengths) if dropped else num_beyond
        return not dropped


def fit_lengths(lengths: Sequence[int], sequence_len: int) -> tuple[int, ...]:
    """Return the tokens of each document of a sample that fit: all, or equal shares, longer documents taking the rest.

    A document of n tokens takes n - 1 positions.
    """
    fitting = list(lengths)
    room, num_left = sequence_len, len(lengths)
    for index in sorted(range(len(lengths)), key=lambda number: lengths[number]):
        fitting[index] = min(lengths[index], 1 + room // num_left)
        room -= max(0, fitting[index] - 1)
        num_left -= 1
    return tuple(fitting)


def open_sink(
    folder: Path,
    prefix: str,
    state: SinkState,
    source: Source,
    rule: SampleRule | None,
    dtype: str,
    max_shard_tokens: int,
) -> Sink:
    """Open the sink for a source's documents: for samples if there is a rule, else for text."""
    if rule is None:
        return TextSink(folder, prefix, state, {"tokens": dtype}, max_shard_tokens)
    dtypes = {"tokens": dtype, "targets": TARGETS_DTYPE, "lengths": LENGTHS_DTYPE}
    dtypes |= {"records": RECORDS_DTYPE, "record_lengths": LENGTHS_DTYPE}
    return SampleSink(source, rule, folder, prefix, state, dtypes, max_shard_tokens)


PROGRESS_NAME = "progress.json"
DIGESTS_NAME = "digests.bin"


@dataclass
class EntryState(RecordCounts):
    """The progress of one source: its records, finished tasks, dropped copies, oddities (count and first location), and
    its sinks. `is_full`: `max_samples` is reached."""

    num_tasks: int = 0
    is_full: bool = False
    duplicates: int = 0
    odd: dict[str, tuple[int, str]] = field(default_factory=dict)
    sinks: dict[str, SinkState] = field(default_factory=dict)


@dataclass
class WritingState:
    """The progress of a corpus: the bytes of the finished tasks, and the progress of each source.

    `stream`: the stream of the document that the last piece belongs to; None if it is dropped. `num_digests`: the
    number of distinct documents so far.
    """

    entries: list[EntryState]
    done_bytes: int = 0
    stream: str | None = None
    num_digests: int = 0
    copies: CopySample = field(default_factory=CopySample)


class WritingJournal:
    """Manages progress.json and the digests of a folder that is being written. A context manager."""

    def __init__(self, folder: Path, num_entries: int) -> None:
        """Load the progress of an earlier process, and delete files that it does not list."""
        self._folder = folder
        fresh = WritingState([EntryState() for _ in range(num_entries)])
        self.state = _load(folder / PROGRESS_NAME, num_entries) or fresh
        self.digests = DigestSet()
        listed = {PROGRESS_NAME, DIGESTS_NAME} if self.is_resumed else set()
        for index, entry in enumerate(self.state.entries):
            for stream, sink in entry.sinks.items():
                for name, part in sink.parts.items():
                    listed.update(shard.file for shard in part.shards)
                    if part.open_tokens:
                        listed.add(f"{part_prefix(shard_prefix(stream, index), name)}-{len(part.shards):05d}.bin")
        for path in folder.iterdir():
            if path.is_file() and path.name not in listed:
                path.unlink()
        self._stream: BinaryIO = (folder / DIGESTS_NAME).open("a+b")
        self._stream.truncate(self.state.num_digests * DIGEST_BYTES)
        self._stream.seek(0)
        while digest := self._stream.read(DIGEST_BYTES):
            self.digests.add(digest)

    def __enter__(self) -> "WritingJournal":
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    @property
    def is_resumed(self) -> bool:
        """Whether an earlier process finished some tasks."""
        return any(entry.num_tasks for entry in self.state.entries)

    def add_document(self, digest: bytes) -> bool:
        """Record a document. Returns whether it is new."""
        if is_new := self.digests.add(digest):
            self._stream.write(digest)
            self.state.num_digests += 1
        return is_new

    def save(self) -> None:
        """Save the state durably. The shards that it describes must already be on disk."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        fresh = self._folder / f"{PROGRESS_NAME}.new"
        with fresh.open("w", encoding="utf-8") as stream:
            json.dump(asdict(self.state), stream)
            stream.flush()
            os.fsync(stream.fileno())
        fresh.replace(self._folder / PROGRESS_NAME)
        sync_path(self._folder)

    def remove(self) -> None:
        """Remove progress and digests: the folder is complete."""
        for name in (DIGESTS_NAME, PROGRESS_NAME):
            (self._folder / name).unlink(missing_ok=True)


def has_progress(folder: Path) -> bool:
    """Whether a folder has saved progress."""
    return (folder / PROGRESS_NAME).is_file()


def _load(path: Path, num_entries: int) -> WritingState | None:
    """Load the saved state; None if it is missing or invalid, in which case the work starts again."""
    with suppress(OSError, ValueError):
        state = read_as(path, WritingState)
        if len(state.entries) == num_entries:
            return state
    return None


_EMPTY = bytes(DIGEST_BYTES)
_FIRST_SLOTS = 2**12


class DigestSet:
    """A growing set of 128-bit digests: open addressing with linear probing in one bytearray, at most 3/4 full.

    It uses 21 to 43 bytes per digest, and 64 while it grows; a Python set uses about 120. Digests are evenly
    distributed, so their first bytes give the slot. The all-zero digest is never found.
    """

    def __init__(self) -> None:
        self._slots = _FIRST_SLOTS
        self._table = bytearray(_FIRST_SLOTS * DIGEST_BYTES)
        self._count = 0

    @property
    def num_bytes(self) -> int:
        """The size of the table."""
        return len(self._table)

    def __len__(self) -> int:
        """The number of digests."""
        return self._count

    def add(self, digest: bytes) -> bool:
        """Add a digest. Returns whether it was new."""
        offset = self._find(digest)
        if self._table[offset : offset + DIGEST_BYTES] == digest:
            return False
        self._table[offset : offset + DIGEST_BYTES] = digest
        self._count += 1
        if self._count * 4 > self._slots * 3:
            self._grow()
        return True

    def _find(self, digest: bytes) -> int:
        """Return the offset of a digest, or of the empty slot where it belongs."""
        slot = int.from_bytes(digest[:8], "little") & (self._slots - 1)
        while True:
            offset = slot * DIGEST_BYTES
            stored = self._table[offset : offset + DIGEST_BYTES]
            if stored in (digest, _EMPTY):
                return offset
            slot = (slot + 1) & (self._slots - 1)

    def _grow(self) -> None:
        old = self._table
        self._slots *= 2
        self._table = bytearray(self._slots * DIGEST_BYTES)
        for offset in range(0, len(old), DIGEST_BYTES):
            digest = bytes(old[offset : offset + DIGEST_BYTES])
            if digest != _EMPTY:
                target = self._find(digest)
                self._table[target : target + DIGEST_BYTES] = digest
