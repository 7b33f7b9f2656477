"""Where text comes from: the files of a source, cut into spans that any process can read on its own.

A *document* is one text file, or one line of a .jsonl file. A *span* is a range of bytes of one file: a whole file, a
run of .jsonl lines, or one piece of a document too long to be held at once. Spans are a function of the files alone, so
however many processes tokenize them, the tokens are the same.

Where a long document is cut matters, because a tokenizer does not see across the cut. Byte-level BPE first splits text
with a regular expression and never merges across its splits, so a cut is exact when the expression splits there anyway
and treats the end of the text as it would the next character. The expressions in use (GPT-2, Llama 3, Qwen, o200k) do
both at a newline between two characters that are not white space. White space before the newline would not do: GPT-2
gives the last character of such a run to what follows, and has nothing to give it to at the end of a piece. Nor would a
slash after it: o200k joins `.`, newline and `/`. A text without such a place is cut between a letter or digit and
the line end after it, exact too; one without line ends, between any two characters, where a token may differ.
"""

import codecs
import glob
import json
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from echelon.errors import DataError

PYTHON_STDLIB = "python-stdlib"
"""The source every machine has: the running Python's standard library, its *.py files."""

PIECE_BYTES = 2**20
"""A span holds at least this much of its file, if there is so much left, and about as much."""

_TEXT_SUFFIXES = """
    .txt .text .md .markdown .rst .tex .org .adoc .log .csv .tsv .json .jsonl .ndjson .yaml .yml .toml .ini .cfg
    .conf .xml .html .htm .css .scss .sql .py .pyi .pyx .c .h .cc .cpp .cxx .hpp .hh .cu .cuh .m .mm .java .kt
    .scala .go .rs .swift .js .jsx .ts .tsx .vue .rb .php .pl .pm .lua .r .jl .hs .ml .mli .ex .exs .erl .clj
    .lisp .el .scm .f90 .f .cs .fs .vb .dart .zig .nim .sh .bash .zsh .fish .ps1 .bat .cmake .mk .proto .graphql
    .tf .gradle .srt .vtt
"""

TEXT_SUFFIXES = frozenset(_TEXT_SUFFIXES.split())
"""The files a folder contributes, by suffix in lower case."""

JSONL_SUFFIXES = frozenset({".jsonl", ".ndjson"})
TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})
"""Left out of `python-stdlib`: two thirds of its bytes are tests, much of them tables of values."""

SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages", "node_modules"})

_WINDOW_BYTES = 2**16
_SEARCHED_WINDOWS = 16
_LINE_STARTS_WORD = re.compile(r"(?<=\S)\n(?=[^\s/])")
_WORD_ENDS_LINE = re.compile(r"(?<=[^\W_])(?=\r?\n)")

Kind = Literal["text", "jsonl"]


@dataclass(frozen=True)
class Source:
    """One entry of `data.train` or `data.validation`.

    `key` is its place in the recipe, for messages; `path` a file, a folder, a glob or `python-stdlib`; `field` the
    .jsonl field that holds the text; `name` what lines and metrics call it.
    """

    key: str
    path: str
    format: str = "auto"
    field: str = "text"
    name: str = ""

    def __str__(self) -> str:
        """The path as the user gave it, for messages: `data.train.0.path=PATH`, or `--data PATH`."""
        return f"{self.key} {self.path}" if self.key.startswith("--") else f"{self.key}.path={self.path}"


@dataclass(frozen=True)
class TextFile:
    """A file of a source, as it was when listed. `required`: named by the user, so it may not be skipped."""

    path: Path
    name: str
    kind: Kind
    field: str
    size: int
    mtime_ns: int
    required: bool


@dataclass(frozen=True)
class Span:
    """Bytes [start, stop) of a file."""

    file: TextFile
    start: int
    stop: int

    @property
    def is_first(self) -> bool:
        """Whether the file starts here."""
        return self.start == 0

    @property
    def is_last(self) -> bool:
        """Whether the file ends here."""
        return self.stop == self.file.size


class UnreadableText(Exception):
    """A file of a folder is not UTF-8 text and is to be skipped."""


def list_files(source: Source) -> tuple[TextFile, ...]:
    """The files of a source, in the order their text is read: by relative path.

    Raises DataError naming the recipe key when there is nothing at the path or no text file in it.
    """
    if source.path == PYTHON_STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        found = [(path, name) for path, name in _walk(root) if path.suffix == ".py" and not _is_of_tests(name)]
        return _describe(source, found, required=False)
    path = Path(source.path).expanduser()
    if path.is_file():
        return _describe(source, [(path, path.name)], required=True)
    if path.is_dir():
        suffixes = JSONL_SUFFIXES if source.format == "jsonl" else TEXT_SUFFIXES
        found = [(file, name) for file, name in _walk(path) if file.suffix.lower() in suffixes]
        if not found:
            raise DataError(
                f"{source} holds no text file (by suffix, such as .txt, .md, .py, .jsonl); name "
                f"the files with a glob such as {source.path}/** if theirs is another."
            )
        return _describe(source, found, required=False)
    if glob.has_magic(source.path):
        names = sorted(name for name in glob.glob(str(path), recursive=True) if os.path.isfile(name))
        if names:
            return _describe(source, [(Path(name), name) for name in names], required=False)
    raise DataError(
        f"{source}: no such file or folder, seen from {Path.cwd()}; give a text file, a folder, "
        f"a glob or {PYTHON_STDLIB}."
    )


def _is_of_tests(name: str) -> bool:
    return not TEST_FOLDERS.isdisjoint(Path(name).parts[:-1])


def _walk(root: Path) -> list[tuple[Path, str]]:
    """Every file under a folder with its relative path, sorted by that; hidden and cache folders are left out."""
    found: list[tuple[Path, str]] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_FOLDERS and not name.startswith(".")]
        paths = (Path(folder, name) for name in names if not name.startswith("."))
        found.extend((path, path.relative_to(root).as_posix()) for path in paths if path.is_file())
    return sorted(found, key=lambda item: item[1])


def _describe(source: Source, found: list[tuple[Path, str]], *, required: bool) -> tuple[TextFile, ...]:
    files = []
    for path, name in found:
        is_jsonl = source.format == "jsonl" or (source.format == "auto" and path.suffix.lower() in JSONL_SUFFIXES)
        status = path.stat()
        kind: Kind = "jsonl" if is_jsonl else "text"
        files.append(TextFile(path.resolve(), name, kind, source.field, status.st_size, status.st_mtime_ns, required))
    if not any(file.size for file in files):
        raise DataError(f"{source} holds no text: it is empty. Give text to train on.")
    return tuple(files)


def _open(file: TextFile) -> BinaryIO:
    try:
        return file.path.open("rb")
    except OSError as error:
        raise DataError(f"{file.path} cannot be read: {error.strerror}.") from error


def iter_spans(file: TextFile, piece_bytes: int = PIECE_BYTES) -> Iterator[Span]:
    """Cut a file into spans of about `piece_bytes`; of a long .jsonl file, at line ends.

    Reads only around the cuts. Yields nothing for an empty file.
    """
    start = 0
    if file.size > piece_bytes:
        with _open(file) as stream:
            while file.size - start > piece_bytes:
                stop = _find_cut(stream, start + piece_bytes, file)
                yield Span(file, start, stop)
                start = stop
    if start < file.size:
        yield Span(file, start, file.size)


def _find_cut(stream: BinaryIO, target: int, file: TextFile) -> int:
    """The first good place to cut at or after `target`; the end of the file if there is none."""
    if file.kind == "jsonl":
        return _find_line_end(stream, target, file.size)
    for pattern in (_LINE_STARTS_WORD, _WORD_ENDS_LINE):
        for window in range(_SEARCHED_WINDOWS):
            cut = _search_window(stream, target + window * _WINDOW_BYTES, file.size, pattern)
            if cut is not None:
                return cut
    if target + _SEARCHED_WINDOWS * _WINDOW_BYTES >= file.size:
        return file.size
    stream.seek(target)
    following = stream.read(4)
    is_start = (index for index, byte in enumerate(following) if byte & 0xC0 != 0x80)
    return target + next(is_start, 0)


def _search_window(stream: BinaryIO, offset: int, size: int, pattern: re.Pattern[str]) -> int | None:
    stream.seek(offset)
    # Bytes of a character that the window cuts become surrogates, one each, and turn back into the same bytes. The
    # search keeps away from both edges, so that what it looks at are whole characters.
    text = stream.read(max(0, min(_WINDOW_BYTES, size - offset))).decode("utf-8", "surrogateescape")
    match = pattern.search(text, 4, max(4, len(text) - 4))
    if match is None:
        return None
    return offset + len(text[: match.end()].encode("utf-8", "surrogateescape"))


def _find_line_end(stream: BinaryIO, target: int, size: int) -> int:
    stream.seek(target)
    offset = target
    while window := stream.read(_WINDOW_BYTES):
        index = window.find(b"\n")
        if index >= 0:
            return min(offset + index + 1, size)
        offset += len(window)
    return size


def read_span(span: Span) -> list[bytes]:
    """The non-empty documents of a span, or its piece of one, as UTF-8.

    Raises DataError naming the file, with the line of .jsonl or the byte offset of what is not UTF-8, and
    UnreadableText for a file of a folder that is not text and fits in one span (of longer ones, see `is_text`).
    """
    file = span.file
    with _open(file) as stream:
        stream.seek(span.start)
        data = stream.read(span.stop - span.start)
    if len(data) != span.stop - span.start:
        raise DataError(f"{file.path} became shorter while it was read; run again when it is complete.")
    if file.kind == "jsonl":
        return [text for text in _read_lines(span, data) if text]
    may_skip = not file.required and span.is_first and span.is_last
    if may_skip and b"\0" in data:
        raise UnreadableText(file.name)
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        if may_skip:
            raise UnreadableText(file.name) from error
        raise DataError(
            f"{file.path} is not UTF-8 text: the byte at offset {span.start + error.start} is wrong ({error.reason}); "
            f"convert it, for instance with iconv."
        ) from error
    return [data]


def is_text(file: TextFile) -> bool:
    """Whether a whole file is UTF-8 without zero bytes, read a window at a time."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        with _open(file) as stream:
            while window := stream.read(PIECE_BYTES):
                if "\0" in decoder.decode(window):
                    return False
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def _read_lines(span: Span, data: bytes) -> Iterator[bytes]:
    field = span.file.field
    for index, line in enumerate(data.split(b"\n")):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            text = record[field] if isinstance(record, dict) else None
            if isinstance(text, str):
                yield text.encode("utf-8")
                continue
            problem = "is no JSON object" if not isinstance(record, dict) else f"holds no text in `{field}`"
        except KeyError:
            problem = f"has no field `{field}`; `fields: {{text: NAME}}` beside the path names another"
        except ValueError as error:
            problem = f"cannot be read ({error})"
        raise DataError(f"{span.file.path}:{_line_number(span, index)} {problem}.")


def _line_number(span: Span, index: int) -> int:
    """The number of a span's line in its file, counted only when there is an error to report."""
    count, left = index + 1, span.start
    with span.file.path.open("rb") as stream:
        while window := stream.read(min(PIECE_BYTES, left)):
            count += window.count(b"\n")
            left -= len(window)
    return count


def count_documents(files: Iterable[TextFile], limit: int) -> int:
    """How many documents the files hold, counted up to `limit` and no further."""
    count = 0
    for file in files:
        if count >= limit:
            break
        if file.kind == "text":
            count += file.size > 0 and (file.required or is_text(file))
            continue
        for span in iter_spans(file):
            count += len(read_span(span))
            if count >= limit:
                break
    return min(count, limit)
