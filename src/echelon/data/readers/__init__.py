"""The formats that are read: one table. A format is a file of this package and a row here.

`record` has what a reader works with and the protocol it fulfils; `compressed` and `sequence` what several share.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from echelon.data.readers.arrays import ArrayReader
from echelon.data.readers.columns import ArrowReader, ColumnReader, ParquetReader, damages
from echelon.data.readers.compressed import COMPRESSIONS
from echelon.data.readers.datasets import HubReader
from echelon.data.readers.ids import NanogptReader, NumpyReader
from echelon.data.readers.lines import JsonLinesReader
from echelon.data.readers.megatron import MegatronReader, is_megatron_index
from echelon.data.readers.record import (
    ALL_FIELDS,
    PIECE_BYTES,
    Broken,
    Odd,
    Reader,
    Reading,
    Record,
    SourceFile,
    Span,
    read_span,
)
from echelon.data.readers.separated import SeparatedReader, read_header
from echelon.data.readers.text import TextReader

_TEXT_SUFFIXES = """
    .txt .text .md .markdown .rst .tex .org .adoc .log .csv .tsv .json .yaml .yml .toml .ini .cfg
    .conf .xml .html .htm .css .scss .sql .py .pyi .pyx .c .h .cc .cpp .cxx .hpp .hh .cu .cuh .m .mm .java .kt
    .scala .go .rs .swift .js .jsx .ts .tsx .vue .rb .php .pl .pm .lua .r .jl .hs .ml .mli .ex .exs .erl .clj
    .lisp .el .scm .f90 .f .cs .fs .vb .dart .zig .nim .sh .bash .zsh .fish .ps1 .bat .cmake .mk .proto .graphql
    .tf .gradle .srt .vtt
"""

TEXT_SUFFIXES = frozenset(_TEXT_SUFFIXES.split())
"""The text files a folder contributes, by suffix in lower case."""


@dataclass(frozen=True)
class Format:
    """A row of the table: the reader, and the suffixes its files have.

    `in_folders`: files of a folder are taken for it by their suffix. Source trees hold .bin and .npy of every kind.
    """

    reader: Reader
    suffixes: tuple[str, ...]
    compressible: bool = False
    in_folders: bool = True


FORMATS: dict[str, Format] = {
    "text": Format(TextReader(), tuple(sorted(TEXT_SUFFIXES)), compressible=True),
    "jsonl": Format(JsonLinesReader(), (".jsonl", ".ndjson"), compressible=True),
    "json": Format(ArrayReader(), (), compressible=True),
    "csv": Format(SeparatedReader(), (".csv", ".tsv"), compressible=True),
    "parquet": Format(ParquetReader(), (".parquet", ".pq")),
    "arrow": Format(ArrowReader(), (".arrow", ".feather", ".ipc")),
    "nanogpt": Format(NanogptReader(), (".bin",), in_folders=False),
    "npy": Format(NumpyReader(), (".npy",), in_folders=False),
    "megatron": Format(MegatronReader(), (".idx",), in_folders=False),
    "hub": Format(HubReader(), (), in_folders=False),
}

_BY_SUFFIX = {suffix: name for name, row in FORMATS.items() for suffix in row.suffixes}


def guess_format(path: Path) -> str | None:
    """The format a file's name tells, `.gz` and `.zst` aside; None for a suffix that no format has."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compressed = bool(suffixes) and suffixes[-1] in COMPRESSIONS
    if compressed:
        suffixes.pop()
    found = _BY_SUFFIX.get(suffixes[-1]) if suffixes else None
    if found is None or (compressed and not FORMATS[found].compressible):
        return None
    if found == "nanogpt" and is_megatron_index(path.with_suffix(".idx")):
        return "megatron"
    return found


def cut_file(file: SourceFile, piece_bytes: int = PIECE_BYTES) -> Iterator[Span]:
    """The spans of a file. See Reader.cut."""
    return FORMATS[file.format].reader.cut(file, piece_bytes)


def read_records(span: Span, reading: Reading) -> Iterator[Record | Broken]:
    """The records of a span. See Reader.read."""
    return read_span(FORMATS[span.file.format].reader, span, reading)


def name_place(record: Broken | Odd) -> str:
    """Where a broken or an odd record is, for people: the file, and the line, row or record where there is one."""
    file = record.file
    return str(file.path) if record.position is None else FORMATS[file.format].reader.place(file, record.position)


def count_documents(files: Iterable[SourceFile], limit: int, reading: Reading) -> int:
    """How many documents the files hold, counted up to `limit` and no further."""
    count = 0
    for file in files:
        if count >= limit:
            break
        count += FORMATS[file.format].reader.count(file, limit - count, reading)
    return count


def field_names(file: SourceFile) -> tuple[str, ...]:
    """The names of the fields of a file of records: a table's columns, or what the first record has that can be read.

    Raises DataError for a file that cannot be opened; none for one that is damaged, which is found when it is read.
    """
    reader = FORMATS[file.format].reader
    if not file.size and file.format != "hub":
        return ()
    if isinstance(reader, ColumnReader):
        try:
            return tuple(reader.columns(file.path))
        except damages():
            return ()
    if isinstance(reader, SeparatedReader):
        return tuple(read_header(file))
    for span in cut_file(replace(file, fields=ALL_FIELDS), 1):
        for found in read_records(span, Reading()):
            if isinstance(found, Record) and isinstance(found.content, Mapping):
                return tuple(found.content)
    return ()
