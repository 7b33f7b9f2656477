"""Preparation of text: cache, lock, split, and refusals."""

import itertools
import json
import logging
import re
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from echelon.ground.checksums import write_manifest
from echelon.ground.errors import ConfigError, DataError, EchelonError
from echelon.ground.progress import Progress
from echelon.learn.data import prepare as prepare_module
from echelon.learn.data.prepare import prepare, prepare_data
from echelon.learn.data.prepare_spec import PrepareSpec, prepare_spec
from echelon.learn.data.prepared import PreparedData, open_prepared
from echelon.learn.data.readers.record import hash_for_split
from echelon.learn.data.shards import TokenDataset
from echelon.learn.data.source import PYTHON_STDLIB, Source
from echelon.learn.data.tokenizer import build_bytes_tokenizer, train_tokenizer
from echelon.recipe.load import load_recipe
from tests.unit.learn.data.test_corpus_writer import build_spec as build_corpus_spec

POEM = "Über allen Gipfeln\nIst Ruh,\nIn allen Wipfeln\nSpürest du\nKaum einen Hauch;\n"


def build_spec(tmp_path: Path, *paths: Path | str, **fields: object) -> PrepareSpec:
    sources = (Source(f"data.train[{index}]", str(path)) for index, path in enumerate(paths))
    return build_corpus_spec(tmp_path, *sources, **{"validation_fraction": 0.1, **fields})


def all_tokens(dataset) -> list[int]:
    return np.concatenate(list(dataset.iter_tokens())).tolist()


def write_documents(folder: Path, count: int, start: int = 0) -> list[str]:
    folder.mkdir(exist_ok=True)
    texts = [f"document {index}: " + POEM * (index % 3 + 1) for index in range(start, start + count)]
    for index, text in enumerate(texts, start):
        (folder / f"{index * 7919 % 10_007:05d}.txt").write_text(text)
    return texts


def held_out(prepared: PreparedData) -> TokenDataset:
    (only,) = prepared.validation
    return only.dataset


def method(prepared: PreparedData) -> str:
    (only,) = prepared.manifest.validation
    return only.method


def held_out_texts(prepared: PreparedData) -> set[str]:
    return {text for text in bytes(all_tokens(held_out(prepared))).decode().split("document ") if text}


def test_one_file_keeps_its_bytes_and_holds_out_its_end(tmp_path, caplog):
    path = tmp_path / "poem.txt"
    path.write_text(POEM * 20)
    prepared = prepare(build_spec(tmp_path, path))
    content = list((POEM * 20).encode())
    assert all_tokens(prepared.train) + all_tokens(held_out(prepared)) == content
    assert prepared.train.num_tokens == int(0.9 * len(content))
    assert prepared.vocab_size == 256
    assert any(line.startswith("validation: the last 10.") for line in caplog.messages)
    assert re.fullmatch(r"tokenizing: [\d.]+ K?i?B of [\d.]+ K?i?B, .* m?s in total", caplog.messages[0])


def test_a_trained_tokenizer_gives_the_tokens_transformers_gives(tmp_path):
    write_documents(tmp_path / "text", 4)
    prepared = prepare(build_spec(tmp_path, tmp_path / "text", tokenizer=300, validation_fraction=0.0))
    tokenizer = AutoTokenizer.from_pretrained(prepared.path / "tokenizer")
    expected = []
    for path in sorted((tmp_path / "text").iterdir()):
        expected += [*tokenizer(path.read_text())["input_ids"], tokenizer.eos_token_id]
    assert all_tokens(prepared.train) == expected
    assert prepared.validation == ()
    assert prepared.vocab_size == len(tokenizer)


def test_tokens_do_not_depend_on_the_number_of_processes(tmp_path, caplog):
    """The standard library, 30 MB of real text, with the fast bytes tokenizer."""
    checksums = set()
    for workers in (1, 2):
        spec = build_spec(
            tmp_path, PYTHON_STDLIB, workers=workers, prepared_dir=tmp_path / str(workers), validation_fraction=0.01
        )
        prepared = prepare(spec)
        checksums.add(
            tuple(shard.sha256 for name in ("train", "validation") for shard in prepared.manifest.shards(name))
        )
        assert any("selected by a hash of their content" in line for line in caplog.messages)
    assert len(checksums) == 1


def test_many_documents_are_held_out_by_their_content(tmp_path):
    folder = tmp_path / "text"
    texts = write_documents(folder, 200)
    first = prepare(build_spec(tmp_path, folder))
    assert method(first) == "hash"
    chosen = {text for text in texts if hash_for_split(text.encode()) / 2**64 < 0.1}
    assert held_out_texts(first) == {text.removeprefix("document ") for text in chosen}
    assert sorted(all_tokens(first.train) + all_tokens(held_out(first))) == sorted("".join(texts).encode())

    added = write_documents(folder, 200, start=200)
    for index, path in enumerate(sorted(folder.iterdir())):
        path.rename(folder / f"{index * 31 % 400:04d}-renamed.txt")
    second = prepare(build_spec(tmp_path, folder))
    new = {text.removeprefix("document ") for text in added}
    assert held_out_texts(second) - new == held_out_texts(first)


def test_with_few_documents_or_none_selected_the_end_is_held_out(tmp_path):
    folder = tmp_path / "text"
    texts = write_documents(folder, 9)
    assert method(prepare(build_spec(tmp_path, folder))) == "tail"
    write_documents(folder, 1, start=9)
    lucky = any(hash_for_split(text.encode()) / 2**64 < 0.1 for text in [*texts, "document 9: " + POEM])
    prepared = prepare(build_spec(tmp_path, folder))
    assert method(prepared) == ("hash" if lucky else "tail")
    same = tmp_path / "same.jsonl"
    unlucky = next(text for text in texts if hash_for_split(text.encode()) / 2**64 >= 0.1)
    same.write_text((json.dumps({"text": unlucky}) + "\n") * 10)
    prepared = prepare(build_spec(tmp_path, same))
    assert method(prepared) == "tail"
    assert all_tokens(prepared.train) + all_tokens(held_out(prepared)) == list(unlucky.encode()) * 10


def test_given_validation_sets_keep_their_names(tmp_path):
    for name in ("a.txt", "b.txt", "c.txt"):
        (tmp_path / name).write_text(name + POEM)
    validation = (
        Source("data.validation.0", str(tmp_path / "b.txt"), name="b.txt"),
        Source("data.validation.1", str(tmp_path / "c.txt"), name="other"),
    )
    spec = build_spec(tmp_path, tmp_path / "a.txt", validation=validation, validation_fraction=0.0)
    found = {each.name: all_tokens(each.dataset) for each in prepare(spec).validation}
    assert found == {"b.txt": list(("b.txt" + POEM).encode()), "other": list(("c.txt" + POEM).encode())}


def test_given_validation_text_is_used_and_may_not_be_trained_on(tmp_path):
    for name in ("a.txt", "b.txt", "c.txt"):
        (tmp_path / name).write_text(name + POEM)
    validation = (Source("data.validation[0]", str(tmp_path / "c.txt")),)
    spec = build_spec(tmp_path, tmp_path / "a.txt", tmp_path / "b.txt", validation=validation, validation_fraction=0.0)
    prepared = prepare(spec)
    assert all_tokens(prepared.train) == list(("a.txt" + POEM + "b.txt" + POEM).encode())
    assert all_tokens(held_out(prepared)) == list(("c.txt" + POEM).encode())
    assert method(prepared) == "sources"
    with pytest.raises(DataError, match=r"data\.validation\[0\]\.path=.*c\.txt, which is also in data\.train"):
        prepare(build_spec(tmp_path, tmp_path, validation=validation))


def test_a_second_call_reuses_the_data_and_a_change_prepares_again(tmp_path, caplog):
    path = tmp_path / "poem.txt"
    path.write_text(POEM)
    spec = build_spec(tmp_path, path)
    first = prepare(spec)
    caplog.clear()
    assert prepare(spec).path == first.path
    assert not any("tokenizing" in line for line in caplog.messages)
    assert len(caplog.messages) == 4  # the last one warns of a small validation set
    paths = {first.path}
    path.write_text(POEM + "x")
    paths.add(prepare(spec).path)
    paths.add(prepare(build_spec(tmp_path, path, validation_fraction=0.2)).path)
    paths.add(prepare(build_spec(tmp_path, path, tokenizer=260)).path)
    assert len(paths) == 4
    assert prepare(build_spec(tmp_path, path, sequence_len=5, workers=2)).path in paths


def test_memory_does_not_grow_with_the_file(tmp_path):
    path = tmp_path / "long.txt"
    path.write_text(POEM * 450_000)
    assert path.stat().st_size > 30 * 2**20
    tracemalloc.start()
    prepare(build_spec(tmp_path, path))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 12 * 2**20


def test_shards_are_split_and_verified(tmp_path):
    path = tmp_path / "poem.txt"
    path.write_text(POEM * 3)
    spec = build_spec(tmp_path, path, max_shard_tokens=50, validation_fraction=0.0)
    prepared = prepare(spec)
    shards = prepared.manifest.shards("train")
    assert [shard.tokens for shard in shards[:-1]] == [50] * (len(shards) - 1)
    assert all_tokens(prepared.train) == list((POEM * 3).encode())
    shard = prepared.path / shards[1].file
    content = shard.read_bytes()
    shard.write_bytes(b"\0" + content[1:])
    prepare(spec)
    with pytest.raises(DataError, match="was altered"):
        prepare(spec, verify=True)
    shard.write_bytes(content[:-2])
    with pytest.raises(DataError, match="98 bytes, but the manifest lists 100"):
        prepare(spec)


def test_a_wrong_tokenizer_is_refused(tmp_path):
    path = tmp_path / "poem.txt"
    path.write_text(POEM)
    folder = prepare(build_spec(tmp_path, path)).path
    assert open_prepared(folder, 8).train.sequence_len == 8
    train_tokenizer([POEM], 260).save_pretrained(folder / "tokenizer")
    for was_opened in (False, True):
        with pytest.raises(DataError, match=r"the tokenizer in .* cannot be read: .*tokenizer.json has"):
            open_prepared(folder, 8, was_opened=was_opened)
    write_manifest(folder / "tokenizer")
    with pytest.raises(DataError, match=r"the tokenizer in .* did not produce the tokens"):
        open_prepared(folder, 8)
    (folder / "tokenizer" / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        open_prepared(folder, 8)


def test_a_bytes_tokenizer_from_a_folder_takes_the_fast_path(tmp_path):
    path = tmp_path / "poem.txt"
    path.write_text(POEM)
    build_bytes_tokenizer().save_pretrained(tmp_path / "bytes")
    named = prepare(build_spec(tmp_path, path))
    from_folder = prepare(build_spec(tmp_path, path, tokenizer=None, checkpoint=str(tmp_path / "bytes")))
    assert from_folder.path == named.path


def test_files_that_are_not_text_are_skipped_counted_and_named(tmp_path, caplog):
    folder = tmp_path / "text"
    write_documents(folder, 3)
    for index in range(5):
        (folder / f"bad{index}.txt").write_bytes(b"\xff\xfe")
    (record,) = prepare(build_spec(tmp_path, folder, max_broken_fraction=0.7)).manifest.streams["train"]
    assert (record.documents, record.num_broken) == (3, 5)
    names = [f"{folder}/bad{index}.txt is not UTF-8 text" for index in range(5)]
    assert list(record.broken) == names
    assert f"data.train[0]: dropped 5 of 8 records: {'; '.join(names[:3])}; and more" in caplog.messages
    with pytest.raises(DataError, match=r"text: 5 of 8 records cannot be used, more than .*fraction=0\.001"):
        prepare(build_spec(tmp_path, folder))


def test_broken_files_are_found_before_a_tokenizer_is_trained(tmp_path, caplog):
    folder = tmp_path / "text"
    write_documents(folder, 66)
    (folder / "bad0.txt").write_bytes(b"caf\xe9")
    (folder / "bad1.txt").write_bytes(bytes(100))
    message = (
        r"text: 2 of 68 records cannot be used, more than data\.max_broken_fraction=0\.001, which allows none of 68: "
        r".*bad0\.txt is not UTF-8 text; .*bad1\.txt is binary, not text: 100% of its bytes are control characters\. "
        r"Fix them, or drop them with data\.max_broken_fraction=0\.03\.$"
    )
    with pytest.raises(DataError, match=message):
        prepare(build_spec(tmp_path, folder, tokenizer=300))
    assert caplog.messages == ["tokenizer: training byte-level BPE with 300 ids"]  # its end would have been logged
    prepare(build_spec(tmp_path, folder, tokenizer=300, max_broken_fraction=0.03))
    assert any("dropped 2 of 68 records" in line for line in caplog.messages)


def test_a_large_source_of_files_is_checked_by_the_files_of_the_sample(tmp_path, monkeypatch):
    folder = tmp_path / "text"
    write_documents(folder, 40)
    for index in range(200):
        (folder / f"bad{index}.txt").write_bytes(b"\xff" * 200)
    monkeypatch.setattr("echelon.learn.data.prepare.TOKENIZER_SAMPLE_BYTES", 10_000)
    monkeypatch.setattr("echelon.learn.data.tokenize.PIECE_BYTES", 1000)
    with pytest.raises(DataError, match=r"text: \d\d of 240 records cannot be used.*Fix them, or drop them with"):
        prepare(build_spec(tmp_path, folder, tokenizer=300, max_broken_fraction=0.01))


@pytest.mark.parametrize(
    ("size", "fraction", "words"),
    [
        (61, 0.02, "validation: the held-out text is a single document, whose loss need not be that of the others"),
        (66, 0.1, None),
        (1, 0.05, "tokens are too few to measure a loss: small differences will be chance; hold out more"),
    ],
)
def test_a_validation_set_that_measures_little_gets_a_warning(tmp_path, caplog, size, fraction, words):
    folder = tmp_path / "text"
    folder.mkdir()
    for index in range(size):
        (folder / f"{index}.txt").write_text(f"The text of document {index}. " * 50)
    prepare(build_spec(tmp_path, folder, validation_fraction=fraction))
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == (words is not None)
    assert words is None or words in warnings[0]


@pytest.mark.parametrize(
    ("content", "fraction", "match"),
    [
        ("", 0.0, "is empty"),
        ("x", 0.0, "has 1 tokens"),
        ("xyz", 0.7, "leaves 0 for training"),
        (POEM, 1.5, "not a fraction"),
    ],
)
def test_too_little_text_is_refused_and_leaves_nothing(tmp_path, content, fraction, match):
    path = tmp_path / "poem.txt"
    path.write_text(content)
    with pytest.raises((DataError, ConfigError), match=match):
        prepare(build_spec(tmp_path, path, validation_fraction=fraction))
    assert [each for each in tmp_path.glob("prepared/*") if each.suffix != ".lock"] == []


@pytest.mark.parametrize("workers", [1, 2])
def test_an_interrupt_leaves_no_partial_files(tmp_path, monkeypatch, workers, started):
    folder = tmp_path / "text"
    write_documents(folder, 50)
    spec = build_spec(tmp_path, folder, workers=workers)

    def interrupt(self, num_bytes: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Progress, "add", interrupt)
        with pytest.raises(KeyboardInterrupt):
            prepare(spec)
    assert [path.suffix for path in (tmp_path / "prepared").iterdir()] == [".lock"]
    assert not started()
    prepare(spec)


def test_files_of_a_killed_process_are_removed(tmp_path):
    path = tmp_path / "poem.txt"
    path.write_text(POEM)
    spec = build_spec(tmp_path, path)
    folder = prepare(spec).path
    folder.rename(folder.with_suffix(".partial"))
    (folder.with_suffix(".partial") / "left-over.bin").touch()
    assert prepare(spec).path == folder
    assert not (folder / "left-over.bin").exists()
    assert not folder.with_suffix(".partial").exists()


def test_a_full_disk_is_reported(tmp_path, monkeypatch):
    path = tmp_path / "poem.txt"
    path.write_text(POEM)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(prepare_module, "save_manifest", fail)
    with pytest.raises(EchelonError, match=r"No space left on device; free disk space or set") as caught:
        prepare(build_spec(tmp_path, path))
    assert caught.value.exit_code == 1


def test_processes_that_want_the_same_data_wait_for_one(tmp_path, monkeypatch):
    write_documents(tmp_path / "text", 20)
    spec = build_spec(tmp_path, tmp_path / "text")
    write = prepare_module.write_folder
    started, waiting = threading.Event(), threading.Event()
    writes = itertools.count()

    def slow_write(*arguments: object) -> None:
        next(writes)
        started.set()
        assert waiting.wait(10)
        write(*arguments)

    def note_waiting(record: logging.LogRecord) -> bool:
        if record.getMessage().startswith("waiting: another process"):
            waiting.set()
        return True

    monkeypatch.setattr(prepare_module.logger, "filters", [note_waiting])
    monkeypatch.setattr(prepare_module, "write_folder", slow_write)
    paths: list[Path] = []
    first = threading.Thread(target=lambda: paths.append(prepare(spec).path))
    second = threading.Thread(target=lambda: paths.append(prepare(spec).path))
    first.start()
    assert started.wait(10)
    second.start()
    first.join()
    second.join()
    assert len(paths) == 2
    assert paths[0] == paths[1]
    assert next(writes) == 1


def test_the_spec_from_a_recipe(tmp_path):
    (tmp_path / "x.jsonl").write_text(json.dumps({"body": POEM}))
    values = {
        "run": {"name": "r", "dir": str(tmp_path / "runs" / "r")},
        "model": {"config": {"model_type": "llama"}},
        "tokenizer": {"train": {"vocab_size": 270}},
        "data": {"train": [{"path": str(tmp_path / "x.jsonl"), "fields": {"text": "body"}}], "sequence_len": 32,
                 "validation_fraction": 0},
        "train": {"steps": 1, "global_batch_size": 1},
        "optim": {"learning_rate": 1e-3},
    }  # fmt: skip
    (tmp_path / "recipe.json").write_text(json.dumps(values))
    recipe, _ = load_recipe(tmp_path / "recipe.json")
    spec = prepare_spec(recipe)
    assert spec.train == (Source("data.train.0", str(tmp_path / "x.jsonl"), "auto", {"text": "body"}, "x.jsonl"),)
    assert (spec.tokenizer, spec.validation_fraction, spec.workers, spec.sequence_len) == (270, 0.0, None, 32)
    prepared = prepare_data(recipe)
    assert prepared.tokenizer.decode(all_tokens(prepared.train)) == POEM + "<|endoftext|>"
