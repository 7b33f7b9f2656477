"""Tokenizing in parallel processes, with the results in order.

The parent plans tasks (groups of spans), worker processes read and tokenize them, and the parent receives token arrays
in the order of the tasks, a few ahead of what it has written. Memory is bounded by that window. Workers start by
`spawn` (a fork of a process with threads can hang) and import neither torch nor transformers: they rebuild the
tokenizer from its JSON.
"""

import hashlib
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from echelon.data.source import PIECE_BYTES, Span, TextFile, UnreadableText, is_text, iter_spans, read_span
from echelon.errors import DataError, EchelonError
from echelon.runtime import use_one_tokenizer_thread

Tokens = npt.NDArray[np.unsignedinteger[Any]]

HASHED_BYTES = PIECE_BYTES
"""The hash of a document reads at most so much from its start."""

_HASH_KEY = b"echelon validation 1"
_TASKS_AHEAD = 3
_STOPS = (signal.SIGTERM, signal.SIGINT)


def token_dtype(vocab_size: int) -> type[np.uint16] | type[np.uint32]:
    """The smallest type kept on disk that holds every id: uint16 up to 65536 ids, else uint32."""
    return np.uint16 if vocab_size <= 2**16 else np.uint32


@dataclass(frozen=True)
class Encoding:
    """What a tokenizer does to text, as plain values. `tokenizer_json` None means bytes; `separator` ends documents."""

    fingerprint: str
    tokenizer_json: str | None
    separator: int | None
    vocab_size: int


@dataclass(frozen=True)
class Task:
    """Spans to tokenize together, all of the source of that index."""

    source: int
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Piece:
    """The tokens of a document, or of a piece of it. `hash` is the document's where `is_first`, else 0."""

    tokens: Tokens
    is_first: bool
    hash: int


@dataclass(frozen=True)
class TokenizedTask:
    """What a task became. `skipped` names files of a folder that are not UTF-8 text."""

    pieces: list[Piece]
    num_bytes: int
    skipped: tuple[str, ...]


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

    def encode(self, texts: list[bytes]) -> list[Tokens]:
        """The tokens of each UTF-8 text, without special tokens around it."""
        if self._tokenizer is None:
            return [np.frombuffer(text, dtype=np.uint8).astype(self._dtype) for text in texts]
        decoded = [text.decode("utf-8") for text in texts]
        encoded = self._tokenizer.encode_batch_fast(decoded, add_special_tokens=False)
        return [np.array(item.ids, dtype=self._dtype) for item in encoded]

    def run(self, task: Task) -> TokenizedTask:
        """Read and tokenize the spans of a task."""
        texts: list[bytes] = []
        edges: list[tuple[bool, bool]] = []
        skipped = []
        for span in task.spans:
            try:
                found = read_span(span)
            except UnreadableText:
                skipped.append(span.file.name)
                continue
            texts += found
            is_whole = span.file.kind == "jsonl"
            edges += [(is_whole or span.is_first, is_whole or span.is_last)] * len(found)
        pieces = [
            Piece(self._separate(tokens, is_last), is_first, hash_document(text) if is_first else 0)
            for text, tokens, (is_first, is_last) in zip(texts, self.encode(texts), edges, strict=True)
        ]
        return TokenizedTask(pieces, sum(span.stop - span.start for span in task.spans), tuple(skipped))

    def _separate(self, tokens: Tokens, is_last: bool) -> Tokens:
        separator = self._encoding.separator
        return np.append(tokens, self._dtype(separator)) if is_last and separator is not None else tokens


def hash_document(text: bytes) -> int:
    """A 64-bit hash of a document's first MiB, which decides its side of the validation split."""
    return int.from_bytes(hashlib.blake2b(text[:HASHED_BYTES], digest_size=8, key=_HASH_KEY).digest(), "little")


def plan_tasks(source: int, files: Iterable[TextFile], skip: Callable[[TextFile], None]) -> Iterator[Task]:
    """Group the spans of a source's files into tasks of about PIECE_BYTES, lazily and in order.

    A file of a folder that takes several spans is checked first, since its first pieces would be written before a bad
    byte in a later one is seen; `skip` is told of one that is not text.
    """
    spans: list[Span] = []
    num_bytes = 0
    for file in files:
        if file.kind == "text" and not file.required and file.size > PIECE_BYTES and not is_text(file):
            skip(file)
            continue
        for span in iter_spans(file):
            spans.append(span)
            num_bytes += span.stop - span.start
            if num_bytes >= PIECE_BYTES:
                yield Task(source, tuple(spans))
                spans, num_bytes = [], 0
    if spans:
        yield Task(source, tuple(spans))


def tokenize_tasks(
    tasks: Iterable[Task], encoding: Encoding, workers: int
) -> Generator[tuple[Task, TokenizedTask], None, None]:
    """Tokenize tasks in `workers` processes (1: in this one), yielding each with its result, in order.

    Raises DataError naming the file when a worker fails or dies. Close the generator to stop the workers.
    """
    if workers == 1:
        encoder = TaskEncoder(encoding)
        for task in tasks:
            yield task, encoder.run(task)
        return
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_worker, (encoding,))
    running: deque[tuple[Task, Future[TokenizedTask]]] = deque()
    try:
        for task in tasks:
            running.append((task, _submit(pool, task)))
            if len(running) >= workers * _TASKS_AHEAD:
                task, future = running.popleft()
                yield task, _result(task, future)
        for task, future in running:
            yield task, _result(task, future)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold SIGTERM and SIGINT back: a pool whose processes or thread were started half-way cannot be shut down.

    Python calls handlers in its main thread whatever that thread blocks, so they are replaced; the processes started
    here inherit what is blocked.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    handlers = {each: signal.signal(each, lambda number, _: arrived.append(number)) for each in _STOPS}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for each, handler in handlers.items():
            signal.signal(each, handler)
        for number in arrived:
            signal.raise_signal(number)


def _submit(pool: ProcessPoolExecutor, task: Task) -> Future[TokenizedTask]:
    try:
        with _uninterrupted():
            return pool.submit(_run_task, task)
    except BrokenProcessPool as error:
        failed: Future[TokenizedTask] = Future()
        failed.set_exception(error)
        return failed


def _result(task: Task, future: Future[TokenizedTask]) -> TokenizedTask:
    error = future.exception()
    if error is None:
        return future.result()
    if isinstance(error, EchelonError):
        raise error
    others = f" (or one of the {len(task.spans) - 1} read with it)" if len(task.spans) > 1 else ""
    name = f"{task.spans[0].file.path}{others}"
    if isinstance(error, BrokenProcessPool):
        raise DataError(
            f"a process that tokenizes died at {name}: killed, perhaps for want of memory; try data.prepare_workers=1."
        ) from error
    raise DataError(f"{name} could not be tokenized: {type(error).__name__}: {error}") from error


_worker_encoder: TaskEncoder | None = None


def _start_worker(encoding: Encoding) -> None:
    """Set up a worker: one thread each, Ctrl-C left to the parent, and no life beyond the parent's."""
    global _worker_encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)  # it was started while the parent held them back
    use_one_tokenizer_thread()
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _worker_encoder = TaskEncoder(encoding)


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run_task(task: Task) -> TokenizedTask:
    assert _worker_encoder is not None
    return _worker_encoder.run(task)


@dataclass
class Progress:
    """Says how far a long job is: bytes, rate and time left, about every `every_seconds`, and once at the end."""

    name: str
    total_bytes: int
    say: Callable[[str], None]
    every_seconds: float = 2.0
    clock: Callable[[], float] = time.monotonic
    done_bytes: int = 0
    _started: float = field(init=False)
    _said: float = field(init=False)

    def __post_init__(self) -> None:
        self._started = self._said = self.clock()

    def add(self, num_bytes: int) -> None:
        """Count bytes as done, and say so if it is time."""
        self.done_bytes += num_bytes
        now = self.clock()
        if now - self._said >= self.every_seconds:
            self._said = now
            rate = self.done_bytes / (now - self._started)
            left = max(0, self.total_bytes - self.done_bytes) / max(rate, 1.0)
            self.say(f"{self._describe(rate)}, about {left:.0f} s left")

    def finish(self) -> None:
        """Say the total."""
        seconds = max(self.clock() - self._started, 1e-3)
        self.say(f"{self._describe(self.done_bytes / seconds)}, {seconds:.1f} s in all")

    def _describe(self, rate: float) -> str:
        return f"{self.name}: {self.done_bytes / 1e6:.1f} of {self.total_bytes / 1e6:.1f} MB, {rate / 1e6:.1f} MB/s"
