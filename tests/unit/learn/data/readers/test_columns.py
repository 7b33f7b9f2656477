"""Damaged tables: what is outside of a column is never read, and what can be read is.

Changes at random are in `test_changed_bytes_are_found_or_harmless`; without the checks one in ten ends the process.
"""

import random
import struct
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from echelon.ground.errors import EchelonError
from echelon.learn.data.readers import cut_file, read_records
from echelon.learn.data.readers.record import EITHER_FIELD, Broken, Fields, Reading
from echelon.learn.data.source import Source, list_files

TEXTS = [f"document {number} größe {'x' * (number * 37 % 200)}" for number in range(300)]
TALKS = [{"messages": [{"role": "user", "content": t}, {"role": "assistant", "content": t[::-1]}]} for t in TEXTS]
TABLES = {
    "text": pa.table({"text": TEXTS}),
    "large": pa.table({"text": pa.array(TEXTS, pa.large_string())}),
    "ids": pa.table({"input_ids": [list(range(number % 50)) for number in range(300)]}),
    "talks": pa.Table.from_pylist(TALKS),
    "prompts": pa.table(
        {
            "prompt": pa.array(TEXTS).dictionary_encode(),
            "time": pa.array(range(300), pa.timestamp("us", "Europe/Berlin")),
            "named": pa.array([[("name", text)] for text in TEXTS], pa.map_(pa.string(), pa.string())),
        }
    ),
}


def write(path: Path, table: pa.Table, form: str) -> bytes:
    if form == "parquet":
        pq.write_table(table, path, row_group_size=100)
    else:
        options = pa.ipc.IpcWriteOptions(compression="lz4" if form == "packed" else None)
        make = pa.ipc.new_stream if form == "stream" else pa.ipc.new_file
        with make(path, table.schema, options=options) as writer:
            writer.write_table(table, 100)
    return path.read_bytes()


def read(path: Path) -> list[object]:
    spans = (span for file in list_files(Source("data.train.0", str(path))) for span in cut_file(file, 1000))
    records = [record for span in spans for record in read_records(span, Reading())]
    return [record.problem if isinstance(record, Broken) else record.content for record in records]


@pytest.mark.parametrize("form", ["file", "stream"])
@pytest.mark.parametrize("kind", ["text", "talks"])
@pytest.mark.parametrize(("place", "change"), [(100, 400), (50, 10**6), (50, -(2**31)), (99, -4000)])
def test_offsets_outside_of_a_column_are_not_followed(tmp_path, form, kind, place, change):
    data = write(tmp_path / "x.arrow", TABLES[kind], form)
    whole = read(tmp_path / "x.arrow")
    assert len(whole) == 300
    texts = TEXTS[:100] if kind == "text" else [turn["content"] for talk in TALKS[:100] for turn in talk["messages"]]
    offsets = [0]
    for text in texts:
        offsets.append(offsets[-1] + len(text.encode()))
    packed = struct.pack(f"<{len(offsets)}i", *offsets)
    at = data.index(packed) + 4 * (place if place < 100 else len(offsets) - 1)
    [value] = struct.unpack("<i", data[at : at + 4])
    changed = struct.pack("<i", max(-(2**31), value + change))
    (tmp_path / "x.arrow").write_bytes(data[:at] + changed + data[at + 4 :])
    try:
        found = read(tmp_path / "x.arrow")
    except EchelonError as error:  # the cut needs the sizes of all batches
        assert "x.arrow is not a readable arrow file (" in str(error)
    else:
        assert found[-200:] == whole[100:] and all("cannot be read" in problem for problem in found[:-200])


def test_a_row_that_is_not_utf8_is_one_broken_record(tmp_path):
    for kind, place in (("text", "document 7 "), ("talks", "document 7 ")):
        data = write(tmp_path / "x.arrow", TABLES[kind], "file")
        (tmp_path / "x.arrow").write_bytes(data.replace(place.encode(), b"document \xff ", 1))
        found = read(tmp_path / "x.arrow")
        assert "is not UTF-8 text" in found[7] and sum(isinstance(one, str) for one in found) == 1


def test_a_time_that_python_does_not_have_is_a_broken_record(tmp_path):
    times = pa.array([0, 2**62, 0], pa.timestamp("us", "Europe/Berlin"))
    pq.write_table(pa.table({"prompt": ["a", "b", "c"], "time": times}), tmp_path / "x.parquet")
    found = read(tmp_path / "x.parquet")
    assert [isinstance(one, str) for one in found] == [False, True, False] and found[1].startswith("cannot be read (")


@pytest.mark.parametrize("form", ["file", "stream", "packed", "parquet"])
def test_changed_bytes_are_found_or_harmless(tmp_path, form):
    draw = random.Random(form)
    for name, table in TABLES.items():
        path = tmp_path / f"{name}.{'parquet' if form == 'parquet' else 'arrow'}"
        data = write(path, table, form)
        for _ in range(12):
            changed = bytearray(data)
            for _ in range(draw.choice([1, 2, 4, 16])):
                changed[draw.randrange(len(data))] = draw.randrange(256)
            path.write_bytes(changed)
            try:
                assert len(read(path)) <= 300
            except EchelonError as error:
                assert "\n" not in str(error)


def test_stored_fields_have_the_form_of_earlier_versions():
    for fields, stored in (
        (EITHER_FIELD, {"text": "text", "tokens": "input_ids"}),
        (Fields(names=(("text", "body"),)), {"text": "body", "tokens": None}),
        (Fields("messages", (("role", "from"),)), {"format": "messages", "names": (("role", "from"),)}),
    ):
        assert fields.to_stored() == stored
