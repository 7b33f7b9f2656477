"""Tokenizers: bytes, trained byte-level BPE, or any fast tokenizer that `transformers` loads.

All are `transformers` tokenizers around one of the `tokenizers` library, so that a saved folder loads by AutoTokenizer.
`transformers` itself is imported where it is used: tokenizing processes need only the JSON of the inner tokenizer.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from echelon.errors import ConfigError, DataError
from echelon.model.hub import HubModel, Part, fetch, is_hub_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

BYTES = "bytes"
END_OF_TEXT = "<|endoftext|>"
EOS = "eos"
"""What `data.document_separator` calls the tokenizer's own end of text."""

MAX_VOCAB = 2**24
MIN_TRAINED_VOCAB = 257
"""256 bytes and `<|endoftext|>`."""


def build_bytes_tokenizer() -> "PreTrainedTokenizerFast":
    """The tokenizer with exactly 256 ids, byte b = id b: no merges, no special tokens, no separator."""
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _wrap(tokenizer)


def _byte_characters() -> Iterator[str]:
    """The printable character that byte-level tokenizers write for each byte, in order of the bytes.

    Printable Latin-1 stands for itself; the other 68 bytes take the characters from U+0100 on (GPT-2's encoder.py).
    """
    num_shifted = 0
    for byte in range(256):
        if 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255:
            yield chr(byte)
        else:
            yield chr(256 + num_shifted)
            num_shifted += 1


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> "PreTrainedTokenizerFast":
    """Train byte-level BPE (GPT-2's splitting rule) with `<|endoftext|>` as end and separator of documents.

    `vocab_size` counts the 256 bytes and `<|endoftext|>`; a short text may give fewer. The same texts give the same
    tokenizer. Raises ConfigError below 257.
    """
    if vocab_size < MIN_TRAINED_VOCAB:
        raise ConfigError(
            f"tokenizer.train.vocab_size={vocab_size} is too small: it counts the 256 bytes and {END_OF_TEXT}; use "
            f"{MIN_TRAINED_VOCAB} or more."
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(END_OF_TEXT, special=True)],
        initial_alphabet=sorted(_byte_characters()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _wrap(tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT)


def _wrap(tokenizer: Tokenizer, **special_tokens: str) -> "PreTrainedTokenizerFast":
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, model_max_length=10**9, **special_tokens
    )


def load_tokenizer(
    path_or_id: str, trust_remote_code: bool = False, key: str = "tokenizer"
) -> "PreTrainedTokenizerFast":
    """Load a tokenizer from a folder or from the hub; `key` is where the recipe names it.

    Raises DataError when it is in neither place, cannot be read, or is not of the `tokenizers` library, and as
    `hub.fetch`.
    """
    path = Path(path_or_id).expanduser()
    given = f"{key}={path_or_id}"
    if is_hub_name(path_or_id):
        path = fetch(HubModel(path_or_id, key, Part.FILES, trust_remote_code))
    elif not path.exists():
        raise DataError(
            f"{given}: no such folder, seen from {Path.cwd()}; give a folder with tokenizer.json, a hub "
            f"id, bytes, or {{train: {{vocab_size: 4096}}}}."
        )
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=True)
        try_tokenizer(tokenizer)
    except Exception as error:  # the tokenizers library raises Exception itself, transformers whatever it trips over
        reason = " ".join(str(error).split())[:300]
        raise DataError(
            f"{given} cannot be loaded from {path}: {reason} Give a folder with tokenizer.json, or a hub id."
        ) from error
    if not isinstance(getattr(tokenizer, "backend_tokenizer", None), Tokenizer):
        raise DataError(
            f"{given} has no fast form (tokenizer.json), which tokenizing in parallel needs; convert it "
            f"with transformers and give the saved folder."
        )
    return tokenizer


def try_tokenizer(tokenizer: "PreTrainedTokenizerBase") -> None:
    """Use a tokenizer that was just loaded: some faults show no earlier. Raises whatever the libraries raise.

    ValueError for an id that no vocabulary reaches: `tokenizers` makes room for all ids below it.
    """
    largest = max(tokenizer.get_vocab().values())
    if largest >= MAX_VOCAB:
        raise ValueError(f"it has a token of id {largest}, and a vocabulary has at most {MAX_VOCAB}.")
    tokenizer.decode(tokenizer.encode("a word"))


def build_tokenizer(
    name: str | None, checkpoint: str | None, trust_remote_code: bool = False, new_tokens: Sequence[str] = ()
) -> "PreTrainedTokenizerFast":
    """The tokenizer a recipe names, with the tokens it adds: `bytes`, a folder or hub id, None for the checkpoint's.

    Raises ConfigError when there is neither a name nor a checkpoint.
    """
    if name == BYTES:
        return add_new_tokens(build_bytes_tokenizer(), new_tokens)
    source, key = (name, "tokenizer") if name is not None else (checkpoint, "tokenizer of model.checkpoint")
    if source is None:
        raise ConfigError(
            "tokenizer is not set and model.config has no checkpoint to take one from; set tokenizer: bytes, a path or "
            "hub id, or {train: {vocab_size: 4096}}."
        )
    return add_new_tokens(load_tokenizer(source, trust_remote_code, key), new_tokens)


def add_new_tokens(tokenizer: "PreTrainedTokenizerFast", tokens: Sequence[str]) -> "PreTrainedTokenizerFast":
    """The tokenizer with `model.new_tokens` as special tokens: those it has not yet take the next ids, in order."""
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in tokens], special_tokens=True)
    return tokenizer


def describe_known_tokens(tokenizer: "PreTrainedTokenizerFast", tokens: Sequence[str]) -> list[str]:
    """A line about those of `model.new_tokens` that a tokenizer has before they are added."""
    ids = {token: tokenizer.backend_tokenizer.token_to_id(token) for token in tokens}
    known = [f"{token} (id {id})" for token, id in ids.items() if id is not None]
    if not known:
        return []
    return [f"model.new_tokens: the tokenizer has {', '.join(known)} already; they are trained like new ones"]


def separator_id(tokenizer: "PreTrainedTokenizerFast", choice: str | None = EOS) -> int | None:
    """The id put after each document: eos, or another token by its text. None for none, or an eos there is not.

    Raises ConfigError for a token that the tokenizer does not have; `bytes` has none.
    """
    if choice is None:
        return None
    if choice == EOS:
        eos: int | None = tokenizer.eos_token_id
        return eos
    is_bytes = tokenizer_fingerprint(tokenizer) == tokenizer_fingerprint(build_bytes_tokenizer())
    separator: int | None = None if is_bytes else tokenizer.backend_tokenizer.token_to_id(choice)
    if separator is None:
        known = ", ".join(str(token) for token in tokenizer.all_special_tokens) or "none"
        raise ConfigError(
            f"data.document_separator={choice} is no token of the tokenizer{' bytes' if is_bytes else ''}; use eos, "
            f"null, or a token it has (special ones: {known})."
        )
    return separator


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """How many ids a model needs for this tokenizer: the largest it can emit, and one."""
    return 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())


def tokenizer_fingerprint(tokenizer: "PreTrainedTokenizerFast") -> str:
    """A hash of what decides the ids: vocabulary, merges, normalizer, pre-tokenizer, added and special tokens.

    Equal for a tokenizer and its saved and loaded copy; truncation, padding and templates do not count.
    """
    return fingerprint_json(tokenizer.backend_tokenizer.to_str())


def fingerprint_json(serialized: str) -> str:
    """`tokenizer_fingerprint` of the text of a tokenizer.json."""
    content: dict[str, Any] = json.loads(serialized)
    parts = {name: content.get(name) for name in ("model", "normalizer", "pre_tokenizer", "added_tokens")}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]
