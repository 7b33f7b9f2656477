"""An encoding of examples as bytes. Separate, because tokenizing processes import it and should import little."""

from dataclasses import dataclass

import numpy as np

from echelon.learn.data.conversation import EncodedDocument
from echelon.learn.data.examples import parse_example
from echelon.learn.data.readers.record import BrokenRecordError


@dataclass(frozen=True)
class BytesEncoding:
    """Makes each byte a token. The targets are the completion, or both answers of a pair, without a stop token."""

    stops: tuple[int, ...] = ()

    def parse(self, record):
        return parse_example(record)

    def encode(self, record):
        if "chosen" in record:
            return tuple(self._join(record["prompt"], record[name]) for name in ("chosen", "rejected"))
        if not isinstance(record["completion"], str):
            raise BrokenRecordError("has no text in `completion`")
        return (self._join(record["prompt"], record["completion"]),)

    @staticmethod
    def _join(prompt: str, completion: str) -> EncodedDocument:
        ids = np.frombuffer((prompt + completion).encode(), dtype=np.uint8).astype(np.int64)
        return EncodedDocument(ids, np.arange(ids.size) >= len(prompt.encode()))
