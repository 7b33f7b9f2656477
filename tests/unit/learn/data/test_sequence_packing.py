"""Samples on disk and their packs: storage, truncation, dropping, packing, reading, and refusal of damage."""

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from echelon.ground.errors import ConfigError, DataError
from echelon.learn.data import corpus_writer as writing
from echelon.learn.data import prepare as prepare_module
from echelon.learn.data import tokenize
from echelon.learn.data.catalog import load_manifest
from echelon.learn.data.loader import BatchLoader, BatchPlace
from echelon.learn.data.order import Permutation, SampleOrder
from echelon.learn.data.packing import best_fit
from echelon.learn.data.prepare import prepare
from echelon.learn.data.prepare_spec import PrepareSpec
from echelon.learn.data.prepared import PreparedData, open_prepared
from echelon.learn.data.readers import cut_file
from echelon.learn.data.shards import NO_LABEL, TokenDataset
from echelon.learn.data.sinks import fit_lengths
from echelon.learn.data.tokenizer import train_tokenizer
from echelon.recipe.batches import constant_batch
from tests.bytes_encoding import BytesEncoding
from tests.unit.learn.data.test_corpus_writer import build_spec as build_corpus_spec

_ = NO_LABEL


@pytest.fixture(autouse=True)
def bytes_encoding(monkeypatch):
    monkeypatch.setattr(prepare_module, "_instruction", lambda *_: BytesEncoding())


def write_records(path: Path, records: list[dict]) -> Path:
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def build_spec(folder: Path, *paths: Path, **fields: object) -> PrepareSpec:
    return build_corpus_spec(folder, *paths, **{"sequence_len": 8, **fields})


def pairs(*texts: tuple[str, str]) -> list[dict]:
    return [{"prompt": prompt, "completion": completion} for prompt, completion in texts]


FOUR = pairs(("ab", "cd"), ("q", "rstuv"), ("x", "y"), ("hij", "klmnopq"))


def read_all(prepared: PreparedData):
    return prepared.train.read_samples(np.arange(prepared.train.num_samples))


# Best fit


def pack_one_by_one(sizes: list[int], room: int) -> list[int]:
    """The free space of each pack, ascending, by the definition of the rule, one sample at a time."""
    left: list[int] = []
    for size in sorted(sizes, reverse=True):
        fitting = [index for index, free in enumerate(left) if free >= size]
        if fitting:
            left[min(fitting, key=left.__getitem__)] -= size
        else:
            left.append(room - size)
    return sorted(left)


@pytest.mark.parametrize("room", [1, 7, 10, 64, 1000])
def test_best_fit_is_the_rule_applied_one_sample_at_a_time(room):
    rng = np.random.default_rng(room)
    for count, high in ((0, 1), (1, room), (300, room), (300, max(1, room // 3)), (300, max(1, room // 20))):
        sizes = rng.integers(1, high + 1, count)
        packs = best_fit(sizes, room)
        filled = np.bincount(packs, sizes).astype(int)
        assert filled.size == 0 or filled.min() > 0
        assert sorted((room - filled).tolist()) == pack_one_by_one(sizes.tolist(), room)


def test_best_fit_by_hand():
    # 6 and 7 open packs with 4 and 3 free; 4 goes into the first, 3 into the second; 2 + 2 + 1 share a third.
    assert best_fit(np.array([2, 6, 3, 7, 4, 1, 2]), 10).tolist() == [2, 1, 0, 0, 1, 2, 2]


# Storing and reading


def test_documents_and_labels_by_hand(tmp_path, caplog):
    prepared = prepare(build_spec(tmp_path, write_records(tmp_path / "x.jsonl", FOUR)))
    assert prepared.apart and prepared.manifest.documents_each == 1
    samples = read_all(prepared)
    # The fourth takes 9 positions and is cut to 8; 5 and 3 fill a pack; the one of 1 has its own pack.
    assert [bytes(row.tolist()).rstrip(b"\0") for row in samples.inputs] == [b"hijklmno", b"abcqrstu", b"x"]
    assert samples.labels.tolist() == [[_, _, *b"klmnop"], [_, *b"cd", *b"rstuv"], [*b"y", _, _, _, _, _, _, _]]
    assert samples.documents is not None
    assert samples.documents.tolist() == [[0] * 8, [0] * 3 + [1] * 5, [0] + [-1] * 7]
    assert (
        "data.train.0: 1 of 4 samples are longer than 8 positions and were cut: 1 tokens lost (data.on_overlong=cut)"
        in caplog.messages
    )
    assert "packing: train, 4 samples in 3 sequences of 8, 70.8% of the positions filled" in caplog.messages
    assert "documents: each attends only to itself (data.document_mask=auto)" in caplog.messages
    assert prepared.train.num_tokens == 4 + 6 + 2 + 9
    assert bytes(np.concatenate(list(prepared.train.iter_tokens(5))).tolist()) == b"cdrstuvyklmnop"


def test_without_packing_each_sample_has_its_own_sequence(tmp_path):
    prepared = prepare(build_spec(tmp_path, write_records(tmp_path / "x.jsonl", FOUR), packing=False))
    samples = read_all(prepared)
    assert [bytes(row.tolist()).rstrip(b"\0") for row in samples.inputs] == [b"abc", b"qrstu", b"x", b"hijklmno"]
    assert samples.documents is not None and set(samples.documents.flat) == {0, -1}


def test_samples_that_are_too_long_are_dropped_or_refused(tmp_path, caplog):
    path = write_records(tmp_path / "x.jsonl", FOUR)
    dropped = prepare(build_spec(tmp_path, path, on_overlong="drop"))
    assert [record.labelled.samples for record in dropped.manifest.streams["train"]] == [3]
    assert any("1 of 4 samples" in line and "were dropped: 10 tokens lost" in line for line in caplog.messages)
    with pytest.raises(DataError, match=r"sample 4 has 10 tokens and takes 9 positions, more than .*_len=8"):
        prepare(build_spec(tmp_path, path, on_overlong="refuse"))
    assert prepare(build_spec(tmp_path, path, on_overlong="refuse", sequence_len=9)).train.num_samples == 2


def test_a_sample_without_a_label_is_dropped_and_counted(tmp_path, caplog):
    records = [*FOUR, *pairs(("long prompt", "x"), ("no completion", ""))]
    prepared = prepare(build_spec(tmp_path, write_records(tmp_path / "x.jsonl", records)))
    (record,) = prepared.manifest.streams["train"]
    assert (record.labelled.samples, record.labelled.num_unlabelled, record.labelled.num_overlong) == (4, 2, 3)
    assert "data.train.0: 2 of 6 samples were dropped: they have no target" in caplog.messages
    only = write_records(tmp_path / "y.jsonl", records[4:])
    with pytest.raises(DataError, match=r"none of 2 samples can be used: 2 are longer .* 2 have no target that"):
        prepare(build_spec(tmp_path, only))


def test_the_longer_document_of_a_pair_is_cut():
    assert fit_lengths((9,), 8) == (9,)
    assert fit_lengths((10,), 8) == (9,)
    assert fit_lengths((4, 9), 8) == (4, 6)  # 3 positions of 3, 5 of the 8
    assert fit_lengths((9, 4), 8) == (6, 4)
    assert fit_lengths((30, 20), 9) == (6, 5)
    assert fit_lengths((2, 7), 8) == (2, 7)


def test_a_pair_shares_a_pack_with_chosen_even_and_rejected_odd(tmp_path):
    records = [{"prompt": "p", "chosen": "c" * n, "rejected": "r" * m} for n, m in ((1, 2), (4, 1), (2, 2), (9, 1))]
    prepared = prepare(build_spec(tmp_path, write_records(tmp_path / "x.jsonl", records), sequence_len=9))
    assert prepared.manifest.documents_each == 2
    samples = read_all(prepared)
    found = []
    for row, documents in zip(samples.labels, samples.documents, strict=True):
        for pair in range(documents.max() // 2 + 1):
            answers = [bytes(row[documents == 2 * pair + odd].tolist()) for odd in (0, 1)]
            found.append(answers)
    assert sorted(found) == [[b"c", b"rr"], [b"cc", b"rr"], [b"cccc", b"r"], [b"cccccccc", b"r"]]
    mixed = write_records(tmp_path / "y.jsonl", FOUR)
    with pytest.raises(DataError, match="one has single texts, the other pairs of a chosen and a rejected"):
        prepare(build_spec(tmp_path, tmp_path / "x.jsonl", mixed))


def many(count: int, seed: int = 0) -> list[dict]:
    sizes = np.random.default_rng(seed).integers(1, 60, (count, 2)).tolist()
    return pairs(*((f"{number}?" + "a" * prompt, "b" * answer) for number, (prompt, answer) in enumerate(sizes)))


def texts_of(dataset, ids) -> list[bytes]:
    """Every document's inputs, and the label of its last position: the text."""
    samples = dataset.read_samples(ids)
    found = []
    for inputs, labels, documents in zip(samples.inputs, samples.labels, samples.documents, strict=True):
        for number in range(documents.max() + 1):
            chosen = documents == number
            found.append(bytes([*inputs[chosen].tolist(), int(labels[chosen][-1])]))
    return found


def test_every_sample_is_in_one_pack_and_held_out_by_its_content(tmp_path):
    records = many(400)
    texts = {(each["prompt"] + each["completion"]).encode() for each in records}
    path = write_records(tmp_path / "x.jsonl", records)
    prepared = prepare(build_spec(tmp_path, path, sequence_len=200, validation_fraction=0.1))
    (held_out,) = prepared.validation
    (described,) = prepared.manifest.validation
    assert described.method == "hash" and 15 < described.documents < 80
    trained, validated = (texts_of(each, np.arange(each.num_samples)) for each in (prepared.train, held_out.dataset))
    assert len(trained) + len(validated) == 400 and {*trained, *validated} == texts
    filled = [len(text) - 1 for text in trained]
    assert prepared.train.num_samples <= 1.02 * -(-sum(filled) // 200)
    # Whether a record is held out does not depend on other records or their order.
    fewer = write_records(tmp_path / "y.jsonl", records[200:][::-1])
    other = prepare(build_spec(tmp_path, fewer, sequence_len=200, validation_fraction=0.1))
    again = texts_of(other.validation[0].dataset, np.arange(other.validation[0].dataset.num_samples))
    assert again and set(again) <= set(validated)


def test_copies_and_broken_records_are_removed(tmp_path):
    path = write_records(tmp_path / "x.jsonl", [*FOUR, FOUR[1], {"prompt": "p", "completion": 5}])
    prepared = prepare(build_spec(tmp_path, path, deduplicate=True, max_broken_fraction=0.5))
    (record,) = prepared.manifest.streams["train"]
    assert (record.labelled.samples, record.num_duplicates, record.num_broken) == (4, 1, 1)
    assert record.broken[0].endswith("x.jsonl:6 has no text in `completion`")


def test_a_mixture_weights_packs_without_mixing_their_samples(tmp_path):
    paths = [write_records(tmp_path / f"{seed}.jsonl", many(50, seed)) for seed in (1, 2)]
    prepared = prepare(build_spec(tmp_path, *paths, sequence_len=150, mixture=True))
    parts = prepared.train.parts
    assert prepared.train.num_samples == sum(part.num_samples for part in parts)
    mixed = prepared.train.read_samples(np.array([parts[0].num_samples, 0, prepared.train.num_samples - 1]))
    for row, (part, own) in enumerate([(parts[1], 0), (parts[0], 0), (parts[1], parts[1].num_samples - 1)]):
        alone = part.read_samples(np.array([own]))
        for name in ("inputs", "labels", "documents"):
            assert np.array_equal(getattr(mixed, name)[row], getattr(alone, name)[0])
    for path, part in zip(paths, parts, strict=True):
        own = {(each["prompt"] + each["completion"]).encode() for each in map(json.loads, path.open())}
        assert set(texts_of(part, np.arange(part.num_samples))) == own


# Resuming


def big_spec(folder: Path, name: str, workers: int) -> PrepareSpec:
    return build_spec(
        folder, folder / "x.jsonl", folder / "text.txt", prepared_dir=folder / name, workers=workers, sequence_len=300,
        validation_fraction=0.05, deduplicate=True, max_shard_tokens=100_000, max_broken_fraction=0.5,
    )  # fmt: skip


PARTS = ("", ".targets", ".lengths")


def checksums(prepared: PreparedData) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in prepared.path.glob("*.bin")}


@pytest.mark.slow
def test_the_same_bytes_from_any_number_of_workers_and_after_a_stop(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenize, "PIECE_BYTES", 2**16)
    monkeypatch.setattr(tokenize, "cut_file", partial(cut_file, piece_bytes=2**16))
    lines = [json.dumps(record) for record in many(2000)]
    lines[50], lines[700] = "{", lines[60]
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    (tmp_path / "text.txt").write_text("".join(f"line {number}\n" for number in range(20_000)))  # one sample
    whole = prepare(big_spec(tmp_path, "whole", 1))
    expected = checksums(whole)
    text = next(name for name in ("train-001", "validation-001") if f"{name}-00000.bin" in expected)
    prefixes = {f"{name}{part}" for name in ("train-000", "validation-000", text) for part in PARTS}
    packs = {f"packs-{split:03d}.{part}" for split in (0, 1) for part in ("stops", "documents")}
    assert {name.rsplit("-", 1)[0] for name in expected} == prefixes | packs
    parallel = prepare(big_spec(tmp_path, "parallel", 3))
    assert (parallel.manifest, checksums(parallel)) == (whole.manifest, expected)
    assert parallel.content_digest == whole.content_digest

    monkeypatch.setattr(writing, "POINT_BYTES", 1)
    take, calls = writing.CorpusWriter.take, []

    def stop_at_each(self, task, result):
        calls.append(task)
        if len(calls) % 2 == 0:
            raise KeyboardInterrupt
        take(self, task, result)

    monkeypatch.setattr(writing.CorpusWriter, "take", stop_at_each)
    for _attempt in range(20):
        try:
            resumed = prepare(big_spec(tmp_path, "resumed", 1))
            break
        except KeyboardInterrupt:
            continue
    assert len(calls) >= 6
    assert (resumed.manifest, checksums(resumed)) == (whole.manifest, expected)


def test_the_key_covers_everything_that_determines_the_samples(tmp_path, monkeypatch):
    path = write_records(tmp_path / "x.jsonl", FOUR)
    specs = [build_spec(tmp_path, path, **changes) for changes in (
        {}, {"sequence_len": 9}, {"packing": False}, {"on_overlong": "drop"},
    )]  # fmt: skip
    assert len({prepare(spec).path for spec in specs}) == 4

    @dataclass(frozen=True)
    class Other(BytesEncoding):
        system_prompt: str = "be brief"

    monkeypatch.setattr(prepare_module, "_instruction", lambda *_: Other())
    assert prepare(specs[0]).path not in {prepare(spec).path for spec in specs[1:]}
    assert len(list((tmp_path / "prepared").glob("*/manifest.json"))) == 8


def test_damaged_samples_are_refused(tmp_path):
    prepared = prepare(build_spec(tmp_path, write_records(tmp_path / "x.jsonl", FOUR)))
    with pytest.raises(DataError, match=r"packed into sequences of 8 tokens, but data\.sequence_len=16; prepare again"):
        open_prepared(prepared.path, 16)
    for path in sorted(prepared.path.glob("*.bin")):
        content = path.read_bytes()
        path.write_bytes(content[:-1])
        with pytest.raises(DataError, match=f"{path.name} has {len(content) - 1} bytes"):
            open_prepared(prepared.path, 8)
        path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        with pytest.raises(DataError, match="was altered"):
            open_prepared(prepared.path, 8, verify=True)
        if "lengths" not in path.name:  # read only by preparation
            with pytest.raises(DataError, match="was altered"):
                read_all(open_prepared(prepared.path, 8))
        path.write_bytes(content)
    manifest = prepared.path / "manifest.json"
    content = json.loads(manifest.read_text())
    del content["sha256"]

    def refuse(match: str) -> None:
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        manifest.write_text(json.dumps({**content, "sha256": digest}))
        with pytest.raises(DataError, match=match):
            load_manifest(prepared.path)

    content["train"][0]["packs"]["packs"] += 1
    refuse("the index does not match the number of packs")
    content["train"][0]["packs"] = None
    refuse("a split of samples has no packs")
    content["streams"]["train"][0]["labelled"]["targets"] = []
    refuse("the numbers of labels and tokens differ")
    content["samples"] = None
    refuse("only some sources have samples")


# Batches


@pytest.fixture
def packed(tmp_path) -> PreparedData:
    return prepare(build_spec(tmp_path, write_records(tmp_path / "x.jsonl", many(41)), sequence_len=301))


def load(data: PreparedData, steps: int, rank: int = 0, ranks: int = 1, micro: int = 2):
    order = SampleOrder(data.train.num_samples, seed=3)
    loader = BatchLoader(data.train, order, constant_batch(6, 301), BatchPlace(micro, rank, ranks))
    return [loader.batch(step) for step in range(steps)]


def test_common_padding_is_trimmed_without_effect_on_the_hash(tmp_path):
    path = write_records(tmp_path / "x.jsonl", many(41))
    packed = prepare(build_spec(tmp_path, path, sequence_len=301, packing=False))
    whole = load(packed, 4)
    widths = set()
    for batch in whole:
        fed = 0
        for each in batch.microbatches:
            samples = packed.train.read_samples(each.sample_ids)
            width = each.input_ids.shape[1]
            filled = int((samples.documents >= 0).sum(axis=1).max())
            assert width == min(301, -(-filled // 8) * 8)
            widths.add(width)
            assert np.array_equal(each.input_ids.numpy(), samples.inputs[:, :width])
            assert np.array_equal(each.labels.numpy(), samples.labels[:, :width])
            assert each.documents is None, "a sequence has one: there is nothing to keep apart, whatever the model"
            fed += int((samples.documents >= 0).sum())
        assert batch.num_tokens == fed
    for ranks, micro in ((2, 1), (3, 2), (4, 1)):
        shares = [load(packed, 4, rank, ranks, micro) for rank in range(ranks)]
        for step, batch in enumerate(whole):
            assert sum(share[step].hash for share in shares) % 2**64 == batch.hash
            assert sum(share[step].num_tokens for share in shares) == batch.num_tokens
    assert len(widths) > 2


def in_order(batch):
    """The samples of a step by position in the global batch."""
    places, ids = (
        np.concatenate([getattr(each, name) for each in batch.microbatches]) for name in ("batch_indices", "sample_ids")
    )
    return ids[np.argsort(places)]


def test_sequences_of_similar_length_share_a_microbatch(tmp_path):
    """Padding is only the difference in length within a microbatch, and it is minimal."""
    path = write_records(tmp_path / "x.jsonl", many(41))
    packed = prepare(build_spec(tmp_path, path, sequence_len=301, packing=False))
    order = SampleOrder(packed.train.num_samples, seed=3)
    batch = BatchLoader(packed.train, order, constant_batch(12, 301), BatchPlace(3)).batch(0)
    lengths = [(packed.train.read_samples(each.sample_ids).documents >= 0).sum(axis=1) for each in batch.microbatches]
    assert [len(each) for each in lengths] == [3, 3, 3, 3]
    together = np.concatenate(lengths)
    assert together.tolist() == sorted(together.tolist(), reverse=True) and together[0] > 2 * together[-1]
    longest = [-(-int(max(each)) // 8) * 8 for each in np.sort(together)[::-1].reshape(4, 3)]
    assert [each.input_ids.shape[1] for each in batch.microbatches] == longest
    assert in_order(batch).tolist() == order.sample_ids(0, 12).tolist()


def test_an_epoch_feeds_each_pack_once_in_a_seeded_order(packed):
    num_packs = packed.train.num_samples
    batches = load(packed, -(-num_packs // 6))
    fed = np.concatenate([in_order(batch) for batch in batches])[:num_packs]
    assert fed.tolist() == Permutation(num_packs, (3, 0)).apply(np.arange(num_packs)).tolist()
    assert len(texts_of(packed.train, fed)) == 41


def test_without_a_mask_padding_is_still_not_counted_as_tokens(packed):
    plain = open_prepared(packed.path, 301, document_mask=False)
    for batch, kept_apart in zip(load(plain, 2), load(packed, 2), strict=True):
        assert all(each.documents is None and each.position_ids is None for each in batch.microbatches)
        assert (batch.num_tokens, batch.hash) == (kept_apart.num_tokens, kept_apart.hash)


def test_texts_are_separated_at_their_separators(tmp_path):
    train_tokenizer(["a b c"], 257).save_pretrained(tmp_path / "tokenizer")
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in ("abc", "d", "efgh")))
    spec = build_spec(tmp_path, path, tokenizer=str(tmp_path / "tokenizer"), sequence_len=4, document_mask=True)
    prepared = prepare(spec)
    (end,) = prepared.tokenizer.encode("<|endoftext|>")
    stream = np.concatenate(list(prepared.train.iter_tokens())).tolist()
    a, b, c, d, e, f, g, h = (prepared.tokenizer.encode(letter)[0] for letter in "abcdefgh")
    assert stream == [a, b, c, end, d, end, e, f, g, h, end]
    samples = read_all(prepared)
    assert samples.inputs.tolist()[:2] == [[a, b, c, end], [d, end, e, f]]
    assert samples.inputs.tolist()[2][:2] == [g, h]
    assert samples.labels.tolist() == [[b, c, end, _], [end, _, f, g], [h, end, _, _]]
    assert samples.documents.tolist() == [[0, 0, 0, 0], [0, 0, 1, 1], [0, 0, -1, -1]]
    plain = open_prepared(prepared.path, 4)
    assert read_all(plain).documents is None and not plain.apart
    for changes in ({"separator": None}, {"tokenizer": "bytes"}):
        with pytest.raises(ConfigError, match=r"data\.document_mask=true needs a token that ends each document"):
            prepare(dataclasses.replace(spec, **changes))


MIXES = "this mamba model cannot keep the documents of a sequence apart: a state passes through them"


def test_samples_are_not_packed_for_a_model_that_mixes_documents(tmp_path, caplog):
    caplog.set_level("INFO")
    path = write_records(tmp_path / "x.jsonl", FOUR)
    prepared = prepare(build_spec(tmp_path, path), find_obstacle=lambda: MIXES)
    assert prepared.train.num_samples == 4 and not prepared.apart and prepared.is_packed is False
    assert f"packing: none, each sample has a sequence of its own, because {MIXES}" in caplog.messages
    assert prepare(build_spec(tmp_path, path, packing=False)).path == prepared.path
    assert prepare(build_spec(tmp_path, path)).is_packed is True


def test_packing_that_the_recipe_asks_for_is_refused_for_a_model_that_mixes_documents(tmp_path):
    path = write_records(tmp_path / "x.jsonl", FOUR)
    with pytest.raises(ConfigError, match=r"data.packing=true: this mamba model .* set data.packing=auto"):
        prepare(build_spec(tmp_path, path, packing=True), find_obstacle=lambda: MIXES)
    assert not (tmp_path / "prepared").exists(), "before anything is read or written"
    mixed = prepare(build_spec(tmp_path, path, document_mask=False), find_obstacle=lambda: pytest.fail("not asked"))
    assert mixed.is_packed is True and not mixed.apart


def test_plain_text_is_joined_whatever_the_model_can_do(tmp_path):
    (tmp_path / "x.txt").write_text("to be or not to be")
    spec = build_spec(tmp_path, tmp_path / "x.txt")
    assert prepare(spec, find_obstacle=lambda: pytest.fail("not asked")).is_packed is None
    with pytest.raises(ConfigError, match=r"data.document_mask=true: this mamba model .* set data.packing=false"):
        prepare(dataclasses.replace(spec, document_mask=True), find_obstacle=lambda: MIXES)


def test_texts_without_packing_are_separate_samples(tmp_path):
    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in ("abc", "d", "efghijklmn")))
    prepared = prepare(build_spec(tmp_path, tmp_path / "x.jsonl", packing=False, sequence_len=4))
    assert isinstance(prepared.train, TokenDataset) is False
    samples = read_all(prepared)
    # A text of one token has nothing to predict.
    assert samples.labels.tolist() == [[*b"bc", _, _], [*b"fghi"]]
    (record,) = prepared.manifest.streams["train"]
    assert (record.labelled.num_unlabelled, record.labelled.lost_tokens) == (1, 5)
