"""Tokenize in parallel processes, with the results in order.

The parent plans tasks (groups of spans), worker processes read and tokenize them, and the parent receives token arrays
in the order of the tasks. Workers run only a few tasks ahead, which bounds the memory. They import neither torch nor
transformers: they rebuild the tokenizer from its JSON.
"""

import itertools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from echelon.ground.errors import ConfigError, DataError, EchelonError, is_panic
from echelon.ground.variables import use_one_tokenizer_thread
from echelon.learn.data.child_process import ChildProcess, stops_held_back
from echelon.learn.data.instruction import InstructionEncoding
from echelon.learn.data.limits import be_spare, find_excess, refuse_template
from echelon.learn.data.readers import cut_file, name_place, read_records
from echelon.learn.data.readers.record import (
    PIECE_BYTES,
    Broken,
    BrokenRecordError,
    Content,
    Reading,
    Record,
    SourceFile,
    Span,
    digest_document,
    hash_for_split,
    serialize_example,
)
from echelon.learn.data.record_counts import find_oddities
from echelon.learn.data.shards import BAD_TARGET, GOOD_TARGET, TARGET
from echelon.learn.data.tokenizer import panics_told
from echelon.recipe.data_formats import WHOLE_RECORD

Tokens = npt.NDArray[np.unsignedinteger[Any]]

_TASKS_AHEAD = 2
_MARKS = {None: np.uint8(TARGET), True: np.uint8(GOOD_TARGET), False: np.uint8(BAD_TARGET)}


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.uint32]:
    """Return the dtype of ids on disk: uint16 for up to 65536 ids, else uint32."""
    return np.uint16 if vocab_size <= 2**16 else np.uint32


@dataclass(frozen=True)
class Encoding:
    """The settings of tokenization, as plain values. `tokenizer_json` None means bytes; `separator` ends documents.

    `digests`: also hash every document, to find copies. `instruction`: the encoding of examples. `name`: that of the
    tokenizer, for messages.
    """

    fingerprint: str
    tokenizer_json: str | None
    separator: int | None
    vocab_size: int
    digests: bool = False
    instruction: InstructionEncoding | None = None
    name: str = "of the recipe"

    @property
    def stops(self) -> tuple[int, ...]:
        """The ids that end an answer, or a document of plain text."""
        if self.instruction is not None:
            return self.instruction.stops
        return () if self.separator is None else (self.separator,)


class WorkerDiedError(EchelonError):
    """A tokenizing process died without reporting an error. Earlier progress is kept."""


@dataclass(frozen=True)
class Task:
    """Spans to tokenize together, all from the source with index `source`."""

    source: int
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """The tokens of a document or of a piece of it, and the size of their text in bytes, None if ids were given.

    `hash` and `digest` belong to the document and are set if `is_first`, else 0 and None; `digest` only if requested.
    The sample of a record is one piece: `lengths` of its documents, `targets` `[n]`, a mark for the tokens with loss.
    `record`: the record itself as JSON, of a prompt whose answers will be judged by it. `oddities`: what is odd about
    the record, which is used nevertheless.
    """

    tokens: Tokens
    is_first: bool
    ends: bool
    hash: int
    text_bytes: int | None
    digest: bytes | None = None
    targets: npt.NDArray[np.uint8] | None = None
    lengths: tuple[int, ...] = ()
    record: bytes | None = None
    lost_tokens: int = 0
    oddities: tuple[Broken, ...] = ()


@dataclass(frozen=True)
class TokenizedTask:
    """The result of a task: pieces of documents and broken records, in order."""

    found: list[Piece | Broken]
    num_bytes: int


class TaskEncoder:
    """Turns spans into tokens. One per process."""

    def __init__(self, encoding: Encoding) -> None:
        self._encoding = encoding
        self._dtype = token_dtype(encoding.vocab_size)
        self._tokenizer: Tokenizer | None = None
        if encoding.tokenizer_json is not None:
            self._tokenizer = Tokenizer.from_str(encoding.tokenizer_json)
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()

    @property
    def dtype(self) -> str:
        """The name of the dtype of `Piece.tokens`."""
        return self._dtype.__name__

    def encode(self, texts: list[bytes]) -> list[Tokens]:
        """Tokenize each UTF-8 text, without special tokens around it."""
        if self._tokenizer is None:
            return [np.frombuffer(text, dtype=np.uint8).astype(self._dtype) for text in texts]
        decoded = [text.decode("utf-8") for text in texts]
        encoded = self._tokenizer.encode_batch_fast(decoded, add_special_tokens=False)
        return [np.array(item.ids, dtype=self._dtype) for item in encoded]

    def run(self, task: Task) -> TokenizedTask:
        """Read and tokenize the spans of a task.

        Raises DataError for ids that the tokenizer does not have and texts on which it fails, ConfigError for a
        template that exceeds its limits.
        """
        reading = Reading(self._encoding.separator, self._encoding.digests)
        records = [(span.file, record) for span in task.spans for record in read_records(span, reading)]
        contents = [record.content for _, record in records if isinstance(record, Record)]
        texts = iter(self._encode_all(records, [content for content in contents if isinstance(content, bytes)]))
        items: list[Piece | Broken] = []
        for file, record in records:
            if isinstance(record, Broken):
                items.append(record)
            elif isinstance(record.content, Mapping):
                try:
                    with self._panics_told(file, record):
                        items.append(self._make_sample(record, record.content, file))
                except BrokenRecordError as error:
                    items.append(Broken(file, record.position, str(error)))
                except ConfigError as error:  # an error of the template that this record triggers
                    raise ConfigError(f"{name_place(Broken(file, record.position, ''))}: {error}") from None
            else:
                is_text = isinstance(record.content, bytes)
                tokens = next(texts) if is_text else self._check(record.content, file)
                items.append(self._make_piece(record, tokens))
        return TokenizedTask(items, sum(span.num_bytes for span in task.spans))

    def _encode_all(self, records: list[tuple[SourceFile, Record | Broken]], texts: list[bytes]) -> list[Tokens]:
        """Tokenize the texts of the records, together. Raises DataError, naming the place, if the tokenizer fails."""
        try:
            return self.encode(texts)
        except BaseException as error:
            if not is_panic(error):
                raise
            for file, record in records:
                if isinstance(record, Record) and isinstance(record.content, bytes):
                    with self._panics_told(file, record):
                        self.encode([record.content])
            raise

    def _panics_told(self, file: SourceFile, record: Record) -> AbstractContextManager[None]:
        return panics_told(self._encoding.name, name_place(Broken(file, record.position, "")))

    def _make_piece(self, record: Record, tokens: Tokens) -> Piece:
        digest = record.digest
        if self._encoding.digests and record.is_first and digest is None:
            digest = digest_document([record.content])
        return Piece(
            tokens=self._separate(record, tokens),
            is_first=record.is_first,
            ends=record.ends,
            hash=hash_for_split(record.content) if record.is_first else 0,
            text_bytes=len(record.content) if isinstance(record.content, bytes) else None,
            digest=digest,
        )

    def _make_sample(self, record: Record, example: Mapping[str, Any], file: SourceFile) -> Piece:
        """Encode an example as one piece. Raises BrokenRecordError."""
        instruction = self._encoding.instruction
        assert instruction is not None
        documents = instruction.encode(example)
        ids = np.concatenate([document.ids for document in documents])
        if ids.size:
            self._check(ids, file)
        return Piece(
            tokens=np.concatenate([document.stored_ids for document in documents]).astype(self._dtype),
            is_first=True,
            ends=True,
            hash=hash_for_split(example),
            text_bytes=None,
            digest=digest_document([example]) if self._encoding.digests else None,
            targets=np.concatenate([document.stored_targets * _MARKS[document.is_good] for document in documents]),
            lengths=tuple(document.stored_ids.size for document in documents),
            record=serialize_example(example[WHOLE_RECORD]) if WHOLE_RECORD in example else None,
            lost_tokens=sum(document.lost_tokens for document in documents),
            oddities=tuple(Broken(file, record.position, what) for what in find_oddities(instruction.parse(example))),
        )

    def _check(self, ids: Content, file: SourceFile) -> Tokens:
        """Check given ids and convert them to the dtype on disk. Raises DataError."""
        assert isinstance(ids, np.ndarray)
        lowest, highest = int(ids.min()), int(ids.max())
        if lowest < 0 or highest >= self._encoding.vocab_size:
            raise DataError(
                f"{file.path} contains the id {lowest if lowest < 0 else highest}, but the tokenizer has the ids 0 to "
                f"{self._encoding.vocab_size - 1}; set tokenizer to the tokenizer of these ids."
            )
        return ids.astype(self._dtype)

    def _separate(self, record: Record, tokens: Tokens) -> Tokens:
        """Append the separator if the document ends here and given ids do not have it already."""
        separator = self._encoding.separator
        if separator is None or not record.ends:
            return tokens
        has_it = isinstance(record.content, np.ndarray) and int(tokens[-1]) == separator
        return tokens if has_it else np.append(tokens, self._dtype(separator))


def plan_tasks(source: int, files: Iterable[SourceFile]) -> Iterator[Task]:
    """Group the spans of a source's files into tasks of about PIECE_BYTES, lazily and in order."""
    spans: list[Span] = []
    num_bytes = 0
    for file in files:
        for span in cut_file(file):
            spans.append(span)
            num_bytes += span.num_bytes
            # A span that carries its content fills a task, whatever its size on disk.
            if num_bytes >= PIECE_BYTES or span.data is not None or span.records is not None:
                yield Task(source, tuple(spans))
                spans, num_bytes = [], 0
    if spans:
        yield Task(source, tuple(spans))


def tokenize_tasks(
    tasks: Iterable[Task], encoding: Encoding, workers: int
) -> Generator[tuple[Task, TokenizedTask], None, None]:
    """Tokenize tasks in `workers` processes (1: in this process), yielding each with its result, in order.

    Raises DataError, naming the file, if a file cannot be read, WorkerDiedError if a worker dies. Close the generator
    to stop the workers.
    """
    if workers == 1:
        encoder = TaskEncoder(encoding)
        for task in tasks:
            yield task, encoder.run(task)
        return
    started: list[_Worker] = []
    try:
        with stops_held_back():
            started.extend(_Worker(encoding) for _ in range(workers))
        yield from _share_out(enumerate(tasks), started)
    finally:
        for worker in started:
            worker.stop()


def _share_out(
    tasks: Iterator[tuple[int, Task]], workers: list["_Worker"]
) -> Generator[tuple[Task, TokenizedTask], None, None]:
    """Give each idle worker the next task, and yield the results in order, buffering a few that are early."""
    idle = list(workers)
    busy: dict[Connection, _Worker] = {}
    early: dict[int, tuple[Task, TokenizedTask]] = {}
    for expected in itertools.count():
        while expected not in early:
            while idle and len(early) < len(workers) * _TASKS_AHEAD and (following := next(tasks, None)) is not None:
                worker = idle.pop()
                worker.send(*following)
                busy[worker.connection] = worker
            if not busy:
                return
            for connection in wait(list(busy)):
                assert isinstance(connection, Connection)
                worker = busy.pop(connection)
                index, task, result = worker.receive()
                early[index] = (task, result)
                idle.append(worker)
        yield early.pop(expected)


class _Worker(ChildProcess):
    """A process that tokenizes one task at a time. The parent knows which task it is running."""

    def __init__(self, encoding: Encoding) -> None:
        super().__init__(serve_requests, encoding, TaskEncoder.run)
        self._encoding = encoding
        self._index = 0
        self._task: Task | None = None

    def send(self, index: int, task: Task) -> None:
        """Send a task. The worker must be idle."""
        self._index, self._task = index, task
        try:
            self.connection.send(task)
        except OSError as error:
            raise self._describe_death() from error

    def receive(self) -> tuple[int, Task, TokenizedTask]:
        """Receive the result of the task with its index. Raises the error that the worker reported."""
        try:
            result = self.connection.recv()
        except (EOFError, OSError) as error:
            raise self._describe_death() from error
        if isinstance(result, EchelonError):
            raise result
        assert self._task is not None
        return self._index, self._task, result

    def _describe_death(self) -> EchelonError:
        assert self._task is not None
        code, spans = self.wait_for_exit(), self._task.spans
        others = f" or a file read with it, up to {spans[-1].file.path}" if len(spans) > 1 else ""
        return explain_death(code, self._encoding, f"{spans[0].file.path}{others}")


def explain_death(code: int | None, encoding: Encoding, place: str) -> EchelonError:
    """The error for a tokenizing process that has ended at a place in the data, from its exit code."""
    if encoding.instruction is not None and (excess := find_excess(code)) is not None:
        return refuse_template(f"{place}: {encoding.instruction.template_name}", excess)
    return WorkerDiedError(
        f"a tokenizing process died (exit code {code}) at {place}; if it ran out of memory, lower data.prepare_workers "
        "and run again."
    )


def serve_requests(connection: Connection, encoding: Encoding, run: Callable[[TaskEncoder, Any], object]) -> None:
    """Run a worker: answer requests with one tokenizer thread until the pipe is closed; an answer may be an error."""
    use_one_tokenizer_thread()
    be_spare()
    encoder = TaskEncoder(encoding)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            request = connection.recv()
            try:
                result = run(encoder, request)
            except EchelonError as error:
                result = error
            connection.send(result)
