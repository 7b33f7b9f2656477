"""Encode examples of any instruction format as token ids with targets. Worker processes receive and run this.

A model that scores texts gives a text its score at the last token, which no token follows. So the shards have a label
of 16 bits there: the number of the text's class, or a half of a pair's margin. No other position of the text has one.
"""

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from echelon.ground.errors import ConfigError
from echelon.learn.data.conversation import (
    Completion,
    Conversation,
    EncodedDocument,
    Judged,
    Labelled,
    Parsed,
    Preference,
    Prompt,
    Text,
    check_answers,
)
from echelon.learn.data.examples import parse_example
from echelon.learn.data.readers.record import BrokenRecordError, Example
from echelon.learn.data.templates import ChatTemplate, Rendered
from echelon.learn.data.tokenizer import vocabulary_size
from echelon.recipe.data_formats import LABELLED_FORMAT

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


@dataclass(frozen=True)
class InstructionEncoding:
    """The settings that turn examples into tokens, as plain values: picklable, and equal if the tokens are equal.

    `template` None: conversations are broken records. `special_tokens`: their names in templates and their texts.
    A prompt-completion record is not rendered by the template: the ids `before` precede it, and `stop`, a target,
    follows it; with `needs_stop` and no `stop` such records are broken. `stops`: the ids that end an answer.
    `eot_tokens`: the ends of turns that the recipe names, in addition to the added tokens of the vocabulary.
    `template_name`: for messages. `scores`: for a model that scores texts, whose only target is their label.
    `holds_place`: a prompt without an answer is followed by one target, in place of the answer that the model gives.
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
    scores: ScoreRule | None = None
    holds_place: bool = False

    def parse(self, record: Example) -> Parsed:
        """Parse an example. Raises BrokenRecordError."""
        return parse_example(record, LABELLED_FORMAT if self.scores is not None and self.scores.labels else None)

    def encode(self, record: Example) -> tuple[EncodedDocument, ...]:
        """Encode an example: one document, or the chosen and the rejected text of a preference pair.

        Documents are not cut to a length, but for texts with a label, and each has at least one target. Raises
        BrokenRecordError, and ConfigError for a label that the recipe does not have.
        """
        example = self.parse(record)
        check_answers(example, self.train_on)
        if isinstance(example, Labelled):
            return (self._encode_labelled(example),)
        if isinstance(example, Preference):
            documents: tuple[EncodedDocument, ...] = tuple(map(self._encode_text, (example.chosen, example.rejected)))
            if self.scores is not None:
                pairs = zip(documents, split_margin(example.margin), strict=True)
                return tuple(label_document(document, label, self.scores) for document, label in pairs)
        elif isinstance(example, Judged):
            documents = (replace(self._encode_text(example.text), is_good=example.is_good),)
        elif isinstance(example, EncodedDocument):
            documents = (self._check_ids(example),)
        elif isinstance(example, Prompt):
            document = self.encode_prompt(example)
            documents = (_with_place(document) if self.holds_place else document,)
        else:
            documents = (self._encode_text(example),)
        if not all(document.targets.any() for document in documents):
            raise BrokenRecordError("has no token to train on")
        return documents

    def encode_conversation(self, conversation: Conversation) -> EncodedDocument:
        """Render a conversation with the chat template and encode it. Raises BrokenRecordError."""
        template = self._need_template()
        if system := self._missing_system(conversation.messages):
            conversation = _put_before(system, conversation)
        ids, targets = self._tokenize(template.render(conversation))
        return EncodedDocument(ids, _mask_first(targets))

    def encode_prompt(self, prompt: Prompt) -> EncodedDocument:
        """Encode a prompt as the model sees it before it answers; all tokens count as targets. BrokenRecordError."""
        if isinstance(prompt.content, str):
            ids, _ = self._tokenize(Rendered(prompt.content, []))
            ids = np.concatenate([np.array(self._missing_before(ids), dtype=np.int64), ids])
        else:
            turns, template = prompt.content, self._need_template()
            turns = (*self._missing_system(turns), *turns)
            ids, _ = self._tokenize(Rendered(template.prompt(turns, generate=True, tools=prompt.tools), []))
        return EncodedDocument(ids, _mask_first(np.ones(len(ids), dtype=bool)))

    def _encode_labelled(self, example: Labelled) -> EncodedDocument:
        """Encode a text as the tokenizer does, with its special tokens, or turns by the template, and add its label."""
        assert self.scores is not None
        if isinstance(example.content, str):
            ids = np.array(self.tokenizer.encode(example.content, example.pair).ids, dtype=np.int64)
        else:
            turns = (*self._missing_system(example.content), *example.content)
            text = self._need_template().prompt(turns, generate=False, tools=example.tools)
            ids, _ = self._tokenize(Rendered(text, []))
        kept = ids[: self.scores.max_tokens]
        document = EncodedDocument(kept, np.zeros(len(kept), dtype=bool), lost_tokens=len(ids) - len(kept))
        return label_document(document, find_label(example.label, self.scores.labels), self.scores)

    def _missing_system(self, turns: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
        """The system turn to put before turns that have none, first or later: `data.system_prompt`."""
        if self.system_prompt is None or any(turn["role"] == "system" for turn in turns):
            return ()
        return ({"role": "system", "content": self.system_prompt},)

    def _need_template(self) -> ChatTemplate:
        if self.chat_template is None:
            raise BrokenRecordError(
                "is a conversation, but the tokenizer has no chat template; set data.chat_template, for example to "
                "chatml"
            )
        return self.chat_template

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The chat template; None if there is none."""
        return None if self.template is None else self.template_for(self.train_on)

    def template_for(self, train_on: str) -> ChatTemplate:
        """Return the chat template with another value of `data.train_on`."""
        tokens = dict(self.special_tokens)
        return ChatTemplate(self.template or "", tokens, train_on, self.eot_tokens, self.template_name)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, without truncation and padding."""
        tokenizer = Tokenizer.from_str(self.tokenizer_json)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return tokenizer

    @cached_property
    def num_ids(self) -> int:
        """The vocabulary size: the largest id plus one."""
        return vocabulary_size(self.tokenizer)

    @cached_property
    def added_ids(self) -> frozenset[int]:
        """The ids of the special and other added tokens, and of the `eot_tokens` of the recipe."""
        added = json.loads(self.tokenizer_json)["added_tokens"]
        named = (self.tokenizer.token_to_id(text) for _, text in self.special_tokens)
        return frozenset(token["id"] for token in added) | {id for id in named if id is not None} | self.eot_ids

    @cached_property
    def eot_ids(self) -> frozenset[int]:
        """The ids of `eot_tokens`."""
        return frozenset(self.tokenizer.encode(text, add_special_tokens=False).ids[0] for text in self.eot_tokens)

    def added_token(self, text: str, place: int) -> int | None:
        """Return the id at index `place` of an encoded text (-1: the last) if it is in `added_ids`, else None."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids[place] if ids and ids[place] in self.added_ids else None

    def _encode_text(self, text: Text) -> EncodedDocument:
        return self._encode_completion(text) if isinstance(text, Completion) else self.encode_conversation(text)

    def _encode_completion(self, text: Completion) -> EncodedDocument:
        """Encode prompt and completion as one text, so that the ids match that text; no template is applied."""
        if self.stop is None and self.needs_stop:
            raise BrokenRecordError(
                "has no token that ends the completion: the tokenizer has no eos; set data.document_separator to one "
                "of its tokens (model.new_tokens adds one), or to null to train without an end token"
            )
        whole = text.prompt + text.completion
        ids, targets = self._tokenize(Rendered(whole, [(len(text.prompt), len(whole))]))
        before = self._missing_before(ids)
        after = () if self.stop is None else (self.stop,)
        ids = np.concatenate([np.array(part, dtype=np.int64) for part in (before, ids, after)])
        targets = np.concatenate([np.zeros(len(before), bool), targets, np.ones(len(after), bool)])
        return EncodedDocument(ids, _mask_first(targets))

    def _missing_before(self, ids: npt.NDArray[np.int64]) -> tuple[int, ...]:
        """Return `before`; nothing if the ids of a text begin with it already."""
        return () if tuple(ids[: len(self.before)].tolist()) == self.before else self.before

    def _tokenize(self, rendered: Rendered) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Return the ids of a text and their target mask, both `[n]`. A target token is completely inside a span.

        The token that ends a turn is its last target: the white space that a template adds after it is never generated.
        """
        encoded = self.tokenizer.encode(rendered.text, add_special_tokens=False)
        ids = np.array(encoded.ids, dtype=np.int64)
        starts, stops = np.array(encoded.offsets, dtype=np.int64).reshape(-1, 2).T
        targets = np.zeros(len(ids), dtype=bool)
        for start, stop in rendered.spans:
            inside = (starts >= start) & (stops <= stop)
            if rendered.are_turns:
                added = [index for index in np.flatnonzero(inside).tolist() if int(ids[index]) in self.added_ids]
                if added and not rendered.text[int(stops[added[-1]]) : stop].strip():
                    inside[added[-1] + 1 :] = False
            targets |= inside
        return ids, targets

    def _check_ids(self, document: EncodedDocument) -> EncodedDocument:
        """Check given ids. Raises BrokenRecordError for an id that the tokenizer does not have."""
        wrong = document.ids[(document.ids < 0) | (document.ids >= self.num_ids)]
        if len(wrong):
            raise BrokenRecordError(f"has the id {wrong[0]}, but the tokenizer has the ids 0 to {self.num_ids - 1}")
        return EncodedDocument(document.ids, _mask_first(document.targets))


def _put_before(turns: tuple[dict[str, Any], ...], conversation: Conversation) -> Conversation:
    """Return a conversation with turns before it that are not trained."""
    return Conversation(
        (*turns, *conversation.messages),
        (*(None for _ in turns), *conversation.learned),
        conversation.tools,
        conversation.answers and conversation.answers + len(turns),
    )


def _with_place(prompt: EncodedDocument) -> EncodedDocument:
    """Return a prompt and one more token, its only target, which is never read: any id will do."""
    targets = np.append(np.zeros(len(prompt.ids), dtype=bool), True)
    return EncodedDocument(np.append(prompt.ids, prompt.ids[-1:] if len(prompt.ids) else 0), targets)


def _mask_first(targets: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Remove the first token from the targets: nothing predicts it."""
    targets = targets.copy()
    targets[:1] = False
    return targets


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


def split_margin(margin: float) -> tuple[int, int]:
    """Return the labels of the chosen and the rejected text: the upper and the lower half of the margin in fp32."""
    high, low = struct.unpack(">HH", struct.pack(">f", margin))
    return high, low
