"""Hugging Face datasets: folders written by `save_to_disk`, and datasets streamed from the Hub.

A saved dataset is a folder of Arrow files and is read as such. A Hub dataset is streamed by one process, which
distributes the records. Only the tokens are stored on disk.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, NotRequired

from typing_extensions import TypedDict, override

from echelon.ground.errors import ConfigError, DataError, EchelonError
from echelon.ground.extras import missing_package
from echelon.ground.stored import read_as
from echelon.learn.data.readers.columns import ArrowReader, damages, drop_nulls
from echelon.learn.data.readers.record import EITHER_FIELD, Broken, Record, SourceFile, content_bytes, parse_record
from echelon.learn.data.readers.sequence import SequentialReader
from echelon.learn.model.hub import dataset_name, find_dataset_commit

_DATASET = "state.json"
_SPLITS = "dataset_dict.json"


class _FileRow(TypedDict):
    filename: str


class _State(TypedDict):
    _data_files: list[_FileRow]
    _split: NotRequired[str | None]


class _SplitNames(TypedDict):
    splits: list[str]


@dataclass(frozen=True)
class SavedFile:
    """An Arrow file of a saved dataset, and the range of rows that a split selects; None for all rows."""

    path: Path
    rows: tuple[int, int] | None


def is_saved_dataset(folder: Path) -> bool:
    """Whether this folder was written by `save_to_disk` of a Dataset or a DatasetDict."""
    return (folder / _SPLITS).is_file() or ((folder / _DATASET).is_file() and (folder / "dataset_info.json").is_file())


def list_saved_dataset(folder: Path, split: str | None, where: str) -> list[SavedFile]:
    """List the files of a saved dataset, or of the given split, in order. `where` starts each message.

    Raises DataError for a damaged folder or a split without records, ConfigError for an invalid or unknown split.
    """
    try:
        files = {name: _list_files(member) for name, member in _find_members(folder).items()}
        lengths = {name: [_count_rows(path) for path in paths] for name, paths in files.items() if split is not None}
    except (OSError, ValueError) as error:
        raise DataError(f"{where} is a damaged save_to_disk dataset ({error}); save it again.") from error
    if split is None:
        return [SavedFile(path, None) for path in files[_only_split(files, where)]]
    chosen = []
    for name, start, stop in parse_split(split, {name: sum(size) for name, size in lengths.items()}, where):
        first = 0
        for path, num_rows in zip(files[name], lengths[name], strict=True):
            rows = (max(start - first, 0), min(stop - first, num_rows))
            if rows[0] < rows[1]:
                chosen.append(SavedFile(path, rows))
            first += num_rows
    if not chosen:
        raise DataError(f"{where}, split={split} has no records.")
    return chosen


def _find_members(folder: Path) -> dict[str, Path]:
    """Map each split name of a saved dataset to its folder. Raises OSError or ValueError if it is damaged."""
    if (folder / _SPLITS).is_file():
        return {name: _within(folder, name) for name in read_as(folder / _SPLITS, _SplitNames)["splits"]}
    return {read_as(folder / _DATASET, _State).get("_split") or "train": folder}


def _within(folder: Path, name: str) -> Path:
    """The path of a file or folder that a folder's own files name. Raises ValueError for one that is not in it."""
    if PurePath(name).is_absolute() or ".." in PurePath(name).parts:
        raise ValueError(f"it names {name}, which is not in the folder")
    return folder / name


def _only_split(splits: Iterable[str], where: str) -> str:
    """Return the only split of a dataset. Raises ConfigError if there are several."""
    first, *others = splits
    if others:
        raise ConfigError(f"{where} has the splits {', '.join(splits)}; select one, for example split: {first}.")
    return first


def parse_split(split: str, num_rows: dict[str, int], where: str) -> list[tuple[str, int, int]]:
    """Parse the slicing syntax of `datasets` into (split, first row, end row, exclusive). Raises ConfigError."""
    datasets = _import_datasets()
    try:
        parts = datasets.ReadInstruction.from_spec(split).to_absolute(num_rows)
    except (ValueError, AssertionError) as error:
        raise ConfigError(
            f"{where}, split={split}: {' '.join(str(error).split())} The dataset has "
            f"{', '.join(f'{name} ({rows} records)' for name, rows in num_rows.items())}; write a split as "
            f"{next(iter(num_rows))} or {next(iter(num_rows))}[:90%]."
        ) from error
    ends = [num_rows[part.splitname] if part.to is None else part.to for part in parts]
    return [(part.splitname, part.from_ or 0, end) for part, end in zip(parts, ends, strict=True)]


def _list_files(folder: Path) -> list[Path]:
    paths = [_within(folder, row["filename"]) for row in read_as(folder / _DATASET, _State)["_data_files"]]
    if missing := [path.name for path in paths if not path.is_file()]:
        raise ValueError(f"{missing[0]} is missing")
    return paths


def _count_rows(path: Path) -> int:
    """Raises ValueError for a damaged file."""
    file = SourceFile(path, path.name, "arrow", path.stat().st_size, 0, required=True)
    try:
        return sum(block.num_rows for block in ArrowReader().blocks(file))
    except damages() as error:
        raise ValueError(f"{path.name}: {_one_line(error)}") from error


class HubReader(SequentialReader):
    """A dataset streamed by `datasets.load_dataset`: a Hub dataset or a folder of data files. See `find_on_hub`."""

    @override
    def walk(self, file: SourceFile) -> Iterator[tuple[int, Record | Broken]]:
        """Raises EchelonError if the stream fails; the records read before are kept."""
        first = file.rows[0] if file.rows else 0
        number, used = first, 0
        try:
            stream = _open(str(file.path), file.revision).as_streaming_dataset()[file.split]
            if file.rows is not None:
                stream = stream.skip(first).take(file.rows[1] - first)
            for number, record in enumerate(stream, first):
                value = record if file.fields.format is None else drop_nulls(record)
                if (parsed := parse_record(file, number, value)) is not None:
                    used += content_bytes(parsed.content) if isinstance(parsed, Record) else 0
                    yield used, parsed
        except ConfigError:
            raise
        except Exception as error:  # those of the library, and of those that it reads files with
            raise EchelonError(
                f"{file.path} cannot be read beyond record {number} ({_one_line(error)}); run again to continue."
            ) from error


def find_on_hub(name: str, split: str | None, where: str) -> list[SourceFile]:
    """Return a streamed dataset as files to read, one for each part of the split.

    `name` is ORG/NAME or ORG/NAME/CONFIG, with `@COMMIT` or at its current commit, or a folder that `load_dataset`
    reads. Raises DataError if it cannot be read, or names files that are not its own, ConfigError for an invalid split,
    and the errors of `hub.find_dataset_commit`.
    """
    folder = Path(name).expanduser()
    revision, size, newest = None, 0, 0
    if folder.is_dir():
        name = str(folder.resolve())
        files = [path.stat() for path in folder.rglob("*") if path.is_file()]
        size, newest = sum(file.st_size for file in files), max((file.st_mtime_ns for file in files), default=0)
    else:
        name, _, commit = name.partition("@")
        revision = commit or find_dataset_commit(name, where)
    with _faults_told(where):
        members = _open(name, revision).as_streaming_dataset()
    infos = {key: (member.info.splits or {}).get(key) for key, member in members.items()}
    sizes = {key: info.num_bytes if info else 0 for key, info in infos.items()}
    chosen = _only_split(members, where) if split is None else split
    parts: list[tuple[str, tuple[int, int] | None]]
    parts = [(chosen, None)] if chosen in members else _find_shares(chosen, infos, where)
    return [
        SourceFile(Path(name), name, "hub", sizes[key] or size, newest, True, EITHER_FIELD, rows, key, revision)
        for key, rows in parts
    ]


def find_hub_files(name: str, split: str | None, where: str) -> tuple[str, list[str]]:
    """Return the address of a dataset of the hub at a commit, and those of the files of a split, in reading order.

    `name`: as for `find_on_hub`. Raises DataError if it cannot be read, ConfigError for a folder, and for a split that
    it does not have or a slice of one, and the errors of `hub.find_dataset_commit`.
    """
    if Path(name).expanduser().is_dir():
        raise ConfigError(
            f"{where}, format=hub: data.stream reads a folder by its files; remove format, or data.stream."
        )
    name, _, commit = name.partition("@")
    revision = commit or find_dataset_commit(name, where)
    with _faults_told(where):
        builder = _open(name, revision)
    splits = {str(key): [str(file) for file in files] for key, files in (builder.config.data_files or {}).items()}
    chosen = _only_split(splits, where) if split is None else split
    if chosen not in splits:
        raise ConfigError(
            f"{where}, split={chosen}: data.stream reads whole splits; the dataset has {', '.join(splits) or 'none'}."
        )
    return f"hf://datasets/{dataset_name(name)}@{revision}", splits[chosen]


def _find_shares(split: str, infos: Mapping[str, Any], where: str) -> list[tuple[str, tuple[int, int] | None]]:
    """Resolve a slice of a streamed dataset to the records of each split. Raises ConfigError."""
    num_rows = {key: info.num_examples if info and info.num_examples else 0 for key, info in infos.items()}
    if "[" in split and not all(num_rows.values()):
        raise ConfigError(
            f"{where}, split={split}: the dataset does not give its number of records, so a slice cannot be "
            f"streamed; select a whole split: {', '.join(infos)}."
        )
    return [(key, (start, stop)) for key, start, stop in parse_split(split, num_rows, where)]


def _open(name: str, revision: str | None) -> Any:
    """Open a dataset, by name. No record is read yet. Raises ValueError if it names files that are not its own."""
    folder = Path(name) if Path(name).is_dir() else None
    names = [name] if folder else [dataset_name(name), *name.split("/")[2:]]
    builder = _import_datasets().load_dataset_builder(*names, revision=revision)
    for files in (builder.config.data_files or {}).values():
        for file in files:
            if not _is_own(str(file).rpartition("::")[2], folder):
                raise ValueError(f"its README.md or a link names {file}, which is not in it")
    return builder


def _is_own(file: str, folder: Path | None) -> bool:
    """Whether the address or path of a file belongs to a dataset of the hub, or to one in a folder, links followed."""
    if folder is None:
        return file.startswith("hf://")
    # A download of the hub's client is a folder of links to the files beside it.
    roots = (folder, folder.parent.parent / "blobs") if folder.parent.name == "snapshots" else (folder,)
    return "://" not in file and any(Path(file).resolve().is_relative_to(root) for root in roots)


@contextmanager
def _faults_told(where: str) -> Iterator[None]:
    """Raise DataError for what `datasets`, and the libraries that it reads files with, raise."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise DataError(
            f"{where} with format: hub cannot be read ({_one_line(error)}); check the name, and the files of the "
            "dataset."
        ) from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _import_datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise missing_package("a dataset of the hub, or a split of a saved one,", "datasets", "data") from error
    datasets.disable_progress_bars()
    return datasets
