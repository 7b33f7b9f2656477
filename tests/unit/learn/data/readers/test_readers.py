"""Every format, on files written by other libraries or byte by byte from the definition."""

import csv
import errno
import gzip
import json
import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from echelon.ground.errors import ConfigError, DataError, EchelonError
from echelon.learn.data.readers import count_documents, cut_file, name_place, read_records
from echelon.learn.data.readers.record import Broken, Reading, Record, digest_document
from echelon.learn.data.readers.text import TextReader
from echelon.learn.data.source import Source, list_files

TEXTS = [f"document {index}: “größe”\nof two lines, {'x' * (index * 37 % 200)}" for index in range(300)]
IDS = [list(range(index % 7, 40 + index % 50)) for index in range(200)]


def read(path: Path | str, piece_bytes: int = 1000, reading: Reading = Reading(), **fields: object) -> list[object]:  # noqa: B008
    """The content of the records, as text or lists of ids, and the positions of broken ones."""
    found = []
    for file in list_files(Source("data.train.0", str(path), **fields)):
        for span in cut_file(file, piece_bytes):
            for each in read_records(span, reading):
                if isinstance(each, Broken):
                    found.append(f"{name_place(each)} {each.problem}")
                else:
                    found.append(each.content.decode() if isinstance(each.content, bytes) else each.content.tolist())
    return found


def write_jsonl(path: Path, records: list[object]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def compress(path: Path, suffix: str) -> Path:
    data = path.read_bytes()
    half = len(data) // 2
    pack = gzip.compress if suffix == ".gz" else zstandard.ZstdCompressor().compress
    target = path.with_name(path.name + suffix)
    # Two members, as from `cat a.gz b.gz` and parallel compressors.
    target.write_bytes(pack(data[:half]) + pack(data[half:]))
    return target


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_lines_and_text_round_trip(tmp_path, suffix):
    assert read(compress(write_jsonl(tmp_path / "x.jsonl", [{"text": text} for text in TEXTS]), suffix)) == TEXTS
    path = tmp_path / "long.txt"
    path.write_text("\n".join(TEXTS) * 60)
    file = list_files(Source("k", str(compress(path, suffix))))[0]
    records = [each for span in cut_file(file) for each in read_records(span, Reading(digests=True))]
    assert len(records) > 1
    assert b"".join(record.content for record in records) == path.read_bytes()
    assert [record.is_first for record in records] == [True] + [False] * (len(records) - 1)
    assert [record.ends for record in records] == [False] * (len(records) - 1) + [True]
    assert records[0].digest == digest_document([path.read_bytes()])


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_damaged_compressed_file_loses_its_end_and_reports_the_position(tmp_path, suffix):
    path = compress(write_jsonl(tmp_path / "x.jsonl", [{"text": text} for text in TEXTS]), suffix)
    path.write_bytes(path.read_bytes()[:-200])
    found = read(path)
    broken = [each for each in found if "cannot be decompressed" in each]
    kept = found[: len(found) - len(broken)]
    assert 100 < len(kept) < len(TEXTS)
    assert kept == TEXTS[: len(kept)]
    assert broken == [found[-1]]
    assert found[-1].startswith(f"{path}:{len(kept) + 1} ")


def test_a_file_that_unpacks_to_far_more_is_refused(tmp_path, monkeypatch):
    """Written by hand, because a library needs seconds for it: 2 GiB in blocks of four bytes."""
    monkeypatch.setattr("echelon.learn.data.readers.compressed.HARMLESS_BYTES", 2**27)
    header = struct.pack("<IBB", 0xFD2FB528, 0, 7 << 3)  # magic, no sizes, a window of 128 KiB
    blocks = [(2**17 << 3 | 1 << 1 | (number == 2**14 - 1)).to_bytes(3, "little") + b"x" for number in range(2**14)]
    for form, name in (("text", "bomb.txt.zst"), ("jsonl", "bomb.jsonl.zst")):
        (tmp_path / name).write_bytes(header + b"".join(blocks))
        assert (tmp_path / name).stat().st_size < 2**17
        [file] = list_files(Source("k", str(tmp_path / name), form, fields={"text": "text"}))
        largest = 0
        try:
            for span in cut_file(file):
                largest = max(largest, len(span.data or b""))
                found = [record.problem for record in span.records or ()]
        except DataError as error:
            found = [str(error)]
        assert largest < 2**22 and "unpacks to more than 2,000 times its size" in found[-1], found


@pytest.mark.parametrize("name", ["x.jsonl.gz", "x.jsonl.zst", "x.json.gz", "x.csv.gz"])
@pytest.mark.parametrize("fill", [" ", "x"])
def test_a_record_of_a_compressed_file_has_a_limit(tmp_path, monkeypatch, name, fill):
    for module in ("lines", "arrays", "separated"):
        monkeypatch.setattr(f"echelon.learn.data.readers.{module}.MAX_RECORD_BYTES", 2**22)
    form = name.split(".")[1]
    long = fill * (9 * 2**20)
    texts = {
        "jsonl": f'{{"text": "one"}}\n{{"text": "two{long}"}}\n{{"text": "three"}}\n',
        "json": f'[{{"text": "one"}}, {{"text": "two{long}"}}, {{"text": "three"}}]',
        "csv": f'text\none\n"two{long}"\nthree\n',
    }
    path = tmp_path / name.rpartition(".")[0]
    path.write_text(texts[form])
    found = read(compress(path, path.with_name(name).suffix))
    if form == "jsonl":
        assert found == ["one", f"{path}.{name[-3:].strip('.')}:2 is longer than 4.00 MiB", "three"]
    else:
        assert found[0] == "one" and len(found) == 2 and "4.00 MiB" in found[1]
    path.write_text(texts[form].replace(long, long[: 3 * 2**20]))
    assert read(compress(path, path.with_name(name).suffix)) == ["one", f"two{long[: 3 * 2**20]}", "three"]


def test_a_broken_line_of_a_compressed_file_is_numbered(tmp_path):
    path = write_jsonl(tmp_path / "x.jsonl", [{"text": text} for text in TEXTS])
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:123], b"{\n", *lines[123:]]))
    (broken,) = (each for each in read(compress(path, ".gz")) if each.startswith(str(path)))
    assert broken.startswith(f"{path}.gz:124 cannot be read")


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".csv.gz"])
def test_rows_of_a_table_with_quoted_line_ends(tmp_path, suffix):
    path = tmp_path / ("x" + suffix.removesuffix(".gz"))
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, delimiter="\t" if suffix == ".tsv" else ",")
        writer.writerow(["id", "text"])
        writer.writerows([index, f'{text} "quoted"\r\nand, more'] for index, text in enumerate(TEXTS))
    if suffix == ".csv.gz":
        path = compress(path, ".gz")
    assert read(path) == [f'{text} "quoted"\r\nand, more' for text in TEXTS]
    with pytest.raises(DataError, match=r"has no column `body` to read text from; its first line names id, text"):
        read(path, fields={"text": "body"})


def test_short_or_non_utf8_rows_are_reported_by_line(tmp_path):
    path = tmp_path / "x.csv"
    path.write_bytes(b'\xef\xbb\xbfid,text\n1,one\n2\n\n3,"th\nree"\n4,caf\xe9\n5,\n6,six\n')
    assert read(path) == [
        "one",
        f"{path}:3 has only 1 columns; `text` is column 2",
        "th\nree",
        f"{path}:7 has text that is not UTF-8 in `text` (surrogates not allowed)",
        "six",
    ]


def test_a_table_in_a_folder_is_read_as_rows_if_it_has_the_column(tmp_path):
    (tmp_path / "a.csv").write_text("text\none\ntwo\n")
    (tmp_path / "b.csv").write_text("year,price\n1999,3\n")
    write_jsonl(tmp_path / "c.jsonl", [{"text": "three"}])
    pq.write_table(pa.table({"text": ["four"]}), tmp_path / "d.parquet")
    (tmp_path / "e.bin").write_bytes(b"\0\0")
    assert read(tmp_path) == ["one", "two", "year,price\n1999,3\n", "three", "four"]
    assert read(tmp_path, format="parquet") == ["four"]


def write_arrow(path: Path, table: pa.Table, kind: str) -> Path:
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=70)
        return path
    options = pa.ipc.IpcWriteOptions(compression="lz4" if kind.endswith("lz4") else None)
    make = pa.ipc.new_stream if kind.startswith("stream") else pa.ipc.new_file
    with make(str(path), table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=70)
    return path


COLUMN_KINDS = ["parquet", "file", "stream", "file-lz4", "stream-lz4"]


@pytest.mark.parametrize("kind", COLUMN_KINDS)
def test_columns_of_text_and_of_ids(tmp_path, kind):
    suffix = "parquet" if kind == "parquet" else "arrow"
    table = pa.table({"n": range(300), "text": TEXTS, "body": pa.array(TEXTS[::-1], pa.large_string())})
    path = write_arrow(tmp_path / f"x.{suffix}", table, kind)
    for piece_bytes in (1, 1000, 10**9):
        assert read(path, piece_bytes) == TEXTS
    assert read(path, fields={"text": "body"}) == TEXTS[::-1]
    with pytest.raises(DataError, match=r"has no column `story`; its columns are n, text, body"):
        read(path, fields={"text": "story"})
    with pytest.raises(DataError, match=r"column `n` has type int64; it must contain text or lists of token ids"):
        read(path, fields={"text": "n"})
    ids = write_arrow(tmp_path / f"ids.{suffix}", pa.table({"input_ids": pa.array(IDS, pa.list_(pa.int32()))}), kind)
    assert read(ids) == IDS
    assert read(ids, format="tokens") == IDS


@pytest.mark.parametrize("kind", COLUMN_KINDS)
def test_spans_of_columns_can_be_read_in_any_order(tmp_path, kind):
    suffix = "parquet" if kind == "parquet" else "arrow"
    (file,) = list_files(Source("k", str(write_arrow(tmp_path / f"x.{suffix}", pa.table({"text": TEXTS}), kind))))
    spans = list(cut_file(file, 2000))
    assert len(spans) > 10
    assert sum(span.stop - span.start for span in spans) == 300
    for span in [*spans[::3], *reversed(spans), spans[0]]:
        found = [each.content.decode() for each in read_records(span, Reading())]
        assert found == TEXTS[span.start : span.stop]


def test_rows_without_text_and_invalid_files(tmp_path):
    raw = pa.array([b"one", b"caf\xe9", None, b"", b"two"], pa.binary())
    column = pa.Array.from_buffers(pa.string(), 5, raw.buffers())
    path = write_arrow(tmp_path / "x.arrow", pa.table({"text": column}), "file")
    assert read(path) == [
        "one",
        f"{path}, row 1 is not UTF-8 text (unexpected end of data)",
        f"{path}, row 2 has no text",
        "two",
    ]
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(DataError, match=r"bad\.parquet is not a readable parquet file"):
        read(tmp_path / "bad.parquet")
    assert f"{tmp_path}/bad.parquet is not a readable parquet file" in read(tmp_path)[-1] + read(tmp_path)[0]


def test_a_damaged_row_group_loses_its_rows(tmp_path):
    path = write_arrow(tmp_path / "x.parquet", pa.table({"text": TEXTS}), "parquet")
    group = pq.ParquetFile(path).metadata.row_group(1).column(0)
    data = bytearray(path.read_bytes())
    start = group.dictionary_page_offset or group.data_page_offset
    data[start : start + 40] = b"\xff" * 40
    path.write_bytes(data)
    (file,) = list_files(Source("k", str(path)))
    found = [each for span in cut_file(file) for each in read_records(span, Reading())]
    assert [each.content.decode() for each in found if isinstance(each, Record)] == TEXTS[:70] + TEXTS[140:]
    assert sum(each.count for each in found if isinstance(each, Broken)) == 70


def test_ids_in_lines(tmp_path):
    records = [{"input_ids": ids, "id": 1} for ids in IDS]
    path = write_jsonl(tmp_path / "x.jsonl", [*records, {"input_ids": "text"}, {"input_ids": [1.5]}, {"input_ids": []}])
    found = read(path)
    assert found[:-2] == IDS
    assert all("has no list of token ids in `input_ids`" in each for each in found[-2:])
    write_jsonl(path, [{"tokens": ids} for ids in IDS])
    assert read(path, fields={"input_ids": "tokens"}) == IDS


FLAT = np.array([5, 1, 2, 0, 3, 0, 0, *range(1, 700), 0, 9], dtype=np.uint16)


def write_flat(tmp_path: Path, kind: str) -> Path:
    path = tmp_path / ("x.npy" if kind == "npy" else "x.bin")
    if kind == "npy":
        np.save(path, FLAT.astype(np.int64))
    elif kind == "raw":
        path.write_bytes(FLAT.astype("<u2").tobytes())
    else:
        magic, version, dtype = (20240520, 1, "<u2") if kind == "gpt2" else (20240801, 7, "<u4")
        header = np.zeros(256, "<i4")
        header[:3] = magic, version, FLAT.size
        path.write_bytes(header.tobytes() + FLAT.astype(dtype).tobytes())
    return path


@pytest.mark.parametrize("kind", ["raw", "gpt2", "llama3", "npy"])
@pytest.mark.parametrize("piece_bytes", [2, 60, 10**6])
def test_a_stream_of_ids_has_a_document_up_to_each_separator(tmp_path, kind, piece_bytes):
    (file,) = list_files(Source("k", str(write_flat(tmp_path, kind))))
    reading = Reading(separator=0, digests=True)
    spans = list(cut_file(file, piece_bytes))
    documents: list[list[int]] = []
    digests = []
    for record in (each for span in spans for each in read_records(span, reading)):
        if record.is_first:
            documents.append([])
            digests.append(record.digest or digest_document([record.content]))
        assert not record.ends  # nothing is added to the stream
        documents[-1] += record.content.tolist()
    expected = [[5, 1, 2, 0], [3, 0], [0], [*range(1, 700), 0], [9]]
    assert documents == expected
    assert digests == [digest_document([np.array(each)]) for each in expected]
    assert count_documents([file], 100, reading) == 5
    whole = [each for span in spans for each in read_records(span, Reading())]
    assert [each.is_first for each in whole] == [True] + [False] * (len(whole) - 1)
    assert count_documents([file], 100, Reading()) == 1


def test_rows_of_an_array_are_documents(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(60, dtype=np.uint32).reshape(20, 3))
    for piece_bytes in (1, 24, 10**6):
        assert read(tmp_path / "x.npy", piece_bytes) == np.arange(60).reshape(20, 3).tolist()


def test_files_without_ids_are_refused(tmp_path):
    path = tmp_path / "x.npy"
    np.save(path, np.array([1.5]))
    with pytest.raises(DataError, match=r"x\.npy is not an integer array"):
        read(path)
    path.write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"x\.npy is not a readable \.npy file"):
        read(path)
    path = write_flat(tmp_path, "gpt2")
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"x\.bin has .* bytes, which does not match the 708 ids in its header"):
        read(path)
    path.write_bytes(b"odd")
    with pytest.raises(DataError, match="not a whole number of uint16 ids"):
        read(path)


@pytest.mark.parametrize(
    ("shape", "found"),
    [
        ("(4611686018427387904,)", "is not a readable .npy file"),
        ("(4294967296, 4294967296)", "is not a readable .npy file"),
        ("(9223372036854775808,)", "is not a readable .npy file"),
        ("(-1,)", "is not a readable .npy file"),
        ("(1,\n\n{}", "is not a readable .npy file"),
        ("(" * 90 + ")" * 90, "is not an integer array"),
        ("(1152921504606846976, 0)", None),
    ],
)
def test_an_array_of_an_impossible_shape_is_refused(tmp_path, shape, found):
    """Also one whose rows have no ids and no end."""
    header = f"{{'descr': '<u2', 'fortran_order': False, 'shape': {shape}, }}".ljust(245) + "\n"
    path = tmp_path / "x.npy"
    path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + bytes(64))
    if found is None:
        assert read(path) == []
        assert count_documents(list_files(Source("k", str(path))), 100, Reading()) == 0
        return
    with pytest.raises(DataError, match=found) as caught:
        read(path)
    assert "\n" not in str(caught.value)


class FailingReader(TextReader):
    """Reads from a disk that fails."""

    def read(self, span, reading):
        yield from super().read(span, reading)
        raise OSError(errno.EIO, "Input/output error")


def test_a_failing_disk_is_named_by_the_file(tmp_path):
    (tmp_path / "x.txt").write_text("text")
    with pytest.raises(EchelonError, match=r"x\.txt cannot be read \(.*Input/output error\)"):
        read(tmp_path / "x.txt", format=f"{__name__}:FailingReader")


def write_megatron(
    prefix: Path, sequences: list[list[int]], bounds: list[int], code: int = 8, kind: str = "<u2"
) -> None:
    """Write a Megatron file from the definition: header, lengths, byte offsets, document bounds."""
    arrays = [np.array(sequence, dtype=kind).tobytes() for sequence in sequences]
    prefix.with_suffix(".bin").write_bytes(b"".join(arrays))
    offsets = np.cumsum([0, *map(len, arrays)])[:-1]
    prefix.with_suffix(".idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<Q", 1)
        + struct.pack("<B", code)
        + struct.pack("<Q", len(sequences))
        + struct.pack("<Q", len(bounds))
        + struct.pack(f"<{len(sequences)}i", *map(len, sequences))
        + struct.pack(f"<{len(sequences)}q", *offsets)
        + struct.pack(f"<{len(bounds)}q", *bounds)
    )


@pytest.mark.parametrize(("code", "kind"), [(1, "u1"), (2, "i1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2")])
def test_megatrons_documents_consist_of_sequences(tmp_path, code, kind):
    write_megatron(tmp_path / "x", [[1, 2], [3], [4, 5, 6], [], [7]], [0, 2, 3, 4, 5], code, kind)
    documents = [[1, 2, 3], [4, 5, 6], [7]]
    for name in ("x.idx", "x.bin", "x"):
        for piece_bytes in (1, 10**6):
            assert read(tmp_path / name, piece_bytes) == documents
    assert read(tmp_path, format="megatron") == documents
    assert count_documents(list_files(Source("k", str(tmp_path / "x.bin"))), 100, Reading()) == 4


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda data: b"NOTMMID\0\0" + data[9:], "does not start with MMIDIDX"),
        (lambda data: data[:9] + struct.pack("<Q", 2) + data[17:], "has version 2"),
        (lambda data: data[:17] + b"\x07" + data[18:], "the ids the type code 7"),
        (lambda data: data[:-1], "too few for 2 sequences and 3 bounds"),
        (lambda data: data[:-8] + struct.pack("<q", 9), "do not cover its sequences"),
        (lambda data: data[:34] + struct.pack("<i", 99) + data[38:], "extends beyond its .bin"),
        (lambda data: data[:42] + struct.pack("<2q", 0, 2**63 - 2) + data[58:], "extends beyond its .bin"),
        (lambda data: data[:34] + struct.pack("<2i2q", 2, 2, 0, 2) + data[58:], "8 bytes together, and its .bin has 6"),
        (lambda data: data[:18] + struct.pack("<2Q", 2**61, 2**61) + data[34:], "too few for"),
        (
            lambda data: (
                data[:26] + struct.pack("<Q", 4) + data[34:58] + struct.pack("<4q", 0, 2**63 - 1, 10 - 2**63, 2)
            ),
            "do not cover its sequences",
        ),
    ],
)
def test_a_damaged_megatron_index_is_refused(tmp_path, change, problem):
    write_megatron(tmp_path / "x", [[1, 2], [3]], [0, 1, 2])
    index = tmp_path / "x.idx"
    index.write_bytes(change(index.read_bytes()))
    with pytest.raises(DataError, match=rf"x\.idx .*{problem}"):
        read(index, format="megatron")
    index.unlink()
    with pytest.raises(DataError, match=r"x\.idx or its \.bin cannot be read"):
        read(tmp_path / "x.bin", format="megatron")


MDS = Path(__file__).parent / "mds"
"""Folders that `MDSWriter` of mosaicml-streaming 0.13.0 wrote, each named by the form of its columns or shards."""

MDS_TEXTS = [f"document {number}: größe {'x' * (number * 7 % 30)}" for number in range(16)]
MDS_IDS = [list(range(number % 7, 5 + number % 7 + number % 4)) for number in range(5)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("text", MDS_TEXTS),  # several shards, with other columns and an index.json, which is no text
        ("gz", MDS_TEXTS),
        ("packed", MDS_TEXTS),  # .zstd
        ("arrays", MDS_IDS),
        ("any", MDS_IDS),  # whose type is stored with each value
        ("bytes", MDS_IDS),  # int64, as of llm-foundry
        ("fixed", [list(range(number, number + 4)) for number in range(4)]),
    ],
)
def test_samples_of_mds_shards(name, expected):
    fields = {} if isinstance(expected[0], str) else {"fields": {"input_ids": "tokens"}}
    assert read(MDS / name, **fields) == expected
    if name == "text":
        assert len(list_files(Source("k", str(MDS / name)))) == 2
        assert read(MDS / name / "*.mds", piece_bytes=1) == expected


def test_examples_of_mds_shards():
    [file] = list_files(Source("data.train.0", str(MDS / "turns")))
    records = [record.content for span in cut_file(file) for record in read_records(span, Reading())]
    assert records[2] == {
        "messages": [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "yes"}]
    } and len(records) == 5  # fmt: skip


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda data: data[:-30], [*MDS_IDS[:4], "cannot be read, nor can the rest of the shard (it ends early)"]),
        (lambda data: b"\xff" * 9 + data[9:], ["(it is not an MDS shard)"]),
        (lambda data: data[:200], ["it ends early"]),
        (lambda data: data.replace(b'"tokens"', b'"takens"'), None),
    ],
)
def test_a_damaged_mds_shard_loses_its_end(tmp_path, change, found):
    (tmp_path / "x.mds").write_bytes(change((MDS / "bytes" / "shard.00000.mds").read_bytes()))
    if found is None:
        with pytest.raises(DataError, match=r"x\.mds has no column `tokens`; its columns are takens"):
            read(tmp_path / "x.mds", fields={"input_ids": "tokens"})
        return
    *kept, last = read(tmp_path / "x.mds", fields={"input_ids": "tokens"})
    assert kept == found[:-1] and last.startswith(f"{tmp_path / 'x.mds'}, record {len(kept)} ") and found[-1] in last


@pytest.mark.parametrize(
    "header",
    [
        b"[]", b"7", b"null", b"[" * 10**5, b'{"column_names": 1, "column_encodings": 2, "column_sizes": 3}',
        b'{"column_names": [[]], "column_encodings": ["str"], "column_sizes": [null]}',
        b'{"column_names": ["tokens"], "column_encodings": [7], "column_sizes": [null]}',
        b'{"column_names": ["tokens"], "column_encodings": ["bytes"], "column_sizes": ["x"]}',
        b'{"column_names": ["tokens"], "column_encodings": ["bytes"], "column_sizes": [-8]}',
        b'{"column_names": ["tokens"], "column_encodings": ["bytes"], "column_sizes": []}',
        b'{"column_names": ["tokens"], "column_encodings": ["ndarray:what"], "column_sizes": [8]}',
        b'{"column_names": ["tokens"], "column_encodings": ["ndarray:O"], "column_sizes": [8]}',
        b'{"column_names": ["tokens"], "column_encodings": ["ndarray:int64:9223372036854775808"], "column_sizes": [8]}',
        b'{"column_names": ["tokens"], "column_encodings": ["ndarray:int64:1:2"], "column_sizes": [8]}',
        b'{"column_names": ["tokens"], "column_encodings": ["ndarray:int64:x"], "column_sizes": [8]}',
    ],
    ids=lambda header: header[:90].decode(),
)  # fmt: skip
def test_a_hostile_header_of_an_mds_shard_is_one_broken_record(tmp_path, header):
    start = 12 + len(header)
    (tmp_path / "x.mds").write_bytes(struct.pack("<3I", 1, start, start + 8) + header + bytes(8))
    [found] = read(tmp_path / "x.mds", fields={"input_ids": "tokens"})
    assert found.startswith(f"{tmp_path / 'x.mds'}, record 0 cannot be ") and "\n" not in found


def test_formats_by_suffix_and_mismatches(tmp_path):
    path = write_jsonl(tmp_path / "x.txt", [{"text": "one"}])
    assert read(path) == ['{"text": "one"}\n']
    assert read(path, format="jsonl") == ["one"]
    with pytest.raises(ConfigError, match=r"format=tokens is for records in .jsonl, .*; for files of ids use nanogpt"):
        read(path, format="tokens")
    with pytest.raises(ConfigError, match=r"split=train\[:9\] is for Hugging Face datasets.*validation_fraction"):
        read(path, split="train[:9]")
