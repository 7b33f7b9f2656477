"""The manifest of a prepared folder: its files, their checksums, and the ranges to train and validate on."""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from echelon.data.shards import BLOCK_BYTES, DTYPES, ShardRecord
from echelon.errors import DataError
from echelon.runs.checksums import file_digest
from echelon.stored import read_json

FORMAT_VERSION = 7
MANIFEST_NAME = "manifest.json"

TARGETS_DTYPE = "uint8"
LENGTHS_DTYPE = "uint32"
INDEX_DTYPE = "uint64"


@dataclass(frozen=True)
class SampleRule:
    """How documents become samples: what fits in a sequence, what becomes of the rest, whether sequences are shared.

    A document of n tokens feeds n - 1 positions, of which each is asked for the token after it. `padding` is the id
    that fills up a sequence.
    """

    sequence_len: int
    on_overlong: Literal["cut", "drop", "refuse"]
    packing: bool
    padding: int


@dataclass(frozen=True)
class SampleRecord:
    """The samples that one source gave to one stream, beside their tokens.

    `targets` has a 0 or 1 for each token, `lengths` a word for each document (see `packing`); a sample is
    `documents_each` documents: one, or two of a preference pair; 0 where there is no sample. Of `num_overlong` samples
    that did not fit, `num_dropped` were left out whole, and `lost_tokens` are missing in all; `num_unlabelled` had no
    label, or none after the cut, and were left out.
    """

    samples: int
    documents_each: int
    targets: tuple[ShardRecord, ...]
    lengths: tuple[ShardRecord, ...]
    num_overlong: int
    num_dropped: int
    lost_tokens: int
    num_unlabelled: int


@dataclass(frozen=True)
class SourceRecord:
    """What one source gave to one stream.

    `source` is its key in the recipe; `text_bytes` the UTF-8 bytes of its documents, None when it was given as tokens.
    `labelled` says more where the folder holds samples. Of the source as a whole: `broken` names at most the first 20
    of `num_broken` records and files that were left out, `num_duplicates` counts the documents left out as copies.
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
        """What a split counts: samples, or tokens where there are none."""
        return self.tokens if self.labelled is None else self.labelled.samples


@dataclass(frozen=True)
class PackRecord:
    """The sequences that the samples of a split were packed into.

    `stops` and `documents` are the index (see `packing`). [first_token, last_token) is where the samples' tokens lie in
    the stream, and `positions` counts those of all sequences that are not padding.
    """

    packs: int
    positions: int
    first_token: int
    last_token: int
    stops: tuple[ShardRecord, ...]
    documents: tuple[ShardRecord, ...]


@dataclass(frozen=True)
class Split:
    """A text to train on: tokens [start, stop) of a stream, or samples where the folder holds such, under a name."""

    name: str
    stream: str
    start: int
    stop: int
    packs: PackRecord | None = field(default=None, kw_only=True)


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

    `samples` is None where the tokens are one text, cut into windows when they are read. `train` has one split, or one
    for each source of a mixture; `validation` a set for each name. `stops`: the ids that end a document or an answer,
    at which a model that learned them stops. `remarks`: lines about what is odd in the text, for whoever trains on it.
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

    def targets(self, stream: str) -> list[ShardRecord]:
        """The shards of the labels of a stream of samples, one for each token."""
        return [shard for source in self.streams[stream] if source.labelled for shard in source.labelled.targets]

    def lengths(self, stream: str) -> list[ShardRecord]:
        """The shards of the lengths of the documents of a stream of samples."""
        return [shard for source in self.streams[stream] if source.labelled for shard in source.labelled.lengths]

    def files(self) -> Iterator[tuple[str, ShardRecord]]:
        """Every shard with the type of what it holds."""
        for stream in self.streams:
            yield from ((self.dtype, shard) for shard in self.shards(stream))
            yield from ((TARGETS_DTYPE, shard) for shard in self.targets(stream))
            yield from ((LENGTHS_DTYPE, shard) for shard in self.lengths(stream))
        for packs in (split.packs for split in (*self.train, *self.validation)):
            if packs is not None:
                yield from ((INDEX_DTYPE, shard) for shard in (*packs.stops, *packs.documents))

    @property
    def documents_each(self) -> int:
        """How many documents a sample has: one, or two of a preference pair; 0 where the folder holds no samples."""
        records = [source.labelled for sources in self.streams.values() for source in sources]
        return max((record.documents_each for record in records if record is not None), default=0)

    @property
    def shares_sequences(self) -> bool:
        """Whether a sequence may hold more than one document."""
        return self.samples is None or self.samples.packing or self.documents_each > 1


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
    streams = {name: tuple(map(_parse_source, sources)) for name, sources in content["streams"].items()}
    train = tuple(Split(**_with_packs(split)) for split in content["train"])
    validation = tuple(HeldOut(**_with_packs(split)) for split in content["validation"])
    rule = content["samples"] and SampleRule(**content["samples"])
    parsed = {"samples": rule, "streams": streams, "train": train, "validation": validation}
    manifest = Manifest(
        **{
            **content,
            **parsed,
            "stops": tuple(map(int, content["stops"])),
            "remarks": tuple(map(str, content["remarks"])),
        }
    )
    for dtype, shard in manifest.files():
        itemsize = DTYPES[dtype].itemsize
        if shard.bytes != shard.tokens * itemsize or len(shard.blocks) != 8 * -(-shard.bytes // BLOCK_BYTES):
            raise ValueError("counts of tokens and bytes disagree")
    _check_counts(manifest)
    return manifest


def _parse_source(content: dict[str, Any]) -> SourceRecord:
    labelled = content["labelled"]
    if labelled is not None:
        files = {name: _parse_shards(labelled[name]) for name in ("targets", "lengths")}
        labelled = SampleRecord(**{**labelled, **files})
    shards, broken = _parse_shards(content["shards"]), tuple(content["broken"])
    return SourceRecord(**{**content, "shards": shards, "broken": broken, "labelled": labelled})


def _with_packs(content: dict[str, Any]) -> dict[str, Any]:
    packs = content["packs"]
    if packs is not None:
        packs = PackRecord(**{**packs, **{name: _parse_shards(packs[name]) for name in ("stops", "documents")}})
    return {**content, "packs": packs}


def _check_counts(manifest: Manifest) -> None:
    """Raises ValueError where the counts of what belongs together differ."""
    is_labelled = manifest.samples is not None
    for name, sources in manifest.streams.items():
        if any((source.labelled is not None) != is_labelled for source in sources):
            raise ValueError("some sources hold samples, and some do not")
        if is_labelled and _count(manifest.targets(name)) != _count(manifest.shards(name)):
            raise ValueError("there is not a label for each token")
    for split in (*manifest.train, *manifest.validation):
        if not 0 <= split.start <= split.stop <= sum(source.size for source in manifest.streams[split.stream]):
            raise ValueError("a split reaches beyond its stream")
        packs = split.packs
        if (packs is not None) != is_labelled:
            raise ValueError("a split of samples has no packs")
        if packs is not None:
            if _count(packs.stops) != packs.packs or _count(packs.documents) % 2:
                raise ValueError("the index of packs is not of their number")
            if not 0 <= packs.first_token <= packs.last_token <= _count(manifest.shards(split.stream)):
                raise ValueError("a split reaches beyond its stream")


def _count(shards: Sequence[ShardRecord]) -> int:
    return sum(shard.tokens for shard in shards)


def _parse_shards(content: Any) -> tuple[ShardRecord, ...]:
    return tuple(map(_parse_shard, content))


def _parse_shard(content: dict[str, Any]) -> ShardRecord:
    shard = ShardRecord(**content)
    if Path(shard.file).name != shard.file:
        raise ValueError(f"{shard.file} is no plain file name")
    return shard


def check_shards(folder: Path, manifest: Manifest, *, verify: bool = False) -> None:
    """Raise DataError for a shard that is missing, truncated or grown; with `verify`, also for one that was altered."""
    for _, shard in manifest.files():
        path = folder / shard.file
        size = path.stat().st_size if path.is_file() else None
        if size is None or size != shard.bytes:
            found = "is missing" if size is None else f"has {size} bytes"
            raise DataError(
                f"{path} {found}, the manifest says {shard.bytes} bytes; delete {folder} and prepare again."
            )
        if verify and file_digest(path) != shard.sha256:
            raise DataError(f"{path} was altered: its sha256 is not the manifest's; delete {folder} and prepare again.")
