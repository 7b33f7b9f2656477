"""Split the streams into training and validation ranges, and describe the split in log lines.

Ranges count tokens of plain text, or samples if the folder contains samples.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from echelon.ground.errors import DataError
from echelon.learn.data.catalog import HeldOut, Manifest, SampleRecord, SampleRule, SourceRecord, Split

STREAMS = ("train", "validation")
MIN_SPLIT_TOKENS = 2
"""A window of plain text needs one input token and one target token."""

# The mean loss of so many tokens still varies by about 0.1, that of so many answers by more.
_FEW_TOKENS = 500
_FEW_SAMPLES = 10

Streams = dict[str, tuple[SourceRecord, ...]]


def divide_streams(
    streams: Streams, fraction: float, by_hash: Sequence[bool], *, mixture: bool
) -> tuple[tuple[Split, ...], tuple[HeldOut, ...]]:
    """Return the training splits and the named validation sets.

    Without a mixture all sources form one text, `train`, with one validation set, `validation`; in a mixture each
    source is a separate text with its own validation set. `by_hash`, one for each source: whether validation documents
    were selected by hash; they are in the validation stream. If the hash selected none, or there were too few
    documents, the end of the text is held out. Each source of `data.validation` is a separate set.

    Raises DataError if too little training text remains.
    """
    train = streams["train"]
    if any(record.source.startswith("data.validation") for record in streams["validation"]):
        validation = tuple(
            HeldOut(record.name, "validation", start, stop, _bytes_per_token((record,)), "sources", record.documents)
            for record, (start, stop) in _places(streams["validation"])
        )
        return tuple(_whole(group, name, streams) for name, group, _ in _texts(train, by_hash, mixture)), validation
    splits, held_out = [], []
    for name, group, hashed in _texts(train, by_hash, mixture):
        split, rest = _hold_out(streams, name, group, fraction, hashed)
        splits.append(split)
        if rest is not None:
            held_out.append(rest)
    return tuple(splits), tuple(held_out)


def _texts(
    train: tuple[SourceRecord, ...], by_hash: Sequence[bool], mixture: bool
) -> Iterator[tuple[str, tuple[SourceRecord, ...], bool]]:
    """Yield each text that is split separately: its name, its sources, and whether it is split by hash."""
    if mixture:
        yield from ((record.name, (record,), hashed) for record, hashed in zip(train, by_hash, strict=True))
    elif train:
        yield "train", train, by_hash[0]


def _hold_out(
    streams: Streams, name: str, group: tuple[SourceRecord, ...], fraction: float, by_hash: bool
) -> tuple[Split, HeldOut | None]:
    whole = _whole(group, name, streams)
    label = name if name != "train" else "validation"
    keys = {record.source for record in group}
    chosen = [(record, span) for record, span in _places(streams["validation"]) if record.source in keys]
    if by_hash and sum(record.size for record, _ in chosen) >= _least(group):
        records = tuple(record for record, _ in chosen)
        documents = sum(record.documents for record in records)
        start, stop = chosen[0][1][0], chosen[-1][1][1]
        return whole, HeldOut(label, "validation", start, stop, _bytes_per_token(records), "hash", documents)
    cut = whole.start + int((whole.stop - whole.start) * (1 - fraction))
    if whole.stop - cut < _least(group):
        cut = whole.stop
    if cut - whole.start < _least(group):
        raise DataError(
            f"data.train{'' if name == 'train' else f' ({name})'} has {_say_size(group, whole.stop - whole.start)}, "
            f"of which data.validation_fraction={fraction} leaves {cut - whole.start} for training; "
            f"{_say_least(group)}. Give more text."
        )
    split = Split(name, "train", whole.start, cut)
    if cut == whole.stop:
        return split, None
    return split, HeldOut(label, "train", cut, whole.stop, _bytes_per_token(group), "tail", 0)


def _whole(group: tuple[SourceRecord, ...], name: str, streams: Streams) -> Split:
    places = {record.source: span for record, span in _places(streams["train"])}
    split = Split(name, "train", places[group[0].source][0], places[group[-1].source][1])
    if split.stop - split.start < _least(group):
        raise DataError(
            f"{group[0].source} has {_say_size(group, split.stop - split.start)} for training; {_say_least(group)}. "
            f"Give more text."
        )
    return split


def _least(group: tuple[SourceRecord, ...]) -> int:
    return MIN_SPLIT_TOKENS if group[0].labelled is None else 1


def _say_size(group: tuple[SourceRecord, ...], size: int) -> str:
    return f"{size:,} {'tokens' if group[0].labelled is None else 'samples'}"


def _say_least(group: tuple[SourceRecord, ...]) -> str:
    least = _least(group)
    return f"a sample needs at least {least}" if group[0].labelled is None else f"at least {least} is needed"


def _places(records: tuple[SourceRecord, ...]) -> Iterator[tuple[SourceRecord, tuple[int, int]]]:
    """Yield each source with its range in the stream."""
    stops = list(accumulate((record.size for record in records), initial=0))
    return zip(records, pairwise(stops), strict=True)


def _bytes_per_token(records: tuple[SourceRecord, ...]) -> float | None:
    """Return the UTF-8 bytes of text per token; None for text that was given as tokens."""
    sizes = [record.text_bytes for record in records]
    num_tokens = sum(record.tokens for record in records)
    if num_tokens == 0 or any(size is None for size in sizes):
        return None
    return sum(size for size in sizes if size is not None) / num_tokens


def describe_split(manifest: Manifest) -> list[str]:
    """Describe prepared data: a line for each validation set, for dropped or cut samples, and for packing."""
    lines = [_describe_set(manifest, held_out) for held_out in manifest.validation]
    lines = lines or ["validation: nothing is held out"]
    if manifest.samples is None:
        return lines
    return [*lines, *_describe_samples(manifest, manifest.samples), *_describe_packs(manifest, manifest.samples)]


def warn_of_small_sets(manifest: Manifest) -> Iterator[str]:
    """Yield a line for each validation set that cannot measure the loss: of one document among many, or too small."""
    least, unit = (_FEW_TOKENS, "tokens") if manifest.samples is None else (_FEW_SAMPLES, "samples")
    for held_out in manifest.validation:
        size = held_out.stop - held_out.start
        more = "hold out more (data.validation_fraction), or name files in data.validation"
        if held_out.method == "sources":
            more = "give more text in data.validation"
        if size < least:
            yield (
                f"{_name_set(held_out)}: {size:,} {unit} are too few to measure a loss: small differences will be "
                f"chance; {more}"
            )
        elif held_out.method == "hash" and held_out.documents == 1:
            yield (
                f"{_name_set(held_out)}: the held-out text is a single document, whose loss need not be that of the "
                f"others; {more}"
            )


def _describe_set(manifest: Manifest, held_out: HeldOut) -> str:
    name, unit = _name_set(held_out), "tokens" if manifest.samples is None else "samples"
    if held_out.method == "sources":
        return f"{name}: the text of data.validation, {held_out.documents:,} documents"
    trained = next((split for split in manifest.train if split.name == held_out.name), manifest.train[0])
    size = held_out.stop - held_out.start
    share = size / (size + trained.stop - trained.start)
    records = [record for record in manifest.streams["train"] if record.name == held_out.name]
    documents = sum(record.documents for record in records or manifest.streams["train"])
    if held_out.method == "hash":
        return (
            f"{name}: {held_out.documents:,} of {documents + held_out.documents:,} documents, selected by a hash of "
            f"their content ({share:.2%} of the {unit})"
        )
    return f"{name}: the last {share:.2%} of the {unit} (too few documents to select by hash: {documents:,})"


def _name_set(held_out: HeldOut) -> str:
    return held_out.name if held_out.name == "validation" else f"validation on {held_out.name}"


def _describe_samples(manifest: Manifest, rule: SampleRule) -> Iterator[str]:
    """Yield lines for each source with samples that did not fit or had no targets."""
    by_source: dict[str, list[SampleRecord]] = {}
    for record in (record for records in manifest.streams.values() for record in records):
        if record.labelled is not None:
            by_source.setdefault(record.source, []).append(record.labelled)
    for source, records in by_source.items():
        kept, overlong, dropped, lost, unlabelled = (
            sum(getattr(record, name) for record in records)
            for name in ("samples", "num_overlong", "num_dropped", "lost_tokens", "num_unlabelled")
        )
        total = kept + dropped + unlabelled
        if overlong:
            became = "dropped" if dropped else "cut"
            yield (
                f"{source}: {overlong:,} of {total:,} samples are longer than {rule.sequence_len:,} positions and were "
                f"{became}: {lost:,} tokens lost (data.on_overlong={rule.on_overlong})"
            )
        if unlabelled:
            yield f"{source}: {unlabelled:,} of {total:,} samples were dropped: they have no target"


def _describe_packs(manifest: Manifest, rule: SampleRule) -> Iterator[str]:
    names = [*(split.name for split in manifest.train), *map(_name_set, manifest.validation)]
    for name, split in zip(names, (*manifest.train, *manifest.validation), strict=True):
        assert split.packs is not None
        share = split.packs.positions / (split.packs.packs * rule.sequence_len)
        yield (
            f"{'packing' if rule.packing else 'no packing'}: {name}, {split.stop - split.start:,} samples in "
            f"{split.packs.packs:,} sequences of {rule.sequence_len:,}, {share:.1%} of the positions filled"
        )
