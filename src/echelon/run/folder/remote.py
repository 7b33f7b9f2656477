"""Checkpoints in an object store: layout, and how to publish, find, verify, download and remove them.

    URL/run.json                          the run that the address belongs to, its recipe, and the current writer
    URL/RUN/step-00000100.json            the marker: the folder, and the size and checksum of every file in it
    URL/RUN/step-00000100-1a2b3c4d/       the checkpoint's files, and run.zip with the other files of the run folder

An object store has no rename, but replaces a single object atomically. So the marker is written last, and removed
first: without a marker there is no checkpoint. A step that is saved again gets a new folder, and its marker is replaced
when that folder is complete.
"""

import json
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from echelon.ground.checksums import FORMAT, MANIFEST, check_files, compare_files, describe_files
from echelon.ground.errors import CheckpointError, ConfigError
from echelon.ground.object_store import ObjectStore, ObjectStoreError
from echelon.ground.stored import parse_json, read_as, write_json
from echelon.learn.checkpoint.folder import Checkpoint
from echelon.run.folder.run_folder import RunFolder

OWNER = "run.json"
BUNDLE = "run.zip"

_DOWNLOADS_AT_ONCE = 4


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
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    faults: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name of its folder in a run folder."""
        return f"step-{self.step:08d}"

    def holds(self, checkpoint: Checkpoint) -> bool:
        """Whether it is a complete copy of this checkpoint."""
        wanted = describe_files([checkpoint.path / MANIFEST])[MANIFEST]
        return not self.faults and self.files.get(MANIFEST) == wanted


@dataclass(frozen=True)
class _Named:
    """The content of remote.json."""

    run: str


class RemoteRuns:
    """The runs under one address, of which `run.json` names the current one. Every method raises ObjectStoreError.

    Nothing is cached: every call sends requests to the server.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.url = store.url

    def read_owner(self) -> Owner | None:
        """Return the owner of the address; None if it is unused. Raises CheckpointError if run.json is invalid."""
        if (content := self._store.read(OWNER)) is None:
            return None
        try:
            values = parse_json(content)
            if not _are_plain([str(values["run"])]):
                raise ValueError("its run is not a plain name")
            return Owner(str(values["run"]), str(values["recipe"]), str(values["writer"]))
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{self.url}/{OWNER} was not written by echelon ({error}); set checkpoint.remote to an address that "
                "nothing else uses, or restore that object."
            ) from error

    def claim(self, owner: Owner) -> None:
        """Assign the address to this run, and make its writer the only one that may publish."""
        self._store.write(OWNER, _render({"format": FORMAT, **asdict(owner)}))

    def find(self, run: str) -> list[RemoteCheckpoint]:
        """Return a run's checkpoints, oldest first, with damage visible in the listing; contents are not read."""
        sizes = self._store.sizes(run)
        steps = sorted(step for name in sizes if (step := _marked_step(name)) is not None)
        found = ((step, self._store.read(f"{run}/{_marker(step)}")) for step in steps)
        return [_parse(step, content, sizes) for step, content in found if content is not None]

    def verify(self, run: str, checkpoint: RemoteCheckpoint) -> list[str]:
        """Read all files and compare them with their checksums; return one phrase for each damaged file."""
        faults = list(checkpoint.faults)
        for name, entry in ({} if faults else checkpoint.files).items():
            try:
                place, expected = f"{run}/{checkpoint.folder}/{name}", (entry["bytes"], entry["sha256"])
                if self._store.digest(place, entry["bytes"]) != expected:
                    faults.append(f"the contents of {name} changed after it was written")
            except ObjectStoreError as error:
                if error.kind != "absent":
                    raise
                faults.append(f"{name} is missing")
        return faults

    def download(self, run: str, checkpoint: RemoteCheckpoint, into: Path) -> list[str]:
        """Download the files, including the bundle, into a folder and verify their checksums; return the faults."""
        if checkpoint.faults:
            return list(checkpoint.faults)
        into.mkdir(parents=True)

        def fetch(name: str) -> str | None:
            try:
                place, num_bytes = f"{run}/{checkpoint.folder}/{name}", checkpoint.files[name]["bytes"]
                self._store.download(place, into / name, num_bytes)
            except ObjectStoreError as error:
                if error.kind != "absent":
                    raise
                return f"{name} is missing"
            return None

        with ThreadPoolExecutor(_DOWNLOADS_AT_ONCE) as readers:
            missing = [fault for fault in readers.map(fetch, checkpoint.files) if fault is not None]
        return missing or compare_files(into, _entries(checkpoint.files), checksums=True)

    def publish(
        self, run: str, checkpoint: Checkpoint, folder: str, bundle: Path, may_publish: Callable[[], bool]
    ) -> int:
        """Upload a local checkpoint and write its marker; return its size in bytes, 0 if `may_publish` returned False.

        Complete files of an earlier attempt in `folder` are not sent again. `may_publish` is called before the marker
        is written.

        Raises:
            CheckpointError: the local checkpoint is damaged, or the server reports other sizes than were sent.
        """
        check_files(checkpoint.path, checksums=True)
        files: dict[str, dict[str, Any]] = dict(json.loads((checkpoint.path / MANIFEST).read_bytes())["files"])
        files |= describe_files([checkpoint.path / MANIFEST])
        files[BUNDLE] = describe_files([bundle])[bundle.name]
        sent = self._store.sizes(f"{run}/{folder}")
        # One after another: client libraries send the parts of one file in parallel, and hold them in memory.
        for name, entry in files.items():
            if sent.get(name) != entry["bytes"] or name == BUNDLE:
                self._store.upload(bundle if name == BUNDLE else checkpoint.path / name, f"{run}/{folder}/{name}")
        sent = self._store.sizes(f"{run}/{folder}")
        for name, entry in files.items():
            if sent.get(name) != entry["bytes"]:
                raise CheckpointError(f"only {sent.get(name, 0)} of {entry['bytes']} bytes of {name} were stored")
        if not may_publish():
            self._store.remove_folder(f"{run}/{folder}")
            return 0
        marker = {"format": FORMAT, "step": checkpoint.step, "folder": folder, "files": files}
        self._store.write(f"{run}/{_marker(checkpoint.step)}", _render(marker))
        return sum(entry["bytes"] for entry in files.values())

    def prune(self, run: str, newest: int, keep_last: int, keep: int | None) -> None:
        """Remove checkpoints older than the newest `keep_last` intact ones up to step `newest`, except step `keep`.

        Checkpoints beyond `newest` are ignored: they belong to a history that a resume has abandoned.
        """
        found = [checkpoint for checkpoint in self.find(run) if checkpoint.step <= newest]
        whole = [checkpoint.step for checkpoint in found if not checkpoint.faults]
        oldest = whole[-keep_last] if len(whole) >= keep_last else 0
        for checkpoint in found:
            if checkpoint.step < oldest and checkpoint.step != keep:
                self._store.remove([f"{run}/{_marker(checkpoint.step)}"])
        self.sweep(run)

    def sweep(self, run: str) -> None:
        """Remove files that no marker names, unless an unreadable marker might. Only the writer may call this."""
        markers = self.find(run)
        named = {marker.folder for marker in markers}
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
        return read_as(folder.remote_path, _Named).run
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{folder.remote_path}: cannot read the name of this run at checkpoint.remote ({error}); write "
            f'{{"run": "NAME"}} to it, with the name in {OWNER} at that address.'
        ) from error


def _entries(files: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, int, str]]:
    return sorted((name, entry["bytes"], entry["sha256"]) for name, entry in files.items())


def _marker(step: int) -> str:
    return f"step-{step:08d}.json"


def _marked_step(name: str) -> int | None:
    digits = name.removeprefix("step-").removesuffix(".json")
    return int(digits) if digits.isdecimal() and name == _marker(int(digits)) else None


def _render(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()


def _parse(step: int, content: bytes, sizes: Mapping[str, int]) -> RemoteCheckpoint:
    """Parse a marker, and compare its file sizes with a listing."""
    try:
        values = parse_json(content)
        if values["format"] != FORMAT:
            return RemoteCheckpoint(step, faults=(f"it has format {values['format']}; this version reads {FORMAT}",))
        folder = str(values["folder"])
        files = {
            str(name): {"bytes": int(entry["bytes"]), "sha256": str(entry["sha256"])}
            for name, entry in values["files"].items()
        }
        if values["step"] != step or not _are_plain([folder, *files]) or not {MANIFEST, BUNDLE} <= files.keys():
            return RemoteCheckpoint(step, faults=("its marker does not match it",))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return RemoteCheckpoint(step, faults=(f"its marker cannot be read ({error})",))
    faults = []
    for name, entry in files.items():
        if (size := sizes.get(f"{folder}/{name}")) is None:
            faults.append(f"{name} is missing")
        elif size != entry["bytes"]:
            faults.append(f"{name} has {size} bytes; {entry['bytes']} were written")
    return RemoteCheckpoint(step, folder, files, tuple(faults))


def _are_plain(names: Collection[str]) -> bool:
    """Whether these are file names and not paths: a server must not choose other folders on this machine."""
    return all(name not in ("", ".", "..") and "\\" not in name and PurePosixPath(name).name == name for name in names)
