"""A corpus: the files of all sources, and what is decided about them before any is written."""

import filecmp
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.data.readers import count_documents, read_records
from echelon.data.readers.record import ExampleFields, Reading, Record, SourceFile
from echelon.data.source import Source, list_files
from echelon.data.tokenize import plan_tasks
from echelon.data.walking import LeftOut
from echelon.errors import DataError
from echelon.progress import Progress


@dataclass(frozen=True)
class CorpusEntry:
    """A source, the stream its text was given for (`train` or `validation`), its files, and what is not read of it."""

    stream: str
    source: Source
    files: tuple[SourceFile, ...]
    left_out: str | None = None


def list_corpus(train: Sequence[Source], validation: Sequence[Source]) -> tuple[CorpusEntry, ...]:
    """List the files of all sources. Raises DataError for text both to train and to validate on: the same file, or one
    of the same content, whatever its name."""
    training = [_list_source("train", source) for source in train]
    validating = [_list_source("validation", source) for source in validation]
    trained_on: dict[tuple[str | None, int], list[SourceFile]] = {}
    for file in (file for entry in training for file in entry.files):
        trained_on.setdefault((file.split, file.size), []).append(file)
    for entry in validating:
        for file in entry.files:
            others = trained_on.get((file.split, file.size), ())
            if (other := next((each for each in others if _is_same(file, each)), None)) is not None:
                is_one = file.path == other.path
                what = "which data.train holds too" if is_one else f"whose content data.train holds as {other.path}"
                raise DataError(
                    f"{entry.source} holds {file.path}, {what}; text to validate on must not be trained on. Leave it "
                    f"out of one, or use data.validation_fraction."
                )
    return (*training, *validating)


def _list_source(stream: str, source: Source) -> CorpusEntry:
    left_out = LeftOut()
    return CorpusEntry(stream, source, list_files(source, left_out), left_out.describe())


def _is_same(one: SourceFile, other: SourceFile) -> bool:
    """Whether two files of one size hold the same text, in rows that both sources read."""
    if not _share_rows(one, other):
        return False
    if one.path == other.path:
        return True
    if not one.size or "hub" in (one.format, other.format):
        return False
    suffixes = (".idx", ".bin") if "megatron" in (one.format, other.format) else (None,)
    try:  # read side by side up to the first difference, which for two texts is the first block
        return all(filecmp.cmp(_beside(one, end), _beside(other, end), shallow=False) for end in suffixes)
    except OSError:  # what cannot be read is refused when it is its turn
        return False


def _beside(file: SourceFile, suffix: str | None) -> Path:
    return file.path if suffix is None else file.path.with_suffix(suffix)


def _share_rows(one: SourceFile, other: SourceFile) -> bool:
    (first, last), (start, stop) = (file.rows or (0, math.inf) for file in (one, other))
    return first < stop and start < last


def corpus_bytes(corpus: Iterable[CorpusEntry]) -> int:
    """The size of all files; 0 where a dataset that is streamed does not say its own."""
    sizes = [file.size for entry in corpus for file in entry.files if file.size or file.format == "hub"]
    return sum(sizes) if all(sizes) else 0


def sample_texts(entries: Sequence[CorpusEntry], max_bytes: int, progress: Progress) -> Iterator[str]:
    """Text taken evenly from all files: every n-th task, for the smallest n that stays at about `max_bytes`.

    Of files whose size is not known, or that hold far more than their size, and of sources of which only the first
    records are read, as much as comes first.
    """
    whole = [file for entry in entries if entry.source.max_samples is None for file in entry.files]
    stride = max(1, math.ceil(sum(file.size for file in whole) / max_bytes))
    yield from _read_texts(whole, stride, math.inf, 2 * max_bytes, progress)
    limited = [entry for entry in entries if entry.source.max_samples is not None]
    for entry in limited:
        assert entry.source.max_samples is not None
        yield from _read_texts(entry.files, 1, entry.source.max_samples, max_bytes // len(limited), progress)


def _read_texts(
    files: Sequence[SourceFile], stride: int, max_records: float, max_bytes: int, progress: Progress
) -> Iterator[str]:
    """The texts of every `stride`-th task of some files, until there are enough of them."""
    taken = num_records = 0
    for index, task in enumerate(plan_tasks(0, files)):
        if index % stride:
            continue
        for span in task.spans:
            progress.add(span.num_bytes)
            for record in read_records(span, Reading()):
                num_records += record.is_first if isinstance(record, Record) else record.count
                if num_records > max_records:
                    return
                for text in _texts(record.content) if isinstance(record, Record) else ():
                    taken += len(text)
                    yield text
        if taken >= max_bytes:
            return


def _texts(content: Any) -> Iterator[str]:
    """The text of a record; of an example, those of its turns."""
    if isinstance(content, bytes):
        yield content.decode("utf-8")
    elif isinstance(content, str):
        yield content.encode("utf-8", "ignore").decode("utf-8")  # JSON can hold half a character
    elif isinstance(content, Mapping | list):
        for value in content.values() if isinstance(content, Mapping) else content:
            yield from _texts(value)


def describe_left_out(corpus: Iterable[CorpusEntry]) -> Iterator[str]:
    """A line for each source of which something is not read."""
    for entry in corpus:
        if entry.left_out is not None:
            yield f"{entry.source.key}: not read of {entry.source.path}: {entry.left_out}"


def describe_examples(corpus: Iterable[CorpusEntry]) -> Iterator[str]:
    """A line for each source whose records are examples: of which format."""
    for entry in corpus:
        kinds = {file.fields.format for file in entry.files if isinstance(file.fields, ExampleFields)}
        if kinds:
            yield f"{entry.source.key}: records of the format {', '.join(kinds)}, in {entry.source.path}"


def describe_limits(corpus: Iterable[CorpusEntry]) -> Iterator[str]:
    """A line for each source of which only the first records are read."""
    for entry in corpus:
        if entry.source.max_samples is not None:
            yield f"{entry.source.key}: only the first {entry.source.max_samples:,} records are read (max_samples)"


def choose_by_hash(
    corpus: Sequence[CorpusEntry], fraction: float, separator: int | None, *, mixture: bool
) -> list[bool]:
    """For each entry, whether validation text is chosen document by document.

    It is where a fraction is to be held out of 1/fraction documents or more: of one source of a mixture, else of all.
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
    """How many documents a source has, counted up to `limit` and no further."""
    return count_documents(entry.files, min(limit, entry.source.max_samples or limit), reading)
