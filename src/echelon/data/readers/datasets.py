"""Hugging Face datasets: what `save_to_disk` wrote, and datasets of the hub, streamed.

A saved dataset is a folder of Arrow files, read as such. A dataset of the hub is walked through by one process, which
hands out its records: nothing of it is kept on the disk but the tokens.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.data.readers.columns import ArrowReader, drop_nulls
from echelon.data.readers.record import (
    EITHER_FIELD,
    Broken,
    BrokenRecordError,
    ExampleFields,
    Record,
    SourceFile,
    content_bytes,
)
from echelon.data.readers.sequence import SequentialReader
from echelon.errors import ConfigError, DataError, EchelonError
from echelon.model.hub import dataset_name, find_dataset_commit

_DATASET = "state.json"
_SPLITS = "dataset_dict.json"


@dataclass(frozen=True)
class SavedFile:
    """An Arrow file of a saved dataset, and the rows of it that a split takes; None for all."""

    path: Path
    rows: tuple[int, int] | None


def is_saved_dataset(folder: Path) -> bool:
    """Whether `save_to_disk` of a Dataset or a DatasetDict wrote this folder."""
    return (folder / _SPLITS).is_file() or ((folder / _DATASET).is_file() and (folder / "dataset_info.json").is_file())


def list_saved_dataset(folder: Path, split: str | None, where: str) -> list[SavedFile]:
    """The files of a saved dataset, or of the split asked for, in order. `where` begins each message.

    Raises DataError for a folder that is damaged or has no such split, ConfigError for what is no split.
    """
    try:
        files = {name: _list_files(member) for name, member in _find_members(folder).items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{where} is a damaged dataset of save_to_disk ({error}); save it again.") from error
    if split is None:
        return [SavedFile(path, None) for path in files[_only_split(files, where)]]
    lengths = {name: [_count_rows(path) for path in paths] for name, paths in files.items()}
    chosen = []
    for name, start, stop in parse_split(split, {name: sum(each) for name, each in lengths.items()}, where):
        first = 0
        for path, num_rows in zip(files[name], lengths[name], strict=True):
            rows = (max(start - first, 0), min(stop - first, num_rows))
            if rows[0] < rows[1]:
                chosen.append(SavedFile(path, rows))
            first += num_rows
    if not chosen:
        raise DataError(f"{where}, split={split} holds no records.")
    return chosen


def _find_members(folder: Path) -> dict[str, Path]:
    """The folder of each split of a saved dataset, by the split's name."""
    if (folder / _SPLITS).is_file():
        names = json.loads((folder / _SPLITS).read_text(encoding="utf-8"))["splits"]
        return {name: folder / name for name in names}
    name = json.loads((folder / _DATASET).read_text(encoding="utf-8")).get("_split") or "train"
    return {str(name): folder}


def _only_split(splits: Iterable[str], where: str) -> str:
    """The one split there is, where none was asked for. Raises ConfigError where there are several to choose from."""
    first, *others = splits
    if others:
        raise ConfigError(f"{where} holds the splits {', '.join(splits)}; choose with split: {first}.")
    return first


def parse_split(split: str, num_rows: dict[str, int], where: str) -> list[tuple[str, int, int]]:
    """`datasets`' slicing syntax as (split, first row, row behind the last). Raises ConfigError."""
    datasets = _import_datasets()
    try:
        parts = datasets.ReadInstruction.from_spec(split).to_absolute(num_rows)
    except (ValueError, AssertionError) as error:
        raise ConfigError(
            f"{where}, split={split}: {' '.join(str(error).split())} It holds "
            f"{', '.join(f'{name} ({rows} records)' for name, rows in num_rows.items())}; a split is written as "
            f"{next(iter(num_rows))} or {next(iter(num_rows))}[:90%]."
        ) from error
    ends = [num_rows[part.splitname] if part.to is None else part.to for part in parts]
    return [(part.splitname, part.from_ or 0, end) for part, end in zip(parts, ends, strict=True)]


def _list_files(folder: Path) -> list[Path]:
    state = json.loads((folder / _DATASET).read_text(encoding="utf-8"))
    return [folder / each["filename"] for each in state["_data_files"]]


def _count_rows(path: Path) -> int:
    file = SourceFile(path, path.name, "arrow", path.stat().st_size, 0, required=True)
    return sum(block.num_rows for block in ArrowReader().blocks(file))


class HubReader(SequentialReader):
    """A dataset that `datasets.load_dataset` streams: one of the hub, or a folder of data files. See `find_on_hub`."""

    def walk(self, file: SourceFile) -> Iterator[tuple[int, Record | Broken]]:
        """See SequentialReader. Raises EchelonError when the stream breaks off: what was read before is to be kept."""
        first = file.rows[0] if file.rows else 0
        number, used = first, 0
        try:
            stream = _stream(str(file.path), file.revision)[file.split]
            if file.rows is not None:
                stream = stream.skip(first).take(file.rows[1] - first)
            for number, record in enumerate(stream, first):
                found = _parse(file, number, record)
                if found is not None:
                    used += content_bytes(found.content) if isinstance(found, Record) else 0
                    yield used, found
        except (OSError, ValueError) as error:
            raise EchelonError(
                f"{file.path} cannot be read on at record {number} ({_one_line(error)}); run again to go on."
            ) from error


def find_on_hub(name: str, split: str | None, where: str) -> list[SourceFile]:
    """A streamed dataset as files to read, one for each part of the split. `name` is ORG/NAME, ORG/NAME/CONFIG, or a
    folder that `load_dataset` takes; of the hub, the commit behind an `@`, else the one it is at now.

    Raises DataError when it cannot be read, ConfigError for what is no split, and as `hub.find_commits`.
    """
    folder = Path(name).expanduser()
    revision, size, newest = None, 0, 0
    if folder.is_dir():
        name = str(folder.resolve())
        size, newest = _measure_folder(folder)
    else:
        name, _, given = name.partition("@")
        revision = given or find_dataset_commit(name, where)
    try:
        members = _stream(name, revision)
    except (OSError, ValueError) as error:
        raise DataError(f"{where} with format: hub cannot be read ({_one_line(error)}); check its name.") from error
    infos = {key: (member.info.splits or {}).get(key) for key, member in members.items()}
    sizes = {key: info.num_bytes if info else 0 for key, info in infos.items()}
    wanted = _only_split(members, where) if split is None else split
    parts: list[tuple[str, tuple[int, int] | None]]
    parts = [(wanted, None)] if wanted in members else _find_shares(wanted, infos, where)
    return [
        SourceFile(Path(name), name, "hub", sizes[key] or size, newest, True, EITHER_FIELD, rows, key, revision)
        for key, rows in parts
    ]


def _measure_folder(folder: Path) -> tuple[int, int]:
    """Bytes of all files of a folder, and when the newest of them was written, in nanoseconds."""
    files = [path.stat() for path in folder.rglob("*") if path.is_file()]
    return sum(each.st_size for each in files), max((each.st_mtime_ns for each in files), default=0)


def _find_shares(split: str, infos: Mapping[str, Any], where: str) -> list[tuple[str, tuple[int, int] | None]]:
    """Which records of which splits of a streamed dataset a slice means. Raises ConfigError."""
    num_rows = {key: info.num_examples if info and info.num_examples else 0 for key, info in infos.items()}
    if "[" in split and not all(num_rows.values()):
        raise ConfigError(
            f"{where}, split={split}: the dataset does not say how many records it has, so no share of it can be "
            f"streamed; choose a whole split: {', '.join(infos)}."
        )
    return [(key, (start, stop)) for key, start, stop in parse_split(split, num_rows, where)]


def _stream(name: str, revision: str | None) -> Any:
    """The splits of a dataset by name, none of them read yet."""
    parts = [name] if Path(name).is_dir() else [dataset_name(name), *name.split("/")[2:]]
    return _import_datasets().load_dataset(*parts, revision=revision, streaming=True)


def _parse(file: SourceFile, number: int, record: Any) -> Record | Broken | None:
    try:
        content = file.fields.pick(drop_nulls(record) if isinstance(file.fields, ExampleFields) else record)
    except BrokenRecordError as error:
        return Broken(file, number, str(error))
    return Record(content, position=number) if len(content) else None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _import_datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(
            "a dataset of the hub, and the splits of one on disk, take the package datasets; install it with "
            "pip install 'echelon[data]'."
        ) from error
    datasets.disable_progress_bars()
    return datasets
