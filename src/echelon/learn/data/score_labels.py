"""What the score of a text is compared with: a label of 16 bits, which takes the place of the next token.

A model gives a text its score at the last token, which no token follows. So the shards have a label there: the number
of the text's class, or a half of a pair's margin. No other position of the text has one.
"""

import struct
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from echelon.ground.errors import ConfigError
from echelon.learn.data.conversation import EncodedDocument
from echelon.learn.data.readers.record import BrokenRecordError

_SHOWN_LABELS = 10


@dataclass(frozen=True)
class ScoreRule:
    """How texts are made for a model that scores them.

    `padding`: the id that fills batches. `transformers` takes the score at the last token that has another id, so such
    ids at the end of a text are removed. `labels`: the names of the classes; none if texts have no class. `max_tokens`:
    where a text with a class is cut; None: never.
    """

    padding: int | None
    labels: tuple[str, ...] = ()
    max_tokens: int | None = None


def find_label(label: Any, labels: tuple[str, ...]) -> int:
    """Return the number of a record's label: of its name, or the number itself, from 0.

    Tables give numbers as text. Where labels have numbers as their names, a number is a name. Raises ConfigError for
    anything else.
    """
    if isinstance(label, str | int) and not isinstance(label, bool):
        if str(label) in labels:
            return labels.index(str(label))
        numbers = [str(number) for number in range(len(labels))]
        if str(label) in numbers and not any(name.lstrip("-").isdecimal() for name in labels):
            return int(label)
    shown = ", ".join(labels[:_SHOWN_LABELS]) + (", ..." if len(labels) > _SHOWN_LABELS else "")
    raise ConfigError(
        f"label={label!r:.80} is none of objective.labels ({shown}), nor a position in that list; correct the record, "
        "or objective.labels."
    )


def label_document(document: EncodedDocument, label: int, rule: ScoreRule) -> EncodedDocument:
    """Return a text with a label as its only target. Raises BrokenRecordError for one of padding alone."""
    filled = np.flatnonzero(document.ids != (-1 if rule.padding is None else rule.padding))
    if not len(filled):
        raise BrokenRecordError("has a text without tokens, which has no score")
    ids = document.ids[: filled[-1] + 1]
    return replace(document, ids=ids, targets=np.zeros(len(ids), dtype=bool), label=label)


def cut_document(document: EncodedDocument, rule: ScoreRule) -> EncodedDocument:
    """Return the beginning of a text, before it has a label."""
    lost = 0 if rule.max_tokens is None else max(0, len(document.ids) - rule.max_tokens)
    kept = len(document.ids) - lost
    return replace(document, ids=document.ids[:kept], targets=document.targets[:kept], lost_tokens=lost)


def split_margin(margin: float) -> tuple[int, int]:
    """Return the labels of the chosen and the rejected text: the upper and the lower half of the margin in fp32."""
    high, low = struct.unpack(">HH", struct.pack(">f", margin))
    return high, low
