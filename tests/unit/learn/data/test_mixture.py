"""Mixtures: exact shares, separate epochs per source, any position in constant time."""

import json
import time

import numpy as np
import pytest

from echelon.ground.errors import ConfigError
from echelon.learn.data.mixture import MixtureDataset, MixtureOrder, build_order, divide_slots
from echelon.learn.data.order import Permutation, branch_seed
from echelon.learn.data.prepare import prepare_data
from echelon.learn.data.shards import TokenDataset
from echelon.learn.data.survey import describe_order
from echelon.recipe.load import load_recipe
from tests.mixtures import WEIGHTS, write_sources
from tests.unit.recipe_samples import SMALL, load_text

SIZES = (70, 31, 13)


def sources_of(ids, sizes=SIZES):
    return np.searchsorted(np.cumsum(sizes), ids, side="right")


@pytest.mark.parametrize(
    ("weights", "slots"),
    [
        ((0.5, 0.3, 0.2), (500, 300, 200)),
        ((5, 3, 2), (500, 300, 200)),
        ((1, 1, 1), (334, 334, 334)),
        ((0.7, 0.2, 0.1), (700, 200, 100)),  # 0.7 + 0.2 + 0.1 is not 1 in binary
        ((1, 2), (334, 668)),
        ((0.9995, 0.0005), (1999, 1)),
        # a million and one would be exact: 499999.5, 499999.5 and 0.999999 of a million, by largest remainder
        ((1e6, 1e6, 2), (500000, 499999, 1)),
        ((123456789, 987654321), (111111, 888889)),
    ],
)
def test_slots_equal_the_shares_in_the_smallest_table(weights, slots):
    assert divide_slots(weights) == slots


def test_a_source_without_a_slot_is_refused():
    with pytest.raises(ConfigError, match=r"data\.train\.1\.weight=1e-09 gives less than one sequence in a million"):
        divide_slots([1.0, 1e-9])


@pytest.mark.parametrize("weights", [WEIGHTS, (1, 1, 1), (3, 1, 7)])
def test_shares_are_exact_and_each_source_has_its_own_epochs(weights):
    order = MixtureOrder(SIZES, weights, seed=5)
    num_slots, rounds = sum(order.slots), 3
    ids = order.sample_ids(0, rounds * num_slots)
    counts = [np.bincount(sources_of(part), minlength=3).tolist() for part in ids.reshape(rounds, num_slots)]
    assert counts == [list(order.slots)] * rounds
    for source, (size, first) in enumerate(zip(SIZES, (0, 70, 101), strict=True)):
        own = ids[sources_of(ids) == source] - first
        epochs = own[: own.size // size * size].reshape(-1, size)
        assert epochs.shape[0] >= 5
        assert np.array_equal(np.sort(epochs, axis=1), np.tile(np.arange(size), (epochs.shape[0], 1)))
        assert not np.array_equal(epochs[0], epochs[1])
        # the n-th use of a source is entry n of a permutation drawn from (seed, source, epoch)
        for epoch in (0, 4):
            key = (branch_seed(5, 1 + source), epoch)
            assert epochs[epoch].tolist() == Permutation(size, key).apply(np.arange(size)).tolist()


def test_any_position_takes_constant_time():
    order = MixtureOrder(SIZES, WEIGHTS, seed=1)
    whole = order.sample_ids(0, 5000)
    for start, count in ((0, 1), (999, 2), (1234, 777), (4999, 1), (17, 0)):
        assert order.sample_ids(start, count).tolist() == whole[start : start + count].tolist()

    def seconds(start):
        times = []
        for _ in range(5):
            began = time.perf_counter()
            order.sample_ids(start, 10_000)
            times.append(time.perf_counter() - began)
        return min(times)

    assert seconds(10**12) < 100 * seconds(0)
    far = 10**12 + 37
    rounds, place = divmod(far, 1000)
    source = sources_of(whole[place])
    uses = rounds * order.slots[source] + np.count_nonzero(sources_of(whole[:place]) == source)
    epoch, index = divmod(int(uses), SIZES[source])
    key = (branch_seed(1, 1 + int(source)), epoch)
    first = (0, 70, 101)[source]
    assert order.sample_ids(far, 1)[0] == first + Permutation(SIZES[source], key).apply(np.array([index]))[0]


def test_uses_are_counted():
    order = MixtureOrder(SIZES, WEIGHTS, seed=2)
    for position in (0, 1, 999, 1000, 1001, 3456):
        counted = np.bincount(sources_of(order.sample_ids(0, position)), minlength=3)
        assert order.uses_before(position) == counted.tolist()


def test_values_are_frozen():
    """A change of these values would change the data order of every existing mixture: never edit them."""
    near = [62, 79, 30, 110, 74, 111, 94, 93, 95, 112, 96, 113]
    assert MixtureOrder(SIZES, WEIGHTS, seed=0).sample_ids(0, 12).tolist() == near
    far = [893234933951, 1000000004, 96446277, 636671439991, 1000000006]
    assert MixtureOrder((10**9, 7, 2**40), (1, 2, 3), seed=42).sample_ids(10**12, 5).tolist() == far
    assert [branch_seed(0, 0), branch_seed(7, 3)] == [12035550249420947055, 11146164815057002045]


def test_neighbours_are_mixed():
    """Any 100 consecutive positions are close to the shares: the table is shuffled, not in blocks."""
    sources = sources_of(MixtureOrder(SIZES, WEIGHTS, seed=3).sample_ids(0, 10_000)).reshape(100, 100)
    for source, share in enumerate(WEIGHTS):
        counts = (sources == source).sum(axis=1)
        assert abs(counts - 100 * share).max() < 5 * np.sqrt(100 * share * (1 - share))


def load_mixture(folder, *overrides):
    sections = {
        "run": {"name": "mix", "dir": str(folder / "run")}, "tokenizer": "bytes",
        "model": {"config": {"model_type": "llama"}}, "optim": {"learning_rate": 1},
        "data": {"train": write_sources(folder), "sequence_len": 32, "prepare_workers": 1, "validation_fraction": 0.1},
        "train": {"steps": 250, "global_batch_size": 8},
    }  # fmt: skip
    (folder / "recipe.json").write_text(json.dumps(sections))
    return load_recipe(folder / "recipe.json", overrides)[0]


def test_a_mixture_reads_the_samples_of_its_sources(tmp_path):
    recipe = load_mixture(tmp_path)
    data = prepare_data(recipe)
    assert isinstance(data.train, MixtureDataset) and len(data.train.parts) == 3
    assert [each.name for each in data.validation] == ["notes", "code.jsonl", "chat"]
    sizes = [part.num_samples for part in data.train.parts]
    assert data.train.num_samples == sum(sizes)
    assert data.train.num_tokens == sum(part.num_tokens for part in data.train.parts)
    assert sum(chunk.size for chunk in data.train.iter_tokens()) == data.train.num_tokens
    ids = build_order(recipe, data.train).sample_ids(0, 100)
    samples = data.train.read_samples(ids)
    inputs, labels = samples.inputs, samples.labels
    words = (b"note ", b"code ", b"chat ")
    for sample, source, tokens, targets in zip(ids, sources_of(ids, sizes), inputs, labels, strict=True):
        own = data.train.parts[source].read_samples(np.array([sample - sum(sizes[:source])]))
        assert np.array_equal(tokens, own.inputs[0]) and np.array_equal(targets, own.labels[0])
        text = bytes(tokens.astype(np.uint8))
        assert words[source] in text or len(text.strip(b"\0")) < 32
    # 250 steps of 8 are two passes through the table
    lines = describe_order(recipe, data)
    assert lines[0] == (
        f"mixture: notes 50.00%; {sizes[0]} sequences per epoch, 1,000 in the run: {1000 / sizes[0]:.2f} epochs"
    )
    assert [line.split(";")[0] for line in lines] == [
        "mixture: notes 50.00%", "mixture: code.jsonl 30.00%", "mixture: chat 20.00%",
    ]  # fmt: skip


def test_shares_that_a_table_cannot_represent_are_reported(tmp_path):
    recipe = load_mixture(tmp_path, "data.train.0.weight=0.123456789")
    first, *_ = describe_order(recipe, prepare_data(recipe))
    # 0.123456789 / 0.623456789
    assert first.startswith("mixture: notes 19.8020% (weight 19.801980%); ")


def test_one_source_with_a_weight_is_not_a_mixture(tmp_path):
    recipe = load_text(tmp_path, SMALL, "data.train.0.weight=3", "train.steps=null", "train.epochs=2")[0]
    assert not recipe.data.is_mixture
    assert isinstance(build_order(recipe, TokenDataset([], 8)).num_samples, int)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.train=[{path: a, weight: 2}, b]", "train.steps=null", "train.epochs=2"],
         "train.epochs=2 is not defined for sources with a weight"),
        (["data.validation=[{path: v, weight: 2}]"], "data.validation.0.weight=2 has no effect"),
        (["data.train=[{path: x/a, weight: 2}, y/a]"], "data.train.1 has the name 'a', as data.train.0"),
    ],
)  # fmt: skip
def test_settings_that_a_mixture_refuses(tmp_path, overrides, message):
    with pytest.raises(ConfigError) as caught:
        load_text(tmp_path, SMALL, *overrides)
    assert message in str(caught.value)
