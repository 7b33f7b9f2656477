"""The common form of examples, independent of their format, and of the documents they become."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class EncodedDocument:
    """A tokenized text. Both `[n]`; `targets`: whether the model is trained to predict the token, False for the first,
    which nothing predicts."""

    ids: npt.NDArray[np.int64]
    targets: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Conversation:
    """Turns in the form of chat templates. `learned`: whether the record marks a turn as trained; None if it does not.

    `tools`: the tool schemas. `answers`: the index of the first turn of the answer, if the turns before it are a
    prompt; 0 for a conversation in which every assistant turn counts.
    """

    messages: tuple[dict[str, Any], ...]
    learned: tuple[bool | None, ...]
    tools: tuple[dict[str, Any], ...] = ()
    answers: int = 0


@dataclass(frozen=True)
class Completion:
    """A plain-text prompt and its completion, without a chat template."""

    prompt: str
    completion: str


Text = Conversation | Completion


@dataclass(frozen=True)
class Preference:
    """A chosen and a rejected answer to the same prompt."""

    chosen: Text
    rejected: Text
