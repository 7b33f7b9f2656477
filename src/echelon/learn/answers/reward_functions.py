"""Rewards that a recipe can name. Each is a function of the answers and of the records of their prompts.

For an answer that cannot be judged a function gives the reason, a text, instead of a number.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?\.?\d+(?:[eE][-+]?\d+)?")


def exact(answers: Sequence[str], records: Sequence[Record], field: str = "answer") -> list[float | str]:
    """1 for an answer that is the text of a field of its record, apart from white space around it, else 0."""
    return [
        float(answer.strip() == str(record[field]).strip()) if field in record else missing(field)
        for answer, record in zip(answers, records, strict=True)
    ]


def number(
    answers: Sequence[str], records: Sequence[Record], field: str = "answer", tolerance: float = 1e-6
) -> list[float | str]:
    """1 for an answer whose last number is the last number in a field of its record, within a relative tolerance.

    A comma between groups of three digits is no decimal point: 1,234.5 is read as 1234.5.
    """
    return [
        _compare(answer, record, field, tolerance) if field in record else missing(field)
        for answer, record in zip(answers, records, strict=True)
    ]


def _compare(answer: str, record: Record, field: str, tolerance: float) -> float | str:
    answered, expected = _last_number(answer), _last_number(str(record[field]))
    if expected is None:
        return f"the record's field {field} has no number"
    return float(answered is not None and abs(answered - expected) <= tolerance * max(1.0, abs(expected)))


def _last_number(text: str) -> float | None:
    numbers = _NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


def regex(
    answers: Sequence[str], records: Sequence[Record], pattern: str = "", field: str | None = None
) -> list[float | str]:
    """1 for an answer in which a regular expression is found; with `field`, only if its first group is that field.

    `.` matches line breaks too, and `^` and `$` are the ends of the answer.
    """
    compiled = re.compile(pattern, re.DOTALL)
    matches = [compiled.search(answer) for answer in answers]
    if field is None:
        return [float(match is not None) for match in matches]
    return [
        float(match is not None and match[1].strip() == str(record[field]).strip())
        if field in record
        else missing(field)
        for match, record in zip(matches, records, strict=True)
    ]


def missing(field: str) -> str:
    """Return the reason for which an answer to a record without a field cannot be judged."""
    return f"the record has no field {field}; name another in the reward's options.field"
