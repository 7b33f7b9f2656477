"""Prepared folders that other machines have written: those in an object store, or one that a recipe names itself.

With `data.prepared_remote` a folder is prepared once, and downloaded by every other machine:

    URL/KEY.json      the marker: the size and checksum of every file of the folder
    URL/KEY/...       the files of the prepared folder KEY

The key is a hash of everything that determines the content, so whoever writes a folder writes the same. The marker is
written last: without it there is no folder.

If `data.prepared_dir` has a manifest, it is a prepared folder itself, and the text is not read. So tokens that were
prepared on one machine can be used on others, which need not have the text. The settings that decided the content are
stored beside the tokens, and must be those of the recipe.
"""

import logging
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from echelon.ground import mirror
from echelon.ground.checksums import Files, list_all_files, parse_manifest
from echelon.ground.errors import ConfigError
from echelon.ground.object_store import ObjectStore, ObjectStoreError, retried
from echelon.ground.sizes import render_bytes
from echelon.ground.stored import read_json, sync_path, write_json
from echelon.learn.data.catalog import MANIFEST_NAME, Manifest
from echelon.learn.data.prepare_spec import PrepareSpec
from echelon.learn.data.prepared import PreparedData, open_prepared
from echelon.learn.data.templates import load_template
from echelon.learn.data.tokenizer import tokenizer_fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


logger = logging.getLogger(__name__)
_KEY = "data.prepared_remote"


class SharedFolders:
    """The prepared folders at an address. A failing store is reported, and the data is then prepared here."""

    def __init__(self, url: str) -> None:
        """Makes no request. Raises ConfigError for an unsupported protocol."""
        self._url = url
        self._store = ObjectStore(url, _KEY)
        self._is_settled = self._is_damaged = False

    def bring(self, folder: Path) -> bool:
        """Download the prepared folder with this name, if the store has it intact. Returns whether it did.

        Only one process may do so at a time. Raises ConfigError if the store refuses access, OSError if the disk is
        full.
        """
        writing, faults = folder.with_suffix(".downloading"), list[str]()
        files: Files | None = None

        def attempt() -> None:
            nonlocal files
            if (files := self._read_marker(folder.name)) is not None:
                size = render_bytes(mirror.count_bytes(files))
                logger.info(f"data: downloading {folder.name} ({size}) from {self._url}")
                faults[:] = mirror.bring(self._store, folder.name, files, writing)

        try:
            self._is_settled = not self._retried(attempt, "the data is prepared here")
            if self._is_settled or files is None:
                return False
            if faults:
                self._is_damaged = True
                logger.warning(f"data: {self._url}/{folder.name} is damaged ({faults[0]}); the data is prepared here")
                return False
            writing.rename(folder)
            sync_path(folder.parent)
            self._is_settled = True
        finally:
            shutil.rmtree(writing, ignore_errors=True)
        return True

    def send(self, folder: Path) -> None:
        """Upload a prepared folder, unless it was brought from there or the store has files of the same sizes.

        Raises ConfigError if the store refuses access.
        """
        if not self._is_settled:
            self._retried(lambda: self._upload(folder), "other machines prepare the data themselves")

    def _retried(self, attempt: Callable[[], None], otherwise: str) -> bool:
        """Make an attempt until it succeeds; returns whether it did. `otherwise`: what happens if it does not."""
        try:
            retried(attempt, mirror.RETRY_DELAYS_SECONDS, time.sleep)
        except ObjectStoreError as error:
            described = f"{_KEY}={self._url} cannot be used ({error})"
            if error.kind != "failed":
                raise ConfigError(
                    f"{described}; check the address, that its bucket exists, and that the credentials in the "
                    "environment allow to list, read and write objects."
                ) from None
            logger.warning(f"data: {described}; {otherwise}")
            return False
        return True

    def _read_marker(self, name: str) -> Files | None:
        """The files of a folder in the store; None if there is none that this version can read."""
        if (content := self._store.read(f"{name}.json")) is None:
            return None
        try:
            return parse_manifest(content)[1]
        except ValueError as error:
            logger.warning(f"data: {self._url}/{name}.json cannot be read ({error}); the data is prepared here")
            return None

    def _upload(self, folder: Path) -> None:
        sizes = {name: path.stat().st_size for name, path in list_all_files(folder).items()}
        marked = {name: entry["bytes"] for name, entry in (self._read_marker(folder.name) or {}).items()}
        if sizes == marked == self._store.sizes(folder.name) and not self._is_damaged:
            return
        logger.info(f"data: uploading {folder.name} ({render_bytes(sum(sizes.values()))}) to {self._url}")
        mirror.publish(self._store, folder)


SETTINGS_NAME = "settings.json"
_ADDRESS = re.compile(r"[a-z][a-z0-9+]*:/")


def is_given(spec: PrepareSpec) -> bool:
    """Whether `data.prepared_dir` is itself a prepared folder, instead of a folder of them.

    Raises ConfigError for the address of an object store, which only a container of SageMaker turns into a folder.
    """
    if _ADDRESS.match(str(spec.prepared_dir)):
        raise ConfigError(
            f"data.prepared_dir={str(spec.prepared_dir).replace(':/', '://', 1)}: only jobs with launch.to=sagemaker "
            "take an address; copy it to this machine and give the folder."
        )
    return (spec.prepared_dir / MANIFEST_NAME).is_file()


def describe_settings(spec: PrepareSpec, tokenizer: "PreTrainedTokenizerFast | None") -> dict[str, Any]:
    """What decides the content of a prepared folder besides its text, by recipe key, as JSON holds it.

    Without `tokenizer`, one is trained on the text.
    """
    options = asdict(spec.instruction)
    template, separator = options.pop("chat_template"), options.pop("separator")
    sources = [
        [source.key, source.name, source.split, source.max_samples, dict(source.fields)] for source in _sources(spec)
    ]
    return {
        "tokenizer": spec.tokenizer if tokenizer is None else tokenizer_fingerprint(tokenizer),
        "model.new_tokens": list(spec.new_tokens),
        "data.train and data.validation": sources,
        "data.validation_fraction": 0.0 if spec.validation else spec.validation_fraction,
        "data.document_separator": separator,
        "data.deduplicate": spec.deduplicate,
        "data.max_broken_fraction": spec.max_broken_fraction,
        "data.chat_template": template and sha256(load_template(template).encode()).hexdigest(),
        **{f"data.{name}": list(value) if isinstance(value, tuple) else value for name, value in options.items()},
    }


def _sources(spec: PrepareSpec) -> tuple[Any, ...]:
    return (*spec.train, *spec.validation)


def save_settings(folder: Path, spec: PrepareSpec, tokenizer: "PreTrainedTokenizerFast | None") -> None:
    """Write what decided the content of a prepared folder."""
    write_json(folder / SETTINGS_NAME, describe_settings(spec, tokenizer))


def open_given(
    spec: PrepareSpec,
    tokenizer: "PreTrainedTokenizerFast | None",
    find_obstacle: Callable[[], str | None],
    *,
    verify: bool = False,
) -> PreparedData:
    """Open the folder that the recipe names.

    Raises ConfigError for a setting of the recipe with which it would have another content, and the errors of
    `open_prepared`.
    """
    folder = spec.prepared_dir
    try:
        stored = read_json(folder / SETTINGS_NAME)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"data.prepared_dir={folder}: {SETTINGS_NAME} cannot be read ({error}), so it is unknown for which recipe "
            "it was made; run `echelon data --prepare` again, with this version of echelon."
        ) from error
    _refuse_differences(folder, stored, describe_settings(spec, tokenizer))
    prepared = open_prepared(folder, spec.sequence_len, spec.document_mask, verify=verify)
    _refuse_other_samples(folder, spec, prepared.manifest)
    obstacle = find_obstacle() if prepared.apart else None
    if obstacle is not None:
        raise ConfigError(
            f"data.prepared_dir={folder} has sequences of several documents: {obstacle}; prepare it with "
            "data.packing=false."
        )
    return replace(prepared, loaded=tokenizer)


def _refuse_differences(folder: Path, stored: Any, wanted: Mapping[str, Any]) -> None:
    settings = stored if isinstance(stored, dict) else {}
    different = [key for key, value in wanted.items() if key not in settings or settings[key] != value]
    if different:
        raise ConfigError(
            f"data.prepared_dir={folder} was prepared with another {' and another '.join(different)}; run `echelon "
            "data --prepare` with this recipe, or use the recipe with which it was prepared."
        )


def _refuse_other_samples(folder: Path, spec: PrepareSpec, manifest: Manifest) -> None:
    rule = manifest.samples
    packing = True if rule is None else rule.packing
    for key, asked, actual in (
        ("data.packing", packing if spec.packing == "auto" else spec.packing, packing),
        ("data.on_overlong", spec.on_overlong, spec.on_overlong if rule is None else rule.on_overlong),
    ):
        if asked != actual:
            raise ConfigError(
                f"data.prepared_dir={folder} was prepared with {key}={str(actual).lower()}, but the recipe has "
                f"{str(asked).lower()}; prepare it again, or change {key}."
            )
