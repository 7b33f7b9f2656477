"""Packs the files of a run folder that a resume needs in addition to a checkpoint, as one archive per upload."""

import zipfile
import zlib
from pathlib import Path

from echelon.ground.errors import CheckpointError
from echelon.ground.sizes import render_bytes
from echelon.ground.stored import MAX_ROWS_BYTES, read_bytes, whole_lines, write_text
from echelon.run.folder.run_folder import RunFolder
from echelon.run.folder.run_rows import is_row_up_to

# In the order in which they are restored: recipe.yaml comes last, because it makes a folder a run.
_FILES = (
    "environment.json", "estimate.json", "data.json", "hub.json", "models.json", "events.jsonl", "spending.json",
    "plan.json", "recipe.yaml",
)  # fmt: skip
_ROWS = ("metrics.jsonl", "samples.jsonl")
_TRACKERS = "trackers"


def write_bundle(folder: RunFolder, step: int, path: Path) -> None:
    """Write an archive of the run's files, with its metrics and samples up to a step."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        ledgers = sorted(f"{_TRACKERS}/{ledger.name}" for ledger in (folder.path / _TRACKERS).glob("*.json"))
        for name in (*_FILES, *ledgers):
            if (folder.path / name).exists():
                archive.writestr(name, read_bytes(folder.path / name, MAX_ROWS_BYTES))
        for name in _ROWS:
            if (folder.path / name).exists():
                archive.writestr(name, _rows_up_to(folder.path / name, step))


def unpack_bundle(path: Path, folder: RunFolder) -> None:
    """Restore metrics and samples, replacing existing ones, and the other files if they are missing.

    Raises:
        CheckpointError: the archive cannot be read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            if (size := sum(info.file_size for info in archive.infolist())) > MAX_ROWS_BYTES:
                raise ValueError(f"it unpacks to {render_bytes(size)}, more than {render_bytes(MAX_ROWS_BYTES)}")
            contents = {name: archive.read(name).decode() for name in archive.namelist()}
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, ValueError, NotImplementedError, RuntimeError) as error:
        raise CheckpointError(f"{path}: cannot read the run's files in this archive ({error}).") from error
    # Only fixed names: an archive must not choose other paths on this machine.
    ledgers = sorted(name for name in contents if name == f"{_TRACKERS}/{Path(name).stem}.json")
    if ledgers:
        (folder.path / _TRACKERS).mkdir(exist_ok=True)
    for name in (*_ROWS, *ledgers, *_FILES):
        if name in contents and (name in _ROWS or not (folder.path / name).exists()):
            write_text(folder.path / name, contents[name])


def _rows_up_to(path: Path, step: int) -> bytes:
    """Return the rows up to a step. Rows are in the order of their steps, so only the last ones are parsed."""
    lines = list(whole_lines(read_bytes(path, MAX_ROWS_BYTES)))
    while lines and not is_row_up_to(path.name, lines[-1], step, step):
        lines.pop()
    return b"".join(lines)
