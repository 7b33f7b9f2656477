"""Turns a panic in the native code of a tokenizer into an error with a message.

A tokenizer.json can hold any regular expression. The library panics, for example, when one backtracks too often on a
text; such an error is not an Exception.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from echelon.ground.errors import DataError, first_line, is_panic


@contextmanager
def panics_told(tokenizer: str, text: str) -> Iterator[None]:
    """Raise DataError for a panic in the block.

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
