"""The files of a run folder that a resume needs beside a checkpoint, as one archive that goes with each upload."""

import zipfile
from pathlib import Path

from echelon.errors import CheckpointError
from echelon.runs.run_folder import RunFolder
from echelon.runs.run_rows import is_row_up_to
from echelon.stored import whole_lines, write_text

# In the order in which they come back: a folder with a recipe counts as a run, so that is the last.
_FILES = (
    "environment.json", "estimate.json", "data.json", "hub.json", "events.jsonl", "spending.json", "plan.json",
    "recipe.yaml",
)  # fmt: skip
_ROWS = ("metrics.jsonl", "samples.jsonl")
_TRACKERS = "trackers"


def write_bundle(folder: RunFolder, step: int, path: Path) -> None:
    """Pack the run's files, and its rows up to a step."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        ledgers = sorted(f"{_TRACKERS}/{each.name}" for each in (folder.path / _TRACKERS).glob("*.json"))
        for name in (*_FILES, *ledgers):
            if (folder.path / name).exists():
                archive.writestr(name, (folder.path / name).read_bytes())
        for name in _ROWS:
            if (folder.path / name).exists():
                archive.writestr(name, _rows_up_to(folder.path / name, step))


def unpack_bundle(path: Path, folder: RunFolder) -> None:
    """Put the rows back, which replace those that are there, and the other files where they are missing.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            contents = {name: archive.read(name).decode() for name in archive.namelist()}
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, RuntimeError) as error:
        raise CheckpointError(f"{path}: the run's files in it cannot be read ({error}).") from error
    # By names of our own: what an archive says decides nothing about other places here.
    ledgers = sorted(name for name in contents if name == f"{_TRACKERS}/{Path(name).stem}.json")
    if ledgers:
        (folder.path / _TRACKERS).mkdir(exist_ok=True)
    for name in (*_ROWS, *ledgers, *_FILES):
        if name in contents and (name in _ROWS or not (folder.path / name).exists()):
            write_text(folder.path / name, contents[name])


def _rows_up_to(path: Path, step: int) -> bytes:
    """Rows stand in the order of their steps, so only those at the end are looked into."""
    lines = list(whole_lines(path.read_bytes()))
    while lines and not is_row_up_to(path.name, lines[-1], step, step):
        lines.pop()
    return b"".join(lines)
