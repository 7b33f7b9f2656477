"""Checkpoints in an object store: layout, and how to publish, find, verify, download and remove them.

    URL/run.json                          the run that the address belongs to, its recipe, and the current writer
    URL/RUN/step-00000100.json            the marker: the folder, and the size and checksum of every file in it
    URL/RUN/step-00000100-1a2b3c4d/       the checkpoint's files, and run.zip with the other files of the run folder

An object store has no rename, but replaces a single object atomically. So the marker is written last, and removed
first: without a marker there is no checkpoint. A step that is saved again gets a new folder, and its marker is replaced
when that folder is complete. Archives with the files that a resume needs in addition are made here too.
"""

import zipfile
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath

from echelon.ground import mirror
from echelon.ground.checksums import FORMAT, MANIFEST, Files, check_files, describe_files, parse_manifest
from echelon.ground.errors import CheckpointError, ConfigError
from echelon.ground.object_store import ObjectStore
from echelon.ground.sizes import render_bytes
from echelon.ground.stored import MAX_ROWS_BYTES, parse_as, read_as, read_bytes, whole_lines, write_json, write_text
from echelon.learn.checkpoint.folder import Checkpoint
from echelon.run.folder.run_folder import RunFolder, is_row_up_to

OWNER = "run.json"
BUNDLE = "run.zip"
# In the order in which they are restored: recipe.yaml comes last, because it makes a folder a run.
_FILES = (
    "environment.json", "estimate.json", "data.json", "hub.json", "models.json", "events.jsonl", "spending.json",
    "plan.json", "recipe.yaml",
)  # fmt: skip
_ROWS = ("metrics.jsonl", "samples.jsonl")
_TRACKERS = "trackers"


@dataclass(frozen=True)
class Owner:
    """The owner of an address: the run's name there, its recipe as YAML, and the process that currently writes."""

    run: str
    recipe: str
    writer: str


@dataclass(frozen=True)
class RemoteCheckpoint:
    """A checkpoint with a marker. `files`: size and checksum by name. `faults`: damage that the listing shows."""

    step: int
    folder: str = ""
    files: Files = field(default_factory=dict)
    faults: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name of its folder in a run folder."""
        return f"step-{self.step:08d}"

    def holds(self, checkpoint: Checkpoint) -> bool:
        """Whether it is a complete copy of this checkpoint."""
        expected = describe_files([checkpoint.path / MANIFEST])[MANIFEST]
        return not self.faults and self.files.get(MANIFEST) == expected


class RemoteRuns:
    """The runs under one address, of which `run.json` names the current one. Every method raises ObjectStoreError.

    Nothing is cached: every call sends requests to the server.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.url = store.url
        self.spared = ""
        """A folder without a marker that `sweep` does not remove: files are sent to it."""

    def read_owner(self) -> Owner | None:
        """Return the owner of the address; None if it is unused. Raises CheckpointError if run.json is invalid."""
        if (content := self._store.read(OWNER)) is None:
            return None
        try:
            owner = parse_as(content, Owner)
            if not _is_plain(owner.run):
                raise ValueError("its run is not a plain name")
        except ValueError as error:
            raise CheckpointError(
                f"{self.url}/{OWNER} was not written by echelon ({error}); set checkpoint.remote to an address that "
                "nothing else uses, or restore that object."
            ) from error
        return owner

    def claim(self, owner: Owner) -> None:
        """Assign the address to this run, and make its writer the only one that may publish."""
        self._store.write_json(OWNER, {"format": FORMAT, **asdict(owner)})

    def find(self, run: str) -> list[RemoteCheckpoint]:
        """Return a run's checkpoints, oldest first, with damage visible in the listing; contents are not read."""
        sizes = self._store.sizes(run)
        steps = sorted(step for name in sizes if (step := _marked_step(name)) is not None)
        markers = ((step, self._store.read(f"{run}/{_marker(step)}")) for step in steps)
        return [_parse(step, content, sizes) for step, content in markers if content is not None]

    def verify(self, run: str, checkpoint: RemoteCheckpoint) -> list[str]:
        """Read all files and compare them with their checksums; return one phrase for each damaged file."""
        return list(checkpoint.faults) or mirror.verify(self._store, f"{run}/{checkpoint.folder}", checkpoint.files)

    def download(self, run: str, checkpoint: RemoteCheckpoint, into: Path) -> list[str]:
        """Download the files, including the bundle, into a folder and verify their checksums; return the faults."""
        return list(checkpoint.faults) or mirror.bring(
            self._store, f"{run}/{checkpoint.folder}", checkpoint.files, into, mirror.RETRY_DELAYS_SECONDS
        )

    def publish(
        self,
        run: str,
        checkpoint: Checkpoint,
        folder: str,
        bundle: Path,
        may_publish: Callable[[], bool],
        sent: Collection[str] = (),
    ) -> int:
        """Upload a local checkpoint and write its marker; return its size in bytes, 0 if `may_publish` returned False.

        Complete files of an earlier attempt in `folder` are not sent again. `may_publish` is called before the marker
        is written. `sent`: the files that the ranks have just sent, as they wrote them.

        Raises:
            CheckpointError: the local checkpoint is damaged.
        """
        if not sent:
            check_files(checkpoint.path, checksums=True)
        files = dict(parse_manifest(read_bytes(checkpoint.path / MANIFEST))[1])
        files |= describe_files([checkpoint.path / MANIFEST])
        sources = {name: checkpoint.path / name for name in files if name not in sent}
        files[BUNDLE] = describe_files([bundle])[bundle.name]
        mirror.send(self._store, f"{run}/{folder}", {**sources, BUNDLE: bundle}, files, sent=sources)
        if not may_publish():
            self._store.remove_folder(f"{run}/{folder}")
            return 0
        name = f"{run}/{_marker(checkpoint.step)}"
        mirror.write_marker(self._store, name, files, step=checkpoint.step, folder=folder)
        return mirror.count_bytes(files)

    def prune(self, run: str, newest: int, keep_last: int, keep: int | None) -> None:
        """Remove checkpoints older than the newest `keep_last` intact ones up to step `newest`, except step `keep`.

        Checkpoints beyond `newest` are ignored: they belong to a history that a resume has abandoned.
        """
        checkpoints = [checkpoint for checkpoint in self.find(run) if checkpoint.step <= newest]
        whole = [checkpoint.step for checkpoint in checkpoints if not checkpoint.faults]
        oldest = whole[-keep_last] if len(whole) >= keep_last else 0
        for checkpoint in checkpoints:
            if checkpoint.step < oldest and checkpoint.step != keep:
                self._store.remove([f"{run}/{_marker(checkpoint.step)}"])
        self.sweep(run)

    def sweep(self, run: str) -> None:
        """Remove files that no marker names, unless an unreadable marker might. Only the writer may call this."""
        markers = self.find(run)
        named = {self.spared, *(marker.folder for marker in markers)}
        unread = tuple(f"{marker.name}-" for marker in markers if not marker.folder)
        folders = {name.partition("/")[0] for name in self._store.sizes(run) if "/" in name}
        for folder in sorted(folders - named):
            if not folder.startswith(unread):
                self._store.remove_folder(f"{run}/{folder}")


def write_run_name(folder: RunFolder, run: str) -> None:
    """Write the run's name in the object store to the run folder."""
    write_json(folder.remote_path, {"run": run})


def read_run_name(folder: RunFolder) -> str | None:
    """Read the run's name in the object store from the run folder; None if it has none.

    Raises ConfigError if remote.json is damaged: with another name, the run would not find its checkpoints.
    """
    try:
        return read_as(folder.remote_path, dict[str, str])["run"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{folder.remote_path}: cannot read the name of this run at checkpoint.remote ({error}); write "
            f'{{"run": "NAME"}} to it, with the name in {OWNER} at that address.'
        ) from error


def _marker(step: int) -> str:
    return f"step-{step:08d}.json"


def _marked_step(name: str) -> int | None:
    digits = name.removeprefix("step-").removesuffix(".json")
    return int(digits) if digits.isdecimal() and name == _marker(int(digits)) else None


def _parse(step: int, content: bytes, sizes: Mapping[str, int]) -> RemoteCheckpoint:
    """Parse a marker, and compare its file sizes with a listing."""
    try:
        values, files = parse_manifest(content)
        folder = str(values["folder"])
        if values["step"] != step or not _is_plain(folder) or not {MANIFEST, BUNDLE} <= files.keys():
            raise ValueError("it is not of this checkpoint")
    except (ValueError, KeyError) as error:
        return RemoteCheckpoint(step, faults=(f"its marker cannot be read ({error})",))
    return RemoteCheckpoint(step, folder, files, tuple(mirror.compare_sizes(files, sizes, f"{folder}/")))


def _is_plain(name: str) -> bool:
    """Whether this is a name and not a path: a server must not choose other folders on this machine."""
    return name not in ("", ".", "..") and "\\" not in name and PurePosixPath(name).name == name


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
