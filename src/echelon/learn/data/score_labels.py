"""What the score of a text is compared with: a label of 16 bits, which takes the place of the next token.

A model gives a text its score at the last token, which no token follows. So the shards have a label there: the number
of the text's class, or a half of a pair's margin. No other position of the text has one.
"""

import struct
from dataclasses import dataclass, replace

import numpy as np

from echelon.learn.data.conversation import EncodedDocument
from echelon.learn.data.readers.record import BrokenRecordError


@dataclass(frozen=True)
class ScoreRule:
    """How texts are made for a model that scores them.

    `padding`: the id that fills batches. `transformers` takes the score at the last token that has another id, so such
    ids at the end of a text are removed. `labels`: the names of the classes; none if texts have no class.
    """

    padding: int | None
    labels: tuple[str, ...] = ()


def label_document(document: EncodedDocument, label: int, rule: ScoreRule) -> EncodedDocument:
    """Return a text with a label as its only target. Raises BrokenRecordError for one of padding alone."""
    filled = np.flatnonzero(document.ids != (-1 if rule.padding is None else rule.padding))
    if not len(filled):
        raise BrokenRecordError("has a text without tokens, which has no score")
    ids = document.ids[: filled[-1] + 1]
    return replace(document, ids=ids, targets=np.zeros(len(ids), dtype=bool), label=label)


def split_margin(margin: float) -> tuple[int, int]:
    """Return the labels of the chosen and the rejected text: the upper and the lower half of the margin in fp32."""
    high, low = struct.unpack(">HH", struct.pack(">f", margin))
    return high, low
