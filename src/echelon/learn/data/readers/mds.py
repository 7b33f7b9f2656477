"""MDS shards of MosaicML's `streaming`: one sample after another, each a value per column.

A shard, little-endian, as `streaming/base/format/mds/writer.py` writes it: uint32 number of samples N, uint32 offsets
[N + 1] of the samples and of the end, in bytes from the start of the file, and the columns as JSON (`column_names`,
`column_encodings`, `column_sizes`). A sample: uint32 sizes of its values in the columns without a fixed size, then the
values. So a shard is read without its index.json.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import NonNegativeInt
from typing_extensions import TypedDict, override

from echelon.ground.sizes import render_bytes
from echelon.ground.stored import parse_as
from echelon.learn.data.readers.columns import find_columns
from echelon.learn.data.readers.compressed import DamagedStreamError, Decompressed, open_decompressed
from echelon.learn.data.readers.record import MAX_RECORD_BYTES, Broken, BrokenRecordError, Record, SourceFile
from echelon.learn.data.readers.sequence import SequentialReader

_WORD = 4
_MOST_HEADER_BYTES = 2**28  # of 60 million samples
_SHAPE_TYPES = ("u1", "<u2", "<u4", "<u8")
_VALUE_TYPES = {8: "u1", 9: "i1", 16: "<u2", 17: "<i2", 18: "<f2", 32: "<u4", 33: "<i4", 34: "<f4", 64: "<u8",
                65: "<i8", 66: "<f8"}  # fmt: skip
_SCALARS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64")


class MdsReader(SequentialReader):
    """Read MDS shards. A position is the number of a sample in its shard, from 0."""

    @override
    def walk(self, file: SourceFile) -> Iterator[tuple[int, Record | Broken]]:
        """Damage yields one broken record and ends the file. Raises DataError if a needed column is missing."""
        number = 0
        with open_decompressed(file) as stream:
            try:
                shard = _read_header(stream)
                columns = find_columns(file, list(shard.readable))
                for number, size in enumerate(shard.sizes):
                    if (record := _parse(file, number, shard, columns, _take(stream, int(size)))) is not None:
                        yield stream.consumed, record
            except (DamagedStreamError, ValueError) as error:
                yield file.size, Broken(file, number, f"cannot be read, nor can the rest of the shard ({error})")


class _Header(TypedDict):
    column_names: list[str]
    column_encodings: list[str]
    column_sizes: list[NonNegativeInt | None]


@dataclass(frozen=True)
class _Column:
    encoding: str
    size: int | None


@dataclass(frozen=True)
class _Shard:
    """The sizes `[N]` of the samples, and the columns in order; `readable` are those whose values can be decoded."""

    sizes: npt.NDArray[np.int64]
    columns: dict[str, _Column]

    @property
    def readable(self) -> dict[str, Callable[[bytes], Any]]:
        decoders = ((name, _find_decoder(column.encoding)) for name, column in self.columns.items())
        return {name: decoder for name, decoder in decoders if decoder is not None}


def _take(stream: Decompressed, size: int) -> bytes:
    """Read `size` bytes. Raises ValueError if there are fewer, or they are too many to hold."""
    if size > MAX_RECORD_BYTES:
        raise ValueError(f"a sample is larger than {render_bytes(MAX_RECORD_BYTES)}")
    if len(data := stream.read(size)) != size:
        raise ValueError("it ends early")
    return data


def _read_header(stream: Decompressed) -> _Shard:
    """Raises ValueError for something else than the header of a shard."""
    count = int.from_bytes(_take(stream, _WORD), "little")
    start = _WORD * (count + 2)
    if start > _MOST_HEADER_BYTES:
        raise ValueError("it is not an MDS shard")
    offsets = np.frombuffer(_take(stream, start - _WORD), "<u4").astype(np.int64)
    if not start <= offsets[0] <= _MOST_HEADER_BYTES or (np.diff(offsets) < 0).any():
        raise ValueError("it is not an MDS shard")
    header = parse_as(_take(stream, int(offsets[0]) - start), _Header)
    rows = zip(header["column_names"], header["column_encodings"], header["column_sizes"], strict=True)
    return _Shard(np.diff(offsets), {name: _Column(encoding, size) for name, encoding, size in rows})


def _parse(
    file: SourceFile, number: int, shard: _Shard, wanted: tuple[str, ...], data: bytes
) -> Record | Broken | None:
    """Return a sample, None for an empty text, or what is wrong with it."""
    try:
        content = file.fields.pick(_decode(shard, wanted, data))
    except BrokenRecordError as error:
        return Broken(file, number, str(error))
    except (ValueError, TypeError, IndexError, KeyError, OverflowError, RecursionError) as error:
        return Broken(file, number, f"cannot be decoded ({error})")
    return Record(content, position=number) if len(content) else None


def _decode(shard: _Shard, wanted: tuple[str, ...], data: bytes) -> dict[str, Any]:
    """Return the values of the wanted columns. Raises various errors for a damaged sample."""
    num_sizes = sum(column.size is None for column in shard.columns.values())
    sizes = iter(np.frombuffer(data, "<u4", num_sizes).tolist())
    offset, decoders, values = _WORD * num_sizes, shard.readable, dict[str, Any]()
    for name, column in shard.columns.items():
        size = next(sizes) if column.size is None else column.size
        if name in wanted:
            value = decoders[name](data[offset : offset + size])
            values[name] = value.tolist() if isinstance(value, np.ndarray | np.generic) else value
        offset += size
    if offset != len(data):
        raise ValueError("its size is not that of its columns")
    return values


def _find_decoder(encoding: str) -> Callable[[bytes], Any] | None:
    """Return what decodes a value; None for images and pickles."""
    kind, _, options = encoding.partition(":")
    if kind == "ndarray":
        return lambda data: _decode_array(data, *options.split(":"))
    if kind in _SCALARS:
        return lambda data: np.frombuffer(data, np.dtype(kind).newbyteorder("<"))[0]
    decoders: dict[str, Callable[[bytes], Any]] = {
        "str": lambda data: data.decode("utf-8"),
        "json": json.loads,
        "int": lambda data: np.frombuffer(data, "<i8")[0],
        "str_int": int,
        "str_float": float,
        "bytes": lambda data: np.frombuffer(data, "<i8"),  # as llm-foundry stores token ids
    }
    return decoders.get(kind)


def _decode_array(data: bytes, dtype: str = "", shape: str = "") -> np.ndarray[Any, Any]:
    """Decode an array, whose type and shape precede the values unless the column has them."""
    if not dtype:
        dtype, data = _VALUE_TYPES[data[0]], data[1:]
    if shape:
        lengths = [int(length) for length in shape.split(",")]
    else:
        kind, num_axes = np.dtype(_SHAPE_TYPES[data[0] % 4]), data[0] >> 2
        lengths = np.frombuffer(data, kind, num_axes, 1).tolist()
        data = data[1 + num_axes * kind.itemsize :]
    return np.frombuffer(data, np.dtype(dtype).newbyteorder("<")).reshape(lengths)
