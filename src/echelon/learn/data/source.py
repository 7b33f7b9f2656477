"""Data sources: an entry of the recipe, the files it refers to, and the kind of their records.

The kind is plain text, token ids, or examples of an instruction format. It is set once per source: by `format` or
`fields` of the recipe, or by the fields of the first record. A record of another kind is broken. Files that are skipped
are recorded, so that nothing is skipped silently.
"""

import glob
import os
import sysconfig
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from typing_extensions import override

from echelon.ground.errors import ConfigError, DataError
from echelon.ground.extensions import is_extension
from echelon.ground.object_store import ObjectInfo
from echelon.ground.scratch import scratch_folder
from echelon.learn.data.readers import field_names, find_reader, guess_format
from echelon.learn.data.readers.arrays import is_array
from echelon.learn.data.readers.datasets import find_hub_files, find_on_hub, is_saved_dataset, list_saved_dataset
from echelon.learn.data.readers.megatron import is_megatron_index
from echelon.learn.data.readers.record import EITHER_FIELD, Fields, SourceFile
from echelon.learn.data.readers.separated import read_header
from echelon.learn.data.stream.addresses import fetch, find_objects, is_address, join_infos, slowness_told
from echelon.recipe.data_formats import LABELLED_FORMAT, PLAIN_FIELDS, PROMPT_FORMAT, RECORD_FORMATS, recognise_format
from echelon.recipe.names import FORMATS

PYTHON_STDLIB = "python-stdlib"
"""A source that every machine has: the *.py files of the running Python's standard library."""

TOKENS = "tokens"
"""The format of records with token ids: any record format, read for its `input_ids`."""

TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})
"""Folders that `python-stdlib` skips: two thirds of its bytes are tests, mostly tables of values."""

_MOST_FOLDERS = 10**7
_MOST_LINKS = 40  # in one path: Linux follows no more


@dataclass(frozen=True)
class Source:
    """One entry of `data.train` or `data.validation`.

    `key`: its recipe key, for messages. `path`: a file, a folder, a glob, `python-stdlib` or a Hub dataset. `fields`:
    maps the format's field names to the records'. `name`: its name in log lines and metrics. `max_samples`: the number
    of records to read from the start; None for all. `options`: the arguments of a custom reader, as JSON. `records`:
    the format of records if nothing else is said; None: they are recognised by their fields. `by_files`: a dataset of
    the hub is read by its files, each of which is fetched whole.
    """

    key: str
    path: str
    format: str = "auto"
    fields: Mapping[str, str] = field(default_factory=dict)
    name: str = ""
    split: str | None = None
    max_samples: int | None = None
    options: str = "{}"
    records: str | None = None
    by_files: bool = False

    @override
    def __str__(self) -> str:
        """The path as the user gave it, for messages: `data.train.0.path=PATH`, or `--data PATH`."""
        return f"{self.key} {self.path}" if self.key.startswith("--") else f"{self.key}.path={self.path}"


@dataclass
class LeftOut:
    """The skipped files of a source: for each reason, the count and the first path."""

    counts: dict[str, tuple[int, str]] = field(default_factory=dict)

    def note(self, reason: str, place: str) -> None:
        """Count one skipped path."""
        count, first = self.counts.get(reason, (0, place))
        self.counts[reason] = (count + 1, min(first, place))

    def describe(self) -> str | None:
        """Describe the skipped files in one line, `hidden files: 3 (.env, ...)`; None if there are none."""
        parts = (
            f"{reason}: {count:,} ({first}{', ...' if count > 1 else ''})"
            for reason, (count, first) in sorted(self.counts.items())
        )
        return "; ".join(parts) or None


def list_files(source: Source, left_out: LeftOut | None = None) -> tuple[SourceFile, ...]:
    """List the files of a source in reading order (by relative path), and record skipped files in `left_out`.

    Raises DataError, naming the recipe key, if the path does not exist, has no text or contains an unreadable folder;
    ConfigError for a split of something that has no splits.
    """
    left_out = LeftOut() if left_out is None else left_out
    path = Path(source.path).expanduser()
    if is_address(source.path):
        return _list_objects(source, left_out)
    if source.format == "hub" and source.by_files:
        return _list_hub_files(source)
    if source.format == "hub":
        return settle_fields(source, find_on_hub(source.path, source.split, str(source)))
    if path.is_dir() and is_saved_dataset(path) and not is_extension(source.format):
        return settle_fields(source, _check_not_empty(source, _list_saved(source, path)))
    if source.split is not None:
        raise ConfigError(
            f"{source.key}.split={source.split} is for Hugging Face datasets, on disk or on the Hub, but {source.path} "
            f"is not one; list the files to read, or hold out a fraction with data.validation_fraction."
        )
    files = _check_not_empty(source, _without_indexes(_list_paths(source, path, left_out)))
    if is_extension(source.format):
        files = [replace(file, options=source.options) for file in files]
        find_reader(files[0], f"{source.key}.format")
    for file in files:
        if not file.size and source.path != PYTHON_STDLIB:
            left_out.note("empty files", file.name)
    return settle_fields(source, files)


def find_absent(sources: Iterable[Source]) -> Iterator[DataError]:
    """Yield an error for each source that is not on this machine. The hub and addresses are not asked."""
    for source in sources:
        if source.format != "hub" and not is_address(source.path) and not Path(source.path).expanduser().exists():
            try:
                list_files(source)
            except DataError as error:
                yield error


def _list_objects(source: Source, left_out: LeftOut) -> tuple[SourceFile, ...]:
    """List the objects of an address, with the fields of the first one that has records; it is fetched for that."""
    objects = find_objects(source.path, str(source))
    is_folder = not glob.has_magic(source.path) and source.path not in objects
    files = []
    for address, info in objects.items():
        path = Path(address)
        if path.suffix == ".bin" and f"{address[:-4]}.idx" in objects:
            continue  # the .idx represents it
        if not info.size:
            left_out.note("empty files", address)
        elif is_folder and not _is_wanted(source.format, path, guess_format(path)):
            left_out.note("files of other formats", address)
        else:
            form = _choose_format(source, path)
            if form == "megatron":
                address, info = _find_megatron(source, address, objects)
            data_path = Path(address)
            files.append(SourceFile(data_path, address, form, info.size, 0, not is_folder, revision=info.version))
    return _settle_objects(source, _check_not_empty(source, _without_indexes(files)))


def _find_megatron(source: Source, address: str, found: dict[str, ObjectInfo]) -> tuple[str, ObjectInfo]:
    """Return the address of a dataset's .idx, given that or its .bin, and the size and version of both."""
    stem = address.removesuffix(".idx").removesuffix(".bin")
    parts = [f"{stem}.idx", f"{stem}.bin"]
    infos = [found[part] if part in found else find_objects(part, str(source))[part] for part in parts]
    return parts[0], join_infos(infos)


def _list_hub_files(source: Source) -> tuple[SourceFile, ...]:
    """List the files of a split of a dataset of the hub, at its commit."""
    folder, addresses = find_hub_files(source.path, source.split, str(source))
    objects, files = find_objects(folder, str(source)), []
    for address in addresses:
        path = Path(address)
        guessed = "jsonl" if ".json" in path.suffixes[-2:] else guess_format(path)
        info = objects.get(address)
        if info is None or guessed is None or not has_records(guessed):
            raise DataError(
                f"{source}: data.stream reads datasets whose repository has .parquet, .jsonl, .json, .csv or .arrow "
                f"files, and {address} is none; remove data.stream."
            )
        files.append(SourceFile(path, address, guessed, info.size, 0, True, revision=info.version))
    return _settle_objects(source, _check_not_empty(source, files))


def _settle_objects(source: Source, files: list[SourceFile]) -> tuple[SourceFile, ...]:
    """Set the fields to read in objects, from those of the first one that has records, which is fetched for that."""
    first = next((file for file in files if has_records(file.format) or ".json" in file.path.suffixes[-2:]), None)
    if first is None:
        return tuple(files)
    with scratch_folder("listing") as folder, slowness_told(f"reading {first.name}, to find its fields"):
        copy = fetch(first, folder)
        copy = replace(copy, format="json") if copy.format == "jsonl" and is_array(copy) else copy
        [settled] = settle_fields(source, [copy])
    alike = [replace(file, format=settled.format) if file.format == first.format else file for file in files]
    return tuple(replace(file, fields=settled.fields) if has_records(file.format) else file for file in alike)


def _list_saved(source: Source, path: Path) -> list[SourceFile]:
    return [
        replace(_describe(file.path, file.path.relative_to(path).as_posix(), "arrow", True), rows=file.rows)
        for file in list_saved_dataset(path, source.split, str(source))
    ]


def _list_paths(source: Source, path: Path, left_out: LeftOut) -> list[SourceFile]:
    if source.path == PYTHON_STDLIB:
        return _list_stdlib(source)
    if not path.is_file() and path.parent.is_dir() and is_megatron_index(path.with_name(path.name + ".idx")):
        path = path.with_name(path.name + ".idx")  # Megatron's tools name a dataset without suffixes
    if path.is_file():
        return [_describe(path, path.name, _choose_format(source, path), True)]
    if path.is_dir():
        if not (files := list(_list_folder(source, path, left_out))):
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
    return [
        _describe(path, name, "text", False)
        for path, name in walked
        if path.suffix == ".py" and TEST_FOLDERS.isdisjoint(Path(name).parts[:-1])
    ]


def _list_matches(source: Source, path: Path) -> list[SourceFile]:
    """List the files that a glob matches, sorted by name; none if the path is not a glob.

    Raises DataError if links make it visit too many folders.
    """
    if not glob.has_magic(source.path):
        return []
    if "**" in path.parts and not _is_listable(path):
        raise DataError(
            f"{source}: links lead to the same folders in more than {_MOST_FOLDERS:,} ways; give the folder, in which "
            "each is read once, or remove the links."
        )
    names = sorted(name for name in glob.glob(str(path), recursive=True) if os.path.isfile(name))
    files = [_describe(Path(name), name, _choose_format(source, Path(name)), False) for name in names]
    return list({file.path: file for file in files}.values())


def _is_listable(pattern: Path) -> bool:
    """Whether a glob with ** visits at most _MOST_FOLDERS: two links to the folder they are in double it 40 times."""
    first = next(index for index, part in enumerate(pattern.parts) if glob.has_magic(part))
    try:
        return _count_folders(str(Path(*pattern.parts[:first])), _MOST_LINKS, {}) <= _MOST_FOLDERS
    except RecursionError:
        return False


def _count_folders(folder: str, links: int, known: dict[tuple[str, int], int]) -> int:
    """Count the folders below a folder, each as often as there are ways to it with so many links in a row."""
    key = os.path.realpath(folder), links
    if key not in known:
        with suppress(OSError), os.scandir(folder) as entries:
            folders = [entry for entry in entries if not entry.name.startswith(".") and entry.is_dir()]
            inner = [(entry.path, links - entry.is_symlink()) for entry in folders]
            known[key] = 1 + sum(_count_folders(path, left, known) for path, left in inner if left >= 0)
    return known.get(key, 1)


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
        file = _describe(path, name, _choose_format(source, path), False)
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


def _describe(path: Path, name: str, format: str, required: bool) -> SourceFile:
    status = path.stat()
    size, mtime_ns = status.st_size, status.st_mtime_ns
    if format == "megatron":
        path = path.with_suffix(".idx")
        parts = [beside.stat() for beside in (path, path.with_suffix(".bin")) if beside.is_file()]
        size, mtime_ns = sum(part.st_size for part in parts), max((part.st_mtime_ns for part in parts), default=0)
    return SourceFile(path.resolve(), name, format, size, mtime_ns, required)


def _without_indexes(files: list[SourceFile]) -> list[SourceFile]:
    """Leave out each index.json beside MDS shards, which repeats what these have."""
    folders = {file.path.parent for file in files if file.format == "mds"}
    return [file for file in files if file.path.name != "index.json" or file.path.parent not in folders]


def _check_not_empty(source: Source, files: list[SourceFile]) -> list[SourceFile]:
    if not any(file.size for file in files):
        raise DataError(f"{source} is empty. Give text to train on.")
    return files


def has_records(format: str) -> bool:
    """Whether files of a format contain records with named fields."""
    return format in FORMATS and FORMATS[format].has_records


def settle_fields(source: Source, files: Sequence[SourceFile]) -> tuple[SourceFile, ...]:
    """Set the fields to read in the files of a source.

    Raises DataError if the recipe names fields of an instruction format and the first record has none of them.
    """
    files = _find_arrays(source, files)
    records = [file for file in files if has_records(file.format)]
    if not records:
        return tuple(files)
    fields = _choose_fields(source, records)
    return tuple(replace(file, fields=fields) if has_records(file.format) else file for file in files)


def has_known_fields(renames: Mapping[str, str], names: Collection[str]) -> bool:
    """Whether records with these fields are of a supported kind."""
    fields = _own_names(renames, names)
    return not fields.isdisjoint(PLAIN_FIELDS) or recognise_format(fields) is not None


def _choose_fields(source: Source, records: Sequence[SourceFile]) -> Fields:
    renames = tuple(sorted(source.fields.items()))
    is_plain = bool(renames) and all(name in PLAIN_FIELDS for name in source.fields)
    if source.format in RECORD_FORMATS and source.format != "tokens":
        return Fields(source.format, renames)
    if source.records is not None:
        return Fields(source.records, renames)
    form = None if is_plain else _recognise(source, records)
    if form is not None:
        return Fields(form, renames)
    if not is_plain and renames:
        raise DataError(
            f"{source.key}.fields: with these names, the first record of {records[0].path} does not have the fields of "
            f"any format; its fields are {', '.join(_first_names(records)) or 'none'}. Set {source.key}.format to one "
            f"of {', '.join(RECORD_FORMATS)}."
        )
    if renames:
        return Fields(names=tuple((name, source.fields[name]) for name in PLAIN_FIELDS if name in source.fields))
    return Fields(names=(("input_ids", "input_ids"),)) if source.format == "tokens" else EITHER_FIELD


def _recognise(source: Source, records: Sequence[SourceFile]) -> str | None:
    """Recognise the format of the first record. If several match, the one whose fields the recipe names."""
    names = _own_names(source.fields, _first_names(records))
    if source.format == "tokens":
        return "tokens" if "labels" in names else None
    meant = [
        name
        for name, row in RECORD_FORMATS.items()
        if source.fields
        and set(row.required) <= set(source.fields)
        and name not in (PROMPT_FORMAT, LABELLED_FORMAT)  # others have such fields too
    ]
    return next((name for name in meant if set(source.fields) & set(names)), None) or recognise_format(names)


def _first_names(records: Sequence[SourceFile]) -> tuple[str, ...]:
    """Return the field names of the first record in any of the files."""
    return next((names for file in records if (names := field_names(file))), ())


def _own_names(renames: Mapping[str, str], names: Collection[str]) -> set[str]:
    """Translate the field names of a record to the formats' own names."""
    renamed = {ours for ours, theirs in renames.items() if theirs in names}
    return renamed | (set(names) - set(renames) - set(renames.values()))


def _find_arrays(source: Source, files: Sequence[SourceFile]) -> Sequence[SourceFile]:
    """Treat .json files as arrays of records if all files of the source contain records, else as plain text."""
    is_json = [file.format == "text" and ".json" in file.path.suffixes[-2:] for file in files]
    pairs = list(zip(files, is_json, strict=True))
    if source.format != "auto" or not all(could_be or has_records(file.format) for file, could_be in pairs):
        return files
    chosen = []
    for file, could_be in pairs:
        array = replace(file, format="json")
        if could_be and is_array(file) and has_known_fields(source.fields, field_names(array)):
            file = array
        chosen.append(file)
    return chosen


SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages", "node_modules"})

Found = list[tuple[Path, str]]
"""Files with their paths relative to a folder."""


def walk(root: Path, left_out: LeftOut, refuse: Callable[[OSError], Exception]) -> Found:
    """List every file under a folder, sorted by relative path, without hidden files and folders and cache folders.

    Links to folders are followed. Each real folder is read once, under its own name if it is below `root`. A link to a
    folder that contains `root` is skipped. For a folder that cannot be listed, raises the error that `refuse` returns.
    """
    files: Found = []
    seen: set[str] = set()
    links = [(root, "")]
    while links:
        deferred: Found = []
        for link, name in sorted(links, key=lambda item: item[1]):
            real = os.path.realpath(link)
            if name and (real in seen or Path(real) in Path(os.path.realpath(root)).parents):
                left_out.note("links to folders that are already read or contain this one", name)
                continue
            deferred += _list_tree(link, name, seen, left_out, refuse, files)
        links = deferred
    return sorted(files, key=lambda item: item[1])


def _list_tree(
    top: Path, name: str, seen: set[str], left_out: LeftOut, refuse: Callable[[OSError], Exception], found: Found
) -> Found:
    """Add the files of a tree to `found` without following links. Returns the links to folders in it."""

    def fail(error: OSError) -> None:
        raise refuse(error) from error

    links: Found = []
    for folder, subfolders, files in os.walk(top, onerror=fail):
        path = Path(folder)
        relative = "/".join(part for part in (name, path.relative_to(top).as_posix()) if part not in ("", "."))
        real = os.path.realpath(folder)
        if real in seen:  # a link to a part of it was followed before
            subfolders[:] = []
            continue
        seen.add(real)
        descend = []
        for subfolder in sorted(subfolders):
            inner = f"{relative}/{subfolder}" if relative else subfolder
            if subfolder in SKIPPED_FOLDERS:
                left_out.note("folders of caches and packages", inner)
            elif subfolder.startswith("."):
                left_out.note("hidden folders", inner)
            elif (path / subfolder).is_symlink():
                links.append((path / subfolder, inner))
            else:
                descend.append(subfolder)
        subfolders[:] = descend
        for file in files:
            inner = f"{relative}/{file}" if relative else file
            if file.startswith("."):
                left_out.note("hidden files", inner)
            elif (path / file).is_file():
                found.append((path / file, inner))
            else:
                left_out.note("broken links and special files", inner)
    return links
