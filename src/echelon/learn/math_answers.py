"""The reward `math`: whether two mathematical expressions are equal, by math-verify, in the process of the rewards."""

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from echelon.ground.errors import ConfigError
from echelon.learn.reward_functions import Record, missing

try:
    from math_verify import parse, verify
except ImportError as error:
    raise ConfigError(
        "reward=math requires the package math-verify, which is not installed; run pip install 'echelon[math]', or use "
        "reward=number."
    ) from error

_SECONDS = 2  # to read an expression, and to compare two; math-verify counts whole seconds
logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it reports each comparison that takes too long


def math(answers: Sequence[str], records: Sequence[Record], field: str = "answer") -> list[float | str]:
    """1 for an answer whose result equals a field of its record as mathematics, else 0: `0.5` equals `\\frac{1}{2}`.

    The result of an answer is what it has in `\\boxed{}`, else its last formula between dollar signs, else its last
    number. The field is a formula, or a text with one in `\\boxed{}` or between dollar signs. An answer that cannot be
    read, or that takes longer than two seconds to read or to compare, has 0. Only for the main thread.
    """
    return [
        _compare(answer, str(record[field]), field) if field in record else missing(field)
        for answer, record in zip(answers, records, strict=True)
    ]


def _compare(answer: str, solution: str, field: str) -> float | str:
    wanted = _read_solution(solution)
    if not wanted:
        return f"the record's field {field} is no formula"
    return float(verify(wanted, parse(answer, parsing_timeout=_SECONDS), timeout_seconds=_SECONDS))


@lru_cache(4096)
def _read_solution(text: str) -> list[Any]:
    found: list[Any] = parse(
        text if "\\boxed" in text or "$" in text else f"\\boxed{{{text}}}", parsing_timeout=_SECONDS
    )
    return found
