"""Open a prepared folder as training and validation datasets, also of prompts, each with the record it was made of."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from echelon.ground.checksums import check_files
from echelon.ground.errors import CheckpointError, ConfigError, DataError
from echelon.ground.stored import read_text
from echelon.learn.data.catalog import (
    LENGTHS_DTYPE,
    RECORDS_DTYPE,
    TARGETS_DTYPE,
    Manifest,
    Split,
    check_shards,
    load_manifest,
)
from echelon.learn.data.mixture import MixtureDataset
from echelon.learn.data.packing import PackedDataset
from echelon.learn.data.shards import Dataset, ShardRecord, TokenDataset, TokenStore, unigram_entropy
from echelon.learn.data.stream.options import StreamOptions
from echelon.learn.data.tokenizer import fingerprint_json, load_tokenizer, padding_id
from echelon.recipe.data_formats import masks_documents

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from echelon.learn.data.stream.dataset import StreamDataset

_MOST_COUNTED = 20_000_000  # held-out tokens that are counted at the start of a run, in a fraction of a second

DocumentMask = bool | Literal["auto"]
"""`data.document_mask`: whether documents attend only to themselves. `auto`: for samples, not for plain text."""


@dataclass(frozen=True)
class ValidationSet:
    """A named validation dataset. `bytes_per_token` is None if the text was given as tokens."""

    name: str
    dataset: Dataset
    bytes_per_token: float | None


@dataclass(frozen=True)
class PreparedData:
    """An open prepared folder.

    `train` is a MixtureDataset if `manifest.train` has several splits, with its parts in their order. `validation` is
    empty if nothing was held out. `apart`: documents share sequences, and none attends to another. `streamed`: `train`
    if it is prepared while the run trains; `num_samples` is then unknown. `loaded`: the tokenizer, if this process has
    it from the preparation.
    """

    path: Path
    manifest: Manifest
    train: Dataset
    validation: tuple[ValidationSet, ...]
    apart: bool = False
    streamed: "StreamDataset | None" = None
    loaded: "PreTrainedTokenizerFast | None" = None

    @cached_property
    def tokenizer(self) -> "PreTrainedTokenizerFast":
        """The tokenizer, loaded on first access unless it is there already."""
        return load_tokenizer(str(self.path / "tokenizer")) if self.loaded is None else self.loaded

    @property
    def padding(self) -> int | None:
        """The id that fills batches; None if the tokenizer has none for that."""
        return padding_id(self.tokenizer)

    @property
    def vocab_size(self) -> int:
        """The vocabulary size that a model needs: the largest id of the tokenizer plus one."""
        return self.manifest.vocab_size

    @property
    def shares_sequences(self) -> bool:
        """Whether a sequence may contain more than one document."""
        return self.manifest.shares_sequences or (self.streamed is not None and self.streamed.plan.shares_sequences)

    @property
    def is_packed(self) -> bool | None:
        """Whether samples share sequences; None for plain text that is joined."""
        return None if self.manifest.samples is None else self.manifest.samples.packing

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the tokenizer that made the tokens."""
        return self.manifest.tokenizer_fingerprint

    @property
    def content_digest(self) -> str:
        """A hash of the tokens and of the training and validation splits, independent of the folder's path.

        Of text that is prepared while the run trains: of names, sizes and versions of its files, instead of its tokens.
        """
        manifest = self.manifest
        shards = {stream: [shard.sha256 for shard in manifest.shards(stream)] for stream in manifest.streams}
        parts = (manifest.train, manifest.validation)
        splits = [[[split.stream, split.start, split.stop] for split in part] for part in parts]
        content: list[object] = [self.fingerprint, shards, splits]
        if manifest.samples is not None:
            content.append([shard.sha256 for _, shard in manifest.files()])
        if self.streamed is not None:
            content.append(self.streamed.digest)
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def describe_held_out(data: PreparedData) -> dict[str, Any]:
    """What tells whether the losses of two runs compare: the tokenizer, and the held-out text.

    tokenizer: its fingerprint. held_out: a digest of the tokens. held_out_bytes: the size of the text, which does not
    depend on the tokenizer; null if it was given as tokens. unigram_entropy: the loss of a model that only knows how
    often each token occurs; null for samples, and for a large text, whose reading would take seconds.
    """
    parts = data.manifest.validation
    files = [[shard.sha256 for shard in data.manifest.shards(part.stream)] for part in parts]
    splits = [[shards, part.start, part.stop] for shards, part in zip(files, parts, strict=True)]
    sizes = [part.bytes_per_token * (part.stop - part.start) for part in parts if part.bytes_per_token is not None]
    datasets = [part.dataset for part in data.validation]
    is_counted = data.is_packed is None and sum(part.stop - part.start for part in parts) <= _MOST_COUNTED
    return {
        "tokenizer": data.fingerprint,
        "held_out": hashlib.sha256(json.dumps(splits).encode()).hexdigest()[:32] if parts else None,
        "held_out_bytes": round(sum(sizes)) if parts and len(sizes) == len(parts) else None,
        "unigram_entropy": unigram_entropy(datasets) if datasets and is_counted else None,
    }


def open_prepared(
    path: Path,
    sequence_len: int,
    document_mask: DocumentMask = "auto",
    *,
    verify: bool = False,
    was_opened: bool = False,
    stream: StreamOptions | None = None,
) -> PreparedData:
    """Open a prepared folder. Plain text is cut into samples of `sequence_len`; packs must have that length.

    Raises DataError for a damaged or incompatible manifest, for a shard of the wrong size (with `verify`, also of the
    wrong sha256), for a tokenizer that was altered or did not produce these tokens, and for packs of another length.
    Raises ConfigError if a document mask is requested for a text without separators.

    `was_opened`: another process of this start has opened the folder before. The tokenizer is then compared with its
    checksums, but not parsed to compute its fingerprint, which takes more than half as long as loading it.

    `stream`: what this machine keeps of text that is prepared while the run trains.
    """
    manifest = load_manifest(path)
    check_shards(path, manifest, verify=verify)
    try:
        check_files(path / "tokenizer", checksums=True)
        fingerprint = manifest.tokenizer_fingerprint
        if not was_opened:
            fingerprint = fingerprint_json(read_text(path / "tokenizer" / "tokenizer.json"))
    except (CheckpointError, OSError, ValueError) as error:
        raise DataError(f"the tokenizer in {path} cannot be read: {error} Delete {path} and prepare again.") from error
    if fingerprint != manifest.tokenizer_fingerprint:
        raise DataError(
            f"the tokenizer in {path} did not produce the tokens there: its fingerprint is {fingerprint}, the tokens "
            f"have {manifest.tokenizer_fingerprint}; restore the tokenizer of these tokens, or delete {path} and "
            "prepare again."
        )
    if (rule := manifest.samples) is None:
        check_mask(document_mask, manifest.separator)
    elif rule.sequence_len != sequence_len:
        raise DataError(
            f"{path} has samples packed into sequences of {rule.sequence_len} tokens, but data.sequence_len="
            f"{sequence_len}; prepare again."
        )
    is_masked = masks_documents(document_mask, rule is not None)
    streamed = _open_stream(path, sequence_len, is_masked, stream)
    apart = is_masked and manifest.shares_sequences if streamed is None else streamed.apart
    cut = _Cutter(path, manifest, sequence_len, apart)
    validation = tuple(ValidationSet(part.name, cut(part), part.bytes_per_token) for part in manifest.validation)
    if streamed is not None:
        return PreparedData(path, manifest, streamed, validation, apart, streamed)
    parts = [cut(split) for split in manifest.train]
    return PreparedData(path, manifest, parts[0] if len(parts) == 1 else MixtureDataset(parts), validation, apart)


def _open_stream(
    path: Path, sequence_len: int, are_apart: bool, options: StreamOptions | None
) -> "StreamDataset | None":
    """Open the training text that is prepared while a run trains; None if all is prepared."""
    if not (path / "stream.json").is_file():
        return None
    from echelon.learn.data.stream.chunks import load_plan
    from echelon.learn.data.stream.dataset import StreamDataset

    plan = load_plan(path)
    return StreamDataset(path, plan, sequence_len, are_apart and plan.shares_sequences, options or StreamOptions())


def check_mask(document_mask: DocumentMask, separator: int | str | None) -> None:
    """Raise ConfigError if a document mask is requested and no separator marks the ends of documents."""
    if document_mask is True and separator is None:
        raise ConfigError(
            "data.document_mask=true needs a token that ends each document, but the tokenizer has no eos or "
            "data.document_separator is null; set data.document_separator to a token of the tokenizer, or "
            "data.document_mask to false."
        )


class _Cutter:
    """Builds the dataset of a split. The files of a stream are opened once."""

    def __init__(self, path: Path, manifest: Manifest, sequence_len: int, apart: bool) -> None:
        self._path, self._manifest = path, manifest
        self._sequence_len = sequence_len
        self._apart = apart
        self._tokens = {name: TokenStore(path, manifest.shards(name), manifest.dtype) for name in manifest.streams}
        self._targets = {
            name: TokenStore(path, manifest.part("targets", name), TARGETS_DTYPE) for name in manifest.streams
        }
        self._records = {
            name: Records(path, shards, manifest.part("record_lengths", name))
            for name in manifest.streams
            if (shards := manifest.part("records", name))
        }

    def __call__(self, split: Split) -> Dataset:
        tokens, rule = self._tokens[split.stream], self._manifest.samples
        if rule is None or split.packs is None:
            separator = self._manifest.separator if self._apart else None
            return TokenDataset([tokens], self._sequence_len, start=split.start, stop=split.stop, separator=separator)
        targets = self._targets[split.stream]
        arguments = (self._path, tokens, targets, split.packs, rule.sequence_len, rule.padding, self._apart)
        if split.stream in self._records:
            return PromptDataset(self._records[split.stream], split.start, *arguments)
        return PackedDataset(*arguments)


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
