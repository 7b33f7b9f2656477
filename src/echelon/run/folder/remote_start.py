"""Handles `checkpoint.remote` when a run starts: downloads newer checkpoints of the run and claims the address.

This happens before any worker and process group exists, so a long download hits no timeout.
"""

import logging
import shutil
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from echelon.ground.checksums import ELSEWHERE, find_faults
from echelon.ground.errors import CheckpointError, ConfigError, EchelonError, explain_storage_error
from echelon.ground.launch_environment import shares_files
from echelon.ground.mirror import count_bytes
from echelon.ground.object_store import ObjectStore, ObjectStoreError
from echelon.ground.sizes import render_bytes
from echelon.ground.stored import write_json
from echelon.learn.checkpoint.folder import find_checkpoints, find_source, give_name, newest_whole
from echelon.recipe.difference import blocking_differences
from echelon.recipe.document import Recipe
from echelon.recipe.load import load_recipe, parse_recipe
from echelon.recipe.render import render_recipe
from echelon.run.folder.remote import (
    BUNDLE,
    OWNER,
    Owner,
    RemoteCheckpoint,
    RemoteRuns,
    read_run_name,
    unpack_bundle,
    write_run_name,
)
from echelon.run.folder.run_folder import RunFolder
from echelon.run.folder.upload import Uploader

logger = logging.getLogger(__name__)


class RemoteStart:
    """The steps of one start that concern `checkpoint.remote`; every method does nothing if the key is not set.

    Raises ConfigError if the address belongs to another run or is unusable, EchelonError if the server fails and the
    start depends on it. A run folder with an intact local checkpoint continues without the server.
    """

    def __init__(self, recipe: Recipe) -> None:
        """Makes no request. Raises ConfigError for an unsupported protocol."""
        self._recipe = recipe
        url = recipe.checkpoint.remote
        self._remote = None if url is None else RemoteRuns(ObjectStore(url))
        self._is_down = False

    def reach(self) -> None:
        """Check that the server answers, before anything is created or moved for a new run."""
        if self._remote is not None:
            try:
                self._remote.read_owner()
            except ObjectStoreError as error:
                raise self._refusal(error) from None

    def bring_back(self, folder: RunFolder) -> None:
        """Download the newest intact remote checkpoint to a locked run folder, if it is newer than the local ones."""
        if self._remote is None:
            return
        is_new = not folder.recipe_path.exists()
        try:
            if (owner := self._remote.read_owner()) is None:
                return
            if read_run_name(folder) not in ({owner.run, None} if is_new else {owner.run}):
                raise ConfigError(
                    f"checkpoint.remote={self._remote.url} contains checkpoints of another run than run.dir="
                    f"{folder.path}; use a different address for each run."
                )
            if is_new:
                self._refuse_other_recipe(owner)
            self._fetch_newest(folder, owner.run, is_new)
            write_run_name(folder, owner.run)
        except ObjectStoreError as error:
            self._continue_without_server(folder, error)

    def claim(self, folder: RunFolder) -> None:
        """Write the owner of the address, which also checks write access. For a run that starts."""
        if self._remote is None:
            return
        run = read_run_name(folder) or f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{uuid.uuid4().hex[:6]}"
        before = None
        try:
            if not self._is_down:
                before = self._remote.read_owner()
                self._remote.claim(Owner(run, render_recipe(self._recipe), ""))
        except ObjectStoreError as error:
            self._continue_without_server(folder, error)
        write_run_name(folder, run)
        if before is not None and before.run != run:
            logger.info(f"checkpoint: the checkpoints of the old run remain in {self._remote.url}/{before.run}")

    def send_rest(self, folder: RunFolder) -> None:
        """Upload a finished run's newest checkpoint, if an outage prevented that when it ended."""
        newest = newest_whole(folder.checkpoints_dir)
        if self._remote is None or self._is_down or newest is None:
            return
        folder.lock()
        try:
            if read_run_name(folder) is None:
                self.claim(folder)
            keep = newest.read_state()["train"].get("best_step") if self._recipe.checkpoint.keep_best else None
            keep_last = self._recipe.checkpoint.keep_last
            uploader = Uploader(self._remote.url, folder, keep_last, folder.rows.append_event)
            uploader.offer(newest, keep, if_missing=True)
            while not uploader.wait(1.0) and not uploader.is_failing:
                pass
            uploader.tell_unfinished()
        finally:
            folder.unlock()

    def _continue_without_server(self, folder: RunFolder, error: ObjectStoreError) -> None:
        """Continue from a local checkpoint. Without one, refuse: the server may have a run that would be repeated."""
        newest = newest_whole(folder.checkpoints_dir)
        if not folder.recipe_path.exists() or newest is None or (newest.path / ELSEWHERE).exists():
            raise self._refusal(error) from None
        self._is_down = True
        logger.warning(
            f"checkpoint: {self._describe(error)}; continuing from the checkpoints in {folder.path}, and uploads will "
            "be retried"
        )

    def _refusal(self, error: ObjectStoreError) -> EchelonError:
        description = self._describe(error)
        if error.kind == "failed":
            return EchelonError(f"{description}; run the same command again when the server answers.")
        return ConfigError(
            f"{description}; check the address, that its bucket exists, and that the credentials in the environment "
            "allow to list, read, write and delete objects."
        )

    def _describe(self, error: ObjectStoreError) -> str:
        return f"checkpoint.remote={self._recipe.checkpoint.remote} cannot be used ({error})"

    def _refuse_other_recipe(self, owner: Owner) -> None:
        """Apply the rule for an existing run folder to a run whose folder is not on this machine."""
        assert self._remote is not None
        try:
            old, _ = parse_recipe(owner.recipe, OWNER)
        except ConfigError as error:
            raise ConfigError(
                f"checkpoint.remote={self._remote.url} contains a run whose recipe cannot be read ({error}); pass "
                "--fresh to keep it there and start a new run, or choose another address."
            ) from error
        if blocking := blocking_differences(old, self._recipe):
            shown = "\n".join(f"  {difference}" for difference in blocking)
            raise ConfigError(
                f"checkpoint.remote={self._remote.url} contains a run with another recipe:\n{shown}\nrestore these "
                "keys to resume it, pass --fresh to keep it there and start a new run, or choose another address."
            )

    def _fetch_newest(self, folder: RunFolder, run: str, is_new: bool) -> None:
        assert self._remote is not None
        checkpoints = self._remote.find(run)
        num_fetched = 0
        for checkpoint in reversed(checkpoints):
            if not is_new and self._has_whole_one(folder, run, checkpoint):
                return
            num_fetched += self._fetch(folder, run, checkpoint, unpacks=num_fetched == 0)
            # Where each machine fetches its files later, others are at hand if they are damaged.
            if num_fetched and (shares_files() or not is_new):
                return
        if is_new and checkpoints and not num_fetched:
            raise CheckpointError(
                f"All checkpoints in {self._remote.url} are damaged, and {folder.path} has none; pass --fresh to start "
                "a new run, which keeps them there."
            )

    def _fetch(self, folder: RunFolder, run: str, checkpoint: RemoteCheckpoint, unpacks: bool) -> bool:
        """Download a checkpoint and publish it if it is intact; return whether it is.

        Of machines that share no folder, each fetches the files of its ranks later. `unpacks`: whether the run's other
        files are restored from it too.
        """
        assert self._remote is not None
        if not shares_files():
            files = {name: entry for name, entry in checkpoint.files.items() if not name.startswith("__")}
            checkpoint = replace(checkpoint, files=files)
        remote, began = self._remote, time.monotonic()
        writing = folder.checkpoints_dir / f".writing-{checkpoint.step:08d}"
        num_bytes = count_bytes(checkpoint.files)
        if not checkpoint.faults:
            logger.info(f"Downloading {checkpoint.name} ({render_bytes(num_bytes)}) from {remote.url}.")
        try:
            faults = remote.download(run, checkpoint, writing)
            if not shares_files():
                write_json(writing / ELSEWHERE, {"url": f"{remote.url}/{run}/{checkpoint.folder}"})
            if faults := faults or find_faults(writing):
                logger.warning(f"Skipping a damaged checkpoint: {remote.url}, {checkpoint.name}: {'; '.join(faults)}.")
                return False
            bundle = folder.path / f".{BUNDLE}.tmp"
            (writing / BUNDLE).replace(bundle)
            give_name(writing, folder.checkpoints_dir / checkpoint.name)
            if unpacks:
                unpack_bundle(bundle, folder)
            bundle.unlink()
        except OSError as error:
            raise EchelonError(
                f"run.dir={folder.path}: {explain_storage_error(error, folder.path) or error}."
            ) from error
        finally:
            shutil.rmtree(writing, ignore_errors=True)
        seconds = time.monotonic() - began
        folder.rows.append_event("download", step=checkpoint.step, seconds=seconds, bytes=num_bytes)
        logger.info(f"Downloaded {checkpoint.name} and verified its checksums in {seconds:.1f} s.")
        return True

    def _has_whole_one(self, folder: RunFolder, run: str, checkpoint: RemoteCheckpoint) -> bool:
        """Whether the run folder has this checkpoint or a later one intact; verifies checksums unless finished.

        Of one whose other files are in the store, the store must have them.
        """
        assert self._remote is not None
        sources = {None, f"{self._remote.url}/{run}/{checkpoint.folder}"}
        paths = [local.path for local in find_checkpoints(folder.checkpoints_dir) if local.step >= checkpoint.step]
        checksums = not folder.is_finished()
        return any(find_source(path) in sources and not find_faults(path, checksums) for path in reversed(paths))


def describe_remote(run: Path, verify: bool) -> Iterator[tuple[str, bool]]:
    """Yield a line for each remote checkpoint of a run, and whether it is damaged; `verify` checks all contents.

    Yields nothing if the run has no `checkpoint.remote`. Raises ObjectStoreError.
    """
    folder = RunFolder(run)
    name = read_run_name(folder)
    url = load_recipe(folder.recipe_path)[0].checkpoint.remote if folder.recipe_path.exists() else None
    if name is None or url is None:
        return
    remote = RemoteRuns(ObjectStore(url))
    try:
        for checkpoint in remote.find(name):
            faults = remote.verify(name, checkpoint) if verify else []
            state = ("damaged: " + "; ".join(faults) if faults else "whole") + "  " if verify else ""
            yield f"step {checkpoint.step}  {state}{url}/{name}/{checkpoint.folder or checkpoint.name}", bool(faults)
    except ObjectStoreError as error:
        raise ObjectStoreError(f"checkpoint.remote={url} cannot be read ({error}).", error.kind) from None
