"""Examples in a common form, independent of their format, and the documents they become."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class EncodedDocument:
    """One text that the model is fed. Both `[n]`; `targets` says of each token whether it is learned, as the one that
    is predicted: never of the first, which nothing predicts."""

    ids: npt.NDArray[np.int64]
    targets: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Conversation:
    """Turns as chat templates take them, and what the record says of each: whether it is learned, or nothing (None).

    `tools`: their schemas. `answers`: the number of the first turn of the answer, where the turns before it are given
    as a prompt; 0 for a conversation of which every turn of the assistant counts.
    """

    messages: tuple[dict[str, Any], ...]
    learned: tuple[bool | None, ...]
    tools: tuple[dict[str, Any], ...] = ()
    answers: int = 0


@dataclass(frozen=True)
class Completion:
    """Plain text to go on from, and how it goes on. No template is put around it."""

    prompt: str
    completion: str


Text = Conversation | Completion


@dataclass(frozen=True)
class Preference:
    """Two answers to one prompt."""

    chosen: Text
    rejected: Text
