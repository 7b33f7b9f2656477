"""The formats of instruction records and their fields: one table, used to check recipes and to read data.

Records of plain text have the field `text`, records of token ids the field `input_ids`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

PLAIN_FIELDS = ("text", "input_ids")

WITHOUT_FIELDS = ("text", "nanogpt", "npy", "megatron")
"""File formats without records."""


@dataclass(frozen=True)
class RecordFormat:
    """The fields of a format: those by which it is detected, and optional ones.

    `turns` are the fields with lists of turns; `turn_fields` are the fields of a turn that a recipe can rename.
    `is_named`: a recipe must name the format, because other records have such fields too.
    `keeps_record`: the whole record is kept too, as the field `WHOLE_RECORD`.
    """

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    turns: tuple[str, ...] = ()
    turn_fields: tuple[str, ...] = ()
    is_named: bool = False
    keeps_record: bool = False

    @property
    def fields(self) -> tuple[str, ...]:
        """All fields of a record, first those by which the format is detected."""
        return (*self.required, *self.optional)


PROMPTS = ("prompt", "question", "instruction", "input", "conversations", "messages")
"""The fields with the prompt of a preference record: the first that exists is used; `instruction` includes `input`."""

_TURN = ("role", "content", "train", "weight", "tool_calls")

RECORD_FORMATS: dict[str, RecordFormat] = {
    "preference": RecordFormat(
        ("chosen", "rejected"), (*PROMPTS, "history", "system", "tools", "margin"),
        ("prompt", "conversations", "messages", "chosen", "rejected"), _TURN,
    ),
    "rejected_response": RecordFormat(
        ("messages", "rejected_response"), ("system", "tools", "margin"), ("messages", "rejected_response"), _TURN
    ),
    "unpaired_messages": RecordFormat(
        ("messages", "label"), ("system", "tools"), ("messages",), _TURN, is_named=True
    ),
    "unpaired_preference": RecordFormat(
        ("prompt", "completion", "label"), ("system", "tools"), ("prompt", "completion"), _TURN
    ),
    "messages": RecordFormat(("messages",), ("system", "tools"), ("messages",), _TURN),
    "sharegpt": RecordFormat(
        ("conversations",), ("system", "tools"), ("conversations",), ("from", "value", "train", "weight")
    ),
    "prompt_completion": RecordFormat(
        ("prompt", "completion"), ("system", "tools"), ("prompt", "completion"), _TURN
    ),
    "alpaca": RecordFormat(("instruction", "output"), ("input", "system", "history")),
    "tokens": RecordFormat(("input_ids", "labels")),
    "prompt": RecordFormat(("prompt",), ("system", "tools"), ("prompt",), _TURN, keeps_record=True),
    "labelled": RecordFormat(
        ("label",), ("text", "text_pair", "messages", "system", "tools"), ("messages",), _TURN, is_named=True
    ),
}  # fmt: skip
"""The formats by their name in `data.train[].format`, in the order in which they are tried."""


PROMPT_FORMAT = "prompt"
"""The format of a prompt without an answer, and whatever a reward needs to judge answers to it."""

LABELLED_FORMAT = "labelled"
"""The format of a text, two texts or messages, with the label that a classifier should give them."""

WHOLE_RECORD = "record"
"""The field of an example with the record that it is from, unchanged."""

PAIR_FORMATS = frozenset(("preference", "rejected_response"))
"""The formats with a chosen and a rejected answer."""

JUDGED_FORMATS = frozenset(("unpaired_preference", "unpaired_messages"))
"""The formats with one answer and whether it is good."""


def recognise_format(fields: Collection[str], is_named: bool = False) -> str | None:
    """Return the format of records with these fields; None for plain text, token ids, and unknown records.

    `is_named`: the fields are those of a format that the recipe names, or that was recognised before. A record with a
    `text` field is plain text, whatever other fields it has.
    """
    if "text" in fields:
        return None
    rows = ((name, row) for name, row in RECORD_FORMATS.items() if is_named or not row.is_named)
    return next((name for name, row in rows if all(field in fields for field in row.required)), None)


def masks_documents(document_mask: bool | Literal["auto"], has_samples: bool) -> bool:
    """Whether documents that share a sequence are to attend to themselves alone: with `auto` those of samples."""
    return has_samples if document_mask == "auto" else document_mask


def describe_formats() -> str:
    """Return the fields by which each format is detected, for an error message about unknown records."""
    examples = (f"{name} ({', '.join(row.required)})" for name, row in RECORD_FORMATS.items())
    return f"records are recognised by the fields {' or '.join(PLAIN_FIELDS)}, or as {', '.join(examples)}"


def check_fields(key: str, format: str, fields: Mapping[str, str]) -> None:
    """Raise ValueError if `fields` of the source `key` renames a field that its format does not have."""
    known = known_fields(format)
    for name, theirs in fields.items():
        if not known:
            raise ValueError(
                f"{key}.fields.{name}={theirs} has no effect: {key}.format={format} has no records with fields; "
                "remove it, or set another format."
            )
        if name not in known:
            near = get_close_matches(name, known, 1)
            guess = f"did you mean {near[0]}? It" if near else "it"
            raise ValueError(
                f"{key}.fields.{name}={theirs} is not a field of {'any format' if format == 'auto' else format}: "
                f"{guess} maps one of {', '.join(known)} to the name it has in your records."
            )
        if not theirs.strip():
            raise ValueError(f"{key}.fields.{name} is empty; give the name that the field has in your records.")


def known_fields(format: str) -> tuple[str, ...]:
    """Return the fields that `fields` may rename for this format; for a file format, those of all record formats."""
    if format in WITHOUT_FIELDS:
        return ()
    is_record = format in RECORD_FORMATS
    rows = [RECORD_FORMATS[format]] if is_record else RECORD_FORMATS.values()
    names = [name for row in rows for name in (*row.fields, *row.turn_fields)]
    return tuple(dict.fromkeys(names if is_record else [*PLAIN_FIELDS, *names]))
