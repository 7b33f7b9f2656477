"""Prompts without answers, each with the record that it was made of."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from echelon.ground.errors import DataError
from echelon.learn.data.catalog import LENGTHS_DTYPE, RECORDS_DTYPE
from echelon.learn.data.mixture import MixtureDataset
from echelon.learn.data.packing import PackedDataset
from echelon.learn.data.shards import Dataset, ShardRecord, TokenStore


@dataclass(frozen=True)
class PromptRecord:
    """A prompt as token ids, and the record of the data that it is from."""

    ids: tuple[int, ...]
    record: dict[str, Any]
    number: int
    """Its place among the prompts of a step or of a held-out set, on all ranks. Draws depend on it."""


class Records:
    """The records of a stream of prompts, by the number of the sample."""

    def __init__(self, folder: Path, shards: Sequence[ShardRecord], lengths: Sequence[ShardRecord]) -> None:
        self._bytes = TokenStore(folder, shards, RECORDS_DTYPE)
        stored = TokenStore(folder, lengths, LENGTHS_DTYPE)
        self._stops = np.cumsum(stored.read(0, stored.num_tokens), dtype=np.int64)

    def read(self, sample: int) -> dict[str, Any]:
        """Return the record of a sample. Raises DataError for one that was altered."""
        start, stop = (int(self._stops[number]) if number >= 0 else 0 for number in (sample - 1, sample))
        record: dict[str, Any] = json.loads(self._bytes.read(start, stop).tobytes())
        return record


class PromptDataset(PackedDataset):
    """The prompts of a split: a `PackedDataset` in which each sample is one prompt."""

    def __init__(self, records: Records, first: int, *place: Any) -> None:
        """`first`: the number of the split's first sample in its stream. `place`: the arguments of PackedDataset."""
        super().__init__(*place)
        self._records, self._first = records, first

    def read_prompt(self, sample: int, number: int) -> PromptRecord:
        """Return the prompt of a sample of the split."""
        samples = self.read_samples(np.array([sample], dtype=np.int64))
        assert samples.documents is not None
        width = int((samples.documents[0] >= 0).sum())
        ids = (*samples.inputs[0, :width].tolist(), int(samples.labels[0, width - 1]))
        return PromptRecord(ids, self._records.read(self._first + sample), number)


def read_prompts(dataset: Dataset, samples: Sequence[int], first: int = 0) -> list[PromptRecord]:
    """Return the prompts of samples, numbered from `first` on. Raises DataError if the data has none."""
    parts = dataset.parts if isinstance(dataset, MixtureDataset) else (dataset,)
    stops = np.cumsum([part.num_samples for part in parts])
    prompts = []
    for number, sample in enumerate(samples, first):
        source = int(np.searchsorted(stops, sample, side="right"))
        part = parts[source]
        if not isinstance(part, PromptDataset):
            raise DataError(
                "the prepared data has no prompts; name the texts of data.train in the recipe, with a field `prompt`."
            )
        prompts.append(part.read_prompt(sample - (int(stops[source]) - part.num_samples), number))
    return prompts
