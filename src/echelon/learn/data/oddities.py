"""Suspicious but usable data: counted during tokenization, stored in the manifest, reported at every start."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import dropwhile

from echelon.learn.data.conversation import Completion, Conversation, Judged, Parsed, Preference

EMPTY_ANSWER = "an empty answer that is not trained on"
EMPTY_REJECTED = "an empty rejected answer"
BEGINS_WITH_ASSISTANT = "an assistant turn at the beginning"
ENDS_WITH_USER = "a user turn at the end"

SAMPLED_DOCUMENTS = 4096
"""The maximum number of documents, selected by hash, among which duplicates are searched."""

WORTH_SAYING = 0.01
"""A smaller fraction of duplicates is not reported."""

_MEANINGS = {
    EMPTY_ANSWER: "the model reads it before later turns",
    EMPTY_REJECTED: "the model learns to answer at all, not which answer is better",
    BEGINS_WITH_ASSISTANT: "no question precedes it",
    ENDS_WITH_USER: "no answer follows",
}


def find_oddities(example: Parsed) -> Iterator[str]:
    """Yield the oddities of an example that `check_answers` has passed, each once."""
    example = example.text if isinstance(example, Judged) else example
    texts = (example.chosen, example.rejected) if isinstance(example, Preference) else (example,)
    conversations = [text for text in texts if isinstance(text, Conversation)]
    if isinstance(example, Preference) and _has_empty_answer(example.rejected):
        yield EMPTY_REJECTED
    elif any(map(_has_empty_answer, texts)):
        yield EMPTY_ANSWER
    if any(_roles(text)[:1] == ["assistant"] for text in conversations):
        yield BEGINS_WITH_ASSISTANT
    if any(_roles(text)[-1:] == ["user"] for text in conversations):
        yield ENDS_WITH_USER


def describe_oddity(source: str, what: str, count: int, total: int, place: str) -> str:
    """Describe one kind of oddity of a source in one line."""
    return f"{source}: {count:,} of {total:,} examples have {what}: {_MEANINGS[what]} (the first: {place})"


def _has_empty_answer(text: Parsed) -> bool:
    if isinstance(text, Completion):
        return not text.completion.strip()
    return isinstance(text, Conversation) and any(map(text.is_empty, range(len(text.messages))))


def _roles(conversation: Conversation) -> list[str]:
    """The roles of the turns, without system messages at the beginning."""
    roles: list[str] = [message["role"] for message in conversation.messages]
    return list(dropwhile(lambda role: role == "system", roles))


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
            self.seen = {key: value for key, value in self.seen.items() if not int(key, 16) & ((1 << self.shift) - 1)}

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
