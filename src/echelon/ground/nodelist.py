"""Expand Slurm's node lists, such as `n[1-3,07],gpu-a`."""

import re
from collections.abc import Iterator
from itertools import product

from echelon.ground.errors import ConfigError

_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def expand_nodelist(text: str) -> list[str]:
    """The host names in order, as `scontrol show hostnames` prints them; empty for an empty text.

    A range keeps the leading zeros of its first number: `n[08-10]` is n08, n09, n10. Of several brackets in a name, the
    last one varies fastest. Raises ConfigError with the invalid part.
    """
    return [name for part in _split(text) for name in _expand(part)]


def _split(text: str) -> list[str]:
    """Split at the commas outside of brackets."""
    return [part.strip() for part in re.split(r",(?![^\[\]]*\])", text) if part.strip()]


def _expand(part: str) -> Iterator[str]:
    # re.split gives plain text and the insides of brackets in turn.
    pieces = _BRACKETS.split(part)
    choices = [_numbers(piece, part) if index % 2 else [piece] for index, piece in enumerate(pieces)]
    if any(character in "[] \t" for piece in pieces for character in piece):
        raise ConfigError(f"{part!r} is not a Slurm node list; expected one such as n[1-3,07],gpu-a.")
    return map("".join, product(*choices))


def _numbers(inside: str, part: str) -> list[str]:
    numbers: list[str] = []
    for piece in inside.split(","):
        match = _RANGE.fullmatch(piece)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ConfigError(f"[{inside}] in {part!r} is not a node range; expected one such as [1-3,07].")
        first, last = match[1], match[2] or match[1]
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def in_number_order(name: str) -> list[tuple[int, str]]:
    """A sort key for natural order: algo-2 before algo-10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
