"""What is held out of training: which text, and how it was chosen."""

from echelon.data.shards import Manifest, SourceRecord, SplitRange
from echelon.errors import DataError

STREAMS = ("train", "validation")
MIN_SPLIT_TOKENS = 2
"""A sample takes a token to read and one to predict."""


def divide_streams(
    streams: dict[str, tuple[SourceRecord, ...]], fraction: float, by_hash: bool
) -> tuple[str, dict[str, SplitRange]]:
    """The splits, as token ranges of the streams, and the method: `sources`, `hash`, `tail` or `none`.

    Documents chosen by hash, or given sources, have filled the validation stream. If it holds nothing, because the
    documents are few or the hash chose none of them, the end of the training stream is held out.
    """
    num_train, num_validation = (sum(record.tokens for record in streams[name]) for name in STREAMS)
    cut = num_train
    method = "hash" if by_hash else "sources"
    validation = SplitRange("validation", 0, num_validation)
    if num_validation < MIN_SPLIT_TOKENS:
        cut = int(num_train * (1 - fraction))
        method = "tail"
        validation = SplitRange("train", cut, num_train)
    splits = {"train": SplitRange("train", 0, cut), "validation": validation}
    if validation.stop - validation.start < MIN_SPLIT_TOKENS:
        method = "none"
        cut = num_train
        splits = {"train": SplitRange("train", 0, num_train)}
    if cut < MIN_SPLIT_TOKENS:
        raise DataError(
            f"data.train holds {num_train} tokens, of which data.validation_fraction={fraction} leaves {cut} to train "
            f"on; a sample takes at least {MIN_SPLIT_TOKENS}. Give more text."
        )
    return method, splits


def describe_split(manifest: Manifest) -> str:
    """One line that says what is held out for validation, and how it was chosen."""
    if manifest.validation_method == "none":
        return "validation: nothing is held out"
    split = manifest.splits["validation"]
    held_out = split.stop - split.start
    share = held_out / (held_out + manifest.splits["train"].stop)
    documents = {name: sum(record.documents for record in manifest.streams[name]) for name in STREAMS}
    if manifest.validation_method == "sources":
        return f"validation: the text of data.validation, {documents['validation']:,} documents"
    if manifest.validation_method == "hash":
        return (
            f"validation: {documents['validation']:,} of {sum(documents.values()):,} documents, chosen by a hash of "
            f"their content ({share:.2%} of the tokens)"
        )
    return (
        f"validation: the last {share:.2%} of the tokens ({sum(documents.values()):,} documents are too few to choose "
        f"some by hash)"
    )
