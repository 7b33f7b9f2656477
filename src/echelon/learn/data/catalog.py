"""The manifest of a prepared folder: its files, their checksums, and the training and validation ranges."""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from echelon.ground.checksums import file_digest
from echelon.ground.errors import DataError
from echelon.ground.stored import read_json, validator_of
from echelon.learn.data.shards import BLOCK_BYTES, DTYPES, ShardRecord

FORMAT_VERSION = 7
MANIFEST_NAME = "manifest.json"

TARGETS_DTYPE = "uint8"
LENGTHS_DTYPE = "uint32"
RECORDS_DTYPE = "uint8"
INDEX_DTYPE = "uint64"
PART_DTYPES = {
    "targets": TARGETS_DTYPE, "lengths": LENGTHS_DTYPE, "record_lengths": LENGTHS_DTYPE, "records": RECORDS_DTYPE
}  # fmt: skip
"""The dtypes of what samples have besides their tokens."""


@dataclass(frozen=True)
class SampleRule:
    """How documents become samples: the sequence length, the handling of long samples, and whether they are packed.

    A document of n tokens takes n - 1 positions, each with the next token as target. `padding` is the id that fills a
    sequence.
    """

    sequence_len: int
    on_overlong: Literal["cut", "drop", "refuse"]
    packing: bool
    padding: int


@dataclass(frozen=True)
class SampleRecord:
    """The samples that one source contributes to one stream, in addition to their tokens.

    `targets` has a mark for each token (see `shards`), `lengths` a word for each document (see `packing`). A sample has
    `documents_each` documents: one, or two for a preference pair; 0 if there is no sample. Of `num_overlong` samples
    that did not fit, `num_dropped` were dropped; `lost_tokens` counts the tokens lost in total. `num_unlabelled`
    samples had no target, or none after the cut, and were dropped. Of prompts, `records` has the JSON of each sample's
    record, one byte per value, and `record_lengths` its length.
    """

    samples: int
    documents_each: int
    targets: tuple[ShardRecord, ...]
    lengths: tuple[ShardRecord, ...]
    num_overlong: int
    num_dropped: int
    lost_tokens: int
    num_unlabelled: int
    records: tuple[ShardRecord, ...] = ()
    record_lengths: tuple[ShardRecord, ...] = ()


@dataclass(frozen=True)
class SourceRecord:
    """The contribution of one source to one stream.

    `source` is its recipe key; `text_bytes` the UTF-8 bytes of its documents, None if it was given as tokens.
    `labelled` is set if the folder contains samples. For the whole source: `broken` describes at most the first 20 of
    `num_broken` dropped records and files, `num_duplicates` counts the documents dropped as copies.
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
    labelled: SampleRecord | None = None

    @property
    def size(self) -> int:
        """The unit of a split: the number of samples, or of tokens if there are no samples."""
        return self.tokens if self.labelled is None else self.labelled.samples


@dataclass(frozen=True)
class PackRecord:
    """The sequences that the samples of a split were packed into.

    `stops` and `documents` are the index (see `packing`). [first_token, last_token) is the range of the samples' tokens
    in the stream, and `positions` counts the positions of all sequences without padding.
    """

    packs: int
    positions: int
    first_token: int
    last_token: int
    stops: tuple[ShardRecord, ...]
    documents: tuple[ShardRecord, ...]


@dataclass(frozen=True)
class Split:
    """A named training text: tokens [start, stop) of a stream, or samples if the folder contains samples."""

    name: str
    stream: str
    start: int
    stop: int
    packs: PackRecord | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class HeldOut(Split):
    """A named validation set, and how its text was selected: given, by a hash of each document, or the end of a text.

    `bytes_per_token` is None if the text was given as tokens; `documents` is 0 for the end of a text.
    """

    bytes_per_token: float | None
    method: Literal["sources", "hash", "tail"]
    documents: int


@dataclass(frozen=True)
class Manifest:
    """manifest.json: the content of a prepared folder and how it was made.

    `samples` is None if the tokens are one text, which is cut into windows when it is read. `train` has one split, or
    one per source of a mixture; `validation` one set per name. `stops`: the ids that end a document or an answer, at
    which generation stops. `remarks`: log lines about oddities in the text.
    """

    format_version: int
    dtype: str
    tokenizer_fingerprint: str
    vocab_size: int
    separator: int | None
    stops: tuple[int, ...]
    samples: SampleRule | None
    streams: dict[str, tuple[SourceRecord, ...]]
    train: tuple[Split, ...]
    validation: tuple[HeldOut, ...]
    remarks: tuple[str, ...] = ()

    def shards(self, stream: str) -> list[ShardRecord]:
        """The shards of a stream in order."""
        return [shard for source in self.streams[stream] for shard in source.shards]

    def part(self, name: str, stream: str) -> list[ShardRecord]:
        """The shards with one part of a stream of samples: a field of `SampleRecord` that is named in PART_DTYPES."""
        labelled = [source.labelled for source in self.streams[stream] if source.labelled]
        return [shard for record in labelled for shard in getattr(record, name)]

    def files(self) -> Iterator[tuple[str, ShardRecord]]:
        """Yield every shard with its dtype."""
        for stream in self.streams:
            yield from ((self.dtype, shard) for shard in self.shards(stream))
            yield from ((dtype, shard) for name, dtype in PART_DTYPES.items() for shard in self.part(name, stream))
        for packs in (split.packs for split in (*self.train, *self.validation)):
            if packs is not None:
                yield from ((INDEX_DTYPE, shard) for shard in (*packs.stops, *packs.documents))

    @property
    def documents_each(self) -> int:
        """The number of documents per sample: one, or two for a preference pair; 0 without samples."""
        records = [source.labelled for sources in self.streams.values() for source in sources]
        return max((record.documents_each for record in records if record is not None), default=0)

    @property
    def shares_sequences(self) -> bool:
        """Whether a sequence may contain more than one document."""
        return self.samples is None or self.samples.packing or self.documents_each > 1


def save_manifest(folder: Path, manifest: Manifest) -> None:
    """Write manifest.json, with a checksum of its content."""
    content = asdict(manifest)
    with (folder / MANIFEST_NAME).open("w", encoding="utf-8") as stream:
        json.dump({**content, "sha256": _digest(content)}, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def load_manifest(folder: Path) -> Manifest:
    """Read manifest.json. Raises DataError if it is missing, damaged or of another version."""
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
        raise DataError(f"{folder} has no prepared data: {MANIFEST_NAME} is missing.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is damaged ({type(error).__name__}: {error}); {remedy}.") from error
    raise DataError(
        f"{path} has format version {version!r:.40}, but this version of echelon reads {FORMAT_VERSION}; {remedy}."
    )


def _parse_manifest(content: dict[str, Any]) -> Manifest:
    """Parse a manifest. Raises ValueError if it is invalid."""
    if missing := {field.name for field in fields(Manifest)} - content.keys():
        raise ValueError(f"it has no {', '.join(sorted(missing))}")
    manifest = validator_of(Manifest).validate_python(content)
    for dtype, shard in manifest.files():
        if Path(shard.file).name != shard.file:
            raise ValueError(f"{shard.file} is not a plain file name")
        itemsize = DTYPES[dtype].itemsize
        if shard.bytes != shard.tokens * itemsize or len(shard.blocks) != 8 * -(-shard.bytes // BLOCK_BYTES):
            raise ValueError("counts of tokens and bytes disagree")
    _check_counts(manifest)
    return manifest


def _check_counts(manifest: Manifest) -> None:
    """Raise ValueError if related counts do not match."""
    is_labelled = manifest.samples is not None
    for name, sources in manifest.streams.items():
        if any((source.labelled is not None) != is_labelled for source in sources):
            raise ValueError("only some sources have samples")
        if is_labelled and _count(manifest.part("targets", name)) != _count(manifest.shards(name)):
            raise ValueError("the numbers of labels and tokens differ")
    for split in (*manifest.train, *manifest.validation):
        if not 0 <= split.start <= split.stop <= sum(source.size for source in manifest.streams[split.stream]):
            raise ValueError("a split extends beyond its stream")
        packs = split.packs
        if (packs is not None) != is_labelled:
            raise ValueError("a split of samples has no packs")
        if packs is not None:
            if _count(packs.stops) != packs.packs or _count(packs.documents) % 2:
                raise ValueError("the index does not match the number of packs")
            if not 0 <= packs.first_token <= packs.last_token <= _count(manifest.shards(split.stream)):
                raise ValueError("a split extends beyond its stream")


def _count(shards: Sequence[ShardRecord]) -> int:
    return sum(shard.tokens for shard in shards)


def check_shards(folder: Path, manifest: Manifest, *, verify: bool = False) -> None:
    """Raise DataError for a shard that is missing, truncated or grown; with `verify`, also for one that was altered."""
    for _, shard in manifest.files():
        path = folder / shard.file
        size = path.stat().st_size if path.is_file() else None
        if size is None or size != shard.bytes:
            fault = "is missing" if size is None else f"has {size} bytes"
            raise DataError(
                f"{path} {fault}, but the manifest lists {shard.bytes} bytes; delete {folder} and prepare again."
            )
        if verify and file_digest(path) != shard.sha256:
            raise DataError(
                f"{path} was altered: its sha256 does not match the manifest; delete {folder} and prepare again."
            )
