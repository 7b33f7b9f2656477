"""Suspicious but usable data: counted during tokenization, stored in the manifest, reported at every start."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from echelon.data.conversation import Completion, Conversation, EncodedDocument, Preference, Text

EMPTY_ANSWER = "an empty answer"
ENDS_WITH_USER = "a turn of the user at the end"

SAMPLED_DOCUMENTS = 4096
"""Copies are looked for among so many documents at most, chosen by their hashes."""

WORTH_SAYING = 0.01
"""A smaller fraction of duplicates is not reported."""

_MEANINGS = {
    EMPTY_ANSWER: "the model learns to answer with nothing",
    ENDS_WITH_USER: "no answer follows it",
}


def find_oddities(example: Text | Preference | EncodedDocument) -> Iterator[str]:
    """What is odd about an example, each thing once."""
    texts = (example.chosen, example.rejected) if isinstance(example, Preference) else (example,)
    if _has_empty_answer(texts[0]):  # a rejected one may well be empty
        yield EMPTY_ANSWER
    if any(isinstance(text, Conversation) and text.messages[-1]["role"] == "user" for text in texts):
        yield ENDS_WITH_USER


def describe_oddity(source: str, what: str, count: int, total: int, place: str) -> str:
    """The line about one kind of oddity of a source."""
    return f"{source}: {count:,} of {total:,} examples have {what}: {_MEANINGS[what]} (the first: {place})"


def _has_empty_answer(text: Text | EncodedDocument) -> bool:
    if isinstance(text, Completion):
        return not text.completion.strip()
    return isinstance(text, Conversation) and any(
        message["role"] == "assistant" and not message.get("tool_calls") and not _says_something(message.get("content"))
        for message in text.messages
    )


def _says_something(content: object) -> bool:
    return bool(content.strip()) if isinstance(content, str) else bool(content)


@dataclass
class CopySample:
    """How much of the text to train on are copies, from a sample of the documents that takes little memory.

    The sample is of those whose hash ends in `shift` zeros, so that all copies of a document are in it or none is.
    `seen` has their hashes, and whether the text is to validate on. Counts stand for all documents: one in the sample
    counts 2^shift. `held_out`: those that are to be validated on too.
    """

    shift: int = 0
    seen: dict[str, bool] = field(default_factory=dict)
    counted: int = 0
    copies: int = 0
    held_out: int = 0

    def add(self, hash: int, is_validation: bool) -> None:
        """Take note of a document; text to validate on has to come first."""
        if hash & ((1 << self.shift) - 1):
            return
        key, weight = f"{hash:x}", 1 << self.shift
        if not is_validation:
            self.counted += weight
            self.copies += weight if self.seen.get(key) is False else 0
            self.held_out += weight if self.seen.get(key) else 0
        self.seen.setdefault(key, is_validation)
        if len(self.seen) > SAMPLED_DOCUMENTS:
            self.shift += 1
            self.seen = {key: each for key, each in self.seen.items() if not int(key, 16) & ((1 << self.shift) - 1)}

    def describe(self) -> Iterator[str]:
        """A line about copies, and one about those of text to validate on, where there are many enough."""
        about = "about " if self.shift else ""
        for count, what, remedy in (
            (self.copies, "copies of others", "leaves them out"),
            (self.held_out, "also text to validate on", "does not train on them"),
        ):
            if count > WORTH_SAYING * self.counted:
                share = f"{about}{count / self.counted:.0%} of the {self.counted:,} documents"
                yield f"data.train: {share} are {what}; data.deduplicate=true {remedy}"
