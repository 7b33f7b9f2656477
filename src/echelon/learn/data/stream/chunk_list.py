"""The chunks of a text that is prepared while a run trains: which files, in reading order, and how they are tokenized.

A chunk is a file, or several small ones in a row. Its tokens depend on nothing else, so any process of any machine can
prepare it, at any time.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from echelon.ground.errors import DataError
from echelon.ground.stored import read_json, validator_of, write_text
from echelon.learn.data.catalog import SampleRule
from echelon.learn.data.readers.record import PIECE_BYTES, Fields, SourceFile
from echelon.learn.data.tokenize import Encoding
from echelon.recipe.data_formats import PAIR_FORMATS

STREAM_NAME = "stream.json"
_MOST_BYTES = 2**32  # names of millions of files

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
    write_text(folder / STREAM_NAME, json.dumps(asdict(plan), default=os.fspath))


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
    parsed = Fields(fields["format"], tuple(map(tuple, fields["names"])))
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
        fields = [repr(file.fields) for chunk in plan.chunks for file in chunk]
        instruction = plan.encoding.instruction
        content.append([asdict(plan.samples), instruction and asdict(instruction), fields])
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]
