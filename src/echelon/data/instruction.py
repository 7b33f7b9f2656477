"""From an example of any instruction format to token ids with targets: what worker processes are sent, and do."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from echelon.data.conversation import EncodedDocument
from echelon.data.readers.record import BrokenRecordError


@dataclass(frozen=True)
class InstructionEncoding:
    """How examples become tokens, as plain values: picklable, and equal where the tokens are."""

    tokenizer_json: str
    stop: int | None

    def encode(self, record: Mapping[str, Any]) -> tuple[EncodedDocument, ...]:
        """The documents of an example: one, or the chosen and the rejected text of a preference pair.

        Never cut to a length. Raises BrokenRecordError with what is wrong with the example.
        """
        parts = [record.get(name) for name in ("prompt", "completion")]
        if not all(isinstance(part, str) for part in parts):
            raise BrokenRecordError("holds no text in `prompt` or `completion`")
        prompt, completion = ([*self._tokenizer.encode(str(part), add_special_tokens=False).ids] for part in parts)
        ids = [*prompt, *completion, *([] if self.stop is None else [self.stop])]
        targets = np.arange(len(ids)) >= len(prompt)
        return (EncodedDocument(np.array(ids, dtype=np.int64), targets),)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer.from_str(self.tokenizer_json)
