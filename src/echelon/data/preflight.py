"""Checks of tokenizer, template and examples before any text is read; each error says what to change.

A template is tried on a short conversation, so a stop token that would never be learned is found here and not in what a
trained model does.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from echelon.data.catalog import TARGETS_DTYPE, Manifest
from echelon.data.conversation import Conversation
from echelon.data.instruction import InstructionEncoding
from echelon.data.readers.record import BrokenRecordError, ExampleFields, SourceFile
from echelon.data.shards import TokenStore
from echelon.data.templates import NAMED_TEMPLATES, load_template, own_template
from echelon.data.tokenizer import EOS, separator_id
from echelon.errors import ConfigError
from echelon.recipe.data_formats import PAIR_FORMATS, PROMPTS
from echelon.recipe.inputs import is_template
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
    """What a recipe says about examples: `data.chat_template`, `train_on`, `system_prompt`, `document_separator`,
    `eot_tokens`, and whether the objective compares answers."""

    chat_template: str | None = None
    train_on: str = "assistant"
    system_prompt: str | None = None
    separator: str | None = EOS
    preferences: bool = False
    eot_tokens: tuple[str, ...] = ()


def build_instruction_encoding(
    options: InstructionOptions, tokenizer: "PreTrainedTokenizerFast", files: Iterable[SourceFile]
) -> InstructionEncoding | None:
    """How the examples in these files become tokens; None where there are none.

    The tokenizer takes the template that is used as its own, so that it is saved with it. Raises ConfigError for what
    cannot work, with the change that makes it work.
    """
    formats = {file.fields.format for file in files if isinstance(file.fields, ExampleFields)}
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
    )
    _check_ends(encoding)
    stops = {encoding.stop, *encoding.eot_ids}
    if template is not None and formats != {"tokens"}:
        stops.add(check_template(encoding, where))
    _keep_template(tokenizer, template)
    return replace(encoding, stops=tuple(sorted(each for each in stops if each is not None)))


def _keep_template(tokenizer: "PreTrainedTokenizerFast", template: str | None) -> None:
    """Make a template the tokenizer's, to be saved with it. Several of its own stay, the one used among them."""
    if template != own_template(tokenizer):
        tokenizer.chat_template = template


def _check_formats(options: InstructionOptions, formats: set[str]) -> None:
    if formats & PAIR_FORMATS and not options.preferences:
        raise ConfigError(
            "objective.name=causal_lm learns one text, and the data has preferences (chosen, rejected); set "
            "objective.name=dpo, or name the field to learn: data.train.0.format: messages, fields: {messages: chosen}."
        )
    if options.preferences and (not formats or formats - PAIR_FORMATS):
        found = ", ".join(sorted(formats - PAIR_FORMATS)) or "plain text"
        raise ConfigError(
            f"objective.name=dpo compares two answers, and the data has {found}; give records with chosen and rejected "
            f"(and the prompt in one of {', '.join(PROMPTS)}, or in both answers) or with messages and "
            "rejected_response, name your fields in data.train.0.fields, or set objective.name=causal_lm."
        )
    given = {
        "train_on": options.train_on == "last",  # of a plain text, all is learned anyway
        "system_prompt": options.system_prompt,
        "eot_tokens": options.eot_tokens,
    }
    for key, is_given in given.items():
        if is_given and not formats:
            value = show_value(plain_value(getattr(options, key)))
            raise ConfigError(
                f"data.{key}={value} is for conversations, and the data is plain text; remove it, or "
                "set data.train.0.format to what the records are."
            )


def _check_ends(encoding: InstructionEncoding) -> None:
    """Raise ConfigError for an end of turns that is not one id: generation looks at ids, and could not stop there."""
    for token in encoding.eot_tokens:
        ids = encoding.tokenizer.encode(token, add_special_tokens=False).ids
        if len(ids) != 1:
            raise ConfigError(
                f"data.eot_tokens: {token!r} is {len(ids)} ids of the tokenizer ({', '.join(map(str, ids))}), and what "
                f"ends a turn must be one; add it with model.new_tokens: [{token!r}], or name a token that it has."
            )


def _choose_template(
    options: InstructionOptions, tokenizer: "PreTrainedTokenizerFast", formats: set[str]
) -> tuple[str | None, str]:
    """The template, and what it is called in messages. Raises ConfigError where there is none and must be one."""
    if options.chat_template is not None:
        named = "" if is_template(options.chat_template) else f"={options.chat_template}"
        return load_template(options.chat_template), f"data.chat_template{named}"
    own = own_template(tokenizer)
    if own is not None:
        return own, "the tokenizer's chat_template"
    asking = sorted(formats.intersection(_CONVERSATIONS))
    if asking == ["alpaca"]:
        return NAMED_TEMPLATES["alpaca"].text, "the template alpaca"
    if asking:
        raise ConfigError(
            f"the data has conversations ({', '.join(asking)}), and the tokenizer has no chat template; set "
            f"data.chat_template to chatml, another of {', '.join(NAMED_TEMPLATES)}, or a Jinja file."
        )
    return None, ""


def check_template(encoding: InstructionEncoding, where: str) -> int:
    """Try the template on a conversation: does it render, are turns told apart, is the stop token learned.

    Returns the id of that token. Raises ConfigError, which `where` begins.
    """
    assert encoding.template is not None
    named = next((each for each in NAMED_TEMPLATES.values() if each.text == encoding.template), None)
    if named is not None and (missing := [each for each in named.tokens if not _is_token(encoding, each)]):
        raise ConfigError(_explain_missing(where, missing))
    if "eos_token" in encoding.template and "eos_token" not in dict(encoding.special_tokens):
        raise ConfigError(
            f"{where} ends a turn with the tokenizer's eos, and the tokenizer has none; use a tokenizer with one, or a "
            "template that ends turns with a token of its own, such as chatml with model.new_tokens: "
            f"[{', '.join(NAMED_TEMPLATES['chatml'].tokens)}]."
        )
    turns = _PROBE if encoding.train_on == "last" else _PROBE * 2
    try:
        encoding.encode_conversation(Conversation(turns, (None,) * len(turns)))
    except BrokenRecordError as error:
        raise ConfigError(f"{where} cannot be used: a conversation of questions and answers {error}.") from error
    return _check_stop(encoding, where)


def _check_stop(encoding: InstructionEncoding, where: str) -> int:
    """Whether the last token of an answer is one at which generation stops, and is learned; and its header is not."""
    last = encoding.template_for("last")
    rendered = last.render(Conversation(_PROBE, (None, None)))
    if not rendered.spans:
        raise ConfigError(
            f"{where} marks nothing of an answer with {{% generation %}}; put the answer between its marks."
        )
    start, stop = rendered.spans[-1]
    answer, behind = rendered.text[start:stop], rendered.text[stop:].lstrip()
    stop_id = encoding.added_token(answer.rstrip(), -1)
    if stop_id is None:
        after = encoding.added_token(behind, 0)
        if last.marks_turns and after is not None:
            raise ConfigError(
                f"{where} ends its {{% generation %}} before {encoding.tokenizer.id_to_token(after)}, the turn's stop "
                "token, which would never get a label; move {% endgeneration %} behind it, or name it in "
                "data.eot_tokens."
            )
        markers = dict.fromkeys(_MARKER.findall(rendered.text))
        missing = [each for each in markers if not _is_token(encoding, each)]
        if missing:
            raise ConfigError(_explain_missing(where, missing))
        raise ConfigError(
            f"{where} ends an answer with {answer[-20:]!r}, in no token at which generation could stop; write "
            "{{ eos_token }} behind each answer, or name the token that ends one in data.eot_tokens."
        )
    header = answer.partition(_ANSWER)[0].strip()
    silent = last.prompt(_PROBE[:1], generate=True) == last.prompt(_PROBE[:1], generate=False)
    if header and silent and not last.marks_turns:
        raise ConfigError(
            f"{where} has no prompt to generate (add_generation_prompt), so {header!r} before each answer would be "
            "learned as part of it; write it under {% if add_generation_prompt %} at the end."
        )
    return stop_id


def check_stops_learned(
    folder: Path, manifest: Manifest, encoding: InstructionEncoding, sources: Iterable[str]
) -> None:
    """Look whether samples that were written ever learn a token that ends an answer. Reads up to the first one.

    `sources`: the keys of those whose texts end in such a token. Raises ConfigError for one where none is learned, as
    when every sample is cut before its end.
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
            names = ", ".join(str(encoding.tokenizer.id_to_token(each)) for each in encoding.stops)
            length = manifest.samples.sequence_len if manifest.samples else 0
            raise ConfigError(
                f"data.sequence_len={length} cuts off the end of every answer of {record.source}, so that {names}, the "
                "token that ends one, is never learned and the model would never stop; set a larger one, or "
                "data.on_overlong=drop."
            )


def _is_token(encoding: InstructionEncoding, text: str) -> bool:
    return len(encoding.tokenizer.encode(text, add_special_tokens=False).ids) == 1


def _explain_missing(where: str, missing: list[str]) -> str:
    listed = ", ".join(f"'{token}'" for token in missing)
    return (
        f"{where} takes {', '.join(missing)} as single tokens, which the tokenizer does not have; add them with "
        f"model.new_tokens: [{listed}], or use the template that the model was made for."
    )
