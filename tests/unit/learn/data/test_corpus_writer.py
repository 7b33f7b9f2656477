"""Writing shards: every format from any number of processes, broken records, copies, separators, and resuming."""

import csv
import gzip
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from echelon.ground.errors import ConfigError, DataError, EchelonError, HubUnreachableError
from echelon.learn.data import corpus_writer as writing
from echelon.learn.data.prepare import prepare
from echelon.learn.data.prepare_spec import PrepareSpec
from echelon.learn.data.prepared import PreparedData
from echelon.learn.data.readers import datasets as datasets_reader
from echelon.learn.data.sinks import DigestSet
from echelon.learn.data.source import Source
from echelon.learn.data.tokenize import WorkerDiedError
from echelon.learn.data.tokenizer import train_tokenizer

TEXTS = [f"document {index}: {'größe ' * (index % 90)}" for index in range(3000)]


def build_spec(tmp_path: Path, *sources: Path | Source, **fields: object) -> PrepareSpec:
    defaults: dict[str, object] = {
        "validation": (),
        "validation_fraction": 0.0,
        "tokenizer": "bytes",
        "checkpoint": None,
        "prepared_dir": tmp_path / "prepared",
        "sequence_len": 16,
        "workers": 1,
    }
    train = tuple(
        each if isinstance(each, Source) else Source(f"data.train.{index}", str(each), name=each.name)
        for index, each in enumerate(sources)
    )
    return PrepareSpec(train=train, **{**defaults, **fields})


def trained_tokenizer(tmp_path: Path, vocab_size: int = 300) -> str:
    train_tokenizer(TEXTS[:100], vocab_size).save_pretrained(tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")


def tokens_of(prepared: PreparedData) -> list[int]:
    return np.concatenate(list(prepared.train.iter_tokens())).tolist()


def write_jsonl(path: Path, texts: list[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts), encoding="utf-8")
    return path


def write_formats(folder: Path, texts: list[str]) -> dict[str, Path]:
    """The same documents in every format of text."""
    import datasets

    lines = write_jsonl(folder / "lines.jsonl", texts)
    (folder / "packed.jsonl.gz").write_bytes(gzip.compress(lines.read_bytes(), compresslevel=1))
    table = pa.table({"text": texts})
    pq.write_table(table, folder / "x.parquet", row_group_size=700)
    with pa.ipc.new_file(str(folder / "x.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=500)
    with (folder / "x.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([["text"], *([text] for text in texts)])
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(folder / "saved")
    names = ["lines.jsonl", "packed.jsonl.gz", "x.parquet", "x.arrow", "x.csv", "saved"]
    return {name: folder / name for name in names}


def test_every_format_gives_the_same_tokens_from_any_number_of_processes(tmp_path, monkeypatch):
    monkeypatch.setattr("echelon.learn.data.tokenize.PIECE_BYTES", 2**16)
    tokenizer = trained_tokenizer(tmp_path)
    seen = set()
    texts = TEXTS[:1000]
    for name, path in write_formats(tmp_path, texts).items():
        for workers in (1, 2) if name in ("lines.jsonl", "x.parquet", "saved") else (1,):
            spec = build_spec(
                tmp_path, path, tokenizer=tokenizer, workers=workers, prepared_dir=tmp_path / f"{name}-{workers}"
            )
            prepared = prepare(spec)
            (record,) = prepared.manifest.streams["train"]
            assert (record.documents, record.num_broken) == (len(texts), 0), name
            assert record.text_bytes == sum(len(text.encode()) for text in texts)
            seen.add(prepared.content_digest)
    assert len(seen) == 1


def test_a_split_of_a_saved_dataset(tmp_path):
    import datasets

    parts = {"train": TEXTS[:100], "test": TEXTS[100:110]}
    saved = datasets.DatasetDict({name: datasets.Dataset.from_dict({"text": texts}) for name, texts in parts.items()})
    saved.save_to_disk(tmp_path / "saved", num_shards={"train": 3, "test": 1})

    def read(split: str | None) -> bytes:
        source = Source("data.train.0", str(tmp_path / "saved"), split=split)
        return bytes(tokens_of(prepare(build_spec(tmp_path, source))))

    assert read("train") == "".join(TEXTS[:100]).encode()
    assert read("test") == "".join(TEXTS[100:110]).encode()
    for split in ("train[:90%]", "train[34:67]", "train[-10:]", "test+train[:1]"):
        names = datasets.ReadInstruction.from_spec(split).to_absolute({"train": 100, "test": 10})
        rows = [text for name in names for text in parts[name.splitname][name.from_ : name.to]]
        assert read(split) == "".join(rows).encode(), split
    with pytest.raises(ConfigError, match=r"saved has the splits train, test; select one, for example split: train"):
        read(None)
    with pytest.raises(ConfigError, match=r"split=dev: .*The dataset has train \(100 records\), test \(10 records\)"):
        read("dev")


def test_a_validation_split_of_the_same_files_is_no_overlap(tmp_path):
    import datasets

    datasets.Dataset.from_dict({"text": TEXTS[:100]}).save_to_disk(tmp_path / "saved")
    train, held_out, overlapping = (
        Source("data.train.0", str(tmp_path / "saved"), name="saved", split=split)
        for split in ("train[:90]", "train[90:]", "train[89:]")
    )
    prepared = prepare(build_spec(tmp_path, train, validation=(held_out,)))
    # The training and the validation source have the same key here; only the rows differ.
    assert prepared.train.num_tokens == len("".join(TEXTS[:90]).encode())
    with pytest.raises(DataError, match=r"which is also in data\.train"):
        prepare(build_spec(tmp_path, train, validation=(overlapping,)))


def test_a_dataset_is_streamed_and_the_hub_refused_without_a_network(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    (tmp_path / "repository").mkdir()
    write_jsonl(tmp_path / "repository" / "train.jsonl", TEXTS[:200])
    write_jsonl(tmp_path / "repository" / "test.jsonl", TEXTS[200:210])
    source = Source("data.train.0", str(tmp_path / "repository"), "hub", split="train")
    assert bytes(tokens_of(prepare(build_spec(tmp_path, source)))) == "".join(TEXTS[:200]).encode()
    source = Source("data.train.0", str(tmp_path / "repository"), "hub")
    with pytest.raises(ConfigError, match=r"has the splits train, test; select one, for example split: train"):
        prepare(build_spec(tmp_path, source))
    source = Source("data.train.0", str(tmp_path / "repository"), "hub", split="train[:50%]")
    with pytest.raises(ConfigError, match="does not give its number of records"):
        prepare(build_spec(tmp_path, source))
    monkeypatch.setattr("echelon.learn.model.hub.is_hub_reachable", lambda: False)
    with pytest.raises(HubUnreachableError, match=r"data\.train\.0\.path=org/name: .* cannot be reached"):
        prepare(build_spec(tmp_path, Source("data.train.0", "org/name", "hub")))


def test_given_ids_are_kept_and_end_with_the_separator(tmp_path):
    tokenizer = trained_tokenizer(tmp_path)  # <|endoftext|> has id 0
    documents = [[5, 6, 7], [8, 0], [9]]
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in documents))
    prepared = prepare(build_spec(tmp_path, path, tokenizer=tokenizer))
    assert tokens_of(prepared) == [5, 6, 7, 0, 8, 0, 9, 0]
    assert prepared.manifest.streams["train"][0].text_bytes is None
    np.array([5, 0, 6, 7, 0, 8], dtype="<u2").tofile(tmp_path / "x.bin")
    prepared = prepare(build_spec(tmp_path, tmp_path / "x.bin", tokenizer=tokenizer))
    assert tokens_of(prepared) == [5, 0, 6, 7, 0, 8]
    assert prepared.manifest.streams["train"][0].documents == 3
    np.array([5, 300, 6, 301], dtype="<u2").tofile(tmp_path / "x.bin")
    with pytest.raises(DataError, match=r"x\.bin contains the id 301, but the tokenizer has the ids 0 to 299"):
        prepare(build_spec(tmp_path, tmp_path / "x.bin", tokenizer=tokenizer))
    np.save(tmp_path / "x.npy", np.array([[5, -1], [3, 4]]))
    with pytest.raises(DataError, match=r"x\.npy contains the id -1"):
        prepare(build_spec(tmp_path, tmp_path / "x.npy", tokenizer=tokenizer))


def test_documents_of_ids_are_held_out_by_hash(tmp_path):
    tokenizer = trained_tokenizer(tmp_path)
    rng = np.random.default_rng(0)
    documents = [[*rng.integers(1, 300, rng.integers(5, 50)).tolist(), 0] for _ in range(200)]
    flat = [token for document in documents for token in document]
    np.array(flat, dtype="<u2").tofile(tmp_path / "x.bin")
    prepared = prepare(build_spec(tmp_path, tmp_path / "x.bin", tokenizer=tokenizer, validation_fraction=0.1))
    (held_out,) = prepared.manifest.validation
    assert held_out.method == "hash"
    assert 5 < held_out.documents < 45
    both = tokens_of(prepared) + np.concatenate(list(prepared.validation[0].dataset.iter_tokens())).tolist()
    assert sorted(both) == sorted(flat)


@pytest.mark.parametrize("workers", [1, 2])
def test_broken_lines_are_skipped_up_to_a_fraction(tmp_path, workers, caplog):
    lines = [json.dumps({"text": text}).encode() for text in TEXTS]
    for index in (7, 1500, 2990):
        lines[index] = b'{"text": "caf\xe9"}'
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"\n".join(lines))
    (record,) = prepare(build_spec(tmp_path, path, workers=workers)).manifest.streams["train"]
    assert (record.documents, record.num_broken) == (2997, 3)
    assert [place.split(" ")[0] for place in record.broken] == [f"{path}:8", f"{path}:1501", f"{path}:2991"]
    (line,) = (line for line in caplog.messages if "dropped" in line)
    assert line.startswith(f"data.train.0: dropped 3 of 3,000 records: {path}:8 cannot be read ('utf-8' codec can't ")
    with pytest.raises(DataError, match=r"3 of 3,000 records cannot be used.*fraction=0\.0009: .*x\.jsonl:8 .*:1501"):
        prepare(build_spec(tmp_path, path, workers=workers, max_broken_fraction=0.0009))
    with pytest.raises(DataError, match=r": 1 of .* records cannot be used.*fraction=0: .*x\.jsonl:8 "):
        prepare(build_spec(tmp_path, path, workers=workers, max_broken_fraction=0.0))
    assert not list((tmp_path / "prepared").glob("*.partial"))


def test_a_source_without_the_field_is_refused_early(tmp_path, monkeypatch):
    monkeypatch.setattr("echelon.learn.data.tokenize.PIECE_BYTES", 2**14)
    path = write_jsonl(tmp_path / "x.jsonl", TEXTS * 20, field="body")
    with pytest.raises(DataError, match=r"1,000 of 1,000 records cannot be used.*x\.jsonl:1 has no field `text`"):
        prepare(build_spec(tmp_path, path, max_broken_fraction=0.9))


@pytest.mark.parametrize("workers", [1, 2])
def test_copies_across_sources_and_of_validation_text_are_removed(tmp_path, workers, caplog):
    long = "a line that is long enough to be cut\n" * 60_000  # more than two spans
    assert len(long) > 2 * 2**20
    first, second, third = tmp_path / "first", tmp_path / "second.jsonl", tmp_path / "held-out.jsonl"
    first.mkdir()
    for name, text in {"a": "one", "b": long, "c": "two", "d": long, "e": long[:-1] + "!", "f": "one"}.items():
        (first / f"{name}.txt").write_text(text)
    write_jsonl(second, ["three", "two", "four", "three", long, "held out"])
    write_jsonl(third, ["held out", "held out", "four"])
    validation = (Source("data.validation.0", str(third), name="held-out"),)
    spec = build_spec(tmp_path, first, second, validation=validation, deduplicate=True, workers=workers)
    prepared = prepare(spec)
    assert bytes(tokens_of(prepared)).decode() == "one" + long + "two" + long[:-1] + "!" + "three"
    assert [record.num_duplicates for record in prepared.manifest.streams["train"]] == [2, 5]
    assert [record.documents for record in prepared.manifest.streams["train"]] == [4, 1]
    (held_out,) = prepared.validation
    assert held_out.dataset.num_tokens == len("held outheld outfour")
    assert "data.train.0: dropped 2 of 6 documents as copies" in caplog.messages
    assert "data.train.1: dropped 5 of 6 documents as copies" in caplog.messages
    assert prepared.path != prepare(build_spec(tmp_path, first, second, validation=validation)).path


def test_the_digest_set_equals_a_python_set():
    rng = random.Random(0)
    numbers = [rng.randrange(20_000) for _ in range(60_000)]
    digests, expected = DigestSet(), set()
    for number in numbers:
        digest = hashlib.blake2b(number.to_bytes(4, "little"), digest_size=16).digest()
        assert digests.add(digest) == (digest not in expected)
        expected.add(digest)
    assert len(digests) == len(expected)
    assert 16 * len(expected) * 4 / 3 < digests.num_bytes < 43 * len(expected)


def test_the_choice_of_separator(tmp_path):
    path = write_jsonl(tmp_path / "x.jsonl", ["one", "two"])
    tokenizer = train_tokenizer(TEXTS[:50], 300)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|doc|>"]})
    tokenizer.save_pretrained(tmp_path / "tokenizer")

    def separator_of(choice: str | None) -> list[int]:
        prepared = prepare(build_spec(tmp_path, path, tokenizer=str(tmp_path / "tokenizer"), separator=choice))
        assert prepared.tokenizer.decode(tokens_of(prepared)).startswith("one")
        return [token for token in tokens_of(prepared) if token in (0, 300)]

    assert separator_of("eos") == [0, 0]
    assert separator_of("<|doc|>") == [300, 300]
    assert separator_of(None) == []
    with pytest.raises(
        ConfigError, match=r"data\.document_separator=<\|no\|> is not a token .*special tokens: .*<\|doc\|>"
    ):
        separator_of("<|no|>")
    with pytest.raises(ConfigError, match=r"data\.document_separator=A is not a token of the tokenizer bytes"):
        prepare(build_spec(tmp_path, path, separator="A"))


KILLED = """
import os, signal, sys
from pathlib import Path
from echelon.learn.data import corpus_writer as writing
from echelon.learn.data.sinks import WritingJournal
from tests.unit.learn.data.test_corpus_writer import resumable_spec

writing.POINT_BYTES = 2**18
save, points = WritingJournal.save, []

def save_and_stop(self):
    save(self)
    points.append(sum(entry.num_tasks for entry in self.state.entries))
    if len(points) == 2:
        print("point", flush=True)

WritingJournal.save = save_and_stop
if __name__ == "__main__":
    from echelon.learn.data.prepare import prepare
    prepare(resumable_spec(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])))
"""


def resumable_spec(folder: Path, prepared_dir: Path, workers: int) -> PrepareSpec:
    """Two sources, a trained tokenizer, copies, broken lines, a hash split, and shards of few tokens."""
    return build_spec(
        folder,
        folder / "texts",
        Source("data.train.1", str(folder / "x.jsonl"), name="x.jsonl", max_samples=1500),
        tokenizer=270,
        prepared_dir=prepared_dir,
        workers=workers,
        validation_fraction=0.1,
        deduplicate=True,
        max_shard_tokens=100_000,
    )


def write_resumable(folder: Path) -> None:
    (folder / "texts").mkdir()
    rng = random.Random(1)
    words = [f"w{rng.randrange(10**6)}" for _ in range(200)]
    for index in range(2):
        (folder / "texts" / f"{index}.txt").write_text(" ".join(rng.choices(words, k=180_000)).replace("w7", "\nx"))
    lines = [json.dumps({"text": " ".join(rng.choices(words, k=rng.randrange(1, 300)))}) for _ in range(1500)]
    lines += rng.choices(lines, k=150)
    lines[50] = "{"
    (folder / "x.jsonl").write_text("\n".join(lines))


FIRST = 60


def write_limited(folder: Path, text_len: int) -> Path:
    """Records of some megabytes; the second is broken, and beyond the first 60 too many are."""
    folder.mkdir()
    lines = [json.dumps({"text": f"{number} " + "größe " * text_len}) for number in range(3000)]
    lines[1] = "{"
    lines[FIRST:] = ["{" if number % 3 else line for number, line in enumerate(lines[FIRST:])]
    return write_lines(folder / "x.jsonl", lines)


def write_lines(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_limited_source_equals_a_source_of_its_first_records(tmp_path, workers, caplog):
    path = write_limited(tmp_path / "all", 300)
    first = write_lines(tmp_path / "x.jsonl", path.read_text(encoding="utf-8").split("\n")[:FIRST])
    options = {"tokenizer": 300, "max_broken_fraction": 0.1, "validation_fraction": 0.02, "workers": workers}
    limited = Source("data.train.0", str(path), max_samples=FIRST, name="x.jsonl")
    found = prepare(build_spec(tmp_path, limited, **options))
    expected = prepare(build_spec(tmp_path, first, **options))
    assert "data.train.0: only the first 60 records are read (max_samples)" in caplog.messages
    assert found.path != expected.path
    assert found.fingerprint == expected.fingerprint, "the tokenizer saw the first records alone"
    assert found.content_digest == expected.content_digest, "and so did the split"
    (record, *_), (same, *_) = found.manifest.streams["train"], expected.manifest.streams["train"]
    assert (record.documents, record.num_broken) == (same.documents, same.num_broken)
    assert record.num_broken == 1 and record.documents + found.manifest.validation[0].documents == FIRST - 1
    if workers == 1:  # several workers may have begun the next task by then
        # 3 of the 6 MB are after the first task: reading ended early.
        told = next(line for line in caplog.messages if line.startswith("tokenizing: ") and " in total" in line)
        assert float(told.split(" ")[1]) < 2.5 < path.stat().st_size / 1e6
    again = prepare(build_spec(tmp_path, replace(limited, max_samples=FIRST - 1), **options))
    assert again.path != found.path and again.content_digest != found.content_digest


def test_a_long_document_counts_once_and_is_read_to_its_end(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in "abc":
        (folder / f"{name}.txt").write_text(f"{name}\n" * 900_000)  # of two pieces, in two tasks
    source = Source("data.train.0", str(folder), max_samples=2)
    tokens = tokens_of(prepare(build_spec(tmp_path, source, separator=None)))
    assert bytes(tokens) == b"a\n" * 900_000 + b"b\n" * 900_000
    more = prepare(build_spec(tmp_path, replace(source, max_samples=99), separator=None))
    assert more.train.num_tokens == 5_400_000, "a source may hold fewer"


def test_a_limit_applies_to_each_source_separately(tmp_path):
    one = write_jsonl(tmp_path / "one.jsonl", ["a" * 40, "b" * 40, "c" * 40])
    two = write_jsonl(tmp_path / "two.jsonl", ["d" * 40, "e" * 40])
    sources = [Source("data.train.0", str(one), max_samples=2), Source("data.train.1", str(two), name="two")]
    held_out = (
        Source("data.validation.0", str(write_jsonl(tmp_path / "v.jsonl", ["x" * 40, "y" * 40])), max_samples=1),
    )
    prepared = prepare(build_spec(tmp_path, *sources, validation=held_out, separator=None))
    assert bytes(tokens_of(prepared)) == b"a" * 40 + b"b" * 40 + b"d" * 40 + b"e" * 40
    (validation,) = prepared.validation
    assert bytes(np.concatenate(list(validation.dataset.iter_tokens())).tolist()) == b"x" * 40


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 1])
def test_a_killed_preparation_resumes_with_the_same_result(tmp_path, workers, caplog):
    write_resumable(tmp_path)
    whole = prepare(resumable_spec(tmp_path, tmp_path / "whole", 1))
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.Popen(
        [sys.executable, script, tmp_path, tmp_path / "killed", str(workers)],
        stdout=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    assert child.stdout is not None
    assert child.stdout.readline() == "point\n"
    time.sleep(0.05)  # into data after the last recorded position
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    (partial,) = (tmp_path / "killed").glob("*.partial")
    trained = (partial / "tokenizer" / "tokenizer.json").stat().st_mtime_ns
    (partial / "train-007-00000.bin").write_bytes(b"left over")

    caplog.clear()
    resumed = prepare(resumable_spec(tmp_path, tmp_path / "killed", workers))
    assert any(line.startswith("tokenizing: resuming after") for line in caplog.messages)
    assert not any(line.startswith("tokenizer: training") for line in caplog.messages)
    assert (resumed.path / "tokenizer" / "tokenizer.json").stat().st_mtime_ns == trained
    assert resumed.manifest == whole.manifest
    names = sorted(path.name for path in whole.path.iterdir())
    assert sorted(path.name for path in resumed.path.iterdir()) == names
    for name in names:
        if name.endswith(".bin"):
            contents = [hashlib.sha256((each.path / name).read_bytes()).digest() for each in (whole, resumed)]
            assert contents[0] == contents[1]
    assert not partial.exists()


def test_an_interrupted_stream_resumes(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(writing, "POINT_BYTES", 2**16)
    (tmp_path / "texts").mkdir()
    lines = [json.dumps({"text": f"line {number} " * 100}) for number in range(4000)]
    (tmp_path / "texts" / "x.jsonl").write_text("\n".join(lines))
    spec = build_spec(tmp_path, Source("data.train.0", str(tmp_path / "texts"), "hub"))
    whole = prepare(spec)
    parse = datasets_reader.parse_record

    def break_off(file, number, record):
        if number == 3000:
            raise ConnectionResetError("the network is gone")
        return parse(file, number, record)

    monkeypatch.setattr(datasets_reader, "parse_record", break_off)
    spec = replace(spec, prepared_dir=tmp_path / "again")
    caplog.clear()
    with pytest.raises(
        EchelonError, match=r"cannot be read beyond record 3000 .*network is gone.*run again to continue"
    ):
        prepare(spec)
    monkeypatch.setattr(datasets_reader, "parse_record", parse)
    assert prepare(spec).manifest == whole.manifest
    assert any(line.startswith("tokenizing: resuming after") for line in caplog.messages)


@pytest.mark.slow
def test_progress_survives_a_dead_worker_and_a_full_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "POINT_BYTES", 2**18)
    write_resumable(tmp_path)
    spec = resumable_spec(tmp_path, tmp_path / "prepared", 1)
    take = writing.CorpusWriter.take

    def fail_with(error: Exception, after: int) -> None:
        calls = []

        def take_some(self, task, result):
            calls.append(task)
            if len(calls) > after:
                raise error
            take(self, task, result)

        monkeypatch.setattr(writing.CorpusWriter, "take", take_some)

    fail_with(WorkerDiedError("died"), 1)
    with pytest.raises(WorkerDiedError):
        prepare(spec)
    fail_with(OSError(28, "No space left on device"), 1)
    with pytest.raises(EchelonError, match=r"No space left .* The progress so far is kept in .*\.partial"):
        prepare(spec)
    fail_with(KeyboardInterrupt(), 0)
    with pytest.raises(KeyboardInterrupt):
        prepare(spec)
    assert len(list((tmp_path / "prepared").glob("*.partial"))) == 1
    monkeypatch.setattr(writing.CorpusWriter, "take", take)
    whole = prepare(resumable_spec(tmp_path, tmp_path / "whole", 1))
    assert prepare(spec).manifest == whole.manifest
