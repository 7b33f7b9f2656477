"""The detection of example records and their format, and reading them from every kind of file."""

import csv
import gzip
import json
import logging
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from echelon.ground.errors import ConfigError, DataError
from echelon.ground.progress import Progress
from echelon.learn.data.corpus import CorpusEntry, TextSample, describe_examples
from echelon.learn.data.readers import count_documents, cut_file, name_place, read_records
from echelon.learn.data.readers.arrays import ArrayReader
from echelon.learn.data.readers.record import Broken, Fields, Reading, Record, digest_document, hash_for_split
from echelon.learn.data.source import Source, list_files
from echelon.recipe.data_formats import RECORD_FORMATS, recognise_format
from tests.unit.recipe_samples import SMALL, load_text

TALK = [{"role": "user", "content": "Hi ü"}, {"role": "assistant", "content": "Ho"}]
RECORDS = [{"messages": TALK, "id": number} for number in range(50)]
ALPACA = [{"instruction": "Say ü", "input": "", "output": "ü"}, {"instruction": "Add", "input": "1 1", "output": "2"}]


def read(path: Path, piece_bytes: int = 500, **options) -> list[object]:
    """The contents of the records, and the positions of broken ones."""
    found = []
    for file in list_files(Source("data.train.0", str(path), **options)):
        for span in cut_file(file, piece_bytes):
            for each in read_records(span, Reading()):
                found.append(f"{name_place(each)} {each.problem}" if isinstance(each, Broken) else each.content)
    return found


def write(path: Path, records: list[object]) -> Path:
    """Write records to a file of the format of the suffix."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    elif path.suffix == ".json":
        path.write_text(json.dumps(records, indent=1, ensure_ascii=False))
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(json.dumps(records).encode()))
    elif path.suffix == ".csv":
        with path.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, list(records[0]))
            writer.writeheader()
            writer.writerows(records)
    else:
        table = pa.Table.from_pylist(records)
        if path.suffix == ".parquet":
            pq.write_table(table, path, row_group_size=20)
        else:
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
                writer.write_table(table, max_chunksize=20)
    return path


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.json.gz", "x.parquet", "x.arrow"])
def test_every_kind_of_file_yields_examples(tmp_path, name):
    path = write(tmp_path / name, RECORDS)
    assert read(path) == [{"messages": TALK}] * 50
    (file,) = list_files(Source("data.train.0", str(path)))
    assert file.fields == Fields("messages")
    assert count_documents([file], 30, Reading()) == 30
    positions = [found.position for span in cut_file(file, 500) for found in read_records(span, Reading())]
    assert positions == sorted(set(positions))
    assert len(positions) == 50


def test_columns_of_no_format_are_not_read(tmp_path):
    path = write(tmp_path / "x.parquet", [{**record, "blob": "x" * 100} for record in RECORDS])
    (file,) = list_files(Source("data.train.0", str(path)))
    assert file.fields.columns(["id", "blob", "messages", "tools"]) == ("messages", "tools")


def test_fields_that_only_other_rows_have_are_absent(tmp_path):
    """A table, or a streamed dataset, adds the arguments of all other tool calls as null."""
    calls = [{"function": {"name": "f", "arguments": {name: 1}}} for name in ("a", "b")]
    records = [{"messages": [*TALK, {"role": "assistant", "tool_calls": [call]}]} for call in calls]
    (tmp_path / "hub").mkdir()
    for path in (write(tmp_path / "x.parquet", records), write(tmp_path / "hub" / "x.parquet", records)):
        source = {"format": "hub", "split": "train"} if path.parent.name == "hub" else {}
        found = read(path if not source else path.parent, **source)
        assert [each["messages"][2]["tool_calls"] for each in found] == [[call] for call in calls]


def test_csv_contains_texts(tmp_path):
    path = write(tmp_path / "x.csv", ALPACA)
    assert read(path) == ALPACA
    path.write_text("prompt,completion\na,b\nc\n\nd,\udce9\n", errors="surrogateescape")
    assert read(path) == [
        {"prompt": "a", "completion": "b"},
        f"{path}:3 has only 1 columns; `completion` is column 2",
        f"{path}:5 has text that is not UTF-8 in `completion` (surrogates not allowed)",
    ]


def test_formats_are_recognised_by_their_fields():
    wanted = {
        "alpaca": ["instruction", "input", "output"], "sharegpt": ["conversations", "id"],
        "messages": ["prompt", "messages"],
        "prompt_completion": ["prompt", "completion"], "rejected_response": ["messages", "rejected_response"],
        "preference": ["prompt", "chosen", "rejected", "messages"],
        "tokens": ["input_ids", "attention_mask", "labels"], "unpaired_preference": ["prompt", "completion", "label"],
        "prompt": ["prompt", "answer"],
    }  # fmt: skip
    assert {name: recognise_format(fields) for name, fields in wanted.items()} == {name: name for name in wanted}
    assert {*wanted, "unpaired_messages", "labelled"} == set(RECORD_FORMATS)
    labelled = ["messages", "label"]  # which may be any label
    assert recognise_format(labelled) == "messages"
    assert recognise_format(labelled, is_named=True) == "unpaired_messages"
    for fields in (["text", "messages"], ["input_ids"], ["body"], []):
        assert recognise_format(fields) is None


def test_fields_under_other_names(tmp_path):
    turns = [{"speaker": "user", "body": "Hi"}, {"speaker": "assistant", "body": "Ho", "train": False}]
    path = write(tmp_path / "x.jsonl", [{"dialogue": turns, "messages": 5}])
    fields = {"messages": "dialogue", "role": "speaker", "content": "body"}
    wanted = [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho", "train": False}]}]
    assert read(path, fields=fields) == wanted
    assert read(path, fields=fields, format="messages") == wanted
    with pytest.raises(
        DataError,
        match=r"fields: with these names, the first record of .* does not have the fields of any format; .* dialogue",
    ):
        read(path, fields={"messages": "talk"})
    path = write(tmp_path / "y.jsonl", [{"ids": [1, 2], "targets": [-100, 2]}])
    assert read(path, fields={"input_ids": "ids", "labels": "targets"}) == [{"input_ids": [1, 2], "labels": [-100, 2]}]


def test_the_recipe_sets_the_format_of_records(tmp_path):
    both = write(tmp_path / "x.jsonl", [{"text": "plain", "prompt": "a", "completion": "b"}])
    assert read(both) == [b"plain"]
    assert read(both, format="prompt_completion") == [{"prompt": "a", "completion": "b"}]
    assert read(both, format="jsonl", fields={"text": "prompt"}) == [b"a"]
    path = write(tmp_path / "y.jsonl", [*RECORDS[:1], {"conversations": []}, {"messages": None}, 5])
    wanted = "has no field `messages`, which the format messages requires"
    assert read(path)[1:] == [f"{path}:2 {wanted}", f"{path}:3 {wanted}", f"{path}:4 is not a JSON object"]
    with pytest.raises(ConfigError, match=r"format=alpaca is for records in \.jsonl, \.json, .*, not for .*z\.txt\."):
        read(Path(write(tmp_path / "z.jsonl", RECORDS).rename(tmp_path / "z.txt")), format="alpaca")
    with pytest.raises(
        DataError, match=r"no column `instruction` and `output`; its columns are messages, id\. Set fields:"
    ):
        read(write(tmp_path / "x.parquet", RECORDS), format="alpaca")


def test_json_files_are_text_except_arrays_of_known_records(tmp_path):
    config = tmp_path / "config.json"
    for text in ('{"messages": []}', '[{"name": "x"}]', "[1, 2]", "[]", "not JSON"):
        config.write_text(text)
        assert read(config) == [text.encode()]
    alpaca = write(tmp_path / "alpaca.json", ALPACA)
    assert read(alpaca) == ALPACA
    assert read(write(tmp_path / "text.json", [{"text": "one"}, {"text": "two"}])) == [b"one", b"two"]
    # A folder with other text is source code, so every file is text, unless a format is given.
    (tmp_path / "a.py").write_text("1")
    assert alpaca.read_bytes() in read(tmp_path)
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder / "a.json", ALPACA)
    write(folder / "b.jsonl", ALPACA)
    assert read(folder) == read(folder, format="alpaca") == ALPACA * 2


@pytest.mark.parametrize("piece", [1, 7, 64])
def test_arrays_are_read_an_element_at_a_time(tmp_path, piece, monkeypatch):
    monkeypatch.setattr("echelon.learn.data.readers.arrays.PIECE_BYTES", piece)
    odd = [{"prompt": 'a "]}, {" \\', "completion": "ü語🙂"}, {"prompt": "", "completion": "[1, 2]"}]
    path = tmp_path / "x.json"
    for text in (json.dumps(odd), json.dumps(odd, indent=3, ensure_ascii=False), "\ufeff " + json.dumps(odd) + "\n\n"):
        path.write_text(text, encoding="utf-8")
        assert read(path) == odd


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('[{"prompt": "a", "completion": "b"}, {"prompt": ', "cannot be read, nor can the rest of the file"),
        ('[{"prompt": "a", "completion": "b"}', "the file ends inside the array"),
        ('[{"prompt": "a", "completion": "b"} {"prompt": "a"}]', "'{' instead of a comma"),
        ('[{"prompt": "a", "completion": "b"}, 5]', "is not a JSON object"),
        ('[{"prompt": "a", "completion": "b"}, ]', "cannot be read"),
        ('[{"prompt": "a", "completion": "b"}, ' + "[" * 100_000, "cannot be read"),
    ],
)
def test_damaged_arrays_yield_the_elements_before_the_damage(tmp_path, text, problem):
    (tmp_path / "x.json").write_text(text)
    good, broken = read(tmp_path / "x.json")
    assert good == {"prompt": "a", "completion": "b"}
    assert broken.startswith(f"{tmp_path / 'x.json'}, record 1 ")
    assert problem in broken


def test_a_file_without_an_array(tmp_path):
    (tmp_path / "x.json").write_text('{"prompt": "a", "completion": "b"}')
    (broken,) = read(tmp_path / "x.json", format="prompt_completion")
    assert "it is not an array of records" in broken
    assert not list(ArrayReader().cut(list_files(Source("k", str(write(tmp_path / "e.json", [])), "json"))[0]))


def test_examples_are_distinguished_by_their_content():
    one, same, other = {"a": [1], "b": "x"}, {"b": "x", "a": [1]}, {"a": [2], "b": "x"}
    assert hash_for_split(one) == hash_for_split(same) != hash_for_split(other)
    assert digest_document([one]) == digest_document([same]) != digest_document([other])
    assert digest_document([{}]) != digest_document([b"{}"])


def test_tokenizers_are_trained_on_the_text_of_examples(tmp_path):
    path = write(tmp_path / "x.jsonl", [{"messages": [*TALK, {"role": "user", "content": "\ud800!"}]}])
    source = Source("data.train.0", str(path))
    entry = CorpusEntry("train", source, list_files(source))
    texts = list(TextSample([entry], 1000, Progress("", 1, logging.getLogger()), 1, "assistant").read())
    assert texts == ["user", "Hi ü", "assistant", "Ho", "user", "!"]
    assert list(describe_examples([entry])) == [f"data.train.0: records of format messages in {path}"]


def test_records_have_their_position(tmp_path):
    path = write(tmp_path / "x.jsonl", RECORDS[:3])
    (file,) = list_files(Source("data.train.0", str(path)))
    found = [each for span in cut_file(file) for each in read_records(span, Reading())]
    assert all(isinstance(each, Record) for each in found)
    assert name_place(Broken(file, found[2].position, "")) == f"{path}:3"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "fields: {mesages: m}",
            r"data\.train\.0\.fields\.mesages=m is not a field of any format: did you mean messages\?",
        ),
        ("format: alpaca, fields: {prompt: q}", "is not a field of alpaca: it maps one of instruction, output, input"),
        ("format: npy, fields: {text: t}", "has no effect: data.train.0.format=npy has no records"),
        ("fields: {text: ''}", "fields.text is empty"),
    ],
)
def test_unknown_fields_are_refused(tmp_path, source, message):
    with pytest.raises(ConfigError, match=message):
        load_text(tmp_path, SMALL, f"data.train=[{{path: x, {source}}}]")
