"""Examples as their bytes, in a module of its own: processes that tokenize import it, and should import little."""

from dataclasses import dataclass

import numpy as np

from echelon.data.conversation import EncodedDocument
from echelon.data.readers.record import BrokenRecordError


@dataclass(frozen=True)
class BytesEncoding:
    """Each byte a token; the completion is learned, of a pair both answers. No token ends them."""

    stops: tuple[int, ...] = ()

    def encode(self, record):
        if "chosen" in record:
            return tuple(self._join(record["prompt"], record[name]) for name in ("chosen", "rejected"))
        if not isinstance(record["completion"], str):
            raise BrokenRecordError("holds no text in `completion`")
        return (self._join(record["prompt"], record["completion"]),)

    @staticmethod
    def _join(prompt: str, completion: str) -> EncodedDocument:
        ids = np.frombuffer((prompt + completion).encode(), dtype=np.uint8).astype(np.int64)
        return EncodedDocument(ids, np.arange(ids.size) >= len(prompt.encode()))
