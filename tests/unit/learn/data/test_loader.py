"""The loader, compared with a plain loop; and the width of microbatches, which changes nothing else."""

import math
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from echelon.ground.errors import DataError
from echelon.learn.data.feed import Feed
from echelon.learn.data.loader import BatchLoader, BatchPlace, Microbatch, Padding, StepBatch, hash_sequences, set_width
from echelon.learn.data.order import Permutation, SampleOrder
from echelon.learn.data.shards import NO_LABEL, Samples, ShardWriter, TokenDataset, TokenStore
from echelon.recipe.batches import BatchSchedule, constant_batch, ramp_batch

GLOBAL_BATCH = 12
TWELVE, FOUR = constant_batch(12, 8), constant_batch(4, 8)


@pytest.fixture
def dataset(tmp_path: Path) -> TokenDataset:
    return build_dataset(tmp_path, num_tokens=403)


def build_dataset(folder: Path, num_tokens: int, kind: type[TokenDataset] = TokenDataset) -> TokenDataset:
    tokens = np.random.default_rng(0).integers(0, 300, num_tokens)
    with ShardWriter(folder, "train", "uint16", 100) as writer:
        writer.append(tokens)
        records = writer.finish()
    return kind([TokenStore(folder, records, "uint16")], 8)


def load(
    dataset: TokenDataset,
    steps: int,
    *,
    micro: int = 4,
    rank: int = 0,
    ranks: int = 1,
    start: int = 0,
    batches: BatchSchedule = TWELVE,
) -> list[StepBatch]:
    order = SampleOrder(dataset.num_samples, seed=1)
    loader = BatchLoader(dataset, order, batches, BatchPlace(micro, rank, ranks))
    return [loader.batch(step) for step in range(start, start + steps)]


def feed(dataset: TokenDataset, place: BatchPlace, batches: BatchSchedule = FOUR, seed: int = 0) -> Feed:
    order = SampleOrder(dataset.num_samples, seed)
    return Feed(lambda place: BatchLoader(dataset, order, batches, place), place)


def join(batches: list[StepBatch], name: str) -> torch.Tensor:
    return torch.cat([torch.as_tensor(getattr(each, name)) for batch in batches for each in batch.microbatches])


def hash_microbatch(each: Microbatch) -> int:
    return hash_sequences(each.sample_ids, each.batch_indices, each.input_ids.numpy(), each.labels.numpy())


def test_a_step_feeds_the_samples_of_the_order(dataset):
    batches = load(dataset, 10)
    num_samples = dataset.num_samples
    assert [batch.step for batch in batches] == list(range(10))
    assert num_samples == 51
    for position, sample in enumerate(join(batches, "sample_ids").tolist()):
        epoch, index = divmod(position, num_samples)
        assert sample == Permutation(num_samples, (1, epoch)).apply(np.array([index]))[0]
    samples = dataset.read_samples(join(batches, "sample_ids").numpy())
    assert torch.equal(join(batches, "input_ids"), torch.from_numpy(samples.inputs))
    assert torch.equal(join(batches, "labels"), torch.from_numpy(samples.labels))
    assert join(batches, "batch_indices").tolist() == list(range(GLOBAL_BATCH)) * 10
    assert join(batches, "input_ids").dtype == join(batches, "labels").dtype == torch.int64
    # 51 samples have 402 targets: an epoch feeds each once, and 6 positions of padding.
    assert sum(batch.num_tokens for batch in batches) == int((samples.labels != -100).sum())
    assert int((samples.labels[:num_samples] != -100).sum()) == 402


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("micro", [1, 2, 3, 5, 12])
def test_ranks_share_a_global_batch_and_their_hashes_add_up(dataset, ranks, micro):
    whole = load(dataset, 6)
    shares = [load(dataset, 6, micro=micro, rank=rank, ranks=ranks) for rank in range(ranks)]
    for step, batch in enumerate(whole):
        parts = [share[step] for share in shares]
        for name in ("input_ids", "labels", "sample_ids", "batch_indices"):
            assert torch.equal(join(parts, name), join([batch], name)), name
        assert sum(part.hash for part in parts) % 2**64 == batch.hash
        assert sum(part.num_tokens for part in parts) == batch.num_tokens
        assert all(len(each.sample_ids) <= micro for part in parts for each in part.microbatches)


def test_resume_is_exact_and_immediate(dataset):
    whole = load(dataset, 12)
    resumed = load(dataset, 5, start=7)
    assert [batch.hash for batch in resumed] == [batch.hash for batch in whole[7:]]
    assert torch.equal(join(resumed, "input_ids"), join(whole[7:], "input_ids"))
    assert load(dataset, 1, start=10**12)[0].step == 10**12


def test_a_ramp_feeds_the_same_sequences_in_the_same_order(dataset):
    ramp = ramp_batch(4, 12, 4, over_tokens=200, sequence_len=8)  # 100 tokens of 4 sequences, 100 of 8, then 12
    sizes = [4, 4, 4, 4, 8, 8, 12, 12]
    batches = load(dataset, 8, batches=ramp)
    assert [sum(len(each.batch_indices) for each in batch.microbatches) for batch in batches] == sizes
    assert join(batches, "batch_indices").tolist() == [place for size in sizes for place in range(size)]
    ids = SampleOrder(dataset.num_samples, seed=1).sample_ids(0, sum(sizes))
    assert join(batches, "sample_ids").tolist() == ids.tolist()
    assert [batch.hash for batch in load(dataset, 3, batches=ramp, start=5)] == [batch.hash for batch in batches[5:]]
    for ranks in (2, 4):
        shares = [load(dataset, 8, micro=1, rank=rank, ranks=ranks, batches=ramp) for rank in range(ranks)]
        for step, batch in enumerate(batches):
            assert sum(share[step].hash for share in shares) % 2**64 == batch.hash
            assert [len(share[step].microbatches) for share in shares] == [sizes[step] // ranks] * ranks


def test_the_hash_is_the_sum_over_sequences_in_any_order(dataset):
    (batch,) = load(dataset, 1, micro=GLOBAL_BATCH)
    (all_of_it,) = batch.microbatches
    assert hash_microbatch(all_of_it) == batch.hash
    rows = np.random.default_rng(0).permutation(GLOBAL_BATCH)
    fields = (all_of_it.sample_ids, all_of_it.batch_indices, all_of_it.input_ids.numpy(), all_of_it.labels.numpy())
    assert hash_sequences(*(each[rows] for each in fields)) == batch.hash
    assert sum(hash_sequences(*(each[[row]] for each in fields)) for row in rows) % 2**64 == batch.hash
    assert hash_sequences(*(each[:0] for each in fields)) == 0


def test_the_hash_detects_any_single_change(dataset):
    (batch,) = load(dataset, 1, micro=GLOBAL_BATCH)
    (each,) = batch.microbatches
    seen = {batch.hash}
    num_changes = 0
    for field in (each.sample_ids, each.batch_indices, each.input_ids.numpy(), each.labels.numpy()):
        for place in np.ndindex(field.shape):
            for change in (1, -1):
                field[place] += change
                seen.add(hash_microbatch(each))
                field[place] -= change
                num_changes += 1
    assert len(seen) == num_changes + 1
    assert hash_microbatch(each) == batch.hash


def test_the_hash_detects_swapped_sequences_and_tokens(dataset):
    (batch,) = load(dataset, 1, micro=GLOBAL_BATCH)
    (each,) = batch.microbatches
    inputs, labels = each.input_ids.numpy(), each.labels.numpy()
    swapped = np.array([1, 0, *range(2, GLOBAL_BATCH)])
    assert hash_sequences(each.sample_ids, each.batch_indices[swapped], inputs, labels) != batch.hash
    assert hash_sequences(each.sample_ids[swapped], each.batch_indices, inputs, labels) != batch.hash
    assert hash_sequences(each.sample_ids, each.batch_indices, labels, inputs) != batch.hash
    assert hash_sequences(each.sample_ids, each.batch_indices, inputs[:, ::-1].copy(), labels) != batch.hash


def hash_one(sample_id: int, position: int, inputs: list[int], labels: list[int]) -> int:
    """The hash of one sequence, computed with Python integers."""
    word = 2**64 - 1

    def mix(value: int) -> int:
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & word
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & word
        return value ^ (value >> 31)

    content = 0
    for place, (token, label) in enumerate(zip(inputs, labels, strict=True), start=1):
        content += mix((token << 32 | label & 0xFFFFFFFF) ^ mix(place * 0x9E3779B97F4A7C15 & word))
    where = mix(sample_id ^ 0xD1B54A32D192ED03) + mix(position ^ 0x8CB92BA72F3D8DD7)
    return mix((content + mix(where & word)) & word)


def test_hash_values_are_those_of_a_scalar_implementation_and_frozen():
    """Runs compare batch_hash across versions: never change these values."""
    ids, indices = np.array([5, 2**40, 0]), np.arange(3)
    inputs = np.arange(12).reshape(3, 4)
    labels = np.where(inputs == 11, -100, inputs + 1)
    value = hash_sequences(ids, indices, inputs, labels)
    rows = zip(ids.tolist(), indices.tolist(), inputs.tolist(), labels.tolist(), strict=True)
    assert value == sum(hash_one(*row) for row in rows) % 2**64
    assert f"{value:016x}" == "d9f35dd93982f256"


def test_a_batch_larger_than_the_data_continues_into_the_next_epoch(tmp_path):
    dataset = build_dataset(tmp_path, num_tokens=30)
    assert dataset.num_samples == 4
    ids = join(load(dataset, 2), "sample_ids").tolist()
    assert all(sorted(ids[first : first + 4]) == [0, 1, 2, 3] for first in range(0, 24, 4))


@pytest.mark.parametrize(("ranks", "micro"), [(5, 3), (5, 2), (7, 1), (9, 2), (13, 1)])
def test_uneven_batches_are_padded_with_sequences_without_targets(dataset, ranks, micro):
    whole = load(dataset, 6)
    shares = [load(dataset, 6, micro=micro, rank=rank, ranks=ranks) for rank in range(ranks)]
    count = math.ceil(GLOBAL_BATCH / ranks)
    for step, batch in enumerate(whole):
        parts = [share[step] for share in shares]
        assert [len(join([part], "batch_indices")) for part in parts] == [count] * ranks
        ids, indices = join(parts, "sample_ids"), join(parts, "batch_indices")
        assert indices.tolist() == list(range(count * ranks))
        assert ids[GLOBAL_BATCH:].tolist() == [-1] * (count * ranks - GLOBAL_BATCH)
        assert (join(parts, "labels")[GLOBAL_BATCH:] == -100).all()
        for name in ("input_ids", "labels", "sample_ids", "batch_indices"):
            assert torch.equal(join(parts, name)[:GLOBAL_BATCH], join([batch], name)), name
        assert sum(part.hash for part in parts) % 2**64 == batch.hash
        assert sum(part.num_tokens for part in parts) == batch.num_tokens
        assert len({len(part.microbatches) for part in parts}) == 1


def test_an_empty_dataset_is_refused():
    empty = TokenDataset([], 8)
    with pytest.raises(DataError, match="a sample needs at least two"):
        BatchLoader(empty, SampleOrder(0, 0), FOUR, BatchPlace(1))


def test_an_error_in_the_thread_is_raised_by_batch(tmp_path):
    class Broken(TokenDataset):
        def read_samples(self, sample_ids):
            raise OSError(5, "the disk is gone")

    broken = build_dataset(tmp_path, num_tokens=403, kind=Broken)
    with closing(feed(broken, BatchPlace(1))) as batches, pytest.raises(OSError, match="the disk is gone"):
        batches.batch(0)


def test_batches_are_read_ahead_from_any_step(dataset):
    with closing(feed(dataset, BatchPlace(1))) as batches:
        straight = [batches.batch(step).hash for step in range(6)]
        assert batches.fed(2).hash == straight[2] and batches.batch(6).step == 6
        assert [batches.batch(step).hash for step in (3, 4, 5)] == straight[3:]


def test_a_changed_share_applies_from_the_next_step(dataset):
    first, second, alone = (load(dataset, 5, rank=rank, ranks=ranks) for rank, ranks in ((0, 2), (1, 2), (0, 1)))
    with closing(feed(dataset, BatchPlace(4, 0, 2), TWELVE, seed=1)) as batches:
        digests = []
        for step, share in enumerate(((0, 2), (0, 2), (1, 2), (0, 1), (0, 2))):
            batches.reshare(*share)
            digests.append(batches.batch(step).hash)
    expected = [first[0], first[1], second[2], alone[3], first[4]]
    assert digests == [each.hash for each in expected]


def test_waiting_is_measured(dataset):
    with closing(feed(dataset, BatchPlace(1))) as batches:
        batches.batch(0)
        assert 0 <= batches.wait_seconds < 5


LENGTHS = [3, 9, 17, 30]


def packed(width=30):
    """Rows of these lengths, padded at the end."""
    places = np.arange(width)
    filled = np.array([places < length for length in LENGTHS])
    labels = np.where(filled, 7, NO_LABEL).astype(np.int64)
    return Samples(np.where(filled, 5, 0).astype(np.int64), labels, np.where(filled, 0, -1).astype(np.int32), True)


class Packed:
    """A dataset of those rows."""

    num_samples, num_tokens = len(LENGTHS), sum(LENGTHS)

    def read_samples(self, ids):
        rows = packed()
        return Samples(rows.inputs[ids], rows.labels[ids], rows.documents[ids], True)


@pytest.mark.parametrize(
    ("padding", "rows", "width"),
    [
        (Padding(), [0], 8),
        (Padding(), [1, 2], 24),
        (Padding(), [3], 30),  # at most the available length
        (Padding(multiple=12), [1], 24),
        (Padding(multiple=16), [3], 32),
        (Padding(is_equal=True), [0], 30),
        (Padding(is_equal=True, multiple=16), [0], 32),
    ],
)
def test_width_of_sequences_with_padding(padding, rows, width):
    samples = set_width(packed(), np.array(rows), padding)
    assert samples.inputs.shape == samples.labels.shape == samples.documents.shape == (len(rows), width)
    for row, length in enumerate(LENGTHS[each] for each in rows):
        assert (samples.labels[row] != NO_LABEL).nonzero()[0].tolist() == list(range(length))
        assert (samples.documents[row] >= 0).sum() == length and (samples.inputs[row] == 5).sum() == length


@pytest.mark.parametrize(("length", "width"), [(200, 200), (473, 480), (481, 512), (505, 512)])
def test_sequences_that_are_nearly_full_keep_their_width(length, width):
    """15 sixteenths of 512 are 480."""
    documents = np.where(np.arange(512) < length, 0, -1).astype(np.int32)[None]
    tokens = np.ones((1, 512), np.int64)
    assert set_width(Samples(tokens, tokens, documents, True)).inputs.shape == (1, width)


@pytest.mark.parametrize(("multiple", "width"), [(1, 30), (8, 32)])
def test_width_of_full_sequences(multiple, width):
    text = Samples(np.ones((2, 30), np.int64), np.ones((2, 30), np.int64))
    samples = set_width(text, padding=Padding(multiple=multiple))
    assert samples.inputs.shape == (2, width) and samples.documents is None
    assert (samples.labels[:, 30:] == NO_LABEL).all() and (samples.labels[:, :30] == 1).all()


def batches(padding, rank):
    order = SampleOrder(len(LENGTHS), seed=1)
    loader = BatchLoader(Packed(), order, constant_batch(4, 30), BatchPlace(1, rank, 2, padding))
    return [loader.batch(step) for step in range(2)]


def test_a_common_width_over_ranks_and_microbatches_keeps_the_counts():
    widths = {}
    for padding in (Padding(), Padding(is_equal=True, multiple=4)):
        fed = [batch for rank in range(2) for batch in batches(padding, rank)]
        widths[padding] = {each.input_ids.shape[1] for batch in fed for each in batch.microbatches}
        counts = [(batch.hash, batch.num_tokens, batch.num_labels) for batch in fed]
        assert counts == [(b.hash, b.num_tokens, b.num_labels) for rank in range(2) for b in batches(Padding(), rank)]
    assert widths == {Padding(): {8, 16, 24, 30}, Padding(is_equal=True, multiple=4): {32}}
