"""Shards, the manifest and windows, compared with a loop over a list."""

import dataclasses
import hashlib
import itertools
import json
import math
import os
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from echelon.ground.errors import DataError
from echelon.learn.data import catalog
from echelon.learn.data.shards import BLOCK_BYTES, ShardRecord, ShardWriter, TokenDataset, TokenStore, unigram_entropy


def write(folder: Path, tokens: np.ndarray, max_tokens: int, dtype: str = "uint16") -> tuple[ShardRecord, ...]:
    with ShardWriter(folder, "train-000", dtype, max_tokens) as writer:
        for part in np.array_split(tokens, 7):
            writer.append(part)
        return writer.finish()


def build_store(folder: Path, tokens: np.ndarray, max_tokens: int, dtype: str = "uint16") -> TokenStore:
    records = write(folder, tokens, max_tokens, dtype)
    return TokenStore(folder, records, dtype)


def build_manifest(shards: tuple[ShardRecord, ...]) -> catalog.Manifest:
    num_tokens = sum(shard.tokens for shard in shards)
    return catalog.Manifest(
        format_version=catalog.FORMAT_VERSION,
        dtype="uint16",
        tokenizer_fingerprint="f" * 32,
        vocab_size=300,
        separator=None,
        stops=(),
        samples=None,
        streams={
            "train": (
                catalog.SourceRecord("data.train[0]", "x.txt", "x.txt", 1, num_tokens, 99, shards, 1, ("bad.txt",)),
            )
        },
        train=(catalog.Split("train", "train", 0, num_tokens),),
        validation=(),
    )


@pytest.mark.parametrize("max_tokens", [1, 10, 33, 100, 1000])
@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_a_store_reads_what_was_written(tmp_path, max_tokens, dtype):
    tokens = np.random.default_rng(0).integers(0, 2**16, 100)
    store = build_store(tmp_path, tokens, max_tokens, dtype)
    assert store.num_tokens == 100
    assert len(list(tmp_path.iterdir())) == math.ceil(100 / max_tokens)
    for start in range(0, 101, 3):
        for stop in range(start, 101, 7):
            assert store.read(start, stop).tolist() == tokens[start:stop].tolist()


def brute_force(tokens: list[int], length: int, pad: int) -> list[tuple[list[int], list[int]]]:
    samples = []
    pairs = list(itertools.pairwise(tokens))
    while pairs:
        head, pairs = pairs[:length], pairs[length:]
        head += [(pad, -100)] * (length - len(head))
        samples.append(([read for read, _ in head], [target for _, target in head]))
    return samples


@pytest.mark.parametrize("num_tokens", [2, 3, 8, 9, 10, 16, 17, 18, 100])
def test_windows_are_those_of_a_loop(tmp_path, num_tokens):
    tokens = np.random.default_rng(1).integers(0, 500, num_tokens)
    half = num_tokens // 2
    (tmp_path / "b").mkdir()
    stores = [build_store(tmp_path, tokens[:half], 11), build_store(tmp_path / "b", tokens[half:], 6)]
    dataset = TokenDataset(stores, sequence_len=8, pad_id=7)
    expected = brute_force(tokens.tolist(), 8, pad=7)
    assert dataset.num_samples == len(expected)
    samples = dataset.read_samples(np.arange(dataset.num_samples)[::-1])
    inputs, labels = samples.inputs, samples.labels
    assert inputs.dtype == labels.dtype == np.int64
    assert list(zip(inputs.tolist(), labels.tolist(), strict=True)) == expected[::-1]
    targets = labels[::-1][labels[::-1] != -100]
    assert targets.tolist() == tokens[1:].tolist()


def test_a_dataset_may_be_a_range_of_its_stores(tmp_path):
    tokens = np.arange(50)
    store = build_store(tmp_path, tokens, 20)
    train, held_out = (TokenDataset([store], 4, start=start, stop=stop) for start, stop in [(0, 45), (45, 50)])
    assert train.num_tokens == 45
    assert train.read_samples(np.array([10])).labels.tolist() == [[41, 42, 43, 44]]
    assert held_out.num_samples == 1
    assert held_out.read_samples(np.array([0])).inputs.tolist() == [[45, 46, 47, 48]]
    assert [TokenDataset([store], 4, start=50 - n).num_samples for n in range(3)] == [0, 0, 1]


def test_more_than_2_to_the_32_tokens(tmp_path):
    """Sparse files: 2^32 + 9 tokens in one shard, then 20 in another; reads on both sides of the boundary."""
    sizes = [2**32 + 9, 20]
    tail = np.arange(1, 30, dtype=np.uint16)
    for index, size in enumerate(sizes):
        path = tmp_path / f"{index}.bin"
        with path.open("wb") as stream:
            os.truncate(path, 2 * size)
            stream.seek(2 * (2**32) if index == 0 else 0)
            stream.write((tail[:9] if index == 0 else tail[9:]).tobytes())
    zeros, ends = f"{zlib.crc32(bytes(BLOCK_BYTES)):08x}", [f"{zlib.crc32(part):08x}" for part in (tail[:9], tail[9:])]
    blocks = [zeros * (2**33 // BLOCK_BYTES) + ends[0], ends[1]]
    shards = [ShardRecord(f"{index}.bin", size, 2 * size, "", blocks[index]) for index, size in enumerate(sizes)]
    store = TokenStore(tmp_path, shards, "uint16")
    assert store.num_tokens == 2**32 + 29
    assert store.read(2**32 - 1, 2**32 + 29).tolist() == [0, *tail.tolist()]
    dataset = TokenDataset([store], sequence_len=4)
    assert dataset.num_samples == 2**30 + 7
    samples = dataset.read_samples(np.array([2**30, 2**30 + 6]))
    assert samples.inputs.tolist() == [[1, 2, 3, 4], [25, 26, 27, 28]]
    assert samples.labels.tolist() == [[2, 3, 4, 5], [26, 27, 28, 29]]


def test_unigram_entropy(tmp_path):
    tokens = np.random.default_rng(2).zipf(1.5, 5000) % 900
    dataset = TokenDataset([build_store(tmp_path, tokens, 999)], 8)
    shares = [count / 5000 for count in Counter(tokens.tolist()).values()]
    assert unigram_entropy([dataset]) == pytest.approx(-sum(share * math.log(share) for share in shares), rel=1e-12)
    assert unigram_entropy([TokenDataset([], 8)]) == 0.0


def test_the_manifest_round_trips(tmp_path):
    manifest = build_manifest(write(tmp_path, np.arange(100), 40))
    catalog.save_manifest(tmp_path, manifest)
    assert catalog.load_manifest(tmp_path) == manifest
    catalog.check_shards(tmp_path, manifest, verify=True)


def test_a_truncated_grown_missing_or_altered_shard_is_refused(tmp_path):
    manifest = build_manifest(write(tmp_path, np.arange(100), 40))
    path = tmp_path / "train-000-00001.bin"
    content = path.read_bytes()
    for damaged in (content[:-1], content + b"\0", b""):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=f"00001.bin has {len(damaged)} bytes, but the manifest lists 80"):
            catalog.check_shards(tmp_path, manifest)
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    catalog.check_shards(tmp_path, manifest)
    with pytest.raises(DataError, match="was altered"):
        catalog.check_shards(tmp_path, manifest, verify=True)
    path.unlink()
    with pytest.raises(DataError, match="is missing"):
        catalog.check_shards(tmp_path, manifest)


def test_a_damaged_or_foreign_manifest_is_refused(tmp_path):
    with pytest.raises(DataError, match="has no prepared data"):
        catalog.load_manifest(tmp_path)
    manifest = build_manifest(write(tmp_path, np.arange(100), 40))
    catalog.save_manifest(tmp_path, manifest)
    path = tmp_path / "manifest.json"
    whole = path.read_text()
    content = json.loads(whole)

    def refuse(text: str, match: str) -> None:
        path.write_text(text)
        with pytest.raises(DataError, match=match):
            catalog.load_manifest(tmp_path)

    def refuse_signed(match: str, **changes: object) -> None:
        """Refuse a manifest with a valid checksum, as an attacker who knows the format would write it."""
        kept = {key: value for key, value in {**content, **changes}.items() if key != "sha256" and value != "absent"}
        digest = hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()
        refuse(json.dumps({**kept, "sha256": digest}), match)

    for text in (whole[: len(whole) // 2], "", "[]", "{}", "null", '{"format_version": 5}', "[" * 10**5):
        refuse(text, "damaged")
    refuse(json.dumps({**content, "format_version": 1}), "has format version 1, but this version of echelon reads 7")
    refuse(whole.replace('"stop": 100', '"stop": 99'), "it changed after it was written")
    for field in dataclasses.fields(catalog.Manifest):
        refuse_signed("damaged", **{field.name: "absent"})
    refuse_signed("damaged", dtype="float32")
    refuse_signed("a split extends beyond", train=[{**content["train"][0], "stop": 101}])
    for change in ({"tokens": 41}, {"blocks": ""}):
        refuse_signed("counts of tokens and bytes disagree", streams=with_first_shard(content, **change))
    refuse_signed("not a plain file name", streams=with_first_shard(content, file="../train-000-00000.bin"))


def with_first_shard(content: dict, **changes: object) -> dict:
    """The streams of a manifest, with a changed first shard."""
    [source] = content["streams"]["train"]
    first, *others = source["shards"]
    return {"train": [{**source, "shards": [{**first, **changes}, *others]}]}


@pytest.mark.parametrize("place", [0, BLOCK_BYTES - 1, BLOCK_BYTES, 3 * BLOCK_BYTES - 1, 4 * BLOCK_BYTES + 7])
def test_altered_tokens_are_refused_when_they_are_read(tmp_path, place):
    """Exactly the tokens of blocks with a wrong checksum are refused, also if a killed writer resumed within one."""
    tokens = np.random.default_rng(4).integers(0, 2**16, 2 * BLOCK_BYTES + 5).astype(np.uint16)
    half = BLOCK_BYTES + 11
    with ShardWriter(tmp_path, "train-000", "uint16") as writer:
        writer.append(tokens[:half])
        finished, num_open = writer.sync()
    with ShardWriter(tmp_path, "train-000", "uint16", finished=finished, open_tokens=num_open) as writer:
        writer.append(tokens[half:])
        records = writer.finish()
    path = tmp_path / records[0].file
    whole = TokenStore(tmp_path, records, "uint16")
    assert np.array_equal(whole.read(0, tokens.size), tokens)
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    store = TokenStore(tmp_path, records, "uint16")
    first = place // BLOCK_BYTES * BLOCK_BYTES // 2
    last = min(first + BLOCK_BYTES // 2, tokens.size)
    for start, stop in ((0, first), (last, tokens.size)):
        assert np.array_equal(store.read(start, stop), tokens[start:stop])
    for start, stop in ((first, first + 1), (last - 1, last), (0, tokens.size)):
        with pytest.raises(DataError, match=f"was altered: its tokens from {first} on .* prepare again"):
            store.read(start, stop)
