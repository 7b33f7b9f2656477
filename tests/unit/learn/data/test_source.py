"""The documents and files of a source, and the splitting of long files."""

import json
import random
import time
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from echelon.ground.errors import DataError
from echelon.learn.data.readers import count_documents, cut_file, name_place, read_records
from echelon.learn.data.readers.record import Broken, Reading, Record
from echelon.learn.data.readers.text import find_fault
from echelon.learn.data.source import PYTHON_STDLIB, Source, list_files

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def source(path: Path | str, **fields: object) -> Source:
    return Source("data.train[0]", str(path), **fields)


def read_span(span) -> list[bytes]:
    return [found.content for found in read_records(span, Reading()) if isinstance(found, Record)]


def read_all(path: Path | str, **fields: object) -> list[bytes]:
    return [text for file in list_files(source(path, **fields)) for span in cut_file(file) for text in read_span(span)]


def write_jsonl(path: Path, records: list[object]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def test_a_file_is_one_document_unchanged(tmp_path):
    content = "first\r\n\r\nsecond \ufeff ünï 語\n".encode()
    (tmp_path / "text").write_bytes(content)
    assert read_all(tmp_path / "text") == [content]


def test_a_folder_gives_its_text_files_by_relative_path(tmp_path):
    names = ["b.txt", "a/z.py", "a.md", "a/b/c.TXT", ".hidden/x.txt", ".x.txt", "__pycache__/x.py", "image.png"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    write_jsonl(tmp_path / "c.jsonl", [{"text": "one"}, {"text": "two"}])
    assert read_all(tmp_path) == [b"a.md", b"a/b/c.TXT", b"a/z.py", b"b.txt", b"one", b"two"]


def test_a_glob_takes_any_suffix(tmp_path):
    for name in ["b.one", "a.one", "c.two"]:
        (tmp_path / name).write_text(name)
    assert read_all(tmp_path / "*.one") == [b"a.one", b"b.one"]


def test_the_standard_library_is_python_source():
    names = [file.name for file in list_files(source(PYTHON_STDLIB))]
    assert "json/decoder.py" in names
    assert names == sorted(names)
    assert not [name for name in names if "/test/" in f"/{name}"]
    assert all(name.endswith(".py") and "site-packages" not in name and "__pycache__" not in name for name in names)


def test_jsonl_fields_and_blank_lines(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text('{"body": "one", "text": 3}\n\n  \n{"body": ""}\n{"body": "zwei \\u00fc"}')
    assert read_all(path, fields={"text": "body"}) == [b"one", "zwei ü".encode()]
    assert len(read_all(path, format="text")) == 1


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"text": "open', "cannot be read"),
        (b'{"body": "x"}', "has no field `text` or `input_ids`"),
        (b'{"text": 3}', "no text in `text`"),
        (b'["text"]', "not a JSON object"),
        (b'{"text": "\\ud800"}', "not UTF-8 in `text`"),
        (b'{"text": "\xff"}', "cannot be read"),
    ],
)
def test_a_broken_jsonl_line_is_named(tmp_path, line, problem):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text": "fine"}\n' * 6 + line + b'\n{"text": "fine"}\n')
    (file,) = list_files(source(path))
    spans = list(cut_file(file, piece_bytes=40))
    assert len(spans) > 2
    found = [each for span in spans for each in read_records(span, Reading())]
    (broken,) = (each for each in found if isinstance(each, Broken))
    assert name_place(broken) == f"{path}:7"
    assert problem in broken.problem
    assert len(found) == 8


@pytest.mark.parametrize("line", ["x\n", "\n"])
def test_a_large_file_without_a_record_is_listed_at_once(tmp_path, line):
    (tmp_path / "x.jsonl").write_text(line * 2**20)
    began = time.process_time()
    assert len(list_files(Source("data.train.0", str(tmp_path / "x.jsonl")))) == 1
    assert time.process_time() - began < 5


def test_missing_and_empty_sources_name_the_recipe_key(tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "folder").mkdir()
    for path in ["absent.txt", "*.nothing", "empty.txt", "folder"]:
        with pytest.raises(DataError, match=r"data\.train\[0\]\.path"):
            list_files(source(tmp_path / path))


def test_a_named_file_that_is_not_utf8_is_refused_with_its_offset(tmp_path):
    (tmp_path / "x.txt").write_bytes("über".encode() + b"\xff")
    with pytest.raises(DataError, match=r"x\.txt is not UTF-8 text: the byte at offset 5"):
        read_all(tmp_path / "x.txt")
    (tmp_path / "y.txt").write_bytes(b"line\n" * 100 + b"\xfe")
    (file,) = list_files(source(tmp_path / "y.txt"))
    with pytest.raises(DataError, match="offset 500"):
        [read_span(span) for span in cut_file(file, piece_bytes=30)]


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"caf\xe9", "is not UTF-8 text"),
        (b"\x7fELF" + bytes(90), "is binary, not text: 97% of its bytes are control characters"),
        ("words in UTF-16".encode("utf-16-le"), "is binary, not text: 50% of its bytes are control characters"),
    ],
    ids=["latin-1", "zeros", "utf-16"],
)
def test_a_file_in_a_folder_that_is_not_text_is_skipped(tmp_path, content, fault):
    (tmp_path / "x.txt").write_bytes(content)
    (file,) = list_files(source(tmp_path))
    (span,) = cut_file(file)
    assert find_fault(file) == fault
    assert list(read_records(span, Reading())) == [Broken(file, None, fault)]


def test_a_named_file_that_is_binary_is_refused(tmp_path):
    (tmp_path / "x.txt").write_bytes(b"some words\n" * 100_000 + bytes(2**21))
    message = r"x\.txt is binary, not text: \d+% of its bytes are control characters from the offset [\d,]+ on; .*iconv"
    with pytest.raises(DataError, match=message):
        read_all(tmp_path / "x.txt")


@pytest.mark.parametrize("name", ["x.txt", "."], ids=["file", "folder"])
def test_text_with_a_few_control_characters_is_read(tmp_path, name):
    """A lost byte of a log, colours of a terminal, form feeds."""
    content = b"a line of a log with a \0 in it, \x1b[31mred\x1b[0m\f\n" * 9
    (tmp_path / "x.txt").write_bytes(content)
    assert read_all(tmp_path / name) == [content]


def test_is_text_across_its_windows(tmp_path):
    path = tmp_path / "x.txt"
    path.write_bytes(b"x" * (2**20 - 1) + "ü".encode())
    assert find_fault(list_files(source(tmp_path))[0]) is None
    path.write_bytes(b"x" * (2**20 - 1) + "ü".encode()[:1])
    assert find_fault(list_files(source(tmp_path))[0]) is not None


def test_a_file_that_shrinks_is_refused(tmp_path):
    path = tmp_path / "x.txt"
    path.write_text("some text")
    (file,) = list_files(source(path))
    path.write_text("some")
    with pytest.raises(DataError, match="became shorter"):
        [read_span(span) for span in cut_file(file)]


def test_documents_are_counted_up_to_a_limit(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"text": "x"}] * 50 + [{"text": ""}])
    (tmp_path / "b.txt").write_text("x")
    (tmp_path / "c.txt").touch()
    (tmp_path / "d.txt").write_bytes(b"\xff")
    files = list_files(source(tmp_path))
    assert count_documents(files, 1000, Reading()) == 51
    assert count_documents(files, 20, Reading()) == 20


def awkward_texts() -> dict[str, str]:
    rng = random.Random(0)
    code = Path(json.decoder.__file__).read_text()
    parts = [*"X_. \t\n\n語é\u0301\u3000", "word", "42", "//", "  ", "\n\n", "\r\n", "'s"]
    return {
        "code": code,
        "crlf": code.replace("\n", "\r\n"),
        "blank lines": code.replace("\n", "\n\n \n"),
        "chinese": "他走了。\n她来了。\n" * 300,
        "noise": "".join(rng.choices(parts, k=6000)),
        "no line ends": "héllo wörld " * 100_000,
    }


@pytest.mark.parametrize("name", awkward_texts())
def test_spans_of_a_long_file_are_whole_and_in_order(tmp_path, name):
    content = awkward_texts()[name].encode()
    (tmp_path / "x.txt").write_bytes(content)
    (file,) = list_files(source(tmp_path / "x.txt"))
    spans = list(cut_file(file, piece_bytes=100 if len(content) < 100_000 else 20_001))
    assert len(spans) > 15
    assert [span.ends for span in spans] == [False] * (len(spans) - 1) + [True]
    records = [record for span in spans for record in read_records(span, Reading())]
    assert [record.is_first for record in records] == [True] + [False] * (len(spans) - 1)
    assert b"".join(text for span in spans for text in read_span(span)) == content


@pytest.mark.parametrize("pattern", [GPT2, LLAMA3, O200K], ids=["gpt2", "llama3", "o200k"])
def test_cuts_do_not_change_the_tokens_of_byte_level_bpe(tmp_path, pattern):
    """Compared with `tokenizers` on the whole text, for the splitting expressions of four model families."""
    texts = awkward_texts()
    del texts["no line ends"]
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts.values(), trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False)
    )
    for name, text in texts.items():
        path = tmp_path / "x.txt"
        path.write_bytes(text.encode())
        (file,) = list_files(source(path))
        pieces = [read_span(span)[0].decode() for span in cut_file(file, piece_bytes=60)]
        assert len(pieces) > 20
        in_pieces = [token for piece in pieces for token in tokenizer.encode(piece).ids]
        assert in_pieces == tokenizer.encode(text).ids, name


def test_jsonl_is_cut_at_line_ends_only(tmp_path):
    texts = [f"text {index} " + "x" * (index % 300) for index in range(500)]
    write_jsonl(tmp_path / "x.jsonl", [{"text": text} for text in texts])
    (file,) = list_files(source(tmp_path / "x.jsonl"))
    for piece_bytes in (1, 100, 10_000, 10**9):
        spans = list(cut_file(file, piece_bytes))
        assert [text.decode() for span in spans for text in read_span(span)] == texts
