"""From an example of any instruction format to token ids with targets: what worker processes are sent, and do."""

import json
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from echelon.data.conversation import Completion, Conversation, EncodedDocument, Preference, Text
from echelon.data.examples import parse_example
from echelon.data.readers.record import BrokenRecordError, Example
from echelon.data.rendering import ChatTemplate, Rendered
from echelon.data.tokenizer import vocabulary_size


@dataclass(frozen=True)
class InstructionEncoding:
    """How examples become tokens, as plain values: picklable, and equal where the tokens are.

    `template` None: conversations are broken records. `special_tokens`: what templates call them, and their texts.
    Around a prompt with its completion, which no template renders, go the ids `before` and, learned, `stop`; with
    `needs_stop` and none they are broken records. `stops`: the ids that end an answer. `eot_tokens`: what the recipe
    names as ends of turns, beside the tokens that were added to the vocabulary whole. `template_name`: for messages.
    """

    tokenizer_json: str
    special_tokens: tuple[tuple[str, str], ...]
    template: str | None
    train_on: str
    system_prompt: str | None
    before: tuple[int, ...]
    stop: int | None
    needs_stop: bool = True
    stops: tuple[int, ...] = ()
    eot_tokens: tuple[str, ...] = ()
    template_name: str = field(default="the chat template", compare=False)

    def encode(self, record: Example) -> tuple[EncodedDocument, ...]:
        """The documents of an example: one, or the chosen and the rejected text of a preference pair.

        Never cut to a length; each has a target. Raises BrokenRecordError with what is wrong with the example.
        """
        example = parse_example(record)
        if isinstance(example, Preference):
            documents: tuple[EncodedDocument, ...] = (
                self._encode_text(example.chosen),
                self._encode_text(example.rejected),
            )
        elif isinstance(example, EncodedDocument):
            documents = (self._check_ids(example),)
        else:
            documents = (self._encode_text(example),)
        if not all(document.targets.any() for document in documents):
            raise BrokenRecordError("has no token to learn")
        return documents

    def encode_conversation(self, conversation: Conversation) -> EncodedDocument:
        """A conversation as the template renders it. Raises BrokenRecordError."""
        if self.chat_template is None:
            raise BrokenRecordError(
                "is a conversation, for which there is no chat template: the tokenizer has none; set "
                "data.chat_template, to chatml for example"
            )
        has_system = any(message["role"] == "system" for message in conversation.messages)
        if self.system_prompt is not None and not has_system:
            conversation = _put_system(self.system_prompt, conversation)
        ids, targets = self._tokenize(self.chat_template.render(conversation))
        return EncodedDocument(ids, _mask_first(targets))

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The template with the tokens it can name."""
        return None if self.template is None else self.template_for(self.train_on)

    def template_for(self, train_on: str) -> ChatTemplate:
        """The template, with other turns to learn."""
        tokens = dict(self.special_tokens)
        return ChatTemplate(self.template or "", tokens, train_on, self.eot_tokens, self.template_name)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, with nothing cut off and nothing filled up."""
        tokenizer = Tokenizer.from_str(self.tokenizer_json)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    @cached_property
    def num_ids(self) -> int:
        """One more than the largest id."""
        return vocabulary_size(self.tokenizer)

    @cached_property
    def added_ids(self) -> frozenset[int]:
        """The ids of special and other tokens that were added whole, and of those that the recipe names as ends."""
        added = json.loads(self.tokenizer_json)["added_tokens"]
        named = (self.tokenizer.token_to_id(text) for _, text in self.special_tokens)
        return frozenset(token["id"] for token in added) | {id for id in named if id is not None} | self.eot_ids

    @cached_property
    def eot_ids(self) -> frozenset[int]:
        """The ids of `eot_tokens`."""
        return frozenset(self.tokenizer.encode(text, add_special_tokens=False).ids[0] for text in self.eot_tokens)

    def added_token(self, text: str, place: int) -> int | None:
        """The id at a place of a text, -1 its end, if it is one of a token that was added to the vocabulary whole."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids[place] if ids and ids[place] in self.added_ids else None

    def _encode_text(self, text: Text) -> EncodedDocument:
        return self._encode_completion(text) if isinstance(text, Completion) else self.encode_conversation(text)

    def _encode_completion(self, text: Completion) -> EncodedDocument:
        """Prompt and completion as one text, so that the ids are those of the text; no template is put around it."""
        if self.stop is None and self.needs_stop:
            raise BrokenRecordError(
                "ends in no token at which generation could stop: the tokenizer has no eos; set "
                "data.document_separator to a token it has (model.new_tokens adds one), or to null to learn no end"
            )
        whole = text.prompt + text.completion
        ids, targets = self._tokenize(Rendered(whole, [(len(text.prompt), len(whole))]))
        before = () if tuple(ids[: len(self.before)].tolist()) == self.before else self.before
        after = () if self.stop is None else (self.stop,)
        ids = np.concatenate([np.array(each, dtype=np.int64) for each in (before, ids, after)])
        targets = np.concatenate([np.zeros(len(before), bool), targets, np.ones(len(after), bool)])
        return EncodedDocument(ids, _mask_first(targets))

    def _tokenize(self, rendered: Rendered) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """The ids of a text and which are learned, both `[n]`: the tokens whose characters are all in a span.

        A turn ends with the token that stops it: the white space that a template writes behind is never generated.
        """
        encoded = self.tokenizer.encode(rendered.text, add_special_tokens=False)
        ids = np.array(encoded.ids, dtype=np.int64)
        starts, stops = np.array(encoded.offsets, dtype=np.int64).reshape(-1, 2).T
        targets = np.zeros(len(ids), dtype=bool)
        for start, stop in rendered.spans:
            inside = (starts >= start) & (stops <= stop)
            if rendered.are_turns:
                added = [place for place in np.flatnonzero(inside).tolist() if int(ids[place]) in self.added_ids]
                if added and not rendered.text[int(stops[added[-1]]) : stop].strip():
                    inside[added[-1] + 1 :] = False
            targets |= inside
        return ids, targets

    def _check_ids(self, document: EncodedDocument) -> EncodedDocument:
        """Ids that were given. Raises BrokenRecordError for one that the tokenizer does not have."""
        wrong = document.ids[(document.ids < 0) | (document.ids >= self.num_ids)]
        if len(wrong):
            raise BrokenRecordError(f"holds the id {wrong[0]}, and the tokenizer has the ids 0 to {self.num_ids - 1}")
        return EncodedDocument(document.ids, _mask_first(document.targets))


def _put_system(text: str, conversation: Conversation) -> Conversation:
    return Conversation(
        ({"role": "system", "content": text}, *conversation.messages),
        (None, *conversation.learned),
        conversation.tools,
        conversation.answers + (conversation.answers > 0),
    )


def _mask_first(targets: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Targets without the first token's: nothing predicts it."""
    targets = targets.copy()
    targets[:1] = False
    return targets
