"""A corpus: the files of all sources, read into streams of tokens and divided into training and validation text."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path

from echelon.data.shards import FORMAT_VERSION, Manifest, ShardWriter, SourceRecord
from echelon.data.source import Source, TextFile, UnreadableText, count_documents, list_files, read_span
from echelon.data.split import STREAMS, divide_streams
from echelon.data.tokenize import Encoding, Progress, Task, TokenizedTask, plan_tasks, token_dtype, tokenize_tasks
from echelon.errors import DataError

Say = Callable[[str], None]

_LISTED_SKIPS = 20
_SAID_SKIPS = 3


@dataclass(frozen=True)
class CorpusEntry:
    """A source, the stream its text was given for (`train` or `validation`), and its files."""

    stream: str
    source: Source
    files: tuple[TextFile, ...]


def list_corpus(train: Sequence[Source], validation: Sequence[Source]) -> tuple[CorpusEntry, ...]:
    """List the files of all sources. Raises DataError for a file both to train and to validate on."""
    training = [CorpusEntry("train", source, list_files(source)) for source in train]
    validating = [CorpusEntry("validation", source, list_files(source)) for source in validation]
    trained_on = {file.path for entry in training for file in entry.files}
    for entry in validating:
        shared = next((file.path for file in entry.files if file.path in trained_on), None)
        if shared is not None:
            raise DataError(
                f"{entry.source} holds {shared}, which data.train holds too; text to "
                f"validate on must not be trained on. Leave it out of one, or use data.validation_fraction."
            )
    return (*training, *validating)


def corpus_bytes(corpus: Iterable[CorpusEntry]) -> int:
    """The size of all files."""
    return sum(file.size for entry in corpus for file in entry.files)


def sample_texts(files: Sequence[TextFile], max_bytes: int, progress: Progress) -> Iterator[str]:
    """Text taken evenly from all files: every n-th task, for the smallest n that stays at about `max_bytes`."""
    stride = max(1, math.ceil(sum(file.size for file in files) / max_bytes))
    for index, task in enumerate(plan_tasks(0, files, skip=lambda file: None)):
        if index % stride:
            continue
        for span in task.spans:
            try:
                texts = read_span(span)
            except UnreadableText:
                continue
            progress.add(span.stop - span.start)
            yield from (text.decode("utf-8") for text in texts)


@dataclass
class _Sink:
    """What one source gives to one stream, while it is written."""

    writer: ShardWriter
    documents: int = 0
    text_bytes: int = 0


class CorpusWriter:
    """Tokenizes a corpus into the shards of a folder. To be used once."""

    def __init__(
        self,
        folder: Path,
        corpus: Sequence[CorpusEntry],
        encoding: Encoding,
        validation_fraction: float,
        max_shard_tokens: int,
        say: Say,
        mixture: bool = False,
    ) -> None:
        """`mixture`: each training source is divided, and later sampled, by itself."""
        self._folder = folder
        self._corpus = corpus
        self._encoding = encoding
        self._dtype = token_dtype(encoding.vocab_size).__name__
        self._max_shard_tokens = max_shard_tokens
        self._say = say
        self._fraction = validation_fraction
        self._mixture = mixture
        self._by_hash = choose_by_hash(corpus, validation_fraction, mixture=mixture)
        self._progress = Progress("tokenizing", corpus_bytes(corpus), say)
        self._skipped: list[list[str]] = [[] for _ in corpus]

    def write(self, workers: int) -> Manifest:
        """Write the shards and return the manifest that describes them.

        Raises DataError for text that cannot be used, or too little of it.
        """
        records: dict[str, list[SourceRecord]] = {stream: [] for stream in STREAMS}
        sinks: list[dict[str, _Sink]] = [{} for _ in self._corpus]
        with closing(tokenize_tasks(self._plan_tasks(), self._encoding, workers)) as results:
            for index, group in groupby(results, key=lambda result: result[0].source):
                sinks[index] = self._write_source(index, group)
        self._progress.finish()
        for index, entry in enumerate(self._corpus):
            self._report_skipped(index)
            for stream, sink in sinks[index].items():
                records[stream].append(self._record(index, sink))
            if not any(sink.documents for sink in sinks[index].values()):
                reason = "no file in it is UTF-8 text" if self._skipped[index] else "it is empty"
                raise DataError(f"{entry.source} holds no text: {reason}.")
        streams = {stream: tuple(records[stream]) for stream in STREAMS}
        num_train = sum(entry.stream == "train" for entry in self._corpus)
        train, validation = divide_streams(streams, self._fraction, self._by_hash[:num_train], mixture=self._mixture)
        return Manifest(
            format_version=FORMAT_VERSION,
            dtype=self._dtype,
            tokenizer_fingerprint=self._encoding.fingerprint,
            vocab_size=self._encoding.vocab_size,
            separator=self._encoding.separator,
            streams=streams,
            train=train,
            validation=validation,
        )

    def _plan_tasks(self) -> Iterator[Task]:
        for index, entry in enumerate(self._corpus):
            yield from plan_tasks(index, entry.files, partial(self._skip, index))

    def _skip(self, index: int, file: TextFile) -> None:
        self._skipped[index].append(file.name)
        self._progress.add(file.size)

    def _write_source(self, index: int, results: Iterable[tuple[Task, TokenizedTask]]) -> dict[str, _Sink]:
        home = self._corpus[index].stream
        threshold = int(self._fraction * 2**64) if self._by_hash[index] else 0
        with ExitStack() as stack:
            sinks = {
                stream: _Sink(
                    stack.enter_context(
                        ShardWriter(self._folder, f"{stream}-{index:03d}", self._dtype, self._max_shard_tokens)
                    )
                )
                for stream in (STREAMS if threshold else (home,))
            }
            sink = sinks[home]
            for _, result in results:
                for piece in result.pieces:
                    if piece.is_first:
                        sink = sinks["validation" if piece.hash < threshold else home]
                        sink.documents += 1
                    sink.writer.append(piece.tokens)
                    sink.text_bytes += piece.text_bytes
                self._skipped[index] += result.skipped
                self._progress.add(result.num_bytes)
            for sink in sinks.values():
                sink.writer.finish()
        return sinks

    def _record(self, index: int, sink: _Sink) -> SourceRecord:
        source, skipped = self._corpus[index].source, self._skipped[index]
        return SourceRecord(
            source=source.key,
            name=source.name,
            path=source.path,
            documents=sink.documents,
            tokens=sink.writer.num_tokens,
            text_bytes=sink.text_bytes,
            shards=sink.writer.finish(),
            num_skipped=len(skipped),
            skipped=tuple(skipped[:_LISTED_SKIPS]),
        )

    def _report_skipped(self, index: int) -> None:
        self._skipped[index].sort()
        names = self._skipped[index]
        if names:
            more = ", ..." if len(names) > _SAID_SKIPS else ""
            self._say(
                f"{self._corpus[index].source.key}: skipped {len(names)} files that are not UTF-8 text: "
                f"{', '.join(names[:_SAID_SKIPS])}{more}"
            )


def choose_by_hash(corpus: Sequence[CorpusEntry], fraction: float, *, mixture: bool) -> list[bool]:
    """For each entry, whether validation text is chosen document by document.

    It is where a fraction is to be held out of 1/fraction documents or more: of one source of a mixture, else of all.
    """
    training = [entry for entry in corpus if entry.stream == "train"]
    if fraction == 0 or len(training) < len(corpus) or math.ceil(1 / fraction) <= 1:
        return [False] * len(corpus)
    enough = math.ceil(1 / fraction)
    if mixture:
        return [count_documents(entry.files, enough) == enough for entry in training]
    return [count_documents((file for entry in training for file in entry.files), enough) == enough] * len(training)
