"""A corpus: the files of all sources, and what is decided about them before any is written."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.data.readers import count_documents, read_records
from echelon.data.readers.record import ExampleFields, Reading, Record, SourceFile
from echelon.data.source import Source, list_files
from echelon.data.tokenize import Progress, plan_tasks
from echelon.errors import DataError


@dataclass(frozen=True)
class CorpusEntry:
    """A source, the stream its text was given for (`train` or `validation`), and its files."""

    stream: str
    source: Source
    files: tuple[SourceFile, ...]


def list_corpus(train: Sequence[Source], validation: Sequence[Source]) -> tuple[CorpusEntry, ...]:
    """List the files of all sources. Raises DataError for text both to train and to validate on."""
    training = [CorpusEntry("train", source, list_files(source)) for source in train]
    validating = [CorpusEntry("validation", source, list_files(source)) for source in validation]
    trained_on: dict[tuple[Path, str | None], list[SourceFile]] = {}
    for file in (file for entry in training for file in entry.files):
        trained_on.setdefault((file.path, file.split), []).append(file)
    for entry in validating:
        for file in entry.files:
            if any(_share_rows(file, other) for other in trained_on.get((file.path, file.split), ())):
                raise DataError(
                    f"{entry.source} holds {file.path}, which data.train holds too; text to "
                    f"validate on must not be trained on. Leave it out of one, or use data.validation_fraction."
                )
    return (*training, *validating)


def _share_rows(one: SourceFile, other: SourceFile) -> bool:
    (first, last), (start, stop) = (file.rows or (0, math.inf) for file in (one, other))
    return first < stop and start < last


def corpus_bytes(corpus: Iterable[CorpusEntry]) -> int:
    """The size of all files; 0 where a dataset that is streamed does not say its own."""
    sizes = [file.size for entry in corpus for file in entry.files if file.size or file.format == "hub"]
    return sum(sizes) if all(sizes) else 0


def sample_texts(files: Sequence[SourceFile], max_bytes: int, progress: Progress) -> Iterator[str]:
    """Text taken evenly from all files: every n-th task, for the smallest n that stays at about `max_bytes`.

    Of files whose size is not known, or that hold far more than their size, as much as comes first.
    """
    stride = max(1, math.ceil(sum(file.size for file in files) / max_bytes))
    taken = 0
    for index, task in enumerate(plan_tasks(0, files)):
        if index % stride:
            continue
        for span in task.spans:
            progress.add(span.num_bytes)
            for record in read_records(span, Reading()):
                for text in _texts(record.content) if isinstance(record, Record) else ():
                    taken += len(text)
                    yield text
        if taken >= 2 * max_bytes:
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


def describe_examples(corpus: Iterable[CorpusEntry]) -> Iterator[str]:
    """A line for each source whose records are examples: of which format."""
    for entry in corpus:
        kinds = {file.fields.format for file in entry.files if isinstance(file.fields, ExampleFields)}
        if kinds:
            yield f"{entry.source.key}: records of the format {', '.join(kinds)}, in {entry.source.path}"


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
        return [count_documents(entry.files, enough, reading) == enough for entry in training]
    files = (file for entry in training for file in entry.files)
    return [count_documents(files, enough, reading) == enough] * len(training)
