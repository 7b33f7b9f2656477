"""Text that is prepared while it is read has the samples of text that was prepared before, and samples too."""

import json
import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path

import fsspec
import numpy as np
import pytest
import yaml

from echelon.ground.errors import ConfigError, DataError, EchelonError
from echelon.learn.data.loader import BatchLoader, BatchPlace
from echelon.learn.data.mixture import build_order
from echelon.learn.data.prepare import prepare_data
from echelon.learn.data.stream import addresses, chunks
from echelon.learn.data.stream.addresses import fetch
from echelon.learn.data.stream.dataset import UNKNOWN
from echelon.recipe.load import load_recipe
from tests.cases import slow
from tests.object_server import BUCKET, bucket_served
from tests.unit.learn.data.readers.test_readers import write_megatron
from tests.unit.recipe_samples import RECIPE

STREAMED = RECIPE | {
    "run": {"name": "tiny", "seed": 3},
    "data": {"train": "text", "sequence_len": 64, "validation_fraction": 0},
    "train": {"steps": 40, "global_batch_size": 16},
}
STREAM = "data.stream={window: 200}"
NUM_FILES = 10


def write_files(folder: Path) -> None:
    folder.mkdir()
    for number in range(NUM_FILES):
        draws = np.random.default_rng(number).integers(0, 10**9, 40 + 7 * number)
        (folder / f"{number:02d}.txt").write_text("".join(f"{number} drew {draw}.\n" for draw in draws))


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Load the recipe, in a folder with its text, with overrides; every file is a chunk."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("echelon.learn.data.stream.chunks.PIECE_BYTES", 1)
    monkeypatch.setattr(addresses, "RETRY_DELAYS_SECONDS", (0.0, 0.0))
    write_files(tmp_path / "text")
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(STREAMED))
    return lambda *overrides: load_recipe(tmp_path / "recipe.yaml", overrides)[0]


def read_batches(recipe, steps=range(40), rank=0, size=1):
    data = prepare_data(recipe).train
    loader = BatchLoader(data, build_order(recipe, data), recipe.batches, BatchPlace(16, rank, size))
    return [loader.batch(step) for step in steps]


def hashes(batches):
    return [batch.hash for batch in batches]


@pytest.mark.parametrize("overrides", [(), slow(("tokenizer=gpt", "data.document_mask=true"))])
def test_batches_are_those_of_text_that_was_prepared_before(load, tmp_path, overrides):
    if overrides:
        whole = prepare_data(load("tokenizer={train: {vocab_size: 300}}"))
        whole.tokenizer.save_pretrained(tmp_path / "gpt")
    whole = prepare_data(load(*overrides))
    expected = read_batches(load(*overrides, STREAM, f"data.prepared_dir={whole.path}"))
    recipe = load(*overrides, STREAM)
    assert prepare_data(recipe).train.num_samples == UNKNOWN
    streamed = read_batches(recipe)
    assert hashes(streamed) == hashes(expected)
    for one, other in zip(streamed, expected, strict=True):
        assert one.microbatches[0].input_ids.equal(other.microbatches[0].input_ids)
    num_samples = whole.train.num_samples
    assert 2 * num_samples < 16 * 40 or overrides, "two epochs are read"
    # Any number of ranks, from any step on.
    parts = [read_batches(recipe, range(17, 21), rank, 4) for rank in range(4)]
    assert [sum(step) % 2**64 for step in zip(*map(hashes, parts), strict=True)] == hashes(expected)[17:21]
    # One window over all of the text is the order of text that was prepared before.
    wide = read_batches(load(*overrides, f"data.stream={{window: {num_samples}}}"))
    assert hashes(wide) == hashes(read_batches(load(*overrides)))


def test_only_the_chunks_of_a_window_are_prepared_before_its_first_batch(load):
    data = prepare_data(load("data.stream={window: 16}"))
    folder = data.path.with_name(f"{data.path.name}.chunks")
    assert not folder.exists()
    assert data.train.reach(5) >= 5
    assert [path.name for path in sorted(folder.glob("*.bin"))] == ["00000000.bin"]


def measure(folder):
    """The bytes of its chunks, of which any may be forgotten meanwhile."""
    total = 0
    for path in folder.glob("*.bin"):
        with suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def test_a_bounded_cache_forgets_chunks_and_prepares_the_same_again(load):
    recipe = load("data.stream={window: 16, cache_gb: 0.0000123}")
    data = prepare_data(recipe)
    loader = BatchLoader(data.train, build_order(recipe, data.train), recipe.batches, BatchPlace(16))
    folder = data.path.with_name(f"{data.path.name}.chunks")
    largest = 0
    found = []
    for step in range(40):
        found.append(loader.batch(step).hash)
        largest = max(largest, measure(folder))
    assert found == hashes(read_batches(load("data.stream={window: 16}")))
    # The cache, the chunks of two windows, and those that are written meanwhile.
    total = sum(json.loads(path.read_text())["bytes"] for path in folder.glob("*.json"))
    assert largest < 12_300 + 4 * 2000 < total


def test_several_ranks_prepare_a_chunk_once(load, monkeypatch):
    recipe = load(STREAM)
    expected = hashes(read_batches(recipe))
    data = prepare_data(recipe)
    folder = data.path.with_name(f"{data.path.name}.chunks")
    for path in folder.iterdir():
        path.unlink()
    fetched = []
    monkeypatch.setattr(chunks, "fetch", lambda file, place: (fetched.append(file.name), fetch(file, place))[1])
    found = {}

    def read(rank):
        found[rank] = hashes(read_batches(recipe, rank=rank, size=3))

    threads = [threading.Thread(target=read, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [sum(step) % 2**64 for step in zip(*(found[rank] for rank in range(3)), strict=True)] == expected
    assert sorted(fetched) == [f"{number:02d}.txt" for number in range(NUM_FILES)]


def test_text_that_changed_is_refused(load, tmp_path):
    recipe = load(STREAM)
    data = prepare_data(recipe)
    path = tmp_path / "text" / "03.txt"
    text = path.read_text()
    path.write_text(text.replace("drew", "DREW"))
    with pytest.raises(DataError, match=r"03\.txt changed since the data was listed: its size or time is another one"):
        data.train.reach(UNKNOWN)
    other = prepare_data(recipe)
    assert other.content_digest != data.content_digest, "a run is not resumed with it"
    # A text that changed in spite of its size and time, and is prepared again.
    other.train.reach(UNKNOWN)
    status = path.stat()
    path.write_text(text.replace("drew", "drow"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    (other.path.with_name(f"{other.path.name}.chunks") / "00000003.bin").unlink()
    with pytest.raises(DataError, match=r"03\.txt: prepared again, this text gives other tokens than before"):
        prepare_data(recipe).train.read_samples(np.arange(100))


def test_broken_records_are_counted_in_each_chunk(load, tmp_path, caplog):
    good = [json.dumps({"text": f"line {number}"}) for number in range(50)]
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines" / "a.jsonl").write_text("\n".join([*good, "{"]))
    (tmp_path / "lines" / "b.jsonl").write_text("\n".join([*good, "{", "["]))
    data = prepare_data(load(STREAM, "data.train=lines")).train
    data.reach(5)
    assert any("dropped 1 of 51 records" in line and "a.jsonl:51" in line for line in caplog.messages)
    with pytest.raises(DataError, match=r"2 of 52 records of a chunk cannot be used, .*b\.jsonl:51 .*b\.jsonl:52"):
        data.reach(UNKNOWN)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.validation_fraction=0.1", "data.validation_fraction=0.1: data.stream would have to read"),
        ("data.deduplicate=true", "data.deduplicate=true: data.stream would have to"),
        ("data.train=[{path: text, weight: 2}]", "data.train.0.weight=2 does not go"),
        ("data.train=[{path: text, max_samples: 2}]", "data.train.0.max_samples=2 does not go"),
        ("data.train=hf://datasets/ORG/NAME/a.txt", "data.train.0.path=hf://.* may change during the run; name the"),
        ("tokenizer={train: {vocab_size: 300}}", "tokenizer.train: data.stream reads text as it trains"),
        ("train.eval_every=1 epochs", "train.eval_every='1 epochs' does not go"),
        ("checkpoint.every=1 epochs", "checkpoint.every='1 epochs' does not go"),
        ("data.stream.cache_gb=1e-6", "may not hold three windows"),
    ],
)
def test_what_needs_all_of_the_text_is_refused(load, override, said):
    with pytest.raises(ConfigError, match=said):
        load(STREAM, override)


def write_records(folder, make):
    """Write files of 30 to 45 records: of `make(draw, number)`."""
    folder.mkdir()
    for number in range(6):
        draw = np.random.default_rng(number)
        records = [make(draw, index) for index in range(30 + 3 * number)]
        (folder / f"{number}.jsonl").write_text("\n".join(map(json.dumps, records)))


def make_ids(draw, number):
    ids = draw.integers(0, 256, draw.integers(2, 70)).tolist()
    return {"input_ids": ids, "labels": [-100, *ids[1:]] if number % 2 else [-100] * (len(ids) - 1) + ids[-1:]}


def make_pair(draw, number):
    return {"prompt": f"{number} ", "chosen": "y" * int(draw.integers(1, 40)), "rejected": f"no {draw.integers(9)}"}


def make_judged(draw, number):
    return {"prompt": f"{number}", "completion": "ab" * int(draw.integers(1, 40)), "label": number % 3 == 0}


def assert_same_samples(found, expected):
    for one, other in zip(found, expected, strict=True):
        for mine, theirs in zip(one.microbatches, other.microbatches, strict=True):
            assert mine.input_ids.equal(theirs.input_ids) and mine.labels.equal(theirs.labels)
            assert (mine.documents is None) == (theirs.documents is None)
            assert mine.documents is None or mine.documents.equal(theirs.documents)
            assert mine.extra.keys() == theirs.extra.keys()
            assert all(mine.extra[name].equal(theirs.extra[name]) for name in mine.extra)


@pytest.mark.parametrize(
    ("make", "overrides"),
    [
        (make_ids, ()),
        slow(make_pair, ("objective.name=dpo", "data.document_separator=null")),
        slow(make_judged, ("objective.name=kto", "data.document_separator=null")),
    ],
)
def test_samples_with_a_sequence_of_their_own_are_those_of_prepared_ones(load, tmp_path, make, overrides):
    write_records(tmp_path / "records", make)
    overrides = (*overrides, "data.train=records", "data.packing=false")
    whole = prepare_data(load(*overrides))
    expected = read_batches(load(*overrides, STREAM, f"data.prepared_dir={whole.path}"))
    found = read_batches(load(*overrides, STREAM))
    assert hashes(found) == hashes(expected)
    assert_same_samples(found, expected)


def rows_of(samples):
    documents = [row.tobytes() for row in samples.documents]
    return list(zip(map(tuple, samples.inputs), map(tuple, samples.labels), documents, strict=True))


def test_samples_are_packed_within_a_chunk(load, tmp_path):
    write_records(tmp_path / "records", make_ids)
    recipe = load(STREAM, "data.train=records")
    data = prepare_data(recipe).train
    found = rows_of(data.read_samples(np.arange(data.reach(UNKNOWN))))
    alone = [prepare_data(load(f"data.train=records/{number}.jsonl")).train for number in range(6)]
    packs = [rows_of(dataset.read_samples(np.arange(dataset.num_samples))) for dataset in alone]
    stops = np.cumsum([0, *map(len, packs)])
    assert len(found) == stops[-1] < 6 * 30
    for first, stop, expected in zip(stops, stops[1:], packs, strict=False):
        assert sorted(found[first:stop]) == sorted(expected)
        # The longest samples, which are packed first, are not all at the beginning.
        assert found[first:stop] != expected
    # Any number of ranks, from any step on, after the chunks are lost.
    batches = hashes(read_batches(recipe))
    for path in prepare_data(recipe).path.with_name(f"{prepare_data(recipe).path.name}.chunks").glob("*.bin"):
        path.unlink()
    parts = [read_batches(recipe, range(9, 13), rank, 4) for rank in range(4)]
    assert [sum(step) % 2**64 for step in zip(*map(hashes, parts), strict=True)] == batches[9:13]
    assert prepare_data(load(STREAM, "data.train=records", "data.on_overlong=drop")).content_digest != (
        prepare_data(recipe).content_digest
    )


@pytest.mark.slow
def test_samples_that_do_not_fit_are_counted_in_each_chunk(load, tmp_path, caplog):
    write_records(tmp_path / "records", make_ids)
    prepare_data(load(STREAM, "data.train=records")).train.reach(UNKNOWN)
    lines = [json.loads(line) for line in (tmp_path / "records" / "0.jsonl").read_text().splitlines()]
    lost = [len(line["input_ids"]) - 65 for line in lines if len(line["input_ids"]) > 65]
    cut = f"of 30 samples of 0.jsonl, {len(lost)} are longer than data.sequence_len and were cut ({sum(lost)} tokens"
    assert lost and any(cut in line for line in caplog.messages), caplog.messages
    with pytest.raises(DataError, match=r"0\.jsonl: sample \d+ has \d+ tokens .* more than data.sequence_len=64"):
        prepare_data(load(STREAM, "data.train=records", "data.on_overlong=refuse")).train.reach(UNKNOWN)
    (tmp_path / "long").mkdir()
    (tmp_path / "long" / "a.jsonl").write_text(json.dumps({"input_ids": [1] * 99, "labels": [-100] * 98 + [1]}))
    with pytest.raises(DataError, match=r"none of its samples can be used"):
        prepare_data(load(STREAM, "data.train=long")).train.reach(1)


def test_prompts_are_refused(load, tmp_path):
    (tmp_path / "asked.jsonl").write_text(json.dumps({"prompt": "a"}))
    with pytest.raises(ConfigError, match=r"data\.stream does not go with prompts"):
        prepare_data(load(STREAM, "data.train=asked.jsonl"))


@pytest.fixture(scope="module")
def server():
    with bucket_served() as server:
        yield server


@pytest.fixture
def bucket(server, tmp_path, load):
    """A folder of a bucket with the text."""
    server.start()
    server.num_cut = 0
    address = f"{BUCKET}/stream-{tmp_path.name}-{os.getpid()}"
    fsspec.filesystem("s3").put(str(tmp_path / "text") + "/", f"{address}/", recursive=True)
    return f"s3://{address}"


def of_bucket(load, bucket, *overrides):
    return load(STREAM, f"data.train={bucket}", f"data.prepared_dir=of-{bucket.rpartition('/')[2]}", *overrides)


@pytest.mark.parametrize("pattern", ["", slow("/*.txt")])
def test_a_bucket_gives_the_batches_of_its_files(load, bucket, pattern):
    expected = hashes(read_batches(load(STREAM)))
    assert hashes(read_batches(of_bucket(load, f"{bucket}{pattern}"))) == expected


@pytest.mark.parametrize(
    "source",
    [
        slow({"path": "ids", "fields": {"input_ids": "tokens"}}),
        {"path": "ids", "format": "megatron"},
        slow({"path": "ids/x.bin", "format": "megatron"}),
        slow({"path": "ids/*"}),
    ],
)
def test_shards_of_ids_in_a_bucket_are_read_as_those_here(load, bucket, tmp_path, source):
    is_mds = "fields" in source
    if is_mds:
        shutil.copytree(Path(__file__).parents[1] / "readers" / "mds" / "arrays", tmp_path / "ids")
    else:
        (tmp_path / "ids").mkdir()
        draw = np.random.default_rng(1)
        write_megatron(tmp_path / "ids" / "x", [draw.integers(0, 256, 900).tolist() for _ in range(5)], [0, 1, 3, 5])
    store = fsspec.filesystem("s3", use_listings_cache=False, skip_instance_cache=True)
    store.put(f"{tmp_path}/ids/", f"{bucket}/ids/", recursive=True)
    far = {**source, "path": f"{bucket}/{source['path']}"}
    here, there = (f"data.train={json.dumps([entry])}" for entry in (source, far))
    expected = np.concatenate(list(prepare_data(load(here)).train.iter_tokens()))
    data = prepare_data(of_bucket(load, bucket, there)).train
    assert np.array_equal(np.concatenate(list(data.iter_tokens())), expected)
    [[file]] = data.plan.chunks
    sizes = [path.stat().st_size for path in (tmp_path / "ids").iterdir()]
    assert file.size == sum(sizes) and len(sizes) == (1 if is_mds else 2)
    for path in (tmp_path / "ids").iterdir():  # also the .bin, beside the .idx that the file is named by
        store.pipe_file(f"{bucket}/ids/{path.name}", path.read_bytes()[:-1] + b"?")
        with pytest.raises(DataError, match=rf"{file.name} changed since the data was listed: its version is"):
            fetch(file, tmp_path)
        store.put_file(str(path), f"{bucket}/ids/{path.name}")


def test_held_out_text_is_fetched_before(load, bucket):
    recipe = of_bucket(load, bucket, f"data.validation={bucket}/03.txt", f"data.train={bucket}/0[0-2].txt")
    [held_out] = prepare_data(recipe).validation
    text = np.concatenate(list(held_out.dataset.iter_tokens())).astype(np.uint8).tobytes()
    assert text == Path("text/03.txt").read_bytes()


def test_objects_that_arrive_incompletely_are_fetched_again(load, bucket, server, caplog):
    expected = hashes(read_batches(load(STREAM), range(5)))
    recipe = of_bucket(load, bucket)
    prepare_data(recipe)
    server.num_cut = 2
    assert hashes(read_batches(recipe, range(5))) == expected
    assert sum("again in 0 s" in line and f"{bucket}/0" in line for line in caplog.messages) >= 1


def test_a_server_that_stays_down_is_named(load, bucket, server):
    data = prepare_data(of_bucket(load, bucket)).train
    server.stop()
    with pytest.raises(EchelonError, match=f"{bucket}/00.txt cannot be fetched .* resume the run"):
        data.reach(1)
    server.start()
    assert data.reach(1) >= 1


def test_an_object_that_changed_is_refused(load, bucket, tmp_path):
    data = prepare_data(of_bucket(load, bucket)).train
    text = Path("text/04.txt").read_text()
    store = fsspec.filesystem("s3", use_listings_cache=False, skip_instance_cache=True)
    store.pipe_file(f"{bucket}/04.txt", text.replace("drew", "DREW").encode())
    with pytest.raises(DataError, match=rf"{bucket}/04\.txt changed since the data was listed: its version is"):
        data.reach(UNKNOWN)
    store.rm_file(f"{bucket}/04.txt")
    with pytest.raises(DataError, match=rf"{bucket}/04\.txt changed since the data was listed: it is gone"):
        data.reach(UNKNOWN)


def test_an_address_needs_a_stream_and_must_exist(load, bucket):
    with pytest.raises(ConfigError, match=r"data at an address is read while the run trains; set data\.stream"):
        prepare_data(load(f"data.train={bucket}"))
    with pytest.raises(DataError, match=r"no such object|no object there has any content"):
        prepare_data(of_bucket(load, f"{bucket}/nothing"))


def test_a_chunk_is_prepared_by_one_machine_and_downloaded_by_others(load, bucket, server, caplog):
    shared = f"data.prepared_remote={bucket}-shared"
    expected = hashes(read_batches(of_bucket(load, bucket, shared)))
    server.requests.clear()
    assert hashes(read_batches(of_bucket(load, bucket, shared, "data.prepared_dir=other"))) == expected
    name = bucket.rpartition("/")[2]
    assert not [path for method, path in server.requests if method == "GET" and f"/{name}/0" in path]
    # A resume on a new machine learns how large the chunks before its position are, and does not download them.
    read_batches(of_bucket(load, bucket, shared, "data.prepared_dir=late", "data.stream.window=16"), range(8, 9))
    [folder] = Path("late").glob("*.chunks")
    assert len(list(folder.glob("*.bin"))) < len(list(folder.glob("*.json")))
    # A chunk that is damaged there is named, and prepared here.
    store = fsspec.filesystem("s3", use_listings_cache=False, skip_instance_cache=True)
    [damaged] = [path for path in store.find(f"{bucket}-shared") if path.endswith("00000002.bin")]
    content = store.cat_file(damaged)
    store.pipe_file(damaged, content[:-1] + bytes([content[-1] ^ 1]))
    caplog.clear()
    assert hashes(read_batches(of_bucket(load, bucket, shared, "data.prepared_dir=third"))) == expected
    assert any(
        "00000002.bin cannot be used" in line and "the chunk is prepared here" in line for line in caplog.messages
    )
    assert store.cat_file(damaged) == content, "what was damaged is replaced"
