"""Check tokenizer, chat template and examples before any text is read. Each error says what to change.

The template is tried on a short conversation, so a stop token that would never be a target is found before training.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from echelon.ground.errors import ConfigError
from echelon.learn.data.catalog import TARGETS_DTYPE, Manifest
from echelon.learn.data.conversation import Conversation
from echelon.learn.data.instruction import InstructionEncoding, ScoreRule
from echelon.learn.data.readers.record import BrokenRecordError, SourceFile
from echelon.learn.data.shards import TokenStore
from echelon.learn.data.templates import NAMED_TEMPLATES, load_template, own_template
from echelon.learn.data.tokenizer import EOS, padding_id, separator_id
from echelon.recipe.data_formats import JUDGED_FORMATS, LABELLED_FORMAT, PAIR_FORMATS, PROMPT_FORMAT, PROMPTS
from echelon.recipe.inputs import is_template
from echelon.recipe.names import Answers, list_objectives
from echelon.recipe.render import plain_value
from echelon.recipe.yaml_text import show_value

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_CHUNK = 2**20
_CONVERSATIONS = ("messages", "sharegpt", "alpaca")
_MARKER = re.compile(r"<\|[^<>|\s]+\|>|<(?:start|end)_of_turn>")
_QUESTION, _ANSWER = "What is one and one?", "Two."
_PROBE = tuple({"role": role, "content": text} for role, text in (("user", _QUESTION), ("assistant", _ANSWER)))


@dataclass(frozen=True)
class InstructionOptions:
    """The recipe's settings for examples: `data.chat_template`, `train_on`, `system_prompt`, `document_separator`,
    `eot_tokens`, what the objective needs of answers, whether its model scores texts, and with which labels.

    `max_text_tokens`: where texts with a label are cut; None: never. `takes_prompts`: whether records may be prompts
    without an answer, because the model is trained on its own alone.
    """

    chat_template: str | None = None
    train_on: str = "assistant"
    system_prompt: str | None = None
    separator: str | None = EOS
    answers: Answers | None = None
    eot_tokens: tuple[str, ...] = ()
    scores_texts: bool = False
    labels: tuple[str, ...] = ()
    max_text_tokens: int | None = None
    takes_prompts: bool = False


def build_instruction_encoding(
    options: InstructionOptions, tokenizer: "PreTrainedTokenizerFast", files: Iterable[SourceFile]
) -> InstructionEncoding | None:
    """Build the encoding of the examples in these files; None if there are no examples.

    The template in use becomes the tokenizer's own, so that it is saved with it. Raises ConfigError, with the fix, for
    a combination that does not work.
    """
    formats = {file.fields.format for file in files if file.fields.format is not None}
    _check_formats(options, formats)
    template, where = _choose_template(options, tokenizer, formats)
    if not formats:
        _keep_template(tokenizer, template)
        return None
    special_tokens = {name: str(text) for name, text in tokenizer.special_tokens_map.items() if isinstance(text, str)}
    inner = tokenizer.backend_tokenizer
    around = inner.encode("", add_special_tokens=True).ids
    encoding = InstructionEncoding(
        tokenizer_json=inner.to_str(),
        special_tokens=tuple(sorted(special_tokens.items())),
        template=template,
        train_on=options.train_on,
        system_prompt=options.system_prompt,
        before=tuple(around[:1]) if around and around[0] == tokenizer.bos_token_id else (),
        stop=separator_id(tokenizer, options.separator),
        needs_stop=options.separator is not None,
        eot_tokens=options.eot_tokens,
        template_name=where or "the chat template",
        scores=ScoreRule(padding_id(tokenizer), options.labels, options.max_text_tokens)
        if options.scores_texts
        else None,
        holds_place=options.takes_prompts,
    )
    _check_ends(encoding)
    stops = {encoding.stop, *encoding.eot_ids}
    if template is not None and formats != {"tokens"}:
        stops.add(check_template(encoding, where))
    _keep_template(tokenizer, template)
    return replace(encoding, stops=tuple(sorted(stop for stop in stops if stop is not None)))


def _keep_template(tokenizer: "PreTrainedTokenizerFast", template: str | None) -> None:
    """Set the tokenizer's template, which is saved with it. If it has several, including this one, they are kept."""
    if template != own_template(tokenizer):
        tokenizer.chat_template = template


def find_answers(formats: Collection[str]) -> Answers | None:
    """Return what records of these formats are for an objective on answers or labels; None for single texts."""
    kinds: dict[Answers, frozenset[str]] = {
        "pairs": PAIR_FORMATS, "judged": JUDGED_FORMATS, "labelled": frozenset({LABELLED_FORMAT})
    }  # fmt: skip
    return next((answers for answers, names in kinds.items() if not names.isdisjoint(formats)), None)


@dataclass(frozen=True)
class _AnswerRow:
    """Records that only some objectives train on: their formats, and the parts of two messages.

    `does`, `records`: for another kind of data, what these objectives do, and how to give their records. `data`,
    `other`: for causal_lm, what the data is, and how to train on it without these objectives.
    """

    formats: frozenset[str]
    does: str
    records: str
    data: str
    other: str


_ANSWERS: dict[Answers, _AnswerRow] = {
    "pairs": _AnswerRow(
        PAIR_FORMATS,
        "compares two answers",
        f"give records with chosen and rejected (and the prompt in one of {', '.join(PROMPTS)}, or in both answers) or "
        "with messages and rejected_response, name your fields in data.train.0.fields",
        "preferences (chosen, rejected)",
        "select one field: data.train.0.format: messages, fields: {messages: chosen}",
    ),
    "judged": _AnswerRow(
        JUDGED_FORMATS,
        "trains on judged answers",
        "give records with prompt, completion and label (true or false), name your fields in data.train.0.fields, set "
        "data.train.0.format: unpaired_messages for messages with a label",
        "judged answers (label)",
        "data.train.0.format: prompt_completion to train on bad answers too",
    ),
    "prompts": _AnswerRow(
        frozenset({PROMPT_FORMAT}),
        "draws answers to prompts",
        "give records with a field `prompt`, a text or messages, and what the reward needs, set "
        "data.train.0.format=prompt if they have an answer too, name your field in data.train.0.fields: {prompt: NAME}",
        "prompts without an answer",
        "name the field with the answer: data.train.0.fields: {completion: NAME}, or have a teacher read the "
        "model's own answers: objective.name=distill with objective.on_policy_fraction=1",
    ),
    "labelled": _AnswerRow(
        frozenset({LABELLED_FORMAT}),
        "learns labels of texts",
        "give records with `label` and `text` (and `text_pair`) or `messages`, name your fields in "
        "data.train.0.fields, and leave data.train.0.format out",
        "texts with a label",
        "leave data.train.0.format out",
    ),
}
"""The rows by what an objective needs of answers."""


def _check_formats(options: InstructionOptions, formats: set[str]) -> None:
    kinds = [answers for answers, row in _ANSWERS.items() if formats & row.formats]
    if options.answers is not None:
        row = _ANSWERS[options.answers]
        if not formats or formats - row.formats:
            shown = ", ".join(sorted(formats - row.formats)) or "plain text"
            named = [
                f"{list_objectives(other)} for {_ANSWERS[other].data}" for other in kinds if other != options.answers
            ]
            raise ConfigError(
                f"objective.name={list_objectives(options.answers)} {row.does}, but the data has {shown}; "
                f"{row.records}, or set objective.name={', '.join(named) or 'causal_lm'}."
            )
    elif kinds and not (options.takes_prompts and kinds == ["prompts"]):
        row = _ANSWERS[kinds[0]]
        raise ConfigError(
            f"objective.name=causal_lm trains on single texts, but the data has {row.data}; set "
            f"objective.name={list_objectives(kinds[0])}, or {row.other}."
        )
    if not formats:
        _refuse_settings_of_conversations(options)


def _refuse_settings_of_conversations(options: InstructionOptions) -> None:
    """Raise ConfigError for a setting that plain text does not have."""
    settings = {
        "train_on": options.train_on == "last",  # the other values have no effect on plain text
        "system_prompt": options.system_prompt,
        "eot_tokens": options.eot_tokens,
    }
    for key, is_given in settings.items():
        if is_given:
            value = show_value(plain_value(getattr(options, key)))
            raise ConfigError(
                f"data.{key}={value} is for conversations, but the data is plain text; remove it, or "
                "set data.train.0.format to the format of the records."
            )


def _check_ends(encoding: InstructionEncoding) -> None:
    """Raise ConfigError for an end-of-turn token that is not a single id, because generation stops only at an id."""
    for token in encoding.eot_tokens:
        ids = encoding.tokenizer.encode(token, add_special_tokens=False).ids
        if len(ids) != 1:
            raise ConfigError(
                f"data.eot_tokens: {token!r} is {len(ids)} ids of the tokenizer ({', '.join(map(str, ids))}), but a "
                f"token that ends a turn must be one id; add it with model.new_tokens: [{token!r}], or use a token of "
                f"the tokenizer."
            )


def _choose_template(
    options: InstructionOptions, tokenizer: "PreTrainedTokenizerFast", formats: set[str]
) -> tuple[str | None, str]:
    """Choose the template. Returns it with its name for messages. Raises ConfigError if one is needed and missing."""
    if options.chat_template is not None:
        named = "" if is_template(options.chat_template) else f"={options.chat_template}"
        return load_template(options.chat_template), f"data.chat_template{named}"
    if (template := own_template(tokenizer)) is not None:
        return template, "the tokenizer's chat_template"
    asking = sorted(formats.intersection(_CONVERSATIONS))
    if asking == ["alpaca"]:
        return NAMED_TEMPLATES["alpaca"].text, "the template alpaca"
    if asking:
        raise ConfigError(
            f"the data has conversations ({', '.join(asking)}), but the tokenizer has no chat template; set "
            f"data.chat_template to chatml, another of {', '.join(NAMED_TEMPLATES)}, or a Jinja file."
        )
    return None, ""


def check_template(encoding: InstructionEncoding, where: str) -> int:
    """Try the template on a conversation: it must render, separate the turns and make the stop token a target.

    Returns the id of that token. Raises ConfigError with a message that starts with `where`.
    """
    assert encoding.template is not None
    named = next((choice for choice in NAMED_TEMPLATES.values() if choice.text == encoding.template), None)
    if named is not None and (missing := [token for token in named.tokens if not _is_token(encoding, token)]):
        raise ConfigError(_explain_missing(where, missing))
    if "eos_token" in encoding.template and "eos_token" not in dict(encoding.special_tokens):
        raise ConfigError(
            f"{where} ends a turn with the tokenizer's eos, but the tokenizer has none; use a tokenizer with an eos, "
            "or a template with its own end-of-turn token, for example chatml with model.new_tokens: "
            f"[{', '.join(NAMED_TEMPLATES['chatml'].tokens)}]."
        )
    turns = _PROBE if encoding.train_on == "last" else _PROBE * 2
    try:
        encoding.encode_conversation(Conversation(turns, (None,) * len(turns)))
    except BrokenRecordError as error:
        raise ConfigError(f"{where} cannot be used: a test conversation {error}.") from error
    return _check_stop(encoding, where)


def _check_stop(encoding: InstructionEncoding, where: str) -> int:
    """Check that an answer ends with a stop token that is a target, and that its header is not. Returns its id."""
    last = encoding.template_for("last")
    rendered = last.render(Conversation(_PROBE, (None, None)))
    if not rendered.spans:
        raise ConfigError(
            f"{where} marks no part of an answer with {{% generation %}}; put the answer between the marks."
        )
    start, stop = rendered.spans[-1]
    answer, behind = rendered.text[start:stop], rendered.text[stop:].lstrip()
    if (stop_id := encoding.added_token(answer.rstrip(), -1)) is None:
        after = encoding.added_token(behind, 0)
        if last.marks_turns and after is not None:
            raise ConfigError(
                f"{where} ends its {{% generation %}} before {encoding.tokenizer.id_to_token(after)}, the turn's stop "
                "token, which would never be a target; move {% endgeneration %} after it, or add it to "
                "data.eot_tokens."
            )
        markers = dict.fromkeys(_MARKER.findall(rendered.text))
        missing = [marker for marker in markers if not _is_token(encoding, marker)]
        if missing:
            raise ConfigError(_explain_missing(where, missing))
        raise ConfigError(
            f"{where} ends an answer with {answer[-20:]!r}, not with a token at which generation can stop; add "
            "{{ eos_token }} after each answer, or set data.eot_tokens to the token that ends an answer."
        )
    header = answer.partition(_ANSWER)[0].strip()
    silent = last.prompt(_PROBE[:1], generate=True) == last.prompt(_PROBE[:1], generate=False)
    if header and silent and not last.marks_turns:
        raise ConfigError(
            f"{where} has no generation prompt (add_generation_prompt), so {header!r} before each answer would be "
            "trained as part of it; add it at the end, inside {% if add_generation_prompt %}."
        )
    return stop_id


def check_stops_learned(
    folder: Path, manifest: Manifest, encoding: InstructionEncoding, sources: Iterable[str]
) -> None:
    """Check that a token that ends an answer is a target in the written samples. Reads up to the first one.

    `sources`: the keys of the sources whose texts end with such a token. Raises ConfigError for a source where it is
    never a target, for example because every sample is cut before its end.
    """
    asked = set(sources)
    for record in manifest.streams["train"]:
        labelled = record.labelled
        if not encoding.stops or labelled is None or not labelled.samples or record.source not in asked:
            continue
        tokens = TokenStore(folder, record.shards, manifest.dtype)
        targets = TokenStore(folder, labelled.targets, TARGETS_DTYPE)
        spans = ((first, min(first + _CHUNK, tokens.num_tokens)) for first in range(0, tokens.num_tokens, _CHUNK))
        if not any(np.isin(tokens.read(*span)[targets.read(*span) != 0], encoding.stops).any() for span in spans):
            names = ", ".join(str(encoding.tokenizer.id_to_token(stop)) for stop in encoding.stops)
            length = manifest.samples.sequence_len if manifest.samples else 0
            raise ConfigError(
                f"data.sequence_len={length} cuts off the end of every answer of {record.source}, so the model would "
                f"never learn to stop ({names} is never a target); increase data.sequence_len, or set "
                "data.on_overlong=drop."
            )


def _is_token(encoding: InstructionEncoding, text: str) -> bool:
    return len(encoding.tokenizer.encode(text, add_special_tokens=False).ids) == 1


def _explain_missing(where: str, missing: list[str]) -> str:
    listed = ", ".join(f"'{token}'" for token in missing)
    return (
        f"{where} requires {', '.join(missing)} as single tokens, which the tokenizer does not have; add them with "
        f"model.new_tokens: [{listed}], or use the template that the model was trained with."
    )
