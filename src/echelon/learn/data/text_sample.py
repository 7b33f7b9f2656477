"""The text that a tokenizer is trained on: a sample of a corpus, in which broken records are found before the work."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from echelon.ground.progress import Progress
from echelon.learn.data.broken_records import RecordCounts, refuse_broken
from echelon.learn.data.conversation import check_answers
from echelon.learn.data.corpus import CorpusEntry
from echelon.learn.data.examples import parse_example
from echelon.learn.data.readers import read_records
from echelon.learn.data.readers.record import Broken, BrokenRecordError, Reading, Record, SourceFile
from echelon.learn.data.tokenize import Task, plan_tasks


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
