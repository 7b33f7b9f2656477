"""What a teacher predicts for every target of prepared data: files beside the data, and datasets that have them too.

The values are in pieces, safetensors files of some consecutive samples, each complete or not there. `taught.json` is
written when all pieces are. A piece has `tokens` [targets, k], `log_probabilities` [targets, k + 1], fp32 (see
`echelon.learn.objectives.distill`), and `stops` [samples]: the targets up to the end of each sample.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from echelon.ground.errors import DataError
from echelon.ground.stored import read_as, sync_path, write_bytes, write_json
from echelon.learn.data.mixture import MixtureDataset
from echelon.learn.data.prepared import PreparedData
from echelon.learn.data.shards import NO_LABEL, Dataset, Samples

TOKENS, SCORES = "teacher_tokens", "teacher_log_probabilities"
"""The keys of `Samples.extra` with the k likeliest tokens of a teacher, int32 `[n, seq, k]`, and their
log-probabilities, followed by that of all other tokens together, fp32 `[n, seq, k + 1]`."""

_FOLDER, _RECORD = "teachers", "taught.json"
_PIECE_BYTES = 2**27
_FORMAT = 1


@dataclass(frozen=True)
class TaughtRecord:
    """What determines the values of a teacher, and taught.json once they are complete.

    Attributes:
        teacher: its name in the recipe.
        fingerprint: of its config and weights.
        temperature: what its logits were divided by.
        sequence_len, apart: how the data is cut into samples, and whether their documents attend only to themselves.
        vocab_size: the width of its logits.
        files: the bytes of each piece; empty before they are there.
    """

    teacher: str
    fingerprint: str
    top_k: int
    temperature: float
    sequence_len: int
    apart: bool
    vocab_size: int
    files: Mapping[str, int] = field(default_factory=dict)
    format: int = _FORMAT

    @property
    def num_tokens(self) -> int:
        """Tokens per target."""
        return min(self.top_k, self.vocab_size)

    @property
    def token_dtype(self) -> npt.DTypeLike:
        """How ids are stored."""
        return np.uint16 if self.vocab_size <= 2**16 else np.int32

    @property
    def bytes_per_target(self) -> int:
        """The size of the values of one target."""
        return self.num_tokens * np.dtype(self.token_dtype).itemsize + (self.num_tokens + 1) * 4

    @property
    def samples_per_piece(self) -> int:
        """Consecutive samples in a file."""
        return max(1, _PIECE_BYTES // (self.sequence_len * self.bytes_per_target))

    def folder(self, data: PreparedData) -> Path:
        """The folder of the values."""
        identity = [self.fingerprint, self.top_k, self.temperature, self.sequence_len, self.apart, self.format]
        return data.path / _FOLDER / hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]

    def fits(self, other: "TaughtRecord") -> bool:
        """Whether both are of the same samples and the same number of tokens, of whatever teacher."""
        kinds = [(one.top_k, one.temperature, one.sequence_len, one.apart, one.format) for one in (self, other)]
        return kinds[0] == kinds[1]


@dataclass(frozen=True)
class TaughtPart:
    """Samples [start, stop) of one dataset, in one file."""

    name: str
    dataset: Dataset
    start: int
    stop: int


def list_pieces(data: PreparedData, record: TaughtRecord) -> list[TaughtPart]:
    """Return the pieces of all training and validation data, in order."""
    return [
        TaughtPart(
            _piece_name(name, number), dataset, start, min(start + record.samples_per_piece, dataset.num_samples)
        )
        for name, dataset in _name_datasets(data).items()
        for number, start in enumerate(range(0, dataset.num_samples, record.samples_per_piece))
    ]


def _piece_name(name: str, number: int) -> str:
    return f"{name}.{number:06d}.safetensors"


def _name_datasets(data: PreparedData) -> dict[str, Dataset]:
    parts = data.train.parts if isinstance(data.train, MixtureDataset) else (data.train,)
    named = {f"train-{index}": part for index, part in enumerate(parts)}
    return named | {f"validation-{index}": part.dataset for index, part in enumerate(data.validation)}


def count_targets(data: PreparedData) -> int:
    """Return an upper bound of the targets of all data: its tokens."""
    return sum(dataset.num_tokens for dataset in _name_datasets(data).values())


def write_piece(
    path: Path, record: TaughtRecord, counts: Sequence[int], tokens: npt.NDArray[Any], scores: npt.NDArray[Any]
) -> int:
    """Write the values of some samples, so that the file is complete or not there; returns its bytes.

    Args:
        counts: the targets of each sample; tokens `[targets, k]` and scores `[targets, k + 1]` are those of all.
    """
    from safetensors.numpy import save

    content = save(
        {
            "stops": np.cumsum(np.array(counts, dtype=np.int64), dtype=np.int64),
            "tokens": np.ascontiguousarray(tokens.astype(record.token_dtype)),
            "log_probabilities": np.ascontiguousarray(scores.astype(np.float32)),
        }
    )
    write_bytes(path, content)
    sync_path(path.parent)
    return len(content)


def finish_record(folder: Path, record: TaughtRecord, pieces: Sequence[TaughtPart]) -> None:
    """Write taught.json, now that every piece is there."""
    sizes = {piece.name: (folder / piece.name).stat().st_size for piece in pieces}
    write_json(folder / _RECORD, asdict(replace(record, files=sizes)))


def is_complete(folder: Path) -> bool:
    """Whether a folder has all values of a teacher."""
    return (folder / _RECORD).is_file()


def find_records(data: PreparedData) -> Iterator[tuple[Path, TaughtRecord]]:
    """Yield the folders beside the data that have all values of a teacher. Raises DataError for a damaged record."""
    for path in sorted((data.path / _FOLDER).glob(f"*/{_RECORD}")):
        try:
            record = read_as(path, TaughtRecord)
        except (OSError, ValueError) as error:
            raise DataError(f"{path} cannot be read ({error}); delete {path.parent} and prepare again.") from error
        yield path.parent, record


def with_teacher(data: PreparedData, folder: Path, record: TaughtRecord) -> PreparedData:
    """Return the data with a teacher's values in `Samples.extra`. Raises DataError for files of another size."""
    for piece in list_pieces(data, record):
        size = record.files.get(piece.name)
        path = folder / piece.name
        if size is None or not path.is_file() or path.stat().st_size != size:
            raise DataError(
                f"{path} is missing or has another size than {folder / _RECORD} says; delete {folder} and prepare the "
                "teacher's values again."
            )
    named = {name: TaughtDataset(dataset, folder, name, record) for name, dataset in _name_datasets(data).items()}
    parts = [dataset for name, dataset in named.items() if name.startswith("train-")]
    validation = tuple(
        replace(part, dataset=named[f"validation-{index}"]) for index, part in enumerate(data.validation)
    )
    return replace(data, train=parts[0] if len(parts) == 1 else MixtureDataset(parts), validation=validation)


class TaughtDataset(Dataset):
    """A dataset whose samples have a teacher's values for their targets in `extra`, and zeros elsewhere."""

    def __init__(self, dataset: Dataset, folder: Path, name: str, record: TaughtRecord) -> None:
        self.sequence_len = dataset.sequence_len
        self._dataset = dataset
        self._folder, self._name, self._record = folder, name, record
        self._files: dict[int, _PieceFile] = {}

    @property
    @override
    def num_tokens(self) -> int:
        return self._dataset.num_tokens

    @property
    @override
    def num_samples(self) -> int:
        return self._dataset.num_samples

    @override
    def iter_tokens(self, chunk_tokens: int = 2**22) -> Iterator[npt.NDArray[Any]]:
        return self._dataset.iter_tokens(chunk_tokens)

    @override
    def read_samples(self, sample_ids: npt.NDArray[np.int64]) -> Samples:
        samples = self._dataset.read_samples(sample_ids)
        top_k = self._record.num_tokens
        tokens = np.zeros((*samples.labels.shape, top_k), dtype=np.int32)
        scores = np.zeros((*samples.labels.shape, top_k + 1), dtype=np.float32)
        for row, sample in enumerate(sample_ids.tolist()):
            number, index = divmod(sample, self._record.samples_per_piece)
            values = self._open(number).read(index)
            labelled = samples.labels[row] != NO_LABEL
            if len(values[0]) != labelled.sum():
                raise DataError(
                    f"{self._folder} has {len(values[0])} targets of a sample with {labelled.sum()}; delete it and "
                    "prepare the teacher's values again."
                )
            tokens[row, labelled], scores[row, labelled] = values
        return replace(samples, extra={**samples.extra, TOKENS: tokens, SCORES: scores})

    def _open(self, number: int) -> "_PieceFile":
        if number not in self._files:
            self._files[number] = _PieceFile(self._folder / _piece_name(self._name, number))
        return self._files[number]


class _PieceFile:
    """A piece, memory-mapped."""

    def __init__(self, path: Path) -> None:
        """Raises DataError for a file that safetensors cannot open."""
        from safetensors import SafetensorError, safe_open

        try:
            self._file: Any = safe_open(path, framework="np")
        except (OSError, SafetensorError) as error:
            raise DataError(f"{path} cannot be read ({error}); delete {path.parent} and prepare again.") from error

    @cached_property
    def _stops(self) -> npt.NDArray[np.int64]:
        return np.concatenate([[0], self._file.get_tensor("stops")])

    def read(self, place: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return the tokens and the log-probabilities of the targets of a sample, by its place in the piece."""
        start, stop = int(self._stops[place]), int(self._stops[place + 1])
        return self._file.get_slice("tokens")[start:stop], self._file.get_slice("log_probabilities")[start:stop]
