"""Write the documents of one source and stream into shards, as continuous text or as samples that fit a sequence."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from echelon.ground.errors import DataError
from echelon.learn.data.catalog import LENGTHS_DTYPE, RECORDS_DTYPE, TARGETS_DTYPE, SampleRule
from echelon.learn.data.packing import CONTINUES
from echelon.learn.data.resume import PartState, SinkState, part_prefix
from echelon.learn.data.shards import ShardWriter
from echelon.learn.data.source import Source
from echelon.learn.data.tokenize import Piece


class Sink(ABC):
    """Writes documents into shards, resuming from its state, which also contains the counts. A context manager."""

    def __init__(
        self, folder: Path, prefix: str, state: SinkState, dtypes: Mapping[str, str], max_shard_tokens: int
    ) -> None:
        """`dtypes`: the parts to write, each with its dtype; `tokens` comes first."""
        self._state = state
        self._open = ExitStack()
        self._writers: dict[str, ShardWriter] = {}
        for part, dtype in dtypes.items():
            left = state.parts.setdefault(part, PartState())
            writer = ShardWriter(
                folder, part_prefix(prefix, part), dtype, max_shard_tokens, left.shards, left.open_tokens
            )
            self._writers[part] = self._open.enter_context(writer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    @abstractmethod
    def append(self, piece: Piece) -> None:
        """Add a document, or a piece of one. Raises DataError."""

    def sync(self) -> None:
        """Flush everything to disk and record it in the state."""
        self._state.parts.update({part: PartState(*writer.sync()) for part, writer in self._writers.items()})

    def finish(self) -> None:
        """Flush everything to disk. Nothing can be added afterwards."""
        self._state.parts.update({part: PartState(writer.finish()) for part, writer in self._writers.items()})


class TextSink(Sink):
    """Writes documents one after the other, as one long text."""

    @override
    def append(self, piece: Piece) -> None:
        """Add a document, or a piece of one."""
        self._writers["tokens"].append(piece.tokens)
        if piece.text_bytes is None:
            self._state.text_bytes = None
        elif self._state.text_bytes is not None:
            self._state.text_bytes += piece.text_bytes


class SampleSink(Sink):
    """Writes samples with their targets and document lengths. Samples that do not fit are cut or dropped."""

    def __init__(self, source: Source, rule: SampleRule, *place: Any) -> None:
        """`place`: the arguments of Sink."""
        super().__init__(*place)
        self._source = source
        self._rule = rule
        self._state.text_bytes = None

    @override
    def append(self, piece: Piece) -> None:
        """Add a sample, or a piece of a text that forms one sample."""
        if piece.is_first and piece.ends:
            targets = np.ones(piece.tokens.size, dtype=np.uint8) if piece.targets is None else piece.targets
            is_kept = self._add(piece.tokens, targets, piece.lengths or (piece.tokens.size,))
            self._state.counts.num_overlong += piece.lost_tokens > 0
            self._state.counts.lost_tokens += piece.lost_tokens
            if is_kept and piece.record is not None:
                self._writers["records"].append(np.frombuffer(piece.record, dtype=np.uint8))
                self._writers["record_lengths"].append(np.array([len(piece.record)], dtype=np.uint32))
            return
        state = self._state
        state.begun.extend(piece.tokens[: self._rule.sequence_len + 1 - len(state.begun)].tolist())
        state.begun_tokens += piece.tokens.size
        if piece.ends:
            ids = np.array(state.begun, dtype=piece.tokens.dtype)
            self._add(ids, np.ones(ids.size, dtype=np.uint8), (state.begun_tokens,))
            state.begun, state.begun_tokens = [], 0

    def _add(self, ids: npt.NDArray[Any], targets: npt.NDArray[np.uint8], lengths: Sequence[int]) -> bool:
        """Add a whole sample; return False if it is dropped. If it must be cut, `ids` may be shorter than `lengths`."""
        counts = self._state.counts
        if counts.documents_each not in (0, len(lengths)):
            raise DataError(
                f"{self._source} has both single texts and pairs of a chosen and a rejected text; use separate recipes."
            )
        counts.documents_each = len(lengths)
        fitting = fit_lengths(lengths, self._rule.sequence_len)
        if fitting != tuple(lengths):
            counts.num_overlong += 1
            if not self._may_cut(lengths, sum(lengths) - sum(fitting)):
                return False
        starts = np.cumsum([0, *lengths])[:-1].tolist()
        spans = [slice(start, start + length) for start, length in zip(starts, fitting, strict=True)]
        if not all(targets[span][1:].any() for span in spans):
            counts.num_unlabelled += 1
            return False
        counts.samples += 1
        for span in spans:
            self._writers["tokens"].append(ids[span])
            self._writers["targets"].append(targets[span])
        words = [length + CONTINUES * (number > 0) for number, length in enumerate(fitting)]
        self._writers["lengths"].append(np.array(words, dtype=np.uint32))
        return True

    def _may_cut(self, lengths: Sequence[int], num_beyond: int) -> bool:
        """Return whether a sample that is too long is cut, and count the lost tokens."""
        counts, rule = self._state.counts, self._rule
        if rule.on_overlong == "refuse":
            raise DataError(
                f"{self._source}: sample {self._state.documents} has {' + '.join(map(str, lengths))} tokens and takes "
                f"{sum(lengths) - len(lengths)} positions, more than data.sequence_len={rule.sequence_len}; increase "
                f"it, or set data.on_overlong to cut or drop."
            )
        dropped = rule.on_overlong == "drop"
        counts.num_dropped += dropped
        counts.lost_tokens += sum(lengths) if dropped else num_beyond
        return not dropped


def fit_lengths(lengths: Sequence[int], sequence_len: int) -> tuple[int, ...]:
    """Return the tokens of each document of a sample that fit: all, or equal shares, longer documents taking the rest.

    A document of n tokens takes n - 1 positions.
    """
    fitting = list(lengths)
    room, num_left = sequence_len, len(lengths)
    for index in sorted(range(len(lengths)), key=lambda number: lengths[number]):
        fitting[index] = min(lengths[index], 1 + room // num_left)
        room -= max(0, fitting[index] - 1)
        num_left -= 1
    return tuple(fitting)


def open_sink(
    folder: Path,
    prefix: str,
    state: SinkState,
    source: Source,
    rule: SampleRule | None,
    dtype: str,
    max_shard_tokens: int,
) -> Sink:
    """Open the sink for a source's documents: for samples if there is a rule, else for text."""
    if rule is None:
        return TextSink(folder, prefix, state, {"tokens": dtype}, max_shard_tokens)
    dtypes = {"tokens": dtype, "targets": TARGETS_DTYPE, "lengths": LENGTHS_DTYPE}
    dtypes |= {"records": RECORDS_DTYPE, "record_lengths": LENGTHS_DTYPE}
    return SampleSink(source, rule, folder, prefix, state, dtypes, max_shard_tokens)
