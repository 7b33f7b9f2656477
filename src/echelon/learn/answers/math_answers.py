"""The reward `math`: whether two mathematical expressions are equal, by math-verify, in the process of the rewards."""

import logging
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from echelon.ground.extras import missing_package
from echelon.learn.answers.reward_functions import Record, missing

try:
    from math_verify import parse, verify
except ImportError as error:
    raise missing_package("reward=math", "math-verify", "math", "or use reward=number") from error

_SECONDS = 2.0
logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns that it has no time limit of its own


class _TooLong(BaseException):
    """Passes the handlers of `Exception` in math-verify."""


def math(answers: Sequence[str], records: Sequence[Record], field: str = "answer") -> list[float | str]:
    """1 for an answer whose result equals a field of its record as mathematics, else 0: `0.5` equals `\\frac{1}{2}`.

    The result of an answer is what it has in `\\boxed{}`, else its last formula between dollar signs, else its last
    number. The field is a formula, or a text with one in `\\boxed{}` or between dollar signs. An answer that cannot be
    read, or that takes longer than two seconds of processor time to read and compare, has 0: what else the machine does
    changes no reward. Only for the main thread.
    """
    return [
        _compare(answer, str(record[field]), field) if field in record else missing(field)
        for answer, record in zip(answers, records, strict=True)
    ]


def _compare(answer: str, solution: str, field: str) -> float | str:
    expected = _read_solution(solution)
    if not expected:
        return f"the record's field {field} is no formula"
    try:
        with _limited():
            return float(verify(expected, parse(answer, parsing_timeout=None), timeout_seconds=None))
    except _TooLong:
        return 0.0


@lru_cache(4096)
def _read_solution(text: str) -> list[Any]:
    formula = text if "\\boxed" in text or "$" in text else f"\\boxed{{{text}}}"
    try:
        with _limited():
            parsed: list[Any] = parse(formula, parsing_timeout=None)
            return parsed
    except _TooLong:
        return []


@contextmanager
def _limited() -> Iterator[None]:
    """Raise _TooLong after two seconds of this process's processor time."""

    def end(*_: object) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, _SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
