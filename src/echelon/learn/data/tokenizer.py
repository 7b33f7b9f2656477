"""Tokenizers: bytes, trained byte-level BPE, or any fast tokenizer that `transformers` loads.

All are `transformers` tokenizers that wrap one of the `tokenizers` library, so AutoTokenizer loads a saved folder.
`transformers` is imported only where it is used: tokenizing processes need only the JSON of the inner tokenizer.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from echelon.ground.errors import ConfigError, DataError, first_line, is_panic
from echelon.ground.stored import check_readable, read_json
from echelon.learn.model.hub import HubModel, Part, fetch, is_hub_name

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

BYTES = "bytes"
EOS = "eos"
"""The value of `data.document_separator` for the tokenizer's own eos."""

MAX_VOCAB = 2**24
MIN_TRAINED_VOCAB = 257
"""256 bytes and `<|endoftext|>`."""


# Classes of transformers that take a tokenizer.json as it is, but for special tokens: those that each has by default.
_DEFAULT_TOKENS = {
    "PreTrainedTokenizer": (), "TokenizersBackend": (), "LlamaTokenizer": ("<unk>", "<s>", "</s>"),
    "Qwen2Tokenizer": ("<|endoftext|>",), "GPT2Tokenizer": ("<|endoftext|>",),
}  # fmt: skip
_CHOSEN_CLASSES = {"qwen2": "Qwen2Tokenizer"}  # the class that transformers takes for a model type, whatever is stated


def build_bytes_tokenizer() -> "PreTrainedTokenizerFast":
    """Build the tokenizer with exactly 256 ids, byte b = id b: no merges, no special tokens, no separator."""
    from echelon.learn.data.tokenizer_training import byte_characters

    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _wrap(tokenizer)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> "PreTrainedTokenizerFast":
    """Train byte-level BPE (GPT-2's splitting rule) with `<|endoftext|>` as end and separator of documents.

    `vocab_size` counts the 256 bytes and `<|endoftext|>`; a short text may give fewer. The same texts give the same
    tokenizer. Raises ConfigError below 257.
    """
    from echelon.learn.data.tokenizer_training import END_OF_TEXT, learn_merges

    if vocab_size < MIN_TRAINED_VOCAB:
        raise ConfigError(
            f"tokenizer.train.vocab_size={vocab_size} is too small: it counts the 256 bytes and {END_OF_TEXT}; use "
            f"{MIN_TRAINED_VOCAB} or more."
        )
    return _wrap(learn_merges(texts, vocab_size), eos_token=END_OF_TEXT, pad_token=END_OF_TEXT)


def _wrap(tokenizer: Tokenizer, **special_tokens: str) -> "PreTrainedTokenizerFast":
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, model_max_length=10**9, **special_tokens
    )


def find_folder(path_or_id: str, trust_remote_code: bool = False, key: str = "tokenizer") -> Path:
    """Return the folder of a tokenizer, after downloading that of a hub id.

    Raises DataError if there is none, and the errors of `hub.fetch`.
    """
    path = Path(path_or_id).expanduser()
    if is_hub_name(path_or_id):
        return fetch(HubModel(path_or_id, key, Part.FILES, trust_remote_code))
    if not path.exists():
        raise DataError(
            f"{key}={path_or_id}: no such folder (working directory {Path.cwd()}); give a folder with tokenizer.json, "
            "a Hub id, bytes, or {train: {vocab_size: 4096}}."
        )
    return path


def load_tokenizer(
    path_or_id: str, trust_remote_code: bool = False, key: str = "tokenizer"
) -> "PreTrainedTokenizerFast":
    """Load a tokenizer from a folder or from the Hub; `key` is its recipe key.

    Raises DataError if it is not found, cannot be read or is not a fast tokenizer, and the errors of `hub.fetch`.
    """
    path, shown = find_folder(path_or_id, trust_remote_code, key), f"{key}={path_or_id}"
    from transformers import AutoTokenizer

    try:
        if path.is_dir():
            check_readable(path)
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=True)
        try_tokenizer(tokenizer)
    except DataError:
        raise
    except Exception as error:  # tokenizers raises plain Exception, transformers many types
        reason = " ".join(str(error).split())[:300]
        raise DataError(
            f"{shown} cannot be loaded from {path}: {reason} Give a folder with tokenizer.json, or a hub id."
        ) from error
    if not isinstance(getattr(tokenizer, "backend_tokenizer", None), Tokenizer):
        raise DataError(
            f"{shown} is not a fast tokenizer (tokenizer.json), which parallel tokenization needs; convert it "
            f"with transformers and give the saved folder."
        )
    return tokenizer


def try_tokenizer(tokenizer: "PreTrainedTokenizerBase") -> None:
    """Test a loaded tokenizer: some faults appear only when it is used. Raises whatever the libraries raise.

    Raises ValueError for an id of MAX_VOCAB or more: `tokenizers` allocates memory for all ids below it. And as
    `settle`, by which texts have the same tokens each time.
    """
    largest = max(tokenizer.get_vocab().values())
    if largest >= MAX_VOCAB:
        raise ValueError(f"it has a token with id {largest}; a vocabulary can have at most {MAX_VOCAB} ids.")
    if isinstance(inner := getattr(tokenizer, "backend_tokenizer", None), Tokenizer):
        from echelon.learn.data.tokenizer_faults import settle

        settle(inner, tokenizer.name_or_path)
    with panics_told(tokenizer.name_or_path, "the text 'a word'"):
        tokenizer.decode(tokenizer.encode("a word"))


def build_tokenizer(
    name: str | None, checkpoint: str | None, trust_remote_code: bool = False, new_tokens: Sequence[str] = ()
) -> "PreTrainedTokenizerFast":
    """Build the recipe's tokenizer with its new tokens: `bytes`, a folder or Hub id, or None for the checkpoint's.

    Raises ConfigError if there is neither a name nor a checkpoint.
    """
    if name == BYTES:
        return add_new_tokens(build_bytes_tokenizer(), new_tokens)
    source, key = find_source(name, checkpoint)
    return add_new_tokens(load_tokenizer(source, trust_remote_code, key), new_tokens)


def find_source(name: str | None, checkpoint: str | None) -> tuple[str, str]:
    """Return the folder or Hub id of a tokenizer, and its recipe key. Raises ConfigError if there is neither."""
    if name is not None:
        return name, "tokenizer"
    if checkpoint is None:
        raise ConfigError(
            "tokenizer is not set and there is no model.checkpoint to load one from; set tokenizer: bytes, a path or "
            "Hub id, or {train: {vocab_size: 4096}}."
        )
    return checkpoint, "tokenizer of model.checkpoint"


def add_new_tokens(tokenizer: "PreTrainedTokenizerFast", tokens: Sequence[str]) -> "PreTrainedTokenizerFast":
    """Add `model.new_tokens` to a tokenizer as special tokens. Tokens that it does not have get the next ids."""
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in tokens], special_tokens=True)
    return tokenizer


def describe_known_tokens(tokenizer: "PreTrainedTokenizerFast", tokens: Sequence[str]) -> list[str]:
    """Return a line about the tokens of `model.new_tokens` that a tokenizer already has."""
    ids = {token: tokenizer.backend_tokenizer.token_to_id(token) for token in tokens}
    existing = [f"{token} (id {id})" for token, id in ids.items() if id is not None]
    if not existing:
        return []
    return [f"model.new_tokens: the tokenizer already has {', '.join(existing)}; they are trained like new tokens"]


def separator_id(tokenizer: "PreTrainedTokenizerFast", choice: str | None = EOS) -> int | None:
    """Return the id that follows each document: eos, or another token by its text. None for no separator or no eos.

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
        names = ", ".join(str(token) for token in tokenizer.all_special_tokens) or "none"
        raise ConfigError(
            f"data.document_separator={choice} is not a token of the tokenizer{' bytes' if is_bytes else ''}; use eos, "
            f"null, or one of its tokens (special tokens: {names})."
        )
    return separator


def padding_id(tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """Return the id that fills batches: that for padding, else eos; None if there is neither."""
    ids = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    return next((token_id for token_id in ids if token_id is not None), None)


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """Return the vocabulary size that a model needs: the largest id of the tokenizer plus one."""
    return 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())


def count_ids(folder: Path) -> int | None:
    """Return the vocabulary size of a folder's tokenizer without transformers, whose import takes seconds.

    None where only transformers can tell: it may add tokens to those in tokenizer.json, or not load it at all.
    """
    from echelon.learn.data.tokenizer_faults import check_growth

    try:
        check_readable(folder)
        settings = read_json(folder / "tokenizer_config.json")
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        check_growth(tokenizer)
        tokenizer.no_padding()
        with panics_told(str(folder), "the text 'a word'"):
            tokenizer.decode(tokenizer.encode("a word").ids)
        ids = tokenizer.get_vocab(with_added_tokens=True)
        size = 1 + max(ids.values())
        is_whole = size == len(ids) <= MAX_VOCAB and ids.keys() >= set(_list_special(folder, settings))
        return size if is_whole and _keeps_added(folder, settings, tokenizer) else None
    except Exception:  # `load_tokenizer` explains it
        return None


def _list_special(folder: Path, settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the tokens that transformers adds to a tokenizer that lacks them. Raises KeyError for an unknown class."""
    yield from _DEFAULT_TOKENS[settings["tokenizer_class"].removesuffix("Fast")]
    config = folder / "config.json"
    if config.exists():
        yield from _DEFAULT_TOKENS[_CHOSEN_CLASSES.get(read_json(config)["model_type"], "TokenizersBackend")]
    values = [value for name, value in settings.items() if name.endswith("_token") and not isinstance(value, bool)]
    for name in ("additional_special_tokens", "extra_special_tokens"):
        more = settings.get(name) or []
        values += more.values() if isinstance(more, dict) else more
    yield from (value["content"] if isinstance(value, dict) else value for value in values if value is not None)


def _keeps_added(folder: Path, settings: Mapping[str, Any], tokenizer: Tokenizer) -> bool:
    """Whether the tokens that were added to a tokenizer.json are those that transformers adds to its vocabulary."""
    names = ["tekken.json"]
    stated = settings.get("added_tokens_decoder")
    if stated is None:
        names += ["added_tokens.json", "special_tokens_map.json"]
    else:
        added = {str(index): token.content for index, token in tokenizer.get_added_tokens_decoder().items()}
        if {index: token["content"] for index, token in stated.items()} != added:
            return False
    return "auto_map" not in settings and not any((folder / name).exists() for name in names)


def tokenizer_fingerprint(tokenizer: "PreTrainedTokenizerFast") -> str:
    """Hash everything that determines the ids: vocabulary, merges, normalizer, pre-tokenizer, added and special tokens.

    A saved and reloaded tokenizer has the same hash. Truncation, padding and templates are not included.
    """
    return fingerprint_json(tokenizer.backend_tokenizer.to_str())


def fingerprint_json(serialized: str) -> str:
    """Compute `tokenizer_fingerprint` from the text of a tokenizer.json."""
    content: dict[str, Any] = json.loads(serialized)
    parts = {name: content.get(name) for name in ("model", "normalizer", "pre_tokenizer", "added_tokens")}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


@contextmanager
def panics_told(tokenizer: str, text: str) -> Iterator[None]:
    """Raise DataError for a panic of a tokenizer's native code in the block, which is not an Exception.

    A tokenizer.json can hold any regular expression. The library panics, for example, when one backtracks too often.

    Args:
        tokenizer: the name of the tokenizer, as a path or hub id.
        text: what is encoded or decoded, as its place in a file, or the text.
    """
    try:
        yield
    except BaseException as error:
        if not is_panic(error):
            raise
        raise DataError(
            f"the tokenizer {tokenizer} failed at {text}: {first_line(error).rstrip('.')}. A regular expression in its "
            "tokenizer.json may not be able to handle this text; use another tokenizer, or change or remove the text."
        ) from None


def shorten(text: str) -> str:
    """The start of a text, for a message."""
    return repr(text if len(text) <= 40 else f"{text[:40]}...")
