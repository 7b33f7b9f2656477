"""Recalls what parsing undamaged files gave, since almost every operation parses the same recipe and metadata again.

Only the results of `undamaged` blocks are kept, and other content is always parsed; so with recipes that are rendered.
What depends on no file is also asked once only: the versions of packages, and what is secret in a short text.
"""

import importlib.metadata
import io
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import IO, Any

import pytest

from echelon.ground import redaction
from echelon.learn.checkpoint import fill
from echelon.recipe import load, render, yaml_text
from echelon.run.report import run_record


class Recall:
    """A function of values, such as a file's content, whose results for undamaged files are kept, as copies."""

    keeps = False

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._kept: dict[bytes, bytes] = {}

    def __call__(self, *given: Any) -> Any:
        """Return the result of the function, which the caller may change."""
        key = pickle.dumps(given)
        if (kept := self._kept.get(key)) is not None:
            return pickle.loads(kept)
        value = self._function(*given)
        if Recall.keeps:
            self._kept[key] = pickle.dumps(value)
        return value


@contextmanager
def undamaged() -> Iterator[None]:
    """Keep what is parsed within the block."""
    Recall.keeps = True
    try:
        yield
    finally:
        Recall.keeps = False


@contextmanager
def recalled() -> Iterator[None]:
    """Within the block, recipes and the metadata of checkpoints that were kept are not parsed again."""
    parse = Recall(yaml_text.parse_yaml)
    real = fill.MetadataUnpickler
    unpickle = Recall(lambda content: real(io.BytesIO(content)).load())

    class Unpickler:
        """In place of echelon's own, which is in Python."""

        def __init__(self, file: IO[bytes]) -> None:
            self._content = file.read()

        def load(self) -> Any:
            """Return the value in the file."""
            return unpickle(self._content)

    redact = redaction.redact_text
    redact_short = lru_cache(10_000)(redact)

    def redact_text(text: str) -> str:
        return redact_short(text) if len(text) < 1_000 else redact(text)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        patch.setattr(importlib.metadata, "version", cache(importlib.metadata.version))
        patch.setattr(redaction, "redact_text", redact_text)
        for module in (load, run_record):
            patch.setattr(module, "parse_yaml", parse)
        patch.setattr(render, "render_yaml", Recall(yaml_text.render_yaml))
        patch.setattr(fill, "MetadataUnpickler", Unpickler)
        yield
