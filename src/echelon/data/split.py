"""What is trained on and what is held out: token ranges of the streams, and how they were chosen."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

from echelon.data.shards import HeldOut, Manifest, SourceRecord, Split
from echelon.errors import DataError

STREAMS = ("train", "validation")
MIN_SPLIT_TOKENS = 2
"""A sample takes a token to read and one to predict."""

Streams = dict[str, tuple[SourceRecord, ...]]


def divide_streams(
    streams: Streams, fraction: float, by_hash: Sequence[bool], *, mixture: bool
) -> tuple[tuple[Split, ...], tuple[HeldOut, ...]]:
    """What is trained on, and the named sets to validate on.

    Without a mixture all sources are one text, `train`, and what is held out of it one set, `validation`; of a mixture
    each source is a text of its own, and so is what is held out of it. `by_hash`, one for each source, says whether
    documents were chosen by hash: they have filled the validation stream. If the hash chose none, or there were too few
    documents, the end of the text is held out. Given validation sources have a set each.

    Raises DataError for a text of which too little is left to train on.
    """
    train = streams["train"]
    if any(record.source.startswith("data.validation") for record in streams["validation"]):
        given = tuple(
            HeldOut(record.name, "validation", start, stop, _bytes_per_token((record,)), "sources", record.documents)
            for record, (start, stop) in _places(streams["validation"])
        )
        return tuple(_whole(group, name, streams) for name, group, _ in _texts(train, by_hash, mixture)), given
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
    """Each text that is divided by itself: its name, the sources it is made of, whether by hash."""
    if mixture:
        yield from ((record.name, (record,), hashed) for record, hashed in zip(train, by_hash, strict=True))
    else:
        yield "train", train, by_hash[0]


def _hold_out(
    streams: Streams, name: str, group: tuple[SourceRecord, ...], fraction: float, by_hash: bool
) -> tuple[Split, HeldOut | None]:
    whole = _whole(group, name, streams)
    label = name if name != "train" else "validation"
    keys = {record.source for record in group}
    chosen = [(record, place) for record, place in _places(streams["validation"]) if record.source in keys]
    if by_hash and sum(record.tokens for record, _ in chosen) >= MIN_SPLIT_TOKENS:
        records = tuple(record for record, _ in chosen)
        documents = sum(record.documents for record in records)
        start, stop = chosen[0][1][0], chosen[-1][1][1]
        return whole, HeldOut(label, "validation", start, stop, _bytes_per_token(records), "hash", documents)
    cut = whole.start + int((whole.stop - whole.start) * (1 - fraction))
    if whole.stop - cut < MIN_SPLIT_TOKENS:
        cut = whole.stop
    if cut - whole.start < MIN_SPLIT_TOKENS:
        raise DataError(
            f"data.train{'' if name == 'train' else f' ({name})'} holds {whole.stop - whole.start} tokens, of which "
            f"data.validation_fraction={fraction} leaves {cut - whole.start} to train on; a sample takes at least "
            f"{MIN_SPLIT_TOKENS}. Give more text."
        )
    split = Split(name, "train", whole.start, cut)
    if cut == whole.stop:
        return split, None
    return split, HeldOut(label, "train", cut, whole.stop, _bytes_per_token(group), "tail", 0)


def _whole(group: tuple[SourceRecord, ...], name: str, streams: Streams) -> Split:
    places = {record.source: place for record, place in _places(streams["train"])}
    split = Split(name, "train", places[group[0].source][0], places[group[-1].source][1])
    if split.stop - split.start < MIN_SPLIT_TOKENS:
        raise DataError(
            f"{group[0].source} holds {split.stop - split.start} tokens to train on; a sample takes at least "
            f"{MIN_SPLIT_TOKENS}. Give more text."
        )
    return split


def _places(records: tuple[SourceRecord, ...]) -> Iterator[tuple[SourceRecord, tuple[int, int]]]:
    """Each source with its token range of the stream."""
    stops = list(accumulate((record.tokens for record in records), initial=0))
    return zip(records, pairwise(stops), strict=True)


def _bytes_per_token(records: tuple[SourceRecord, ...]) -> float | None:
    """UTF-8 bytes of text for each token; None for text that was given as tokens."""
    sizes = [record.text_bytes for record in records]
    num_tokens = sum(record.tokens for record in records)
    if num_tokens == 0 or any(size is None for size in sizes):
        return None
    return sum(size for size in sizes if size is not None) / num_tokens


def describe_split(manifest: Manifest) -> list[str]:
    """A line for each set that is held out for validation: how large it is, and how it was chosen."""
    if not manifest.validation:
        return ["validation: nothing is held out"]
    return [_describe_set(manifest, held_out) for held_out in manifest.validation]


def _describe_set(manifest: Manifest, held_out: HeldOut) -> str:
    name = held_out.name if held_out.name == "validation" else f"validation on {held_out.name}"
    if held_out.method == "sources":
        return f"{name}: the text of data.validation, {held_out.documents:,} documents"
    trained = next((split for split in manifest.train if split.name == held_out.name), manifest.train[0])
    num_tokens = held_out.stop - held_out.start
    share = num_tokens / (num_tokens + trained.stop - trained.start)
    records = [record for record in manifest.streams["train"] if record.name == held_out.name]
    documents = sum(record.documents for record in records or manifest.streams["train"])
    if held_out.method == "hash":
        return (
            f"{name}: {held_out.documents:,} of {documents + held_out.documents:,} documents, chosen by a hash of "
            f"their content ({share:.2%} of the tokens)"
        )
    return f"{name}: the last {share:.2%} of the tokens (too few documents to choose some by hash: {documents:,})"
