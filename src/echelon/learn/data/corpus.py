"""A corpus: the files of all sources, decisions that are made before tokens are written, text to train tokenizers."""

import filecmp
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from echelon.ground.errors import DataError
from echelon.ground.progress import Progress
from echelon.learn.data.conversation import check_answers
from echelon.learn.data.examples import parse_example
from echelon.learn.data.readers import count_documents, read_records
from echelon.learn.data.readers.record import Broken, BrokenRecordError, Reading, Record, SourceFile
from echelon.learn.data.record_counts import RecordCounts, refuse_broken
from echelon.learn.data.source import LeftOut, Source, list_files
from echelon.learn.data.tokenize import Task, plan_tasks


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
    (first, last), (start, stop) = (file.rows or (0, math.inf) for file in (one, other))
    if first >= stop or start >= last:
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


class TextSample:
    """Samples text evenly from all files: every n-th task, for the smallest n that gives about `max_bytes`.

    Files of unknown size, files that contain far more text than their size, and sources with `max_samples` contribute
    text from their start. `max_broken` and `train_on`: `data.max_broken_fraction` and
    `data.train_on`.
    """

    def __init__(
        self, entries: Sequence[CorpusEntry], max_bytes: int, progress: Progress, max_broken: float, train_on: str
    ) -> None:
        self._entries = entries
        self._max_bytes = max_bytes
        self._progress = progress
        self._max_broken = max_broken
        self._train_on = train_on
        self._counts = [RecordCounts() for _ in entries]

    def read(self) -> Iterator[str]:
        """Yield the texts.

        Raises DataError, at the end of what is read, for a source that is known to have too many broken records: one
        that was read to its end, or one of files that are a record each.
        """
        whole = [index for index, entry in enumerate(self._entries) if entry.source.max_samples is None]
        size = sum(file.size for index in whole for file in self._entries[index].files)
        stride = max(1, math.ceil(size / self._max_bytes))
        yield from self._read(whole, stride, 2 * self._max_bytes)
        limited = [index for index in range(len(self._entries)) if index not in whole]
        for index in limited:
            yield from self._read([index], 1, self._max_bytes // len(limited))

    def _read(self, indices: Sequence[int], stride: int, max_bytes: int) -> Iterator[str]:
        """Yield the texts of every `stride`-th task of these sources, up to about `max_bytes`."""
        taken = num_tasks = 0
        for index in indices:
            is_whole = stride == 1
            for task in plan_tasks(index, self._entries[index].files):
                num_tasks += 1
                if (num_tasks - 1) % stride:
                    continue
                if taken >= max_bytes:
                    is_whole = False
                    break
                for text in self._read_task(task):
                    taken += len(text)
                    yield text
                if self._is_full(index):
                    break
            self._check(index, is_whole)
            if taken >= max_bytes:
                return

    def _read_task(self, task: Task) -> Iterator[str]:
        for span in task.spans:
            self._progress.add(span.num_bytes)
            for record in read_records(span, Reading()):
                if self._is_full(task.source) and (isinstance(record, Broken) or record.is_first):
                    return
                self._count(task.source, span.file, record)
                yield from _texts(record.content) if isinstance(record, Record) else ()

    def _is_full(self, index: int) -> bool:
        limit = self._entries[index].source.max_samples
        return limit is not None and self._counts[index].records >= limit

    def _count(self, index: int, file: SourceFile, record: Record | Broken) -> None:
        counts, source = self._counts[index], self._entries[index].source
        if isinstance(record, Record) and isinstance(record.content, Mapping):
            try:
                check_answers(parse_example(record.content, file.fields.format), self._train_on)
            except BrokenRecordError as error:
                record = Broken(file, record.position, str(error))
        if isinstance(record, Record):
            counts.documents += record.is_first
            return
        room = record.count if source.max_samples is None else source.max_samples - counts.records
        counts.add_broken(replace(record, count=min(record.count, room)))
        if counts.is_hopeless:
            raise refuse_broken(source, counts, self._max_broken, None)

    def _check(self, index: int, is_whole: bool) -> None:
        entry, counts = self._entries[index], self._counts[index]
        records: int | None = counts.records if is_whole else None
        if not is_whole and all(file.format == "text" for file in entry.files):
            records = len(entry.files)
        if records is not None and counts.broken > self._max_broken * records:
            raise refuse_broken(entry.source, counts, self._max_broken, records)


def _texts(content: Any) -> Iterator[str]:
    """Yield the text of a record; for an example, the texts of its turns."""
    if isinstance(content, bytes):
        yield content.decode("utf-8")
    elif isinstance(content, str):
        yield content.encode("utf-8", "ignore").decode("utf-8")  # JSON can contain half a surrogate pair
    elif isinstance(content, Mapping | list):
        for value in content.values() if isinstance(content, Mapping) else content:
            yield from _texts(value)
