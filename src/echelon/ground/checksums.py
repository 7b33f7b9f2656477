"""The manifest of a folder: the size and checksum of each of its files."""

import hashlib
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from echelon.ground.errors import CheckpointError
from echelon.ground.stored import parse_json, read_bytes, write_json

FORMAT = 1
MANIFEST = "manifest.json"
ELSEWHERE = "elsewhere.json"
"""In a folder without all files of its manifest: the address of the folder of an object store that has them."""

_FILES_AT_ONCE = 4
_REMOVALS = 20
_MARKERS = (".sagemaker-uploading", ".sagemaker-uploaded")

Files = Mapping[str, Mapping[str, Any]]
"""Files by their path in a folder: `bytes` and `sha256` of each."""


def list_files(folder: Path, pattern: str = "*") -> list[Path]:
    """Return the sorted entries of a folder without SageMaker's markers; empty if there is no folder.

    While SageMaker copies a folder to S3, it puts an empty `FILE.sagemaker-uploading` or `FILE.sagemaker-uploaded`
    beside each file. They come and go at any moment, so they must not be opened, copied or recorded.
    """
    return sorted(path for path in folder.glob(pattern) if not path.name.endswith(_MARKERS))


def remove_tree(folder: Path) -> None:
    """Remove a folder also while another process puts files into it or removes some, as SageMaker does (`list_files`).

    Raises OSError if it cannot be removed.
    """
    for _ in range(_REMOVALS):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
    shutil.rmtree(folder)


def write_manifest(folder: Path, described: Mapping[str, Any] | None = None) -> None:
    """Write the manifest of a folder; `described` has already known entries, the other files are read."""
    files = dict(described or {})
    files |= describe_files(path for path in list_files(folder) if path.name not in files and path.name != MANIFEST)
    write_json(folder / MANIFEST, {"format": FORMAT, "files": files})


def describe_files(paths: Iterable[Path], below: Path | None = None) -> dict[str, Any]:
    """Return the manifest entry of each file, by name, or by its path `below` a folder: size and checksum.

    Reads a few files at a time.
    """
    paths = sorted(paths)
    with ThreadPoolExecutor(_FILES_AT_ONCE) as readers:
        digests = list(readers.map(file_digest, paths))
    return {
        path.relative_to(below or path.parent).as_posix(): {"bytes": path.stat().st_size, "sha256": digest}
        for path, digest in zip(paths, digests, strict=True)
    }


def list_all_files(folder: Path) -> dict[str, Path]:
    """Return the files of a folder and its subfolders by their path in it, without SageMaker's markers."""
    return {path.relative_to(folder).as_posix(): path for path in list_files(folder, "**/*") if path.is_file()}


def check_files(folder: Path, checksums: bool = False) -> None:
    """Compare a folder's files with its manifest: names and sizes, and with `checksums` also contents.

    Raises:
        CheckpointError: the message names the first file that is missing or differs.
    """
    if faults := find_faults(folder, checksums, whole=True):
        raise CheckpointError(f"{folder}: {faults[0]}.")


def find_faults(folder: Path, checksums: bool = False, part: int = 0, parts: int = 1, whole: bool = False) -> list[str]:
    """Return a phrase for each file of a folder that differs from its manifest; empty if it is intact.

    With `checksums` all contents are read and hashed, a few files at a time; otherwise only sizes are compared. Several
    processes can divide the files: each checks share `part` of `parts`. Files that are elsewhere (ELSEWHERE) are faults
    only with `whole`.
    """
    try:
        files = parse_manifest(read_bytes(folder / MANIFEST))[1]
    except (OSError, ValueError) as error:
        return [f"it has no readable {MANIFEST} ({error})"]
    if not whole and (folder / ELSEWHERE).exists():
        files = {name: files[name] for name in files.keys() - find_absent(folder, files)}
    return compare_files(folder, dict(sorted(files.items())[part::parts]), checksums)


def find_absent(folder: Path, files: Files) -> Files:
    """Return the files that a folder does not have with their size."""
    sizes = {path.name: path.stat().st_size for path in list_files(folder)}
    return {name: entry for name, entry in files.items() if sizes.get(name) != entry["bytes"]}


def parse_manifest(content: bytes) -> tuple[dict[str, Any], Files]:
    """Return what a manifest holds, and its files. Raises ValueError if this version cannot read it."""
    values: dict[str, Any] = parse_json(content)
    try:
        if values["format"] != FORMAT:
            raise ValueError(f"it has format {values['format']!r:.40}, and this version reads format {FORMAT}")
        files = {
            str(name): {"bytes": int(entry["bytes"]), "sha256": str(entry["sha256"])}
            for name, entry in values["files"].items()
        }
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    for name in files:  # it may come from a server, which must not choose other folders on this machine
        if {*name.split("/")} & {"", ".", ".."} or {*name} & {"\\", "\0"} or len(name) > 255:
            raise ValueError(f"{name[:50]!r} is not a file of the folder")
    return values, files


def compare_files(folder: Path, files: Files, checksums: bool) -> list[str]:
    """Compare the files of a folder with what they should be; return a phrase for each that differs."""
    with ThreadPoolExecutor(_FILES_AT_ONCE) as readers:
        found = readers.map(
            lambda name: _find_fault(folder / name, files[name]["bytes"], files[name]["sha256"] if checksums else None),
            files,
        )
        return [fault for fault in found if fault is not None]


def _find_fault(path: Path, num_bytes: int, digest: str | None) -> str | None:
    try:
        if not path.is_file():
            return f"{path.name} is missing"
        if path.stat().st_size != num_bytes:
            return f"{path.name} has {path.stat().st_size} bytes; {num_bytes} were written"
        if digest is not None and file_digest(path) != digest:
            return f"the contents of {path.name} changed after it was written"
    except OSError as error:  # a failing disk
        return f"{path.name} cannot be read ({error.strerror or error})"
    return None


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file's contents."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
