"""The batch size of every step, compared with a loop that counts tokens step by step."""

import math
from fractions import Fraction

import pytest

from echelon.ground.errors import ConfigError
from echelon.recipe.batches import Rhythm, constant_batch, ramp_batch
from echelon.recipe.render import render_recipe
from tests.unit.recipe_samples import SMALL, load_text


def sizes_by_addition(start, size, increment, over_tokens, length, steps):
    """Megatron-LM's rule applied step by step: (size, sequences fed before) of each step."""
    fed, found = 0, []
    num_increments = (size - start) // increment
    for _ in range(steps):
        tokens = fed * length
        grown = size if tokens >= over_tokens else start + tokens * num_increments // over_tokens * increment
        found.append((grown, fed))
        fed += grown
    return found


@pytest.mark.parametrize(
    "ramp",
    [
        (32, 256, 32, 1_000_000, 128),
        (4, 12, 4, 200, 8),
        (1, 7, 3, 1000, 10),
        (2, 100, 1, 3000, 16),  # stages of 30 tokens, shorter than one step: some sizes are skipped
        (1, 1000, 333, 1, 2048),  # the ramp ends before the second step
        (8, 1536, 8, 12_000_000_000, 2048),
    ],
)
def test_every_step_equals_a_count_of_tokens(ramp):
    batches = ramp_batch(*ramp)
    slow = sizes_by_addition(*ramp, steps=3000)
    assert [(batches.sequences(step), batches.first_sequence(step)) for step in range(3000)] == slow
    occurring = {size for size, _ in slow}
    assert occurring <= set(batches.sizes) and list(batches.sizes) == sorted(set(batches.sizes))
    if slow[-1][0] == ramp[1]:
        assert occurring == set(batches.sizes)
    for fed in (0, 1, slow[1][1], slow[7][1] - 1, slow[7][1], slow[7][1] + 1, slow[-1][1]):
        assert batches.num_steps(fed) == next(step for step, (_, before) in enumerate(slow) if before >= fed)


def test_gpt_3_grows_from_32_thousand_to_3_million_tokens():
    """Brown et al. 2020, appendix B: from 32k tokens to 3.2M, here in 98 steps of 32k over 8 billion tokens."""
    batches = ramp_batch(16, 16 * 99, 16, 8_000_000_000, 2048)
    assert batches.sequences(0) * 2048 == 32_768
    assert batches.sequences(10**6) * 2048 == 99 * 32_768
    full = next(stage for stage in batches.stages if stage.size == 16 * 99)
    assert 8_000_000_000 <= batches.first_token(full.first_step) < 8_000_000_000 + 98 * 32_768
    assert batches.describe().startswith("batch ramp: 16 -> 1,584 sequences in 99 sizes over 8,00")


def test_a_constant_batch():
    batches = constant_batch(12, 8)
    assert batches.sizes == (12,) and batches.sequences(10**9) == 12
    assert batches.first_sequence(7) == 84 and batches.first_token(7) == 672
    assert [batches.num_steps(n) for n in (0, 1, 12, 13)] == [0, 1, 1, 2]


def ramped(folder, *overrides):
    return load_text(folder, SMALL, "train.batch_ramp={from: 2, over_tokens: 1280, increment: 2}", *overrides)[0]


def test_a_recipe_counts_steps_through_its_ramp(tmp_path):
    # 64 tokens per sequence; three stages of 426 2/3 tokens = 6 2/3 sequences: 4 steps of 2, 2 of 4, 1 of 6, then 8
    recipe = ramped(tmp_path)
    assert recipe.batches.sizes == (2, 4, 6, 8) and recipe.global_batch_size == 8
    assert [recipe.batches.sequences(step) for step in range(9)] == [2, 2, 2, 2, 4, 4, 6, 8, 8]
    # 30 sequences after 8 steps
    for tokens, steps in ((1, 1), (30 * 64, 8), (30 * 64 + 1, 9)):
        assert ramped(tmp_path, f"train.tokens={tokens}", "train.steps=null").num_steps(0) == steps
    assert ramped(tmp_path, "train.epochs=1.5", "train.steps=null").num_steps(20) == 8


def test_the_ramp_is_in_the_unit_of_the_batch_key(tmp_path):
    ramp = "train.batch_ramp={from: 128, to: 512, over_tokens: 1280, increment: 128}"
    recipe = load_text(tmp_path, SMALL, "train.global_batch_size=null", "train.global_batch_tokens=512", ramp)[0]
    assert recipe.batches == ramped(tmp_path).batches


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.batch_ramp.to=16", "train.batch_ramp.to=16 is not train.global_batch_size=8, where the ramp ends"),
        ("train.batch_ramp.from=8", "train.batch_ramp.from=8 must be less than train.global_batch_size=8."),
        ("train.batch_ramp.increment=4", "increment=4 does not divide the 6 from train.batch_ramp.from=2 to"),
    ],
)
def test_a_ramp_that_does_not_meet_the_batch_is_refused(tmp_path, override, message):
    with pytest.raises(ConfigError) as caught:
        ramped(tmp_path, override)
    assert message in str(caught.value)


def test_a_ramp_in_tokens_needs_whole_sequences(tmp_path):
    ramp = "train.batch_ramp={from: 100, over_tokens: 1280, increment: 128}"
    with pytest.raises(ConfigError, match=r"batch_ramp\.from=100 tokens is not a whole number .* use 128\."):
        load_text(tmp_path, SMALL, "train.global_batch_size=null", "train.global_batch_tokens=512", ramp)


@pytest.mark.parametrize("batches", [constant_batch(8, 64), constant_batch(64, 64), ramp_batch(2, 16, 2, 9000, 10)])
@pytest.mark.parametrize(("num_samples", "per_epoch"), [(100, 1), (100, 3), (101, 0.5), (7, 2), (40, 0.3), (160, 4)])
def test_steps_of_events_per_epoch(batches, num_samples, per_epoch):
    """Compared with a loop that feeds the sequences one by one."""
    places = {math.ceil(Fraction(num_samples * count) / Fraction(str(per_epoch))) for count in range(1, 10_000)}
    expected, fed = [], 0
    for step in range(400):
        size = batches.sequences(step)
        if any(fed + number in places for number in range(1, size + 1)):
            expected.append(step + 1)
        fed += size
    rhythm = Rhythm(batches, every_sequences=num_samples / Fraction(str(per_epoch)))
    assert [done for done in range(401) if rhythm.is_due(done)] == expected
    assert list(rhythm.first_steps(3)) == expected[:3]


def test_an_epoch_ends_where_a_run_of_one_epoch_ends(tmp_path):
    recipe, _ = load_text(tmp_path, SMALL.replace("steps: 100", "epochs: 3\n  eval_every: 1 epoch"))
    assert recipe.num_steps(100) == 38 and recipe.evaluation_rhythm(100).first_steps(3) == (13, 25, 38)
    assert load_text(tmp_path, render_recipe(recipe))[0] == recipe, "what a run keeps of its recipe loads"


def test_events_by_steps():
    assert Rhythm(constant_batch(8, 64), every_steps=5).first_steps(2) == (5, 10)
    never = Rhythm(constant_batch(8, 64))
    assert never.first_steps(2) == () and not any(never.is_due(done) for done in range(100))


BOTH = SMALL.replace("steps: 100", "steps: 100\n  eval_every: 0.5 epochs") + "checkpoint: {every: 1 epochs}\n"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("run.seed=0", ("0.5 epochs", "1 epochs")),
        ("train.eval_every=5", (5, "1 epochs")),
        ("train.eval_every=null", (None, "1 epochs")),  # only at the end
        ("checkpoint.every=auto", ("0.5 epochs", "auto")),
        ("checkpoint.every=2/6 epochs", ("0.5 epochs", "1/3 epochs")),
        ("checkpoint.every=7 steps", ("0.5 epochs", 7)),
    ],
)
def test_a_rhythm_has_a_unit(tmp_path, override, expected):
    recipe, _ = load_text(tmp_path, BOTH, override)
    assert (recipe.train.eval_every, recipe.checkpoint.every) == expected


MIXED = BOTH.replace("[{path: text.txt}]", "[{path: a.txt, weight: 2}, b.txt]")


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        (SMALL, ("checkpoint.every=null",), "checkpoint.every=null must be a number of steps, or of passes over"),
        (SMALL, ("train.eval_every=0 epochs",), "train.eval_every=0 epochs must be a number of steps, or of passes"),
        (SMALL, ("train.eval_every=1.5",), "train.eval_every=1.5 must be a number of steps, or of passes over the"),
        (SMALL, ("train.eval_every=2 hours",), "train.eval_every=2 hours must be a number of steps, or of passes"),
        (MIXED, (), "checkpoint.every='1 epochs' is not defined for sources with a weight, which have epochs of"),
        (MIXED, ("checkpoint.every=9",), "train.eval_every='0.5 epochs' is not defined for sources with a weight"),
    ],
)
def test_other_units_and_epochs_of_mixtures_are_refused(tmp_path, text, overrides, message):
    with pytest.raises(ConfigError) as caught:
        load_text(tmp_path, text, *overrides)
    assert message in str(caught.value)
