"""A corpus: the files of all sources, and the decisions that are made before tokens are written."""

import filecmp
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from echelon.ground.errors import DataError
from echelon.learn.data.file_walk import LeftOut
from echelon.learn.data.readers import count_documents
from echelon.learn.data.readers.record import Reading, SourceFile
from echelon.learn.data.source import Source, list_files


@dataclass(frozen=True)
class CorpusEntry:
    """A source, its stream (`train` or `validation`), its files, and a description of what is not read."""

    stream: str
    source: Source
    files: tuple[SourceFile, ...]
    left_out: str | None = None


def list_corpus(train: Sequence[Source], validation: Sequence[Source]) -> tuple[CorpusEntry, ...]:
    """List the files of all sources.

    Raises DataError if a file is in both training and validation data, by path or by content.
    """
    training = [_list_source("train", source) for source in train]
    validating = [_list_source("validation", source) for source in validation]
    trained_on: dict[tuple[str | None, int], list[SourceFile]] = {}
    for file in (file for entry in training for file in entry.files):
        trained_on.setdefault((file.split, file.size), []).append(file)
    for entry in validating:
        for file in entry.files:
            others = trained_on.get((file.split, file.size), ())
            if (other := next((other for other in others if _is_same(file, other)), None)) is not None:
                is_one = file.path == other.path
                what = "which is also in data.train" if is_one else f"a copy of {other.path} in data.train"
                raise DataError(
                    f"{entry.source} contains {file.path}, {what}; validation text must not be trained on. Remove it "
                    f"from one of them, or use data.validation_fraction."
                )
    return (*training, *validating)


def _list_source(stream: str, source: Source) -> CorpusEntry:
    left_out = LeftOut()
    return CorpusEntry(stream, source, list_files(source, left_out), left_out.describe())


def _is_same(one: SourceFile, other: SourceFile) -> bool:
    """Whether two files of equal size have the same text, in rows that both sources read."""
    if not _share_rows(one, other):
        return False
    if one.path == other.path:
        return True
    if not one.size or "hub" in (one.format, other.format):
        return False
    suffixes = (".idx", ".bin") if "megatron" in (one.format, other.format) else (None,)
    try:  # compared up to the first difference, which for different texts is in the first block
        return all(filecmp.cmp(_beside(one, end), _beside(other, end), shallow=False) for end in suffixes)
    except OSError:  # an unreadable file is reported when it is read
        return False


def _beside(file: SourceFile, suffix: str | None) -> Path:
    return file.path if suffix is None else file.path.with_suffix(suffix)


def _share_rows(one: SourceFile, other: SourceFile) -> bool:
    (first, last), (start, stop) = (file.rows or (0, math.inf) for file in (one, other))
    return first < stop and start < last


def corpus_bytes(corpus: Iterable[CorpusEntry]) -> int:
    """Return the total size of all files in bytes; 0 if the size of a streamed dataset is unknown."""
    sizes = [file.size for entry in corpus for file in entry.files if file.size or file.format == "hub"]
    return sum(sizes) if all(sizes) else 0


def describe_left_out(corpus: Iterable[CorpusEntry]) -> Iterator[str]:
    """Yield a line for each source that is not read completely."""
    for entry in corpus:
        if entry.left_out is not None:
            yield f"{entry.source.key}: not read in {entry.source.path}: {entry.left_out}"


def describe_examples(corpus: Iterable[CorpusEntry]) -> Iterator[str]:
    """Yield a line with the format of each source whose records are examples."""
    for entry in corpus:
        kinds = {file.fields.format for file in entry.files if file.fields.format is not None}
        if kinds:
            yield f"{entry.source.key}: records of format {', '.join(kinds)} in {entry.source.path}"


def describe_limits(corpus: Iterable[CorpusEntry]) -> Iterator[str]:
    """Yield a line for each source with `max_samples`."""
    for entry in corpus:
        if entry.source.max_samples is not None:
            yield f"{entry.source.key}: only the first {entry.source.max_samples:,} records are read (max_samples)"


def choose_by_hash(
    corpus: Sequence[CorpusEntry], fraction: float, separator: int | None, *, mixture: bool
) -> list[bool]:
    """Return for each entry whether validation documents are selected by hash.

    They are if a fraction is held out and there are at least 1/fraction documents: in the source, for a mixture, or
    else in all sources.
    """
    training = [entry for entry in corpus if entry.stream == "train"]
    if fraction == 0 or len(training) < len(corpus) or math.ceil(1 / fraction) <= 1:
        return [False] * len(corpus)
    enough, reading = math.ceil(1 / fraction), Reading(separator)
    if mixture:
        return [_count_documents(entry, enough, reading) == enough for entry in training]
    count = 0
    for entry in training:
        count += _count_documents(entry, enough - count, reading)
    return [count == enough] * len(training)


def _count_documents(entry: CorpusEntry, limit: int, reading: Reading) -> int:
    """Count the documents of a source, stopping at `limit`."""
    return count_documents(entry.files, min(limit, entry.source.max_samples or limit), reading)
