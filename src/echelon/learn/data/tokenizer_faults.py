"""Faults of tokenizers that others have made: texts that grow without end, and tokens that are drawn.

The library aborts the process when its memory is full, which nothing in Python catches.
"""

import base64
import json
import logging
import re
from typing import Any

from tokenizers import Tokenizer

logger = logging.getLogger(__name__)

MAX_GROWTH = 64
"""A normalizer may turn a character into at most this many. That of Unicode (NFKC) makes up to 18."""

MAX_TOKENS_AROUND = 1000
"""A tokenizer may add at most this many special tokens to a text."""

_MAY_MATCH_NOTHING = re.compile(r"^$|[*?|^$]|\\[bBAzZG]|\{0?,|\{0\}")


def settle(tokenizer: Tokenizer, name: str) -> None:
    """Have a tokenizer give a text the same tokens each time: a dropout of BPE is reset, with a line.

    Raises ValueError as `check_growth`.
    """
    check_growth(tokenizer)
    if (dropout := getattr(tokenizer.model, "dropout", None)) is not None:
        tokenizer.model.dropout = None
        logger.warning(
            f"tokenizer {name}: its dropout of {dropout:g}, by which a text has other tokens each time, is not used"
        )


def check_growth(tokenizer: Tokenizer) -> None:
    """Raise ValueError for a tokenizer that makes very long texts of short ones, or adds very many tokens."""
    for name in ("normalizer", "decoder"):
        part = getattr(tokenizer, name)
        if part is not None and (growth := _find_growth(json.loads(part.__getstate__()))) > MAX_GROWTH:
            raise ValueError(f"its {name} can make {growth:.3g} characters of one; it may make {MAX_GROWTH}.")
    if tokenizer.post_processor is not None:
        added = sum(map(_count_added, _flatten(json.loads(tokenizer.post_processor.__getstate__()))))
        if added > MAX_TOKENS_AROUND:
            raise ValueError(f"it adds {added:,} special tokens to a text; it may add {MAX_TOKENS_AROUND:,}.")


def _flatten(part: dict[str, Any]) -> list[dict[str, Any]]:
    """The parts of a normalizer, decoder or post-processor, in the order in which they are applied."""
    members = next((part[name] for name in ("normalizers", "decoders", "processors") if name in part), None)
    return [part] if members is None else [inner for member in members for inner in _flatten(member)]


def _count_added(part: dict[str, Any]) -> int:
    """Count the tokens, and the repetitions of the text, that a part of a post-processor adds."""
    ids = {name: len(token["ids"]) for name, token in part.get("special_tokens", {}).items()}
    pieces = [*part.get("single", ()), *part.get("pair", ())]
    return sum(ids[piece["SpecialToken"]["id"]] if "SpecialToken" in piece else 1 for piece in pieces)


def _find_growth(part: dict[str, Any]) -> float:
    """An upper bound of the characters that a normalizer or decoder makes of one.

    Computed backwards: the weight of a character is the number of characters that the later steps may make of it. A
    text that a step writes, by its weight, is shared by the characters that it replaces.
    """
    weights, other = dict[str, float](), 1.0  # of named characters, and of all others
    for step in reversed(_flatten(part)):
        texts, replaced, is_added = _read_step(step)
        if not texts:  # it may write any character in place of any
            weights, other = {}, max([other, *weights.values()])
            continue
        written = max(sum(weights.get(character, other) for character in text) for text in texts)
        if replaced:
            share = written / len(replaced)
            weights |= {character: max(share, weights.get(character, other)) for character in replaced}
            continue
        weights = {key: weight + written if is_added else max(weight, written) for key, weight in weights.items()}
        other = other + written if is_added else max(other, written)
    return max([other, *weights.values()])


def _read_step(step: dict[str, Any]) -> tuple[list[str], str, bool]:
    """What a step of a normalizer may write; the text in whose place it does, if known; whether it may add to others.

    No text: it writes single characters.
    """
    if step["type"] == "Prepend":
        return [step["prepend"]], "", True
    if step["type"] == "Precompiled":
        return _list_written(step["precompiled_charsmap"]), "", False
    if step["type"] != "Replace":
        return [], "", False
    [(form, pattern)] = step["pattern"].items()
    return [step["content"]], pattern if form == "String" else "", _MAY_MATCH_NOTHING.search(pattern) is not None


def _list_written(charsmap: str) -> list[str]:
    """The texts that a normalizer of SentencePiece writes. They follow a trie; the first four bytes have its size."""
    data = base64.b64decode(charsmap)
    return data[4 + int.from_bytes(data[:4], "little") :].decode("utf-8", "replace").split("\0")
