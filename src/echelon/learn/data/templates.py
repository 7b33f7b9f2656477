"""Chat templates: those with names, the choice of a run's, and conversations rendered with the spans that are targets.

Each named template ends an assistant turn with a token at which generation stops and starts it with the generation
prompt, so that the targets can be located exactly.

Targets are spans of characters. If the template marks the assistant's text (`{% generation %}`), the marks are the
spans. Otherwise a turn's span is found by rendering the conversation twice: before the turn, with the generation
prompt, and including the turn. The first text must be a prefix of the second, and the second a prefix of the whole
conversation; the turn is the difference. No text is searched for. A template that renders earlier turns differently
once later turns follow has no such spans and is refused.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from echelon.ground.errors import ConfigError
from echelon.ground.stored import read_text
from echelon.learn.data.conversation import Conversation
from echelon.learn.data.limits import LimitError, refuse_template, run_limited
from echelon.learn.data.readers.record import BrokenRecordError
from echelon.recipe.inputs import is_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast


@dataclass(frozen=True)
class NamedTemplate:
    """A template of the folder `chat_templates`, and the tokens that must be single tokens of the tokenizer."""

    name: str
    tokens: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The template."""
        return read_text(_FOLDER / f"{self.name}.jinja")


_FOLDER = Path(__file__).with_name("chat_templates")

# chatml: with tools in the form of Qwen2.5 and Hermes. alpaca: the texts of Stanford's train.py; a turn of an alpaca
# record also has the keys `instruction` and `input`.
NAMED_TEMPLATES: dict[str, NamedTemplate] = {
    "chatml": NamedTemplate("chatml", ("<|im_start|>", "<|im_end|>")),
    "llama3": NamedTemplate("llama3", ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
    "mistral": NamedTemplate("mistral"),
    "gemma": NamedTemplate("gemma", ("<start_of_turn>", "<end_of_turn>")),
    "zephyr": NamedTemplate("zephyr"),
    "alpaca": NamedTemplate("alpaca"),
    "plain": NamedTemplate("plain"),
}
"""The names for `data.chat_template`. `plain` joins the turns unchanged and ends each answer with eos."""


def load_template(choice: str) -> str:
    """Return the template text for `data.chat_template`: a name, the path of a file, or the template itself.

    Raises ConfigError for a value that is none of them.
    """
    if choice in NAMED_TEMPLATES:
        return NAMED_TEMPLATES[choice].text
    if is_template(choice):
        return choice
    path = Path(choice).expanduser()
    try:
        return read_text(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(
            f"data.chat_template={choice} is neither a named template ({', '.join(NAMED_TEMPLATES)}) nor a readable "
            f"file ({reason}); use one of these names or the path of a Jinja file."
        ) from error


def own_template(tokenizer: "PreTrainedTokenizerFast") -> str | None:
    """Return a tokenizer's own template, or the default one if it has several; None if it has none."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    return template or None


Spans = list[tuple[int, int]]
_Result = TypeVar("_Result")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
# The limit of the rendered text in characters, plus a multiple of the conversation's length.
_MAX_CHARACTERS, _MAX_GROWTH = 1_000_000, 100


@dataclass(frozen=True)
class Rendered:
    """A conversation as text, and the spans of characters that are targets.

    `are_turns`: each span covers the complete text of a turn, including white space after its stop token.
    """

    text: str
    spans: Spans
    are_turns: bool = False


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template with the special tokens it can use. `train_on` and `eot_tokens` are from the recipe, `name` is
    its name in messages.

    It runs under the limits of `data.limits`. Exceeding them raises ConfigError, because it is not the record's fault.
    """

    text: str
    special_tokens: Mapping[str, str]
    train_on: str = "assistant"
    eot_tokens: tuple[str, ...] = ()
    name: str = "the chat template"

    @property
    def marks_turns(self) -> bool:
        """Whether the template marks the text that the assistant generates."""
        return _GENERATION.search(self.text) is not None

    @classmethod
    def of(
        cls, tokenizer: "PreTrainedTokenizerBase", name: str, tools: Sequence[dict[str, Any]] = ()
    ) -> "ChatTemplate":
        """The template that a tokenizer has, for conversations with these tools; it must have one."""
        special_tokens = {key: token for key, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
        return cls(tokenizer.get_chat_template(tools=list(tools) or None), special_tokens, name=name)

    def render(self, conversation: Conversation) -> Rendered:
        """Render a whole conversation with its spans. Raises BrokenRecordError if the template cannot render it."""
        return self._limited(partial(self._render, conversation))

    def prompt(self, messages: Sequence[dict[str, Any]], generate: bool, tools: Sequence[dict[str, Any]] = ()) -> str:
        """Render turns as text, with or without the generation prompt. Raises BrokenRecordError."""
        conversation = Conversation(tuple(messages), (None,) * len(messages), tuple(tools))
        self._check_tools(conversation)
        return self._limited(partial(self._run, conversation, len(messages), generate=generate))[0]

    def _limited(self, call: Callable[[], _Result]) -> _Result:
        try:
            return run_limited(_load_renderer, call)
        except LimitError as error:
            raise refuse_template(self.name, error) from None

    def _render(self, conversation: Conversation) -> Rendered:
        self._check_tools(conversation)
        turns = conversation.trained_turns(self.train_on)
        text, marks = self._run(conversation, len(conversation.messages), marks=self.marks_turns)
        if conversation.takes_all(self.train_on):
            return Rendered(text, self._all_but(conversation, text, turns))
        if not marks:
            return Rendered(text, [self._find_turn(conversation, text, turn) for turn in turns], True)
        if turns != conversation.assistant_turns():
            marks = [mark for turn in turns for mark in self._marks_of(conversation, marks, turn)]
        return Rendered(text, [(start, self._find_end(text, stop)) for start, stop in marks])

    def _check_tools(self, conversation: Conversation) -> None:
        """Raise BrokenRecordError for tools that the template would silently ignore."""
        used = {
            "tools": conversation.tools,
            "tool_calls": any("tool_calls" in message for message in conversation.messages),
        }
        for name, is_used in used.items():
            if is_used and name not in self.text:
                raise BrokenRecordError(f"has `{name}`, which the chat template does not use; use a template that does")

    def _find_turn(self, conversation: Conversation, text: str, turn: int) -> tuple[int, int]:
        before = self._run(conversation, turn, generate=True)[0]
        until = text if turn + 1 == len(conversation.messages) else self._run(conversation, turn + 1)[0]
        # The fix depends on which of the two conditions fails.
        if not until.startswith(before):
            fault, fix = "from its generation prompt", "use another data.chat_template, or"
        elif not text.startswith(until):
            fault, fix = "once more turns follow", "set data.train_on: last, or"
        else:
            return len(before), len(until)
        raise BrokenRecordError(
            f"cannot be split into turns: the chat template renders turn {turn} differently {fault}, so the "
            f"assistant's text has no exact position; {fix} mark it in the template with {{% generation %}}"
        )

    def _marks_of(self, conversation: Conversation, marks: Spans, turn: int) -> Spans:
        """Return the marks of one assistant turn: those between its generation prompt and the next one's."""
        later = [other for other in conversation.assistant_turns() if other > turn]
        first, *stop = (
            len(self._run(conversation, count, generate=True, marks=True)[1]) for count in (turn, *later[:1])
        )
        return marks[first : stop[0] if stop else len(marks)]

    def _find_end(self, text: str, stop: int) -> int:
        """Return the end of a marked answer, including a token of `eot_tokens` that follows it."""
        behind = text[stop:].lstrip()
        ending = next((token for token in self.eot_tokens if behind.startswith(token)), None)
        return stop if ending is None else len(text) - len(behind) + len(ending)

    def _all_but(self, conversation: Conversation, text: str, turns: Sequence[int]) -> Spans:
        """Return the spans of everything except the turns that are not trained."""
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
                        f"has a turn to exclude from training (number {turn}), but the chat template renders it "
                        "differently once more turns follow, so it has no exact position"
                    )
            spans.append((start, first))
            start = stop
        return [*spans, (start, len(text))]

    def _run(
        self, conversation: Conversation, count: int, *, generate: bool = False, marks: bool = False
    ) -> tuple[str, Spans]:
        """Render the first `count` turns; with `marks`, also return the spans that the template marks."""
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
        except Exception as error:  # a template is a program and can raise any exception
            reason = " ".join(str(error).split())[:200]
            raise BrokenRecordError(f"cannot be rendered by the chat template ({reason})") from error
        most = _MAX_CHARACTERS
        if len(texts[0]) > most and len(texts[0]) > (most := most + _MAX_GROWTH * len(repr(conversation))):
            raise LimitError(f"writes more than {most:,} characters")
        return texts[0], [(start, stop) for start, stop in spans[0]] if marks else []


@cache
def _load_renderer() -> Callable[..., tuple[list[str], list[list[tuple[int, int]]]]]:
    """Return the template renderer of transformers, so that conversations are rendered identically."""
    from transformers.utils.chat_template_utils import render_jinja_template

    renderer: Callable[..., tuple[list[str], list[list[tuple[int, int]]]]] = render_jinja_template
    return renderer
