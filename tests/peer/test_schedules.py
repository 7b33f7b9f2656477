"""Schedules equal those of `transformers` and torch after the warm-up; during the warm-up echelon is one step ahead."""

import pytest
import torch
from transformers import TrainingArguments, get_scheduler

from echelon.recipe.batches import constant_batch
from echelon.recipe.schedule import build_schedule, find_warmup
from echelon.recipe.training import OptimConfig

PEAK, WARMUP, STEPS = 0.5, 10, 100
ONE = constant_batch(1, 1)


def rates_of(build, num_steps=STEPS):
    """The learning rate of each step under a torch scheduler."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler, rates = build(optimizer), []
    for _ in range(num_steps):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


def ours(num_steps, **config):
    rate = build_schedule(OptimConfig(learning_rate=PEAK, warmup=WARMUP, **config), num_steps, ONE)
    return [rate(step) for step in range(STEPS)]


# Their schedules reach the floor one step after the last step, echelon's at it: its run is one step longer here.
@pytest.mark.parametrize(
    ("name", "settings", "config"),
    [
        ("linear", {}, {"schedule": "linear", "min_learning_rate_fraction": 0.0}),
        ("cosine", {}, {"schedule": "cosine", "min_learning_rate_fraction": 0.0}),
        ("cosine_with_min_lr", {"min_lr_rate": 0.2}, {"schedule": "cosine", "min_learning_rate_fraction": 0.2}),
        ("constant_with_warmup", {}, {"schedule": "constant"}),
        ("polynomial", {"power": 3.0, "lr_end": 0.1},
         {"schedule": "polynomial", "polynomial_power": 3.0, "min_learning_rate_fraction": 0.2}),
        ("inverse_sqrt", {}, {"schedule": "inverse_sqrt", "min_learning_rate_fraction": 0.0}),
    ],
)  # fmt: skip
def test_the_same_as_transformers(name, settings, config):
    theirs = rates_of(
        lambda optimizer: get_scheduler(name, optimizer, WARMUP, STEPS, scheduler_specific_kwargs=settings)
    )
    rates = ours(STEPS + 1, **config)
    assert rates[WARMUP:] == pytest.approx(theirs[WARMUP:], abs=1e-12)
    assert rates[: WARMUP - 1] == pytest.approx(theirs[1:WARMUP])


def test_wsd_is_the_same_as_transformers():
    settings = {"num_decay_steps": 25, "decay_type": "1-sqrt", "min_lr_ratio": 0.1}
    # Theirs still has the peak rate in the first step of the decay: 25 steps of echelon equal 25 of their 26.
    theirs = rates_of(
        lambda optimizer: get_scheduler(
            "warmup_stable_decay", optimizer, WARMUP, STEPS, scheduler_specific_kwargs=settings
        )
    )
    rate = build_schedule(
        OptimConfig(learning_rate=PEAK, warmup=WARMUP, schedule="wsd", decay_fraction=0.25), STEPS, ONE
    )
    assert [rate(step - 1) for step in range(WARMUP + 1, STEPS)] == pytest.approx(theirs[WARMUP + 1 :], abs=1e-12)
    assert rate(STEPS - 1) == pytest.approx(0.1 * PEAK)


@pytest.mark.parametrize(("ratio", "num_steps"), [(0.03, 100), (0.1, 95), (0.25, 10), (0.333, 77), (0.001, 100)])
def test_a_warm_up_fraction_is_the_same_as_transformers(tmp_path, ratio, num_steps):
    warmup = TrainingArguments(str(tmp_path), warmup_steps=ratio).get_warmup_steps(num_steps)
    theirs = rates_of(lambda optimizer: get_scheduler("linear", optimizer, warmup, num_steps), num_steps)
    config = OptimConfig(learning_rate=PEAK, schedule="linear", warmup=ratio, min_learning_rate_fraction=0.0)
    assert find_warmup(config, num_steps, ONE) == warmup
    # During the warm-up echelon is one step ahead; afterwards its run is one step longer.
    rate = build_schedule(config, num_steps, ONE)
    assert [rate(step) for step in range(warmup - 1)] == pytest.approx(theirs[1:warmup])
    assert rate(warmup) == theirs[warmup] == PEAK
    longer = build_schedule(config.model_copy(update={"warmup": warmup}), num_steps + 1, ONE)
    assert [longer(step) for step in range(warmup, num_steps)] == pytest.approx(theirs[warmup:])


def test_the_same_as_torch():
    theirs = rates_of(lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 90, eta_min=0.05))
    assert ours(STEPS + 1)[WARMUP:] == pytest.approx(theirs[:90], abs=1e-12)
    theirs = rates_of(lambda optimizer: torch.optim.lr_scheduler.PolynomialLR(optimizer, 90, power=2.0))
    polynomial = ours(STEPS + 1, schedule="polynomial", min_learning_rate_fraction=0.0)
    assert polynomial[WARMUP:] == pytest.approx(theirs[:90], abs=1e-12)
