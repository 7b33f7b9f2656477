"""Ways to damage a file, each a pure function of a random generator: disk, network and editing errors, and attacks."""

import gzip
import io
import json
import os
import pickle
import random
import re
import struct
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

HUGE = (2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**53, 2**63 - 1, 2**64 - 1, 10**19)
ODD_VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 3, 2.5, -0.0, 1e308, float("nan"), float("inf"), 2**31, 2**63, 10**30, "", "x", "../x",
    "/etc/passwd", "\0", "é\u202e", "\x1b]0;x\x07", "a\ud800", "1", "null", [], {}, [[]], [None], {"": {}}, "x" * 5000,
)  # fmt: skip


ODD_FILES = ("a folder", "a pipe", "a device", "a huge file")
"""What may stand in a file's place; to read it to its end would take for ever."""


def put_odd_file(path: Path, what: str) -> None:
    """Put one of ODD_FILES in the place of a file."""
    path.unlink(missing_ok=True)
    match what:
        case "a folder":
            path.mkdir()
        case "a pipe":
            os.mkfifo(path)
        case "a device":
            path.symlink_to("/dev/zero")
        case "a huge file":
            with path.open("wb") as file:
                file.truncate(2**42)


class Canary:
    """An object that creates a folder when it is unpickled without protection."""

    def __init__(self, marker: Path) -> None:
        self._marker = str(marker)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (self._marker,)


def torch_archive(payload: bytes) -> bytes:
    """A file in the format of `torch.save` with a different pickle inside."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", payload)
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
    return buffer.getvalue()


def foreign_files(marker: Path) -> dict[str, bytes]:
    """Files of other formats, by name; two of them would execute code if they were trusted."""
    payload = pickle.dumps(Canary(marker))
    return {
        "nothing": b"",
        "a pickle that runs code": payload,
        "a torch file that runs code": torch_archive(payload),
        "an old pickle that runs code": pickle.dumps(Canary(marker), protocol=0),
        "a picture": b"\x89PNG\r\n\x1a\n" + bytes(64),
        "compressed": b"\x1f\x8b\x08\x00" + bytes(60),
        "text": b"Not what you were looking for.\n",
        "a page": b"<!DOCTYPE html><html><body>404</body></html>",
        "a Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12345\n",
        "an empty mapping": b"{}",
        "an empty list": b"[]",
        "null": b"null",
        "a number": b"1" * 5000,
        "deep lists": b"[" * 100_000 + b"]" * 100_000,
        "deep mappings": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        "zeros": bytes(4096),
        "ones": b"\xff" * 4096,
    }


def flip_bits(rng: random.Random, data: bytes) -> bytes:
    """Flip up to 24 bits."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 24))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def set_bytes(rng: random.Random, data: bytes) -> bytes:
    """Set a few bytes to other values, including values with a meaning in many formats."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        changed[rng.randrange(len(changed))] = rng.choice((0, 0xFF, 0x80, *b'"{}[]:,.-\\0129\n', rng.randrange(256)))
    return bytes(changed)


def truncate(rng: random.Random, data: bytes) -> bytes:
    """Keep only the beginning."""
    return data[: rng.choice((rng.randrange(len(data)), len(data) - 1, min(8, len(data) - 1)))]


def append(rng: random.Random, data: bytes) -> bytes:
    """Append bytes."""
    return data + rng.choice((b"\0", b"\n}", data, data[: rng.randrange(1, 200)], rng.randbytes(rng.randrange(1, 200))))


def insert(rng: random.Random, data: bytes) -> bytes:
    """Insert a few bytes."""
    place = rng.randrange(len(data) + 1)
    return data[:place] + rng.randbytes(rng.randrange(1, 9)) + data[place:]


def delete(rng: random.Random, data: bytes) -> bytes:
    """Delete a span."""
    start, stop = _span(rng, data)
    return data[:start] + data[stop:]


def duplicate(rng: random.Random, data: bytes) -> bytes:
    """Duplicate a span."""
    start, stop = _span(rng, data)
    return data[:stop] + data[start:stop] + data[stop:]


def overwrite(rng: random.Random, data: bytes) -> bytes:
    """Overwrite a span with zeros, ones or other bytes of the same file, like a lost disk block."""
    start, stop = _span(rng, data)
    source = rng.randrange(len(data))
    fill = rng.choice((bytes(stop - start), b"\xff" * (stop - start), data[source : source + stop - start]))
    return data[:start] + fill + data[start + len(fill) :]


def huge_field(rng: random.Random, data: bytes) -> bytes:
    """Write a huge number where a length may be: in the first bytes, or anywhere."""
    width = rng.choice(("<I", "<Q", ">I", ">Q"))
    value = rng.choice(HUGE) % (2**32 if width[1] == "I" else 2**64)
    place = rng.choice((0, 0, rng.randrange(len(data))))
    field = struct.pack(width, value)
    return data[:place] + field + data[place + len(field) :]


def huge_digits(rng: random.Random, data: bytes) -> bytes:
    """Replace a number in the text by a huge, negative, zero, random or non-finite one."""
    numbers = list(re.finditer(rb"\d+", data))
    if not numbers:
        return huge_field(rng, data)
    chosen = rng.choice(numbers)
    number = rng.choice((*map(str, HUGE), "-1", "0", "1e400", "9" * 5000, "NaN", str(rng.randrange(10**6)))).encode()
    return data[: chosen.start()] + number + data[chosen.end() :]


def _span(rng: random.Random, data: bytes) -> tuple[int, int]:
    start = rng.randrange(len(data))
    return start, min(len(data), start + rng.choice((1, 1, rng.randrange(1, 64), rng.randrange(1, 4096))))


BYTEWISE = (
    flip_bits, flip_bits, set_bytes, set_bytes, truncate, append, insert, delete, duplicate, overwrite, huge_field,
    huge_digits,
)  # fmt: skip


def damage_bytes(rng: random.Random, data: bytes) -> bytes:
    """Apply one or two of the functions above; the result differs from the data."""
    while True:
        changed = rng.choice(BYTEWISE)(rng, data)
        if changed and rng.random() < 0.2:
            changed = rng.choice(BYTEWISE)(rng, changed)
        if changed != data:
            return changed


def damage_json(rng: random.Random, data: bytes) -> bytes:
    """Change one value, key or entry; the result is valid JSON."""
    content = json.loads(data)
    places = list(_places(content))
    while json.dumps(content) == json.dumps(json.loads(data)):
        container, key = rng.choice(places)
        choice = rng.randrange(5)
        if choice == 0:
            del container[key]
        elif choice == 1 and isinstance(container, dict):
            container[rng.choice(("x", key + "x", ""))] = container.pop(key)
        elif choice == 2:
            other, other_key = rng.choice(places)
            container[key] = json.loads(json.dumps(other[other_key]))
        else:
            container[key] = rng.choice((*ODD_VALUES, *HUGE))
        places = list(_places(content))
        if not places:
            break
    return json.dumps(content).encode()


def _places(content: Any) -> Any:
    """Every (container, key) of a JSON value."""
    if isinstance(content, dict):
        items: Any = content.items()
    elif isinstance(content, list):
        items = enumerate(content)
    else:
        return
    for key, value in items:
        yield content, key
        yield from _places(value)


def damage_gzip(rng: random.Random, data: bytes) -> bytes:
    """Damage a compressed file, or the JSON in it, or replace it by one that unpacks to a thousand times its size."""
    choice = rng.randrange(8)
    if choice == 0:
        return _make_bomb()
    inner = gzip.decompress(data)
    if choice < 4:
        return gzip.compress((damage_json if choice < 3 else damage_bytes)(rng, inner), 1)
    return damage_bytes(rng, data)


@cache
def _make_bomb() -> bytes:
    return gzip.compress(b'{"traceEvents": [' + b" " * 2**29, 1)


def damage_header(rng: random.Random, data: bytes) -> bytes:
    """Damage the header of a safetensors file: its length, its text, or one of its entries with a correct length.

    The tensors are unchanged: the format has no checksum, so a change could not be detected.
    """
    length = int.from_bytes(data[:8], "little")
    header, tensors = data[8 : 8 + length], data[8 + length :]
    choice = rng.randrange(6)
    if choice == 0:
        return struct.pack("<Q", rng.choice((*HUGE[:-1], 0, 1, length - 1, length + 1, length + 8))) + data[8:]
    if choice == 1:
        return truncate(rng, data)
    if choice == 2:
        return data[: 8 + length] + rng.choice((tensors[:-1], tensors[1:], tensors + b"\0", b""))
    changed = damage_json(rng, header) if choice == 3 else damage_bytes(rng, header)
    return struct.pack("<Q", len(changed)) + changed + tensors if choice < 5 else data[:8] + changed + tensors
