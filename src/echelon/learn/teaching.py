"""`echelon data --teacher`: a teacher's likeliest tokens for every target of the data, computed once.

Processes take pieces of the data, one after another; a lock keeps two from computing the same one. So the same command
on several machines that share the folder divides the work, and one that was killed goes on where it was.
"""

import logging
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from echelon.ground.errors import ConfigError, EchelonError
from echelon.ground.file_lock import FileLock
from echelon.ground.progress import Progress
from echelon.ground.sizes import render_bytes
from echelon.learn.checkpoint.first_weights import load_frozen
from echelon.learn.checkpoint.given_models import fingerprint_model
from echelon.learn.data.child_process import ChildProcess, stops_held_back
from echelon.learn.data.loader import Microbatch
from echelon.learn.data.prepared import PreparedData, open_prepared
from echelon.learn.data.taught import (
    TaughtPart,
    TaughtRecord,
    count_targets,
    finish_record,
    is_complete,
    list_pieces,
    write_piece,
)
from echelon.learn.evaluation import read_in_order
from echelon.learn.model.build import build_on_meta, load_config
from echelon.learn.model.hub import HubModel, Part, fetch, is_hub_name
from echelon.learn.model.traits import find_traits
from echelon.learn.objectives.distill import top_scores
from echelon.learn.objectives.loss import IGNORE
from echelon.learn.objectives.outputs import DecoderOutputs, ObjectiveModule
from echelon.learn.teacher import check_teacher, describe_values
from echelon.planner.model_shape import logits_chunk_tokens
from echelon.recipe.document import Recipe

logger = logging.getLogger(__name__)

_TOKENS_AT_ONCE = {"cuda": 8192, "cpu": 2048}  # of a forward pass
_WAIT_SECONDS = 0.5


def prepare_teacher(recipe: Recipe, data: PreparedData, num_processes: int | None = None) -> Path:
    """Write what the recipe's teacher predicts for its data, `objective.top_k` tokens for every target.

    Returns the folder. Nothing is done if it is there. An interrupted preparation keeps its pieces, which the next one
    does not compute again.

    Args:
        num_processes: on this machine, each with the whole teacher; None: one for each GPU, or one.

    Raises:
        ConfigError: the teacher is not there, or has another tokenizer, or `objective.top_k` is not set.
        EchelonError: the disk lacks room, or cannot be written.
    """
    recipe = _with_local_teacher(recipe)
    check_teacher(recipe, data.tokenizer)
    source = Path(recipe.objective.teacher or "")
    fingerprint = fingerprint_model(source)
    if fingerprint is None:
        raise ConfigError(f"objective.teacher={source} has no *.safetensors; give a complete HF folder, or a run.")
    vocab_size = load_config(str(source), recipe.model.trust_remote_code).vocab_size
    record = describe_values(recipe, data, fingerprint, vocab_size)
    folder = record.folder(data)
    if is_complete(folder):
        logger.info(f"teacher: prepared in {folder}")
        return folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        pieces = list_pieces(data, record)
        _check_room(folder, data, record, pieces)
        _work_together(_Task(recipe, data.path, folder, record), pieces, num_processes)
        finish_record(folder, record, pieces)
        for path in folder.glob("*.lock*"):
            path.unlink(missing_ok=True)
    except OSError as error:
        raise EchelonError(
            f"the teacher's values cannot be written to {folder}: {error.strerror or error}; free disk space, or set "
            "data.prepared_dir to another folder. The pieces that are complete are kept."
        ) from error
    logger.info(f"teacher: prepared in {folder}")
    return folder


def _with_local_teacher(recipe: Recipe) -> Recipe:
    """Return the recipe with this machine's copy of a teacher of the hub."""
    name = recipe.objective.teacher
    if name is None or not is_hub_name(name):
        return recipe
    path = fetch(HubModel(name, "objective.teacher", Part.WEIGHTS, recipe.model.trust_remote_code))
    return recipe.model_copy(update={"objective": recipe.objective.model_copy(update={"teacher": str(path)})})


def _check_room(folder: Path, data: PreparedData, record: TaughtRecord, pieces: Sequence[TaughtPart]) -> None:
    """Log the size of the values, and raise EchelonError if the disk lacks room for what is left."""
    size, done = count_targets(data) * record.bytes_per_target, _count_bytes(folder, pieces)
    free = shutil.disk_usage(folder).free
    kept = f", {render_bytes(done)} of it are there" if done else ""
    logger.info(
        f"teacher: {record.num_tokens} tokens for each of at most {count_targets(data):,} targets need up to "
        f"{render_bytes(size)} in {folder}{kept}; the time left is shown from the first of {len(pieces)} pieces on"
    )
    if size - done > free:
        raise EchelonError(
            f"the teacher's values need up to {render_bytes(size - done)} in {folder}, where {render_bytes(free)} are "
            "free; use a smaller objective.top_k, free disk space, or set data.prepared_dir to another folder."
        )


def _count_bytes(folder: Path, pieces: Sequence[TaughtPart]) -> int:
    num_bytes = 0
    for piece in pieces:
        with suppress(FileNotFoundError):
            num_bytes += (folder / piece.name).stat().st_size
    return num_bytes


@dataclass(frozen=True)
class _Task:
    """What a process needs to compute pieces."""

    recipe: Recipe
    data: Path
    folder: Path
    record: TaughtRecord

    def open_pieces(self) -> list[TaughtPart]:
        sequence_len, mask = self.record.sequence_len, self.recipe.data.document_mask
        return list_pieces(open_prepared(self.data, sequence_len, mask, was_opened=True), self.record)


def _work_together(task: _Task, pieces: Sequence[TaughtPart], num_processes: int | None) -> None:
    """Compute the missing pieces, in this process and in others beside it. Raises EchelonError if one of them fails."""
    count = max(1, torch.cuda.device_count()) if num_processes is None else num_processes
    count = max(1, min(count, sum(not (task.folder / piece.name).exists() for piece in pieces)))
    with stops_held_back():
        helpers = [ChildProcess(_help, task, number, count) for number in range(1, count)]
    try:
        _compute(task, pieces, 0, count, is_first=True)
        for helper in helpers:
            if (problem := _receive(helper.connection)) is not None:
                raise EchelonError(f"a process of the teacher failed: {problem}")
    finally:
        for helper in helpers:
            helper.stop()


def _receive(connection: Connection) -> str | None:
    try:
        problem: str | None = connection.recv()
    except EOFError:
        return "it was killed; the same command goes on with the pieces that are missing."
    return problem


def _help(connection: Connection, task: _Task, number: int, count: int) -> None:
    """The work of another process: computes pieces, and sends None, or what went wrong."""
    try:
        _compute(task, task.open_pieces(), number, count)
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}")
    else:
        connection.send(None)


def _compute(task: _Task, pieces: Sequence[TaughtPart], number: int, count: int, is_first: bool = False) -> None:
    """Compute pieces until all are there, also those that other processes and machines take.

    Args:
        number: of this process on its machine, of `count`.
        is_first: whether it logs the progress of all.
    """
    torch.set_num_threads(max(1, torch.get_num_threads() // count))
    first, reader = number * len(pieces) // count, cache(partial(_Reader, task, number))
    done = _count_bytes(task.folder, pieces)
    progress = Progress("teacher", _expect(done, pieces, task), logger, done_bytes=done) if is_first else None
    while missing := [piece for piece in (*pieces[first:], *pieces[:first]) if not _is_there(task, piece)]:
        if not any(_take(task, piece, reader) for piece in missing):
            time.sleep(_WAIT_SECONDS)
        if progress is not None:
            progress.add(_count_bytes(task.folder, pieces) - progress.done_bytes)
    if progress is not None:
        progress.finish()


def _take(task: _Task, piece: TaughtPart, reader: Callable[[], "_Reader"]) -> bool:
    """Compute a piece, unless it is there or another process computes it. Returns whether it was computed here."""
    lock = FileLock(task.folder / f"{piece.name}.lock")
    if _is_there(task, piece) or not lock.take():
        return False
    try:
        if _is_there(task, piece):
            return False
        reader().write(piece)
        return True
    finally:
        lock.release()


def _is_there(task: _Task, piece: TaughtPart) -> bool:
    return (task.folder / piece.name).exists()


def _expect(done: int, pieces: Sequence[TaughtPart], task: _Task) -> int:
    """Return about how many bytes all pieces have, by the tokens of their data."""
    targets = sum({id(piece.dataset): piece.dataset.num_tokens for piece in pieces}.values())
    return max(done, targets * task.record.bytes_per_target)


class _Reader:
    """A teacher that reads samples."""

    def __init__(self, task: _Task, number: int) -> None:
        """`number`: of the process on its machine, which chooses its GPU."""
        recipe, self._record, self._folder = task.recipe, task.record, task.folder
        source, trusted = recipe.objective.teacher, recipe.model.trust_remote_code
        assert source is not None
        count = torch.cuda.device_count()
        self._device = torch.device("cuda", number % count) if count else torch.device("cpu")
        dtype = torch.bfloat16 if count and recipe.train.precision != "fp32" else torch.float32
        traits = find_traits(build_on_meta(load_config(source, trusted), None, trusted), task.record.sequence_len)
        self._module = ObjectiveModule(load_frozen(recipe, source, dtype, self._device), traits=traits).eval()

    @torch.no_grad()
    def write(self, piece: TaughtPart) -> None:
        """Compute the values of a piece, and write it."""
        counts: list[int] = []
        tokens, scores = [], []
        at_once = max(1, _TOKENS_AT_ONCE[self._device.type] // self._record.sequence_len)
        for start in range(piece.start, piece.stop, at_once):
            batch = read_in_order(piece.dataset, start, min(at_once, piece.stop - start), piece.stop)
            counts += (batch.labels != IGNORE).sum(1).tolist()
            for predictions in self._read(batch.to(self._device)):
                tokens.append(predictions[0])
                scores.append(predictions[1])
        write_piece(self._folder / piece.name, self._record, counts, np.concatenate(tokens), np.concatenate(scores))

    def _read(self, batch: Microbatch) -> list[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
        """Return the values of a batch's targets in order, a chunk of tokens at a time: [n, k] and [n, k + 1]."""
        record = self._record
        pairs: list[tuple[npt.NDArray[Any], npt.NDArray[Any]]] = []

        def compute(outputs: DecoderOutputs, batch: Microbatch) -> Tensor:
            _, state, read = outputs.lazy_logits()
            rows = state.flatten(0, 1)[(batch.labels != IGNORE).flatten()]
            for chunk in torch.split(rows, logits_chunk_tokens(record.vocab_size, self._device.type, False)):
                tokens, scores = top_scores(read(chunk) / record.temperature, record.num_tokens)
                pairs.append((tokens.cpu().numpy(), scores.cpu().numpy()))
            return state.new_zeros(())

        self._module(batch, compute)
        return pairs
