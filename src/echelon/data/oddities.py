"""Suspicious but usable data: counted during tokenization, stored in the manifest, reported at every start."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from echelon.data.conversation import Completion, Conversation, EncodedDocument, Preference, Text

EMPTY_ANSWER = "an empty answer"
ENDS_WITH_USER = "a user turn at the end"

SAMPLED_DOCUMENTS = 4096
"""The maximum number of documents, selected by hash, among which duplicates are searched."""

WORTH_SAYING = 0.01
"""A smaller fraction of duplicates is not reported."""

_MEANINGS = {
    EMPTY_ANSWER: "the model learns to give empty answers",
    ENDS_WITH_USER: "no answer follows",
}


def find_oddities(example: Text | Preference | EncodedDocument) -> Iterator[str]:
    """Yield the oddities of an example, each once."""
    texts = (example.chosen, example.rejected) if isinstance(example, Preference) else (example,)
    if _has_empty_answer(texts[0]):  # a rejected answer may be empty
        yield EMPTY_ANSWER
    if any(isinstance(text, Conversation) and text.messages[-1]["role"] == "user" for text in texts):
        yield ENDS_WITH_USER


def describe_oddity(source: str, what: str, count: int, total: int, place: str) -> str:
    """Describe one kind of oddity of a source in one line."""
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
    """Estimates the share of duplicates in the training text from a small sample of the documents.

    The sample consists of the documents whose hash ends in `shift` zero bits, so it contains either all copies of a
    document or none. `seen` maps their hashes to whether they are validation text. Counts are scaled to all documents:
    one in the sample counts 2^shift. `held_out`: training documents that are also validation text.
    """

    shift: int = 0
    seen: dict[str, bool] = field(default_factory=dict)
    counted: int = 0
    copies: int = 0
    held_out: int = 0

    def add(self, hash: int, is_validation: bool) -> None:
        """Add a document. Validation text must be added first."""
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
        """Yield a line about duplicates and one about copies of validation text, if there are enough of them."""
        about = "about " if self.shift else ""
        for count, what, remedy in (
            (self.copies, "copies of others", "drops them"),
            (self.held_out, "also validation text", "does not train on them"),
        ):
            if count > WORTH_SAYING * self.counted:
                share = f"{about}{count / self.counted:.0%} of the {self.counted:,} documents"
                yield f"data.train: {share} are {what}; data.deduplicate=true {remedy}"
