"""The models that a run was given: its base, its teacher, its reward models. Are they those of its first start?"""

import hashlib
import json
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from echelon.ground.checksums import MANIFEST, list_files
from echelon.ground.errors import ConfigError
from echelon.ground.run_files import is_run
from echelon.ground.stored import open_regular, read_as, read_bytes, write_json
from echelon.learn.checkpoint.folder import newest_of
from echelon.learn.model.safetensors_folder import SafetensorsFolder
from echelon.recipe.document import Recipe

logger = logging.getLogger(__name__)

RECORD = "models.json"
"""File of a run folder with the fingerprints of the given models, by recipe key."""

_BASE = "model.checkpoint"
_BLOCK, _BLOCKS = 2**14, 128  # bytes of a tensor, and tensors of a file, that are read
_HEADER_BYTES = 10**8  # the limit of safetensors
_FILES_AT_ONCE = 8


def fingerprint_model(source: Path) -> str | None:
    """Return what tells models apart, whatever their size after a few MiB; None if there are no weights here.

    Of a run, a hash of the checksums of its newest checkpoint. Of an HF folder, a hash of config.json and of each
    weight file: its size, its header, and the middle 16 KiB of each tensor, or of 128 of them, evenly spread. Neither
    the folder's place nor the times of files count. A change that leaves all of this as it is stays unseen: of single
    rows of a large matrix, or of single tensors in a file with very many.

    Raises:
        OSError: a file cannot be read.
        ConfigError, CheckpointError: a run has no checkpoint, or what is there is damaged.
    """
    if is_run(source):
        return hashlib.sha256(read_bytes(newest_of(source).path / MANIFEST)).hexdigest()[:16]
    if not list_files(source, "*.safetensors"):
        return None
    files = sorted(set(SafetensorsFolder(source).files.values()))
    digest = hashlib.sha256(read_bytes(source / "config.json"))
    with ThreadPoolExecutor(_FILES_AT_ONCE) as readers:
        for path, sampled in zip(files, readers.map(_sample, files), strict=True):
            digest.update(path.name.encode() + sampled)
    return digest.hexdigest()[:16]


def _sample(path: Path) -> bytes:
    """Return a hash of a weight file's size, header and blocks. A damaged header, which has no tensors, differs too."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with open_regular(path) as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = stream.read(min(length, size, _HEADER_BYTES))
        digest.update(header)
        for start, stop in _find_blocks(header):
            stream.seek(min(8 + length + start, size))
            digest.update(stream.read(stop - start))
    return digest.digest()


def _find_blocks(header: bytes) -> list[tuple[int, int]]:
    """Return the first and the last byte of each block, counted from the end of the header."""
    spans = list[tuple[int, int]]()
    with suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
        tensors = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
        spans = sorted((max(0, int(start)), int(stop)) for start, stop in (e["data_offsets"] for e in tensors.values()))
    chosen = [spans[number * len(spans) // _BLOCKS] for number in range(_BLOCKS)] if len(spans) > _BLOCKS else spans
    middles = [(max(start, (start + stop - _BLOCK) // 2), stop) for start, stop in chosen]
    return [(start, min(stop, start + _BLOCK)) for start, stop in middles]


def keep_given_models(run: Path, recipe: Recipe) -> None:
    """Refuse a run whose models are no longer those of its first start, and record those that are not known yet.

    So a run that an earlier version began goes on, and from then on with its models as they are now. One rank calls it.

    Args:
        run: its folder, which has the record.
        recipe: with hub ids replaced by local copies.

    Raises:
        ConfigError: a model was replaced.
    """
    saved = _read_record(run / RECORD)
    marks = {key: mark for key, source in _list_given(recipe) if (mark := _check(key, source, saved, run)) is not None}
    if not marks.keys() <= saved.keys():
        write_json(run / RECORD, saved | marks)


def check_base(run: Path, recipe: Recipe) -> None:
    """Refuse to use what a run trained with another base model than its own. Takes what `keep_given_models` takes."""
    if recipe.model.checkpoint is not None:
        _check(_BASE, recipe.model.checkpoint, _read_record(run / RECORD), run)


def _check(key: str, source: str, known: dict[str, str], run: Path) -> str | None:
    """Return a model's fingerprint; None if it has none here, which whoever reads it reports."""
    mark = None
    with suppress(OSError):
        mark = fingerprint_model(Path(source))
    if mark is not None and known.get(key, mark) != mark:
        what, fix = "its weights or its config.json were replaced", "restore that folder from a copy"
        if is_run(Path(source)):
            what, fix = "that run has another newest checkpoint now", "remove the newer ones"
        raise ConfigError(
            f"{key}={source} is not the model that the run {run} began with: {what}; {fix}, or train again with "
            "--fresh."
        )
    return mark


def _list_given(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield the recipe key and the folder of each model whose weights a run reads, or has read for its data."""
    if recipe.model.checkpoint is not None:
        yield _BASE, recipe.model.checkpoint
    if recipe.objective.teacher is not None:
        yield "objective.teacher", recipe.objective.teacher
    for index, reward in enumerate(recipe.reward):
        if reward.model_path is not None:
            yield f"reward.{index}.options.path", reward.model_path


def _read_record(path: Path) -> dict[str, str]:
    """Return the fingerprints of a run's models, by recipe key; empty for a run of an earlier version."""
    try:
        return read_as(path, dict[str, str])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        logger.warning(f"{path} cannot be read ({error}); whether the run's models were replaced is not known")
        return {}
