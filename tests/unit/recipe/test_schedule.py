"""Learning-rate schedules, compared with values by hand."""

import pytest

from echelon.ground.errors import ConfigError
from echelon.recipe.batches import constant_batch, ramp_batch
from echelon.recipe.render import render_recipe
from echelon.recipe.schedule import build_schedule, find_fault, find_warmup, render_schedule
from echelon.recipe.training import OptimConfig
from tests.unit.recipe_samples import SMALL, load_text

EIGHT = constant_batch(8, 64)
FROZEN = [
    "0x1.67830373ccbddp-15", "0x1.3a92a30553261p-12", "0x1.3a92a30553261p-12",
    "0x1.049c14a9a42ffp-12", "0x1.6e82b35bce192p-13", "0x1.6052502eec7c9p-16",
]  # fmt: skip


def rates(num_steps, batches=EIGHT, **config):
    rate = build_schedule(OptimConfig(**{"learning_rate": 1.0, **config}), num_steps, batches)
    return [rate(step) for step in range(num_steps + 1)]


def test_cosine_by_hand():
    rate = rates(11, warmup=4)
    assert rate[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert rate[4] == pytest.approx(1.0)  # the cosine starts at the peak
    assert rate[7] == pytest.approx(0.55)  # half way: the mean of peak and floor
    assert rate[10] == rate[11] == pytest.approx(0.1)  # the last step, and any after it: the floor


def test_cosine_in_steps_is_frozen():
    """Runs resume bit for bit across versions: never change these values."""
    rate = build_schedule(OptimConfig(learning_rate=3e-4, warmup=7, min_learning_rate_fraction=0.07), 100, EIGHT)
    assert [rate(step).hex() for step in (0, 6, 7, 33, 50, 99)] == FROZEN


def test_no_warmup_starts_at_the_peak():
    for schedule in ("cosine", "linear", "constant", "polynomial", "wsd"):
        assert rates(10, schedule=schedule, learning_rate=2.0)[0] == 2.0


def test_each_decay_by_hand():
    warm = {"warmup": 2, "min_learning_rate_fraction": 0.2}
    # 7 steps, 2 of warm-up: the last one is 4 steps later, so the progress is 0, 1/4, 1/2, 3/4, 1
    assert rates(7, schedule="linear", **warm)[1:] == pytest.approx([1, 1, 0.8, 0.6, 0.4, 0.2, 0.2])
    assert rates(7, schedule="constant", **warm) == [0.5, 1, 1, 1, 1, 1, 1, 1]
    # (1 - progress)^2 of the 0.8 above the floor: 0.45, 0.2, 0.05
    assert rates(7, schedule="polynomial", **warm)[2:] == pytest.approx([1, 0.65, 0.4, 0.25, 0.2, 0.2])
    assert rates(7, schedule="polynomial", polynomial_power=3.0, **warm)[4] == pytest.approx(0.2 + 0.8 / 8)
    # sqrt(2/2), sqrt(2/8); sqrt(2/72) = 1/6 is below the floor
    root = rates(80, schedule="inverse_sqrt", **warm)
    assert (root[0], root[1], root[2], root[8], root[72]) == pytest.approx((0.5, 1, 1, 0.5, 0.2))
    # the last 4 of 10 steps decrease by sqrt(1/4), sqrt(1/2), sqrt(3/4), 1
    stable = rates(10, schedule="wsd", decay_fraction=0.4, **warm)
    falls = [0.2 + 0.8 * (1 - share**0.5) for share in (0.25, 0.5, 0.75, 1)]
    assert stable == pytest.approx([0.5, 1, 1, 1, 1, 1, *falls, 0.2])
    assert stable[1:6] == [1.0] * 5


def test_tokens_and_steps_agree_with_a_constant_batch():
    for schedule in ("cosine", "linear", "constant", "inverse_sqrt", "polynomial", "wsd"):
        by_steps = rates(50, schedule=schedule, warmup=5)
        by_tokens = rates(50, schedule=schedule, warmup=f"{5 * 8 * 64} tokens")
        assert by_tokens == pytest.approx(by_steps, rel=1e-12)


def test_tokens_follow_the_ramp():
    # stages of 20 tokens: steps of 1, 1, 2, 3, 4, 4, ... sequences of 10
    ramp = ramp_batch(1, 4, 1, over_tokens=60, sequence_len=10)
    assert [ramp.first_token(step) for step in range(7)] == [0, 10, 20, 40, 70, 110, 150]
    rate = rates(6, ramp, schedule="linear", warmup="30 tokens", min_learning_rate_fraction=0.0)
    # the warm-up covers 10, 20 and then all 30 tokens; from there it is 80 to the start of the last step
    assert rate[:6] == pytest.approx([1 / 3, 2 / 3, 1, 1 - 10 / 80, 1 - 40 / 80, 0])


def test_a_fraction_of_the_run_is_warm_up():
    # 0.25 of 10 steps is 2.5, rounded up to 3
    by_fraction = rates(10, schedule="linear", warmup="25%")
    assert by_fraction == rates(10, schedule="linear", warmup=3)
    assert by_fraction[:4] == pytest.approx([1 / 3, 2 / 3, 1, 1])
    # in decimal: in binary, 0.07 * 100 is a little more than 7
    assert find_warmup(OptimConfig(learning_rate=1, warmup="7%"), 100, EIGHT) == 7
    assert rates(10, warmup="0%") == rates(10)
    # in tokens, a fraction of the tokens: half of the 150 that 6 steps feed under this ramp
    ramp = ramp_batch(1, 4, 1, over_tokens=60, sequence_len=10)
    tokens = OptimConfig(learning_rate=1, warmup="50% of tokens")
    assert (ramp.first_token(6), find_warmup(tokens, 6, ramp)) == (150, 75)
    assert find_warmup(OptimConfig(learning_rate=1, warmup="50%"), 6, ramp) == 3


def test_the_length_of_the_run_may_be_given_in_any_way(tmp_path):
    text = SMALL.replace("steps: 100", "{length}") + "  warmup: 10%\n"
    for length, num_samples in (("steps: 100", 0), ("tokens: 51200", 0), ("epochs: 2.5", 320)):
        recipe, _ = load_text(tmp_path, text.replace("{length}", length))
        num_steps = recipe.num_steps(num_samples)
        assert (num_steps, find_warmup(recipe.optim, num_steps, recipe.batches)) == (100, 10)


def test_an_override_of_one_warm_up_replaces_the_other(tmp_path):
    steps, fraction = SMALL + "  warmup: 5\n", SMALL + "  warmup: 10%\n"
    for spelling in ("optim.warmup=20%", "optim.warmup=0.2", "optim.warmup_fraction=0.2"):
        assert load_text(tmp_path, steps, spelling)[0].optim.warmup == "20%"
    for spelling in ("optim.warmup=7", "optim.warmup=7 steps", "optim.warmup_steps=7"):
        assert load_text(tmp_path, fraction, spelling)[0].optim.warmup == 7
    again, _ = load_text(tmp_path, render_recipe(load_text(tmp_path, fraction)[0]))
    assert again.optim.warmup == "10%", "what a run keeps of its recipe loads"


def fault(steps=100, **config):
    return find_fault(OptimConfig(learning_rate=1.0, **config), steps, EIGHT)


def test_settings_that_do_not_fit_the_run_are_refused():
    assert fault(warmup=100) is None
    assert fault(warmup=101) == ("optim.warmup=101 is more than the 100 steps of the whole run; use at most 100.")
    assert fault(warmup="51201 tokens") == (
        "optim.warmup='51201 tokens' is more than the 51200 tokens of the whole run; use at most 51200."
    )
    assert fault(schedule="wsd", warmup=80) is None
    assert fault(schedule="wsd", warmup=81) == (
        "optim.decay_fraction=0.2 of the run's 100 steps is 20, and optim.warmup=81 leaves 19; use at most 0.19, "
        "or a shorter warm-up."
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optim.warmup=5 epochs"], "optim.warmup=5 epochs must be a number of steps, or such as 1B tokens, 2%"),
        (["optim.warmup=1.5"], "optim.warmup=1.5 must be a number of steps"),
        (["optim.warmup='5'"], "optim.warmup='5' must be a number of steps"),
        (["optim.decay_fraction=0.3"], "=0.3 has no effect with optim.schedule=cosine; set optim.schedule: wsd, or r"),
        (["optim.schedule=linear", "optim.polynomial_power=3"], "power=3 has no effect with optim.schedule=linear"),
        (["optim.schedule=inverse_sqrt"], "needs a warm-up; set optim.warmup, for example to 2%"),
        (["optim.schedule=inverse_sqrt", "optim.warmup=0 tokens"], "set optim.warmup, for example to 2%"),
        (
            ["optim.warmup=5", "optim.warmup_fraction=0.1"],
            "optim.warmup=warmup_fraction=0.1 and warmup=5 must be a number of steps",
        ),
        (["optim.warmup=100%"], "optim.warmup=100% must be a number of steps"),
        (["optim.schedule=wsd", "optim.warmup=90%"], "optim.warmup='90%' (90 steps) leaves 10; use at most 0.1"),
        (["optim.warmup=101"], "optim.warmup=101 is more than the 100 steps"),
        (["optim.schedule=wsd", "optim.warmup=90"], "optim.warmup=90 leaves 10; use at most 0.1"),
        (["optim.warmup=1B tokens"], "more than the 51200 tokens of the whole run"),
    ],
)
def test_a_recipe_with_such_settings_is_refused(tmp_path, overrides, message):
    with pytest.raises(ConfigError) as caught:
        load_text(tmp_path, SMALL, *overrides)
    assert message in str(caught.value)


def test_the_rates_are_printed_before_the_start():
    config = OptimConfig(learning_rate=1e-3, warmup=4, min_learning_rate_fraction=0.1)
    assert render_schedule(config, 21, EIGHT) == (
        "schedule: cosine over 21 steps, warm-up over 4 steps: 2.50e-04 at step 1, 9.91e-04 at step 6, "
        "7.22e-04 at step 11, 3.00e-04 at step 16, 1.00e-04 at step 21"
    )
    share = OptimConfig(learning_rate=1e-3, warmup="20%", min_learning_rate_fraction=0.1)
    assert render_schedule(share, 20, EIGHT).startswith(
        "schedule: cosine over 20 steps, warm-up over 4 steps (20 % of the run): 2.50e-04 at step 1, "
    )
    tokens = OptimConfig(learning_rate=1e-3, schedule="wsd", warmup="0 tokens")
    assert render_schedule(tokens, 2, EIGHT) == (
        "schedule: wsd over 2 steps (1,024 tokens): 1.00e-03 at step 1, 1.00e-04 at step 2"
    )
