"""The common form of examples, independent of their format, and of the documents they become."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from echelon.learn.data.readers.record import BrokenRecordError


@dataclass(frozen=True)
class EncodedDocument:
    """A tokenized text. Both `[n]`; `targets`: whether the model is trained to predict the token, False for the first,
    which nothing predicts."""

    ids: npt.NDArray[np.int64]
    targets: npt.NDArray[np.bool_]
    is_good: bool | None = None
    """Whether it is a good answer; None if nobody says."""
    label: int | None = None
    """What follows the ids as the only target, instead of a token (see `ScoreRule`); None for most texts."""
    lost_tokens: int = 0
    """The tokens that were cut off at its end, before the label."""

    @property
    def stored_ids(self) -> npt.NDArray[np.int64]:
        """The ids as shards have them, with the label if there is one: `[n]`."""
        return self.ids if self.label is None else np.append(self.ids, self.label)

    @property
    def stored_targets(self) -> npt.NDArray[np.bool_]:
        """The targets among `stored_ids`: `[n]`."""
        return self.targets if self.label is None else np.append(self.targets, True)


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

    def assistant_turns(self) -> list[int]:
        """The indices of the assistant's turns."""
        return [turn for turn, message in enumerate(self.messages) if message["role"] == "assistant"]

    def takes_all(self, train_on: str) -> bool:
        """Whether turns of every role are trained. In a prompt with an answer, only the answer is."""
        return train_on == "all" and not self.answers

    def trained_turns(self, train_on: str) -> list[int]:
        """The indices of the trained turns, by `data.train_on`: with `all`, turns of any role.

        Raises BrokenRecordError for a record that marks another turn for training.
        """
        flags = list(enumerate(self.learned))
        if self.takes_all(train_on):
            return [turn for turn, flag in flags if flag is not False]
        answers = [turn for turn in self.assistant_turns() if turn >= self.answers]
        if train_on == "last" and not self.answers:
            answers = answers[-1:]
        for turn, flag in flags:
            if flag and self.messages[turn]["role"] != "assistant":
                role = self.messages[turn]["role"]
                raise BrokenRecordError(f"marks a {role} turn for training, which requires data.train_on: all")
        return [turn for turn, flag in flags if turn in answers and flag is not False]

    def is_empty(self, turn: int) -> bool:
        """Whether a turn of the assistant says nothing and calls no tool."""
        message = self.messages[turn]
        return message["role"] == "assistant" and not message.get("tool_calls") and not message["content"].strip()


@dataclass(frozen=True)
class Completion:
    """A plain-text prompt and its completion, without a chat template."""

    prompt: str
    completion: str


Text = Conversation | Completion


@dataclass(frozen=True)
class Prompt:
    """A prompt without an answer: plain text, or the turns before the answer. `tools`: the tool schemas."""

    content: str | tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Preference:
    """A chosen and a rejected answer to the same prompt. `margin`: by how much the chosen one should score more."""

    chosen: Text
    rejected: Text
    margin: float = 0.0


@dataclass(frozen=True)
class Judged:
    """An answer to a prompt, and whether it is good."""

    text: Text
    is_good: bool


@dataclass(frozen=True)
class Labelled:
    """A text, two texts, or turns, with a label: what the record has, not checked. `tools`: the tool schemas."""

    content: str | tuple[dict[str, Any], ...]
    label: Any
    pair: str | None = None
    tools: tuple[dict[str, Any], ...] = ()


Parsed = Text | Preference | Judged | EncodedDocument | Prompt | Labelled
"""An example of any format."""


def check_answers(example: Parsed, train_on: str) -> None:
    """Raise BrokenRecordError for a trained answer that is empty. A rejected or bad one may be; ids are not checked."""
    if isinstance(example, Judged) and not example.is_good:
        return
    text = example.chosen if isinstance(example, Preference) else example
    text = text.text if isinstance(text, Judged) else text
    if isinstance(text, Completion):
        is_empty = not text.completion.strip()
    else:
        is_empty = isinstance(text, Conversation) and any(map(text.is_empty, text.trained_turns(train_on)))
    if is_empty:
        raise BrokenRecordError("has an empty answer, from which the model would learn to stop at once")
