"""Mixtures and batch ramps feed the same batches at every world size, and go on exactly where they stopped."""

import itertools
from dataclasses import replace
from functools import partial

import pytest

from echelon.learn.data.loader import BatchLoader, BatchPlace
from echelon.learn.data.mixture import build_order
from echelon.learn.data.prepare import prepare_data
from echelon.recipe.load import load_recipe
from tests.cases import slow
from tests.mixtures import write_sources
from tests.parity import training

pytestmark = pytest.mark.dist

STEPS = 10
# Three stretches of 384 tokens, which are 12 sequences of 32.
RAMP = {"from": 4, "over_tokens": 1152, "increment": 4}
SIZES = [4, 4, 4, 8, 8, 12, 16, 16, 16, 16]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """What differs in the recipe: the three sources, a ramp, and a schedule that follows the tokens."""
    folder = tmp_path_factory.mktemp("sources")
    return {
        "data": {"train": write_sources(folder), "prepared_dir": str(folder / "prepared")},
        "train": {"global_batch_size": 16, "batch_ramp": RAMP},
        "optim": {"schedule": "wsd", "warmup": "512 tokens"},
    }


@pytest.fixture(scope="module")
def uninterrupted(workers, text, tmp_path_factory, mixture):
    """Ten steps on one process, where they lie."""
    folder = tmp_path_factory.mktemp("one")
    return training.train(workers, training.Row(micro_batch=4, changes=mixture), folder, text, STEPS), folder


@pytest.mark.parametrize(("parallel", "ranks", "micro"), [("ddp", 2, 2), slow("zero1", 4, 1)])
def test_ranks_make_no_difference(workers, text, tmp_path, mixture, uninterrupted, parallel, ranks, micro):
    rows = training.train(workers, training.Row(parallel, ranks, micro, changes=mixture), tmp_path, text, STEPS)
    training.assert_same_curve(rows, uninterrupted[0])


def test_the_batches_are_those_of_the_order(text, tmp_path, mixture, uninterrupted):
    """The hashes and the schedule of the run are those of the sequences that the mixture's order names."""
    recipe, _ = load_recipe(training.write_recipe(training.Row(micro_batch=4, changes=mixture), tmp_path, text, STEPS))
    data = prepare_data(recipe)
    assert [recipe.batches.sequences(step) for step in range(STEPS)] == SIZES
    ids = build_order(recipe, data.train).sample_ids(0, sum(SIZES)).tolist()
    loader = BatchLoader(data.train, build_order(recipe, data.train), recipe.batches, BatchPlace(4))
    batches = map(loader.batch, range(STEPS))
    fed = [[microbatch.sample_ids.tolist() for microbatch in batch.microbatches] for batch in batches]
    assert list(itertools.chain(*itertools.chain(*fed))) == ids
    assert [len(each) for each in fed] == [size // 4 for size in SIZES]
    rates = [row["learning_rate"] for row in uninterrupted[0] if row["kind"] == "train"]
    # 128, 256, 384 and then all of the 512 tokens of the warm-up; the last of 3328 tokens, of which 512 are the last
    # step's, at the floor
    assert rates[:7] == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, *[1e-3] * 4])
    assert rates[9] == pytest.approx(0.1e-3)


def test_a_resume_in_the_middle_is_exact(workers, text, tmp_path, mixture):
    row = training.with_ranks(training.Row("ddp", changes=mixture), 2, micro_batch=2)
    training.check_exact_resume(partial(training.train, workers, row), tmp_path, text, STEPS, stop_at=4)


def test_a_resume_on_other_ranks_is_the_same_curve(workers, text, tmp_path, mixture, uninterrupted):
    one = training.Row(micro_batch=4, changes=mixture)
    training.train(workers, replace(one, ranks=4, micro_batch=1), tmp_path, text, STEPS, stop_at=3)
    training.train(workers, one, tmp_path, text, STEPS, stop_at=6)
    rows = training.train(workers, replace(one, parallel="fsdp", ranks=2, micro_batch=1), tmp_path, text, STEPS)
    training.assert_same_curve(rows, uninterrupted[0])


def test_other_weights_are_another_order(workers, text, tmp_path, mixture, uninterrupted):
    """The comparison can fail."""
    sources = [{**source, "weight": 1.0} for source in mixture["data"]["train"]]
    changes = {**mixture, "data": {**mixture["data"], "train": sources}}
    rows = training.train(workers, training.Row(micro_batch=4, changes=changes), tmp_path, text, STEPS, stop_at=3)
    assert not set(training.hashes(rows)) & set(training.hashes(uninterrupted[0]))
