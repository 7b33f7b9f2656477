"""Tokenize a corpus into the shards of a folder. An interrupted writer can be resumed."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

from echelon.ground.errors import DataError
from echelon.ground.progress import Progress
from echelon.ground.sizes import render_bytes
from echelon.learn.data.catalog import (
    FORMAT_VERSION,
    Manifest,
    PackRecord,
    SampleRecord,
    SampleRule,
    SourceRecord,
    Split,
)
from echelon.learn.data.corpus import CorpusEntry, choose_by_hash, corpus_bytes
from echelon.learn.data.packing import write_packs
from echelon.learn.data.readers import name_place
from echelon.learn.data.readers.record import Broken
from echelon.learn.data.record_counts import describe_oddity, refuse_broken
from echelon.learn.data.sinks import EntryState, Sink, SinkState, WritingJournal, open_sink, shard_prefix
from echelon.learn.data.source import Source
from echelon.learn.data.split import STREAMS, divide_streams
from echelon.learn.data.tokenize import Encoding, Piece, Task, TokenizedTask, plan_tasks, token_dtype, tokenize_tasks

logger = logging.getLogger(__name__)

POINT_BYTES = 2**26
"""After this many bytes of the sources, the written data is flushed to disk and the progress is saved."""


@dataclass(frozen=True)
class WritingOptions:
    """The settings that determine the content of the shards, besides text and tokenizer.

    `mixture`: each training source is split and sampled separately. `deduplicate`: drop copies. `samples`: the rule
    that turns documents into samples; None: documents form one text.
    """

    validation_fraction: float
    mixture: bool
    max_shard_tokens: int
    max_broken_fraction: float
    deduplicate: bool
    samples: SampleRule | None


class CorpusWriter:
    """Tokenizes a corpus into the shards of a folder, resuming an interrupted writer. Use it only once."""

    def __init__(
        self, folder: Path, corpus: Sequence[CorpusEntry], encoding: Encoding, options: WritingOptions
    ) -> None:
        self._folder = folder
        self._corpus = corpus
        self._encoding = encoding
        self._options = options
        self._dtype = token_dtype(encoding.vocab_size).__name__
        self._by_hash = choose_by_hash(corpus, options.validation_fraction, encoding.separator, mixture=options.mixture)
        # Validation text first, because its documents must not be trained on.
        self._order = sorted(range(len(corpus)), key=lambda index: corpus[index].stream != "validation")
        self._num_finished = 0
        self._sinks: dict[str, Sink] = {}

    def write(self, workers: int) -> Manifest:
        """Write the shards and return the manifest that describes them.

        Raises DataError for unusable text or too little text.
        """
        with WritingJournal(self._folder, len(self._corpus)) as self._journal, ExitStack() as self._open:
            state = self._journal.state
            is_limited = any(entry.source.max_samples is not None for entry in self._corpus)
            total = 0 if is_limited else corpus_bytes(self._corpus)
            if self._journal.is_resumed:
                logger.info(f"tokenizing: resuming after {render_bytes(state.done_bytes)}")
            progress = Progress("tokenizing", total, logger, done_bytes=state.done_bytes)
            last_point = state.done_bytes
            with closing(tokenize_tasks(self._plan_tasks(), self._encoding, workers)) as results:
                for task, result in results:
                    self.take(task, result)
                    progress.add(result.num_bytes)
                    if state.done_bytes - last_point >= POINT_BYTES:
                        last_point = state.done_bytes
                        for sink in self._sinks.values():
                            sink.sync()
                        self._journal.save()
            self._finish_entries(None)
            progress.finish()
            return self._describe()

    def finish(self) -> None:
        """Remove the files that are needed only to resume. The manifest must be on disk."""
        self._journal.remove()

    def _plan_tasks(self) -> Iterator[Task]:
        for index in self._order:
            entry = self._journal.state.entries[index]
            tasks = islice(plan_tasks(index, self._corpus[index].files), entry.num_tasks, None)
            while not entry.is_full and (task := next(tasks, None)) is not None:
                yield task

    def take(self, task: Task, result: TokenizedTask) -> None:
        """Write the tokens of the next task."""
        self._finish_entries(task.source)
        self._open_entry(task.source)
        state, index = self._journal.state, task.source
        entry, limit = state.entries[index], self._corpus[index].source.max_samples
        for item in result.found:
            room = None if limit is None else limit - entry.records
            begins = isinstance(item, Broken) or item.is_first
            entry.is_full = entry.is_full or (room == 0 and begins)
            if entry.is_full:
                break
            if isinstance(item, Broken):
                self._leave_out(index, item if room is None else replace(item, count=min(item.count, room)))
                continue
            if item.is_first:
                state.stream = self._choose_stream(index, item)
            if state.stream is not None:
                self._sinks[state.stream].append(item)
            for odd in item.oddities:
                count, where = entry.odd.get(odd.problem, (0, name_place(odd)))
                entry.odd[odd.problem] = (count + 1, where)
        entry.num_tasks += 1
        state.done_bytes += result.num_bytes

    def _choose_stream(self, index: int, piece: Piece) -> str | None:
        """Choose the stream of the document that starts with this piece; None for a copy."""
        entry, home = self._journal.state.entries[index], self._corpus[index].stream
        entry.documents += 1
        if piece.digest is not None and not self._journal.add_document(piece.digest) and home == "train":
            entry.duplicates += 1
            return None
        stream = "validation" if piece.hash < self._threshold(index) else home
        if stream == home and not self._options.deduplicate:
            self._journal.state.copies.add(piece.hash, home == "validation")
        entry.sinks[stream].documents += 1
        return stream

    def _threshold(self, index: int) -> int:
        return int(self._options.validation_fraction * 2**64) if self._by_hash[index] else 0

    def _leave_out(self, index: int, broken: Broken) -> None:
        entry, most = self._journal.state.entries[index], self._options.max_broken_fraction
        entry.add_broken(broken)
        if entry.is_hopeless or most == 0:
            raise refuse_broken(self._corpus[index].source, entry, most, None)

    def _open_entry(self, index: int) -> None:
        """Open the sinks for the streams of a source, if they are not open yet."""
        if self._sinks:
            return
        entry = self._journal.state.entries[index]
        for stream in STREAMS if self._threshold(index) else (self._corpus[index].stream,):
            sink = entry.sinks.setdefault(stream, SinkState())
            prefix, options = shard_prefix(stream, index), self._options
            writer = open_sink(
                self._folder,
                prefix,
                sink,
                self._corpus[index].source,
                options.samples,
                self._dtype,
                options.max_shard_tokens,
            )
            self._sinks[stream] = self._open.enter_context(writer)

    def _finish_entries(self, following: int | None) -> None:
        """Finish the sources before `following`, or all for None. Finishing a source twice has no effect."""
        while self._num_finished < len(self._order) and self._order[self._num_finished] != following:
            index = self._order[self._num_finished]
            self._open_entry(index)
            for sink in self._sinks.values():
                sink.finish()
            self._sinks = {}
            self._open.close()
            self._num_finished += 1
            self._check_entry(index)

    def _check_entry(self, index: int) -> None:
        """Raise DataError for a source with too little usable text, and log what was dropped."""
        entry, source = self._journal.state.entries[index], self._corpus[index].source
        if entry.broken > self._options.max_broken_fraction * entry.records:
            raise refuse_broken(source, entry, self._options.max_broken_fraction, entry.records)
        if not entry.documents:
            raise DataError(f"{source} is empty.")
        if self._options.samples is not None:
            self._check_samples(source, entry, self._options.samples)
        if entry.broken:
            logger.warning(f"{source.key}: dropped {entry.broken:,} of {entry.records:,} records: {entry.say_places()}")
        if self._options.deduplicate and self._corpus[index].stream == "train":
            logger.info(f"{source.key}: dropped {entry.duplicates:,} of {entry.documents:,} documents as copies")

    @staticmethod
    def _check_samples(source: Source, entry: EntryState, rule: SampleRule) -> None:
        counts = [sink.counts for sink in entry.sinks.values()]
        if not any(count.samples for count in counts):
            overlong, unlabelled = (
                sum(getattr(count, name) for count in counts) for name in ("num_overlong", "num_unlabelled")
            )
            raise DataError(
                f"{source}: none of {entry.documents:,} samples can be used: {overlong:,} are longer than "
                f"data.sequence_len={rule.sequence_len} (data.on_overlong={rule.on_overlong}), and {unlabelled:,} "
                "have no target that fits; increase data.sequence_len or change data.train_on."
            )

    def _describe(self) -> Manifest:
        records: dict[str, list[SourceRecord]] = {stream: [] for stream in STREAMS}
        for index, entry in enumerate(self._journal.state.entries):
            for stream, sink in entry.sinks.items():
                records[stream].append(self._record(index, entry, sink))
        streams = {stream: tuple(records[stream]) for stream in STREAMS}
        num_train = sum(entry.stream == "train" for entry in self._corpus)
        options = self._options
        train, validation = divide_streams(
            streams, options.validation_fraction, self._by_hash[:num_train], mixture=options.mixture
        )
        if options.samples is not None:
            _check_pairs(streams)
            splits = enumerate((*train, *validation))
            packs = (self._pack(index, split, streams[split.stream]) for index, split in splits)
            train = tuple(replace(split, packs=next(packs)) for split in train)
            validation = tuple(replace(split, packs=next(packs)) for split in validation)
        return Manifest(
            format_version=FORMAT_VERSION,
            dtype=self._dtype,
            tokenizer_fingerprint=self._encoding.fingerprint,
            vocab_size=self._encoding.vocab_size,
            separator=self._encoding.separator,
            stops=self._encoding.stops,
            samples=options.samples,
            streams=streams,
            train=train,
            validation=validation,
            remarks=(*self._describe_oddities(), *self._journal.state.copies.describe()),
        )

    def _describe_oddities(self) -> Iterator[str]:
        for entry, state in zip(self._corpus, self._journal.state.entries, strict=True):
            for what, (count, where) in sorted(state.odd.items()):
                yield describe_oddity(entry.source.key, what, count, state.documents, where)

    def _pack(self, index: int, split: Split, records: Sequence[SourceRecord]) -> PackRecord:
        rule, max_shard_tokens = self._options.samples, self._options.max_shard_tokens
        assert rule is not None
        lengths = [shard for record in records if record.labelled for shard in record.labelled.lengths]
        span = (split.start, split.stop)
        return write_packs(self._folder, f"packs-{index:03d}", lengths, span, rule, max_shard_tokens)

    def _record(self, index: int, entry: EntryState, sink: SinkState) -> SourceRecord:
        source, shards = self._corpus[index].source, sink.parts["tokens"].shards
        labelled = None
        if self._options.samples is not None:
            labelled = SampleRecord(
                targets=sink.parts["targets"].shards,
                lengths=sink.parts["lengths"].shards,
                records=sink.parts["records"].shards,
                record_lengths=sink.parts["record_lengths"].shards,
                **asdict(sink.counts),
            )
        return SourceRecord(
            source=source.key,
            name=source.name,
            path=source.path,
            documents=sink.documents,
            tokens=sum(shard.tokens for shard in shards),
            text_bytes=sink.text_bytes,
            shards=shards,
            num_broken=entry.broken,
            broken=tuple(entry.places),
            num_duplicates=entry.duplicates,
            labelled=labelled,
        )


def _check_pairs(streams: dict[str, tuple[SourceRecord, ...]]) -> None:
    """Raise DataError if one source has single texts and another has preference pairs."""
    kinds: dict[int, str] = {}
    for record in (record for records in streams.values() for record in records):
        if record.labelled is not None and record.labelled.samples:
            kinds.setdefault(record.labelled.documents_each, record.source)
    if len(kinds) > 1:
        raise DataError(
            f"{' and '.join(kinds.values())}: one has single texts, the other pairs of a chosen and a rejected text; "
            f"use separate recipes."
        )
