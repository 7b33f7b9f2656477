"""The chunks of a text that is prepared while a run trains: their files, how each is prepared, and those on this disk.

A chunk is a file, or several small ones in a row. Its tokens depend on nothing else, so any process of any machine can
prepare it, at any time.

    KEY.chunks/00000012.bin       the tokens of a chunk, or the rows of its samples, until it is removed to make room
    KEY.chunks/00000012.json      its record, which stays: a chunk that is prepared again must have the same tokens

All processes that see the folder work together: a chunk is prepared by whoever takes its lock, and the others wait.
With `data.prepared_remote`, chunks are shared through an object store as well, under the same names.
"""

import hashlib
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from echelon.ground.errors import DataError, EchelonError, explain_storage_error
from echelon.ground.file_lock import FileLock
from echelon.ground.mirror import bring
from echelon.ground.object_store import ObjectStore, ObjectStoreError
from echelon.ground.stored import parse_json, read_json, validator_of, write_json, write_text
from echelon.learn.data.catalog import INDEX_DTYPE, TARGETS_DTYPE, PackRecord, SampleRule
from echelon.learn.data.child_process import ChildProcess, stops_held_back
from echelon.learn.data.packing import PackedDataset, write_packs
from echelon.learn.data.readers.record import PIECE_BYTES, STORED, Broken, Fields, SourceFile
from echelon.learn.data.record_counts import RecordCounts
from echelon.learn.data.shards import DTYPES, GOOD, Samples, ShardRecord, ShardWriter, TokenStore
from echelon.learn.data.sinks import SampleCounts, SinkState, open_sink
from echelon.learn.data.source import Source
from echelon.learn.data.stream.addresses import SLOW_SECONDS, fetch, is_address, slowness_told
from echelon.learn.data.stream.options import StreamOptions
from echelon.learn.data.tokenize import Encoding, TaskEncoder, explain_death, plan_tasks, serve_requests, token_dtype
from echelon.recipe.data_formats import PAIR_FORMATS

logger = logging.getLogger(__name__)

ROW_DTYPE = "uint32"
"""Of a row: a sequence of L positions as the model receives it, in 3 L + 1 numbers. They are inputs, labels, documents
as in `Samples`, and whether the answer is judged good (1), bad (0), or not at all (-1). So a chunk is one file, whose
size tells how many sequences it has."""

MAX_CHUNK_TOKENS = 2**62
"""A chunk of a stream is one shard, whatever its size."""

_ROWS_AT_ONCE = 64
_NUM_LOCKS = 64
_POLL_SECONDS = 0.05
Files = tuple[SourceFile, ...]


@dataclass(frozen=True)
class StreamPlan:
    """stream.json. `chunks`: the files of each chunk. `max_broken_fraction`: of the records of a chunk.

    `samples`: the rule that turns the documents of a chunk into samples; None: all documents form one text.
    """

    encoding: Encoding
    max_broken_fraction: float
    chunks: tuple[Files, ...]
    samples: SampleRule | None = None

    @property
    def num_bytes(self) -> int:
        """The size of all files, as stored."""
        return sum(file.size for files in self.chunks for file in files)

    @property
    def shares_sequences(self) -> bool:
        """Whether a sequence may contain more than one document."""
        has_pairs = any(file.fields.format in PAIR_FORMATS for files in self.chunks for file in files)
        return self.samples is None or self.samples.packing or has_pairs


class ChunkKeeper:
    """The chunks of a stream, prepared when they are asked for. Threads and processes may share the folder."""

    def __init__(self, folder: Path, plan: StreamPlan, options: StreamOptions) -> None:
        """Reads and writes nothing."""
        self.plan = plan
        self.needed = frozenset[int]()
        """The chunks that are not removed to make room."""
        self._folder = folder
        self._options = options
        self._remote = None if options.remote is None else ObjectStore(options.remote, "data.prepared_remote")
        name = ROW_DTYPE if plan.samples is not None else token_dtype(plan.encoding.vocab_size).__name__
        self.dtype = DTYPES[name]
        """The type of the numbers of a chunk."""
        self._tokenizing = threading.Lock()
        self._child: ChildProcess | None = None

    def find(self, index: int) -> ShardRecord | None:
        """Return the record of a chunk; None if it was never prepared here. Raises DataError if it is damaged."""
        path = self._record_path(index)
        try:
            return _parse_record(read_json(path))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} cannot be read ({error}); delete {self._folder} and run again.") from error

    def has_tokens(self, index: int) -> bool:
        """Whether the tokens of a chunk are on this machine."""
        return self._tokens_path(index).exists()

    def describe(self, index: int) -> ShardRecord:
        """Return the record of a chunk, after preparing it if no machine has. Raises as `prepare`."""
        while (record := self.find(index)) is None:
            if (shared := self._find_shared(index)) is not None:
                write_json(self._record_path(index), asdict(shared))
            elif not self.prepare(index):
                self._await(index, lambda: self.find(index) is not None)
        return record

    def open(self, index: int) -> TokenStore:
        """Open the tokens of a chunk, after preparing it if need be. Raises as `prepare`."""
        record = self.describe(index)
        store = TokenStore(self._folder, [record], self.dtype.name)
        while True:
            try:
                os.utime(self._tokens_path(index))
                store.read(0, min(1, record.tokens))
            except FileNotFoundError:
                if not self.prepare(index):
                    self._await(index, lambda: self.has_tokens(index))
            else:
                return store

    def prepare(self, index: int) -> bool:
        """Prepare a chunk that is not here, unless another process or thread does; returns whether it is here.

        Raises:
            DataError: its files are not those that were listed or cannot be used, or give other tokens than before.
            EchelonError: they cannot be fetched, or the disk is full.
        """
        lock = FileLock(self._folder / f"{index % _NUM_LOCKS:02d}.lock")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if not lock.take():
                return False
            try:
                if not self.has_tokens(index):
                    with slowness_told(f"preparing {self.plan.chunks[index][0].name}"):
                        self._make_room()
                        self._produce(index)
            finally:
                lock.release()
        except OSError as error:
            reason = explain_storage_error(error, self._folder) or error
            raise EchelonError(f"the prepared data cannot be written to {self._folder}: {reason}.") from error
        return True

    def _await(self, index: int, is_done: Callable[[], bool]) -> None:
        """Wait until another process has prepared a chunk, or none does any more."""
        lock, next_line = FileLock(self._folder / f"{index % _NUM_LOCKS:02d}.lock"), time.monotonic() + SLOW_SECONDS
        while not is_done() and (holder := lock.read_holder()) is not None:
            if time.monotonic() >= next_line:
                logger.info(f"data: waiting for {self.plan.chunks[index][0].name}, which process {holder} prepares")
                next_line += SLOW_SECONDS
            time.sleep(_POLL_SECONDS)

    def _produce(self, index: int) -> None:
        earlier = self.find(index)
        writing = self._tokens_path(index).with_suffix(".writing")
        shutil.rmtree(writing, ignore_errors=True)  # of a process that was killed
        writing.mkdir()
        try:
            brought = self._bring(index, writing)
            record = brought or self._tokenize(index, writing)
            if earlier is not None and earlier.sha256 != record.sha256:
                names = ", ".join(file.name for file in self.plan.chunks[index][:3])
                raise DataError(
                    f"{names}: prepared again, this text gives other tokens than before; it changed, or the tokenizer "
                    "did. Restore it and resume the run, or start a new one with --fresh."
                )
            (writing / record.file).rename(self._tokens_path(index))
            if earlier is None:
                write_json(self._record_path(index), asdict(record))
        finally:
            shutil.rmtree(writing, ignore_errors=True)
        if brought is None:
            self._send(index, record)

    def _tokenize(self, index: int, folder: Path) -> ShardRecord:
        """Fetch the files of a chunk, and tokenize them in a process of its own."""
        files = self.plan.chunks[index]
        copies = [fetch(file, folder) for file in files]
        name = self._tokens_path(index).name
        with self._tokenizing:
            if self._child is None:
                with stops_held_back():
                    self._child = ChildProcess(_serve, self.plan.encoding, self.plan.samples)
            try:
                self._child.connection.send((copies, folder, name))
                answer = self._child.connection.recv()
            except (EOFError, OSError) as error:
                code, self._child = self._child.wait_for_exit(), None
                raise explain_death(code, self.plan.encoding, files[0].name) from error
        if isinstance(answer, EchelonError):
            raise type(answer)(_name_originals(str(answer), files, copies))
        record, counts, samples = answer
        self._judge(counts, [_name_originals(where, files, copies) for where in counts.places])
        if samples.num_overlong or samples.num_unlabelled:
            logger.info(f"data.train: of {counts.documents:,} samples of {files[0].name}, {_say_lost(samples)}")
        assert isinstance(record, ShardRecord)
        return record

    def _judge(self, counts: RecordCounts, places: list[str]) -> None:
        """Report the broken records of a chunk. Raises DataError for too many."""
        if not counts.broken:
            return
        most = self.plan.max_broken_fraction
        said = "; ".join(places[:3])
        if counts.broken > max(most * counts.records, 1 if most else 0):
            raise DataError(
                f"data.train: {counts.broken:,} of {counts.records:,} records of a chunk cannot be used, more than "
                f"data.max_broken_fraction={most:g}: {said}. Fix them, or allow more."
            )
        logger.warning(f"data.train: dropped {counts.broken:,} of {counts.records:,} records: {said}")

    def _bring(self, index: int, folder: Path) -> ShardRecord | None:
        """Download a chunk that another machine has prepared; None if there is none that can be used."""
        if self._remote is None or (record := self._find_shared(index)) is None:
            return None
        try:
            files = {record.file: {"bytes": record.bytes, "sha256": record.sha256}}
            faults = bring(self._remote, self._folder.name, files, folder)
        except ObjectStoreError as error:
            faults = [str(error)]
        if not faults:
            return record
        self._tell_unusable(record.file, faults[0])
        return None

    def _find_shared(self, index: int) -> ShardRecord | None:
        """Return the record of a chunk that another machine has prepared; None if there is none that can be used."""
        if self._remote is None:
            return None
        name = self._record_path(index).name
        try:
            if (content := self._remote.read(f"{self._folder.name}/{name}")) is None:
                return None
            record = _parse_record(parse_json(content))
            if record.file != self._tokens_path(index).name:
                raise ValueError("it is of another chunk")
        except (ValueError, KeyError, TypeError, ObjectStoreError) as error:
            self._tell_unusable(name, str(error))
            return None
        return record

    def _tell_unusable(self, name: str, fault: str) -> None:
        address = f"{self._options.remote}/{self._folder.name}/{name}"
        logger.warning(f"data: {address} cannot be used ({fault}); the chunk is prepared here")

    def _send(self, index: int, record: ShardRecord) -> None:
        """Give a chunk that was prepared here to other machines. A store that fails is reported."""
        if self._remote is None:
            return
        key = f"{self._folder.name}/{record.file}"
        try:
            self._remote.upload(self._tokens_path(index), key)
            self._remote.write_json(f"{key[:-4]}.json", asdict(record))
        except (ObjectStoreError, OSError) as error:
            logger.warning(f"data: {self._options.remote}/{key} cannot be written ({error})")

    def _make_room(self) -> None:
        """Remove the tokens of the chunks that were used least recently, until the rest fits into the cache."""
        files = []
        for path in self._folder.glob("*.bin"):
            with suppress(FileNotFoundError):  # removed by another process
                status = path.stat()
                files.append((status.st_mtime_ns, status.st_size, path))
        left = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if left <= self._options.cache_bytes:
                return
            if int(path.stem) not in self.needed:
                path.unlink(missing_ok=True)
                left -= size

    def _tokens_path(self, index: int) -> Path:
        return self._folder / f"{index:08d}.bin"

    def _record_path(self, index: int) -> Path:
        return self._folder / f"{index:08d}.json"


def _parse_record(content: dict[str, object]) -> ShardRecord:
    record = ShardRecord(**content)  # type: ignore[arg-type]
    if not isinstance(record.tokens, int) or not isinstance(record.sha256, str):
        raise TypeError("it is not the record of a chunk")
    return record


def _name_originals(text: str, files: tuple[SourceFile, ...], copies: list[SourceFile]) -> str:
    """Replace the paths of copies in a message by the addresses that they were fetched from."""
    for file, copy in zip(files, copies, strict=True):
        if is_address(file.name):
            text = text.replace(str(copy.path), file.name)
    return text


def _say_lost(counts: SampleCounts) -> str:
    became = "dropped" if counts.num_dropped else "cut"
    return (
        f"{counts.num_overlong:,} are longer than data.sequence_len and were {became} ({counts.lost_tokens:,} tokens "
        f"lost), and {counts.num_unlabelled:,} were dropped because they have no target"
    )


def _serve(connection: Connection, encoding: Encoding, rule: SampleRule | None) -> None:
    serve_requests(connection, encoding, lambda encoder, request: write_chunk(encoder, rule, *request))


def write_chunk(
    encoder: TaskEncoder, rule: SampleRule | None, files: list[SourceFile], folder: Path, name: str
) -> tuple[ShardRecord, RecordCounts, SampleCounts]:
    """Write the tokens of files, or their samples if there is a rule, to `folder/name`.

    Returns its record, what could be read, and what became of samples. Raises DataError.
    """
    counts, state = RecordCounts(), SinkState()
    source = Source("data.train", files[0].name)
    with open_sink(folder, name, state, source, rule, encoder.dtype, MAX_CHUNK_TOKENS) as sink:
        for task in plan_tasks(0, files):
            for item in encoder.run(task).found:
                if isinstance(item, Broken):
                    counts.add_broken(item)
                else:
                    counts.documents += item.is_first
                    state.documents += item.is_first
                    sink.append(item)
        sink.finish()
    if rule is None:
        records = state.parts["tokens"].shards
    else:
        records = write_rows(folder, name, state, rule, encoder.dtype)
    if not records:
        (folder / name).touch()
        return ShardRecord(name, 0, 0, "", ""), counts, state.counts
    [record] = records
    (folder / record.file).rename(folder / name)
    return ShardRecord(name, record.tokens, record.bytes, record.sha256, record.blocks), counts, state.counts


def row_size(sequence_len: int) -> int:
    """Return the numbers in a row."""
    return 3 * sequence_len + 1


def write_rows(folder: Path, prefix: str, state: SinkState, rule: SampleRule, dtype: str) -> tuple[ShardRecord, ...]:
    """Pack the samples that a finished sink wrote with `dtype`, and write a row for each pack.

    The rows are in the order in which the longest sample of each was read. So rows near each other do not have samples
    of the same length, although the longest samples are packed first.
    """
    if not state.counts.samples:
        return ()
    parts = {name: part.shards for name, part in state.parts.items()}
    span = (0, state.counts.samples)
    packs = write_packs(folder, f"{prefix}.packs", parts["lengths"], span, rule, MAX_CHUNK_TOKENS)
    tokens, targets = TokenStore(folder, parts["tokens"], dtype), TokenStore(folder, parts["targets"], TARGETS_DTYPE)
    packed = PackedDataset(folder, tokens, targets, packs, rule.sequence_len, rule.padding, apart=True)
    order = _find_reading_order(folder, packs)
    with ShardWriter(folder, f"{prefix}.rows", ROW_DTYPE, MAX_CHUNK_TOKENS) as writer:
        for first in range(0, order.size, _ROWS_AT_ONCE):
            writer.append(_as_rows(packed.read_samples(order[first : first + _ROWS_AT_ONCE])).reshape(-1))
        return writer.finish()


def _find_reading_order(folder: Path, packs: PackRecord) -> npt.NDArray[np.int64]:
    """Return the packs `[n]` in the order in which the longest document of each was read."""
    stops, index = (TokenStore(folder, shards, INDEX_DTYPE) for shards in (packs.stops, packs.documents))
    bounds = np.concatenate([[0], stops.read(0, packs.packs).astype(np.int64)])
    firsts, lengths = index.read(0, index.num_tokens).astype(np.int64).reshape(-1, 2).T
    longest_first = np.lexsort((firsts, -lengths, np.repeat(np.arange(packs.packs), np.diff(bounds))))
    return np.argsort(firsts[longest_first[bounds[:-1]]], kind="stable")


def _as_rows(samples: Samples) -> npt.NDArray[np.uint32]:
    count = len(samples.inputs)
    judged = samples.extra.get(GOOD, np.full(count, -1)).reshape(count, 1)
    assert samples.documents is not None
    parts = (samples.inputs, samples.labels, samples.documents, judged)
    return np.concatenate([part.astype(np.int32) for part in parts], axis=1).view(np.uint32)


def read_rows(rows: npt.NDArray[np.uint32], apart: bool) -> Samples:
    """Return rows `[n, row_size]` as samples."""
    length = rows.shape[1] // 3
    inputs, labels, documents, judged = np.split(rows.view(np.int32), [length, 2 * length, 3 * length], axis=1)
    extra = {GOOD: judged[:, 0] == 1} if (judged >= 0).any() else {}
    return Samples(inputs.astype(np.int64), labels.astype(np.int64), documents, apart, extra)


STREAM_NAME = "stream.json"
_MOST_BYTES = 2**32  # names of millions of files


def cut_chunks(files: Iterable[SourceFile]) -> Iterator[Files]:
    """Yield the files of each chunk: as many in a row as have about PIECE_BYTES together, at least one."""
    taken, num_bytes = list[SourceFile](), 0
    for file in (file for file in files if file.size):
        taken.append(file)
        num_bytes += file.size
        if num_bytes >= PIECE_BYTES:
            yield tuple(taken)
            taken, num_bytes = [], 0
    if taken:
        yield tuple(taken)


def save_plan(folder: Path, plan: StreamPlan) -> None:
    """Write stream.json."""
    chunks = [[{**asdict(file), "fields": file.fields.to_stored()} for file in files] for files in plan.chunks]
    write_text(folder / STREAM_NAME, json.dumps({**asdict(plan), "chunks": chunks}, default=os.fspath))


def load_plan(folder: Path) -> StreamPlan:
    """Read stream.json. Raises DataError if it cannot be read."""
    path = folder / STREAM_NAME
    try:
        content = read_json(path, _MOST_BYTES)
        encoding = validator_of(Encoding).validate_python(content["encoding"])
        chunks = tuple(tuple(map(_parse_file, files)) for files in content["chunks"])
        rule = content.get("samples")
        return StreamPlan(encoding, content["max_broken_fraction"], chunks, rule and SampleRule(**rule))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} cannot be read ({error}); delete {folder} and run again.") from error


def _parse_file(values: dict[str, Any]) -> SourceFile:
    rows, fields = values["rows"] and tuple(values["rows"]), values["fields"]
    names = fields.get("names") or [(name, fields[kind]) for kind, name in STORED.items() if fields.get(kind)]
    parsed = Fields(fields.get("format"), tuple(map(tuple, names)))
    return SourceFile(**{**values, "path": Path(values["path"]), "fields": parsed, "rows": rows})


def digest_plan(plan: StreamPlan) -> str:
    """A hash of what decides the tokens and samples: the settings, and name, size and version of each file."""
    files = [
        [file.name, file.format, file.size, file.revision or file.mtime_ns, file.rows, str(file.fields)]
        for chunk in plan.chunks
        for file in chunk
    ]
    content: list[Any] = [plan.encoding.fingerprint, plan.encoding.separator, files]
    if plan.samples is not None:
        fields = [f"Example{file.fields!r}" for chunk in plan.chunks for file in chunk]  # as the class was called
        instruction = plan.encoding.instruction
        content.append([asdict(plan.samples), instruction and asdict(instruction), fields])
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]
