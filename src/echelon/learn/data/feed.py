"""The batches of a run for one rank, from today's loader or a source that the recipe names."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial

import torch
from typing_extensions import override

from echelon.ground.errors import ConfigError
from echelon.ground.extensions import build_named
from echelon.learn.data.loader import (
    BatchLoader,
    BatchPlace,
    BatchSource,
    Microbatch,
    StepBatch,
    choose_padding,
    is_per_token,
)
from echelon.learn.data.mixture import build_order
from echelon.learn.data.prepared import PreparedData
from echelon.learn.distributed.mesh import Meshes
from echelon.planner.plan import ParallelPlan
from echelon.recipe.document import Recipe

_PREFETCH = 2
_KEPT = 4


class Feed(BatchSource):
    """The batches of a source: a pure one is read two steps ahead in a background thread, which `batch` waits for."""

    def __init__(self, open_source: Callable[[BatchPlace], BatchSource], place: BatchPlace) -> None:
        """`open_source` opens the source for a place, again each time the place changes."""
        self.source = open_source(place)
        """The source of the batches."""
        self.wait_seconds = 0.0
        """How long the last `batch` took, in seconds."""
        self.place = place
        """Which sequences of every batch it feeds."""
        self._open = open_source
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batch-feed")
        self._ready: deque[Future[StepBatch]] = deque()
        self._fed: deque[StepBatch] = deque(maxlen=_KEPT)
        self._next_step = 0

    @property
    @override
    def is_pure(self) -> bool:
        return self.source.is_pure

    @override
    def batch(self, step: int) -> StepBatch:
        started = time.perf_counter()
        if self.is_pure:
            if not self._ready or self._next_step - len(self._ready) != step:
                self._drop()
                self._next_step = step
                for _ in range(_PREFETCH):
                    self._request()
            batch = self._ready[0].result()
            self._ready.popleft()
            self._request()
        else:
            batch = self.source.batch(step)
            self._fed.append(batch)
        self.wait_seconds = time.perf_counter() - started
        return batch

    def fed(self, step: int) -> StepBatch:
        """Return the batch that one of the last steps was fed, for a diagnosis."""
        if self.is_pure:
            return self._thread.submit(self.source.batch, step).result()
        return next(batch for batch in reversed(self._fed) if batch.step == step)

    def reshare(self, rank: int, size: int) -> None:
        """Read the part of another place in every batch from now on. No effect if rank and size are unchanged."""
        if (rank, size) == (self.place.rank, self.place.size):
            return
        self._drop()
        self.place = replace(self.place, rank=rank, size=size)
        self._thread.submit(self.source.close).result()
        self.source = self._open(self.place)

    @override
    def close(self) -> None:
        """Stop the thread, and close the source."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self.source.close()

    def _drop(self) -> None:
        for ready in self._ready:
            ready.cancel()
        self._ready.clear()

    def _request(self) -> None:
        self._ready.append(self._thread.submit(self.source.batch, self._next_step))
        self._next_step += 1


def find_batch_place(recipe: Recipe, plan: ParallelPlan, meshes: Meshes) -> BatchPlace:
    """Return which sequences of every batch this rank feeds, and in which form."""
    return BatchPlace(
        plan.micro_batch_size,
        meshes.data_rank,
        meshes.data_size,
        choose_padding(plan),
        meshes.sequence_part,
        pin_memory=meshes.device_type == "cuda",
        sequence_len=recipe.data.sequence_len,
    )


def open_feed(recipe: Recipe, data: PreparedData, place: BatchPlace) -> Feed:
    """Open the batches of a run for one rank. Raises ConfigError for a source that the recipe cannot use."""
    return Feed(partial(open_source, recipe, data), place)


def open_source(recipe: Recipe, data: PreparedData, place: BatchPlace) -> BatchSource:
    """Open the source of the recipe: `data.source`, or else the loader of the prepared data.

    Raises ConfigError for a source that does not tell whether it is pure, or that `sync` cannot use.
    """
    if (name := recipe.data.source) is None:
        return BatchLoader(data.train, build_order(recipe, data.train), recipe.batches, place)
    source: BatchSource = build_named(
        "data.source", name, {}, BatchSource, recipe, data, place, options=recipe.data.options
    )
    if not isinstance(getattr(source, "is_pure", None), bool):
        raise ConfigError(
            f"data.source={name}: it must tell whether a batch depends on its step alone; set is_pure = True if it "
            "does, and is_pure = False otherwise."
        )
    if not source.is_pure and (goes_on := recipe.goes_on) is not None:
        raise ConfigError(
            f"data.source={name} is not pure (is_pure = False), but {goes_on} divides a batch again when a process "
            "is lost; use a pure source, or sync.name: every_step and fault.on_lost_process: restart."
        )
    return source


def like_source(microbatch: Microbatch, recipe: Recipe, data: PreparedData, place: BatchPlace) -> Microbatch:
    """Return a microbatch for a rehearsal, with `extra` like that of the recipe's source in step 0, all zero."""
    if recipe.data.source is None:
        return microbatch
    with closing(open_source(recipe, data, place)) as source:
        extra = source.batch(0).microbatches[0].extra
    (batch, seq), device = microbatch.input_ids.shape, microbatch.input_ids.device
    shapes = {
        name: (batch, seq, *tensor.shape[2:]) if is_per_token(tensor.shape) else (batch, *tensor.shape[1:])
        for name, tensor in extra.items()
    }
    zeros = {name: torch.zeros(shape, dtype=extra[name].dtype, device=device) for name, shape in shapes.items()}
    return microbatch.with_extra(**zeros)


def describe_source(recipe: Recipe, feed: Feed) -> Iterator[str]:
    """A line about a source of one's own, for the start of a run."""
    if recipe.data.source is not None:
        exact = (
            "" if feed.is_pure else "; it is not pure (is_pure = False), so a resumed run is not claimed to be exact"
        )
        yield f"data: batches of {recipe.data.source}{exact}"
