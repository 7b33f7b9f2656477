"""Prepared text as it would be with several documents in a sequence, preference pairs, or judged answers."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np

from echelon.learn.data.instruction import split_margin
from echelon.learn.data.prepare import PreparedData
from echelon.learn.data.shards import GOOD, NO_LABEL, Samples
from echelon.planner.plan import ParallelPlan
from echelon.run.lifecycle import run_learner
from tests.parity.training import train_rank
from tests.workers import WorkerPool

LENGTHS = ((7, 9, 6, 5), (10, 3, 8, 11), (6, 12))  # of a sample's documents, by its number; the rest is padding
PROMPT = 2


class Packed:
    """A dataset whose sequences are cut into documents: no label reaches beyond its own, and padding has none.

    As `pairs`, each document begins with a prompt, whose tokens have no label. As `scored` or `labelled`, only its last
    position has one: half of its pair's margin, or a number from 0 to 2.
    """

    def __init__(self, dataset: Any, kind: str) -> None:
        self._dataset, self._kind = dataset, kind
        self.num_samples, self.num_tokens = dataset.num_samples, dataset.num_tokens
        self.iter_tokens, self.sequence_len = dataset.iter_tokens, dataset.sequence_len

    def read_samples(self, ids: Any) -> Samples:
        samples = self._dataset.read_samples(ids)
        documents = np.full(samples.inputs.shape, -1, dtype=np.int32)
        for row, sample in enumerate(ids.tolist()):
            stop = 0
            for number, length in enumerate(LENGTHS[sample % len(LENGTHS)]):
                start, stop = stop, stop + length
                documents[row, start:stop] = number
                samples.labels[row, stop - 1] = NO_LABEL
                if self._kind == "pairs":
                    samples.labels[row, start : start + PROMPT - 1] = NO_LABEL
                if self._kind in ("scored", "labelled"):
                    samples.labels[row, start : stop - 1] = NO_LABEL
                    own = {"scored": split_margin(sample / 7)[number % 2], "labelled": (sample + number) % 3}
                    samples.labels[row, stop - 1] = own[self._kind]
            samples.labels[row, stop:] = NO_LABEL
        return replace(samples, documents=documents)


class Judged:
    """A dataset whose sequences are answers of different lengths, good ones and bad ones, each after a prompt."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.num_samples, self.num_tokens = dataset.num_samples, dataset.num_tokens
        self.iter_tokens, self.sequence_len = dataset.iter_tokens, dataset.sequence_len

    def read_samples(self, ids: Any) -> Samples:
        samples = self._dataset.read_samples(ids)
        documents = np.zeros(samples.inputs.shape, dtype=np.int32)
        for row, sample in enumerate(ids.tolist()):
            documents[row, samples.inputs.shape[1] - sample % 9 :] = -1
            samples.labels[row, : PROMPT + sample % 5] = NO_LABEL
        samples.labels[documents < 0] = NO_LABEL
        return replace(samples, documents=documents, apart=False, extra={GOOD: ids % 3 != 0})


def see(dataset: Any, kind: str) -> Any:
    """The dataset as `packed`, `pairs`, `scored`, `labelled` or `judged`."""
    return Judged(dataset) if kind == "judged" else Packed(dataset, kind)


def pack(data: PreparedData, kind: str) -> PreparedData:
    """Prepared text seen as such a kind: see `see`."""
    sets = tuple(replace(each, dataset=see(each.dataset, kind)) for each in data.validation)
    return replace(data, train=see(data.train, kind), validation=sets, apart=kind != "judged")


def packed_samples(kind: str) -> AbstractContextManager[Any]:
    """Makes a trainer that is built inside see its text as such a kind; an empty kind changes nothing."""
    if not kind:
        return nullcontext()
    opened = run_learner.open_prepared

    return mock.patch.object(
        run_learner, "open_prepared", lambda *args, **options: pack(opened(*args, **options), kind)
    )


def train_packed(rank: int, world_size: int, path: str, plan: ParallelPlan, kind: str, *rest: Any) -> None:
    """One rank, its text packed; `rest` as for `train_rank`."""
    with packed_samples(kind):
        train_rank(rank, world_size, path, plan, *rest)


class PackedPool:
    """The pool, with `train_packed` for `train_rank`."""

    def __init__(self, pool: WorkerPool, kind: str) -> None:
        self._pool, self._kind = pool, kind

    def run(self, function: Any, world_size: int, path: str, plan: Any, *rest: Any) -> None:
        self._pool.run(train_packed, world_size, path, plan, self._kind, *rest)
