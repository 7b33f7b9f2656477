"""The progress of writing shards, stored next to them, so that interrupted preparation resumes.

progress.json is replaced at points: the shards are brought to the disk first, so whatever a kill leaves, the last
progress.json tells of bytes that are there. What lies beyond is cut off and made again, the same.
"""

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from echelon.data.duplicates import DigestSet
from echelon.data.oddities import CopySample
from echelon.data.readers.record import DIGEST_BYTES
from echelon.data.shards import ShardRecord
from echelon.stored import read_json, sync_path

PROGRESS_NAME = "progress.json"
DIGESTS_NAME = "digests.bin"


@dataclass
class PartState:
    """How far a file of a sink is: its finished shards, and what the open one holds."""

    shards: tuple[ShardRecord, ...] = ()
    open_tokens: int = 0


@dataclass
class SampleCounts:
    """What became of the samples of a sink. See SampleRecord."""

    samples: int = 0
    documents_each: int = 0
    num_overlong: int = 0
    num_dropped: int = 0
    lost_tokens: int = 0
    num_unlabelled: int = 0


@dataclass
class SinkState:
    """What one source has given to one stream so far: counts, and the files by what they hold.

    `begun` is the start of a text that is to be one sample and has not ended yet, of `begun_tokens` so far.
    """

    documents: int = 0
    text_bytes: int | None = 0
    parts: dict[str, PartState] = field(default_factory=dict)
    counts: SampleCounts = field(default_factory=SampleCounts)
    begun: list[int] = field(default_factory=list)
    begun_tokens: int = 0


@dataclass
class EntryState:
    """How far one source is: the tasks done, readable documents, broken records and where the first are, copies that
    were left out, what is odd (how often, and the first place), its sinks. `is_full`: as many records are read as are
    wanted of it."""

    num_tasks: int = 0
    is_full: bool = False
    documents: int = 0
    broken: int = 0
    places: list[str] = field(default_factory=list)
    duplicates: int = 0
    odd: dict[str, tuple[int, str]] = field(default_factory=dict)
    sinks: dict[str, SinkState] = field(default_factory=dict)


@dataclass
class WritingState:
    """How far a corpus is: the bytes of the tasks that are done, and each source.

    `stream` is where the document goes that the last piece belongs to; None where it is left out. `num_digests` is how
    many documents are known to be no copies.
    """

    entries: list[EntryState]
    done_bytes: int = 0
    stream: str | None = None
    num_digests: int = 0
    copies: CopySample = field(default_factory=CopySample)

    @property
    def num_tasks(self) -> int:
        """The tasks done of all sources."""
        return sum(entry.num_tasks for entry in self.entries)


class WritingJournal:
    """The progress.json and the digests of a folder that is being written. A context manager."""

    def __init__(self, folder: Path, num_entries: int) -> None:
        """Take up what an earlier process left in the folder, and clear away what its progress does not tell of."""
        self._folder = folder
        fresh = WritingState([EntryState() for _ in range(num_entries)])
        self.state = _load(folder / PROGRESS_NAME, num_entries) or fresh
        self.digests = DigestSet()
        known = {PROGRESS_NAME, DIGESTS_NAME} if self.is_resumed else set()
        for index, entry in enumerate(self.state.entries):
            for stream, sink in entry.sinks.items():
                for name, part in sink.parts.items():
                    known.update(shard.file for shard in part.shards)
                    if part.open_tokens:
                        known.add(f"{part_prefix(shard_prefix(stream, index), name)}-{len(part.shards):05d}.bin")
        for path in folder.iterdir():
            if path.is_file() and path.name not in known:
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
        """Whether an earlier process has done some of the tasks."""
        return self.state.num_tasks > 0

    def add_document(self, digest: bytes) -> bool:
        """Whether a document was not seen before; from now on it was."""
        is_new = self.digests.add(digest)
        if is_new:
            self._stream.write(digest)
            self.state.num_digests += 1
        return is_new

    def save(self) -> None:
        """Make the state durable; the shards it tells of must be already."""
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
        """Take progress and digests away: the folder is complete."""
        for name in (DIGESTS_NAME, PROGRESS_NAME):
            (self._folder / name).unlink(missing_ok=True)


def shard_prefix(stream: str, index: int) -> str:
    """How the shards of a stream begin that come from the source of that index."""
    return f"{stream}-{index:03d}"


def part_prefix(prefix: str, part: str) -> str:
    """How the shards begin that hold something of a source: `tokens`, or what belongs to them."""
    return prefix if part == "tokens" else f"{prefix}.{part}"


def has_progress(folder: Path) -> bool:
    """Whether some of a folder's text is written for good."""
    return (folder / PROGRESS_NAME).is_file()


def _load(path: Path, num_entries: int) -> WritingState | None:
    """The saved state; None where there is none or it makes no sense, and all is done again."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        content: dict[str, Any] = read_json(path)
        entries = []
        for entry in content["entries"]:
            sinks = {stream: _parse_sink(sink) for stream, sink in entry["sinks"].items()}
            entries.append(EntryState(**{**entry, "sinks": sinks}))
        if len(entries) == num_entries:
            copies = CopySample(**content["copies"])
            return WritingState(**{**content, "entries": entries, "copies": copies})
    return None


def _parse_sink(content: dict[str, Any]) -> SinkState:
    parts = {
        name: PartState(tuple(ShardRecord(**shard) for shard in part["shards"]), part["open_tokens"])
        for name, part in content["parts"].items()
    }
    return SinkState(**{**content, "parts": parts, "counts": SampleCounts(**content["counts"])})
