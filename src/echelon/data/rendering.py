"""Conversations rendered by a chat template, and the exact characters of them that are learned.

Where the template marks what the assistant says (`{% generation %}`), its marks are the spans. Elsewhere a turn's span
is found by rendering: what the conversation up to the turn, with the prompt to generate, is rendered as, must be how
the conversation with the turn begins, and that how the whole begins; what lies between is the turn. No text is searched
for. A template that renders earlier turns in another way once later ones follow has no such spans, and is refused.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from echelon.data.conversation import Conversation
from echelon.data.limits import LimitError, run_limited
from echelon.data.readers.record import BrokenRecordError
from echelon.errors import ConfigError

Spans = list[tuple[int, int]]
_Result = TypeVar("_Result")

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# A template may write so many characters, and so many times those of its conversation.
_MAX_CHARACTERS, _MAX_GROWTH = 1_000_000, 100


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, and the spans of characters that are learned.

    `are_turns`: each span is all that the template writes for a turn, white space behind its stop token included.
    """

    text: str
    spans: Spans
    are_turns: bool = False


@dataclass(frozen=True)
class ChatTemplate:
    """A template with the tokens it can name. `train_on` and `eot_tokens` are those of the recipe, `name` is what
    messages call it.

    It runs under the limits of `data.limits`; one that exceeds them raises ConfigError, for it is no record's fault.
    """

    text: str
    special_tokens: Mapping[str, str]
    train_on: str = "assistant"
    eot_tokens: tuple[str, ...] = ()
    name: str = "the chat template"

    @property
    def marks_turns(self) -> bool:
        """Whether the template itself says what the assistant generates."""
        return _GENERATION.search(self.text) is not None

    def render(self, conversation: Conversation) -> Rendered:
        """The whole conversation with its spans. Raises BrokenRecordError for what the template cannot render."""
        return self._limited(lambda: self._render(conversation))

    def prompt(self, messages: Sequence[dict[str, Any]], generate: bool) -> str:
        """Some turns as text, with the beginning of an answer or without. Raises BrokenRecordError."""
        conversation = Conversation(tuple(messages), (None,) * len(messages))
        return self._limited(lambda: self._run(conversation, len(messages), generate=generate)[0])

    def _limited(self, call: Callable[[], _Result]) -> _Result:
        _load_renderer()
        try:
            return run_limited(call)
        except LimitError as error:
            raise ConfigError(
                f"{self.name} {error} to render one conversation; use another data.chat_template, or mend this one."
            ) from None

    def _render(self, conversation: Conversation) -> Rendered:
        self._check_tools(conversation)
        turns = self._wanted(conversation)
        text, marks = self._run(conversation, len(conversation.messages), marks=self.marks_turns)
        if self._takes_all(conversation):
            return Rendered(text, self._all_but(conversation, text, turns))
        if not marks:
            return Rendered(text, [self._find_turn(conversation, text, turn) for turn in turns], True)
        if turns != self._answers(conversation):
            marks = [mark for turn in turns for mark in self._marks_of(conversation, marks, turn)]
        return Rendered(text, [(start, self._find_end(text, stop)) for start, stop in marks])

    def _check_tools(self, conversation: Conversation) -> None:
        """Raise BrokenRecordError for tools that the template would leave out without a word."""
        used = {"tools": conversation.tools, "tool_calls": any("tool_calls" in each for each in conversation.messages)}
        for name, is_used in used.items():
            if is_used and name not in self.text:
                raise BrokenRecordError(f"has `{name}`, of which the chat template knows nothing; use one that does")

    def _wanted(self, conversation: Conversation) -> list[int]:
        """The turns that are learned; of `all`, those of any role that are."""
        flags = list(enumerate(conversation.learned))
        if self._takes_all(conversation):
            return [turn for turn, flag in flags if flag is not False]
        answers = [turn for turn in self._answers(conversation) if turn >= conversation.answers]
        if self.train_on == "last" and not conversation.answers:
            answers = answers[-1:]
        for turn, flag in flags:
            if flag and conversation.messages[turn]["role"] != "assistant":
                role = conversation.messages[turn]["role"]
                raise BrokenRecordError(f"asks to learn a turn of the {role}, which only data.train_on: all does")
        return [turn for turn, flag in flags if turn in answers and flag is not False]

    def _takes_all(self, conversation: Conversation) -> bool:
        """Whether every role is learned. Of a prompt with an answer, the answer is."""
        return self.train_on == "all" and not conversation.answers

    def _answers(self, conversation: Conversation) -> list[int]:
        return [turn for turn, message in enumerate(conversation.messages) if message["role"] == "assistant"]

    def _find_turn(self, conversation: Conversation, text: str, turn: int) -> tuple[int, int]:
        before = self._run(conversation, turn, generate=True)[0]
        until = text if turn + 1 == len(conversation.messages) else self._run(conversation, turn + 1)[0]
        # Which of the two is at fault decides what helps.
        if not until.startswith(before):
            fault, fix = "than its prompt to generate begins it", "use another data.chat_template, or"
        elif not text.startswith(until):
            fault, fix = "once more turns follow", "set data.train_on: last, or"
        else:
            return len(before), len(until)
        raise BrokenRecordError(
            f"cannot be told apart by the chat template: it renders turn {turn} in another way {fault}, so that what "
            f"the assistant says has no exact place; {fix} mark it in the template with {{% generation %}}"
        )

    def _marks_of(self, conversation: Conversation, marks: Spans, turn: int) -> Spans:
        """The marks of one turn of the assistant: those that come between its prompt to generate and the next one's."""
        later = [other for other in self._answers(conversation) if other > turn]
        first, *stop = (
            len(self._run(conversation, count, generate=True, marks=True)[1]) for count in (turn, *later[:1])
        )
        return marks[first : stop[0] if stop else len(marks)]

    def _find_end(self, text: str, stop: int) -> int:
        """Where a marked answer ends: behind the token of `eot_tokens` that follows it, where one does."""
        behind = text[stop:].lstrip()
        found = next((token for token in self.eot_tokens if behind.startswith(token)), None)
        return stop if found is None else len(text) - len(behind) + len(found)

    def _all_but(self, conversation: Conversation, text: str, turns: Sequence[int]) -> Spans:
        """Everything but the turns that are not to be learned."""
        spans, start = [], 0
        for turn, message in enumerate(conversation.messages):
            if turn in turns:
                continue
            if message["role"] == "assistant":
                first, stop = self._find_turn(conversation, text, turn)
            else:
                before, until = (self._run(conversation, count)[0] if count else "" for count in (turn, turn + 1))
                first, stop = len(before), len(until)
                if not text.startswith(until) or not until.startswith(before):
                    raise BrokenRecordError(
                        f"has a turn that is not to be learned (number {turn}), and the chat template renders it in "
                        "another way once more turns follow, so that it has no exact place"
                    )
            spans.append((start, first))
            start = stop
        return [*spans, (start, len(text))]

    def _run(
        self, conversation: Conversation, count: int, *, generate: bool = False, marks: bool = False
    ) -> tuple[str, Spans]:
        """The first `count` turns as text; with `marks`, also the spans that the template marks."""
        try:
            texts, spans = _load_renderer()(
                [list(conversation.messages[:count])],
                tools=list(conversation.tools) or None,
                chat_template=self.text,
                add_generation_prompt=generate,
                return_assistant_tokens_mask=marks,
                **self.special_tokens,
            )
        except MemoryError:
            raise
        except Exception as error:  # it is a program over the record's values, and raises what it likes
            reason = " ".join(str(error).split())[:200]
            raise BrokenRecordError(f"cannot be rendered by the chat template ({reason})") from error
        most = _MAX_CHARACTERS
        if len(texts[0]) > most and len(texts[0]) > (most := most + _MAX_GROWTH * len(repr(conversation))):
            raise LimitError(f"writes more than {most:,} characters")
        return texts[0], [(start, stop) for start, stop in spans[0]] if marks else []


@cache
def _load_renderer() -> Callable[..., tuple[list[str], list[list[tuple[int, int]]]]]:
    """What runs a template: that of transformers, so that conversations are rendered as it renders them."""
    from transformers.utils.chat_template_utils import render_jinja_template

    renderer: Callable[..., tuple[list[str], list[list[tuple[int, int]]]]] = render_jinja_template
    return renderer
