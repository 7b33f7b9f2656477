"""Data sources: an entry of the recipe, and the files it refers to."""

import glob
import os
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from typing_extensions import override

from echelon.ground.errors import ConfigError, DataError
from echelon.ground.extensions import is_extension
from echelon.learn.data.file_walk import LeftOut, walk
from echelon.learn.data.readers import find_reader, guess_format
from echelon.learn.data.readers.datasets import find_on_hub, is_saved_dataset, list_saved_dataset
from echelon.learn.data.readers.megatron import is_megatron_index
from echelon.learn.data.readers.record import SourceFile
from echelon.learn.data.readers.separated import read_header
from echelon.learn.data.record_kinds import has_known_fields, has_records, settle_fields
from echelon.recipe.data_formats import RECORD_FORMATS
from echelon.recipe.names import FORMATS

PYTHON_STDLIB = "python-stdlib"
"""A source that every machine has: the *.py files of the running Python's standard library."""

TOKENS = "tokens"
"""The format of records with token ids: any record format, read for its `input_ids`."""

TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})
"""Folders that `python-stdlib` skips: two thirds of its bytes are tests, mostly tables of values."""


@dataclass(frozen=True)
class Source:
    """One entry of `data.train` or `data.validation`.

    `key`: its recipe key, for messages. `path`: a file, a folder, a glob, `python-stdlib` or a Hub dataset. `fields`:
    maps the format's field names to the records'. `name`: its name in log lines and metrics. `max_samples`: the number
    of records to read from the start; None for all. `options`: the arguments of a custom reader, as JSON.
    """

    key: str
    path: str
    format: str = "auto"
    fields: Mapping[str, str] = field(default_factory=dict)
    name: str = ""
    split: str | None = None
    max_samples: int | None = None
    options: str = "{}"

    @override
    def __str__(self) -> str:
        """The path as the user gave it, for messages: `data.train.0.path=PATH`, or `--data PATH`."""
        return f"{self.key} {self.path}" if self.key.startswith("--") else f"{self.key}.path={self.path}"


def list_files(source: Source, left_out: LeftOut | None = None) -> tuple[SourceFile, ...]:
    """List the files of a source in reading order (by relative path), and record skipped files in `left_out`.

    Raises DataError, naming the recipe key, if the path does not exist, has no text or contains an unreadable folder;
    ConfigError for a split of something that has no splits.
    """
    left_out = LeftOut() if left_out is None else left_out
    path = Path(source.path).expanduser()
    if source.format == "hub":
        return settle_fields(source, find_on_hub(source.path, source.split, str(source)))
    if path.is_dir() and is_saved_dataset(path) and not is_extension(source.format):
        return settle_fields(source, _check_not_empty(source, _list_saved(source, path)))
    if source.split is not None:
        raise ConfigError(
            f"{source.key}.split={source.split} is for Hugging Face datasets, on disk or on the Hub, but {source.path} "
            f"is not one; list the files to read, or hold out a fraction with data.validation_fraction."
        )
    files = _check_not_empty(source, _list_paths(source, path, left_out))
    if is_extension(source.format):
        files = [replace(file, options=source.options) for file in files]
        find_reader(files[0], f"{source.key}.format")
    for file in files:
        if not file.size and source.path != PYTHON_STDLIB:
            left_out.note("empty files", file.name)
    return settle_fields(source, files)


def find_absent(sources: Iterable[Source]) -> Iterator[DataError]:
    """Yield an error for each source that is not on this machine. Datasets of the hub are not looked for."""
    for source in sources:
        if source.format != "hub" and not Path(source.path).expanduser().exists():
            try:
                list_files(source)
            except DataError as error:
                yield error


def _list_saved(source: Source, path: Path) -> list[SourceFile]:
    saved = list_saved_dataset(path, source.split, str(source))
    files = [_describe(source, file.path, file.path.relative_to(path).as_posix(), "arrow", True) for file in saved]
    return [replace(file, rows=saved_file.rows) for file, saved_file in zip(files, saved, strict=True)]


def _list_paths(source: Source, path: Path, left_out: LeftOut) -> list[SourceFile]:
    if source.path == PYTHON_STDLIB:
        return _list_stdlib(source)
    if not path.is_file() and path.parent.is_dir() and is_megatron_index(path.with_name(path.name + ".idx")):
        path = path.with_name(path.name + ".idx")  # Megatron's tools name a dataset without suffixes
    if path.is_file():
        return [_describe(source, path, path.name, _choose_format(source, path), True)]
    if path.is_dir():
        files = list(_list_folder(source, path, left_out))
        if not files:
            raise DataError(
                f"{source} contains no text file (by suffix, for example .txt, .md, .py, .jsonl, .parquet); for files "
                f"with other suffixes, use a glob such as {source.path}/**."
            )
        return files
    if files := _list_matches(source, path):
        return files
    raise DataError(
        f"{source}: no such file or folder (working directory {Path.cwd()}); give a text file, a folder, "
        f"a glob or {PYTHON_STDLIB}, or set format: hub for a Hub dataset."
    )


def _list_stdlib(source: Source) -> list[SourceFile]:
    """List the source files of Python's standard library, without its tests."""
    walked = walk(Path(sysconfig.get_path("stdlib")), LeftOut(), partial(_unlistable, source))
    found = [(path, name) for path, name in walked if path.suffix == ".py" and not _is_of_tests(name)]
    return [_describe(source, path, name, "text", False) for path, name in found]


def _list_matches(source: Source, path: Path) -> list[SourceFile]:
    """List the files that a glob matches, sorted by name; none if the path is not a glob."""
    if not glob.has_magic(source.path):
        return []
    names = sorted(name for name in glob.glob(str(path), recursive=True) if os.path.isfile(name))
    files = [_describe(source, Path(name), name, _choose_format(source, Path(name)), False) for name in names]
    return list({file.path: file for file in files}.values())


def _choose_format(source: Source, path: Path) -> str:
    guessed = guess_format(path)
    if source.format in RECORD_FORMATS:
        if path.suffix.lower() == ".json":
            return "json"
        if guessed is None or not has_records(guessed):
            raise ConfigError(
                f"{source.key}.format={source.format} is for records in .jsonl, .json, .csv, .parquet or .arrow files, "
                f"not for {path}"
                + ("; for files of ids use nanogpt, npy or megatron." if source.format == TOKENS else ".")
            )
        return guessed
    return source.format if source.format != "auto" else guessed or "text"


def _list_folder(source: Source, folder: Path, left_out: LeftOut) -> Iterator[SourceFile]:
    """List the files of a folder whose suffix matches the source's format; by default, all formats read in folders."""
    for path, name in walk(folder, left_out, partial(_unlistable, source)):
        guessed = guess_format(path)
        if guessed == "megatron" and path.suffix == ".bin" and source.format == "megatron":
            continue  # the .idx represents it
        if not _is_wanted(source.format, path, guessed):
            left_out.note("files of other formats", name)
            continue
        file = _describe(source, path, name, _choose_format(source, path), False)
        if source.format == "auto" and file.format == "csv" and not has_known_fields(source.fields, read_header(file)):
            file = replace(file, format="text")  # a table in a source tree, not one of documents
        yield file


def _is_wanted(format: str, path: Path, guessed: str | None) -> bool:
    """Whether a folder's file is read with this `format` of the source; `guessed` is the format of its file name."""
    if is_extension(format):
        return True
    is_json = path.suffix.lower() == ".json"
    if guessed is None:
        return False
    if format == "auto":
        return FORMATS[guessed].in_folders
    if format in RECORD_FORMATS:
        return has_records(guessed) or is_json
    if format == "text":
        return guessed in ("text", "csv", "jsonl")
    return is_json if format == "json" else format == guessed


def _unlistable(source: Source, error: OSError) -> DataError:
    return DataError(
        f"{source}: the folder {error.filename} cannot be read ({error.strerror}); make it readable, or select the "
        "files with a glob."
    )


def _is_of_tests(name: str) -> bool:
    return not TEST_FOLDERS.isdisjoint(Path(name).parts[:-1])


def _describe(source: Source, path: Path, name: str, format: str, required: bool) -> SourceFile:
    status = path.stat()
    size, mtime_ns = status.st_size, status.st_mtime_ns
    if format == "megatron":
        path = path.with_suffix(".idx")
        parts = [beside.stat() for beside in (path, path.with_suffix(".bin")) if beside.is_file()]
        size, mtime_ns = sum(part.st_size for part in parts), max((part.st_mtime_ns for part in parts), default=0)
    return SourceFile(path.resolve(), name, format, size, mtime_ns, required)


def _check_not_empty(source: Source, files: list[SourceFile]) -> list[SourceFile]:
    if not any(file.size for file in files):
        raise DataError(f"{source} is empty. Give text to train on.")
    return files
