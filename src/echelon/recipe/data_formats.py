"""The formats of instruction records: which fields each has. One table, for the recipe's checks and for reading.

Plain records, those of a text or of token ids, have the fields `text` and `input_ids`.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

PLAIN_FIELDS = ("text", "input_ids")

WITHOUT_FIELDS = ("text", "nanogpt", "npy", "megatron")
"""Formats of files that hold no records."""


@dataclass(frozen=True)
class RecordFormat:
    """The fields of a format: those by which it is recognised, and those a record may have beside them.

    `turns`: the fields that hold lists of turns.  `turn_fields`: what a turn has that can be renamed.
    """

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    turns: tuple[str, ...] = ()
    turn_fields: tuple[str, ...] = ()

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of a record, those by which it is recognised first."""
        return (*self.required, *self.optional)


PROMPTS = ("prompt", "question", "instruction", "input", "conversations", "messages")
"""Where a preference has its prompt: the first of these that a record has, an instruction with its input."""

_TURN = ("role", "content", "train", "weight", "tool_calls")

RECORD_FORMATS: dict[str, RecordFormat] = {
    "preference": RecordFormat(
        ("chosen", "rejected"), (*PROMPTS, "history", "system", "tools"),
        ("prompt", "conversations", "messages", "chosen", "rejected"), _TURN,
    ),
    "rejected_response": RecordFormat(
        ("messages", "rejected_response"), ("system", "tools"), ("messages", "rejected_response"), _TURN
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
}  # fmt: skip
"""By the name in `data.train[].format`, in the order in which they are recognised."""


PAIR_FORMATS = frozenset(("preference", "rejected_response"))
"""The formats of pairs of a chosen and a rejected answer."""


def recognise_format(fields: Collection[str]) -> str | None:
    """The format of records with these fields; None for plain text, plain ids, and what is neither.

    A text wins: it is what a record with both was written out for.
    """
    if "text" in fields:
        return None
    return next((name for name, row in RECORD_FORMATS.items() if all(each in fields for each in row.required)), None)


def describe_formats() -> str:
    """The fields that records are recognised by, for a message about records that have none of them."""
    examples = (f"{name} ({', '.join(row.required)})" for name, row in RECORD_FORMATS.items())
    return f"records are recognised by the fields {' or '.join(PLAIN_FIELDS)}, or as {', '.join(examples)}"


def check_fields(key: str, format: str, fields: Mapping[str, str]) -> None:
    """Raise ValueError for a name under `fields` of the source `key` that its format does not know."""
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
    """What `fields` may name for a source of that format; for a format of files, whatever any kind of record has."""
    if format in WITHOUT_FIELDS:
        return ()
    if format in RECORD_FORMATS:
        row = RECORD_FORMATS[format]
        return _once(row.fields, row.turn_fields)
    return _once(PLAIN_FIELDS, *((*row.fields, *row.turn_fields) for row in RECORD_FORMATS.values()))


def _once(*groups: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for group in groups for name in group))
