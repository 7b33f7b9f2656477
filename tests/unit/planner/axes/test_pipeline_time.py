"""The planner's pipeline against a simulation, event by event, of the actions that PyTorch's schedules list."""

import itertools
import random

import pytest

from echelon.planner.axes.pipeline_schedule import StageTime, bubble_seconds, fits_schedule, round_size, shared_seconds
from tests.unit.planner.axes.test_stages import SCHEDULES, order_of


def simulate(order, stages):
    """(the seconds of a step, those that its busiest rank computes), with time passing from one event to the next."""
    waiting = {rank: list(actions) for rank, actions in order.items()}
    free, busy, finished, now = dict.fromkeys(order, 0.0), dict.fromkeys(order, 0.0), {}, 0.0
    while any(waiting.values()):
        for rank, actions in waiting.items():
            if not actions or free[rank] > now:
                continue
            kind, stage, index = actions[0]
            needed = {"F": ("F", stage - 1, index), "W": ("I", stage, index)}.get(kind, ("I", stage + 1, index))
            if 0 <= needed[1] < len(stages) and finished.get(needed, float("inf")) > now:
                continue
            forward, inputs, weights = stages[stage]
            seconds = {"F": forward, "B": inputs + weights, "I": inputs, "W": weights}[kind]
            free[rank] = finished["I" if kind == "B" else kind, stage, index] = now + seconds
            busy[rank] += seconds
            actions.pop(0)
        now = min((each for each in {*free.values(), *finished.values()} if each > now), default=now)
    return max(free.values()), max(busy.values())


def pipelines(schedule):
    """Numbers of ranks, stages of each and microbatches that the schedule takes."""
    several = (1, 2, 3) if schedule in ("interleaved", "zero_bubble") else (1,)
    for ranks, per_rank, count in itertools.product((2, 3, 4), several, (4, 5, 8, 13)):
        if fits_schedule(schedule, ranks, count):
            yield ranks, per_rank, count


def stages_of(kind, count, chance):
    """The three times of each stage: all equal, with a head on the last one, or each of any length."""
    match kind:
        case "equal":
            return [(1.0, 1.0, 1.0)] * count
        case "head":
            return [(2.0, 3.1, 1.7)] * (count - 1) + [(3.3, 4.4, 3.0)]
    return [tuple(chance.uniform(0.5, 2.0) for _ in range(3)) for _ in range(count)]


@pytest.mark.parametrize("kind", ["equal", "head", "any"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_bubble_is_that_of_a_simulated_step(schedule, kind):
    chance, seen = random.Random(7), 0
    for ranks, per_rank, count in pipelines(schedule):
        stages = stages_of(kind, ranks * per_rank, chance)
        seconds, busiest = simulate(order_of(schedule, ranks, per_rank, count), stages)
        bubble = bubble_seconds(schedule, ranks, [StageTime(*each) for each in stages], count)
        assert bubble == pytest.approx(seconds - busiest, rel=0.01, abs=1e-3 * busiest), (ranks, per_rank, count)
        seen += 1
    assert seen >= 8


def simulate_shared(order, stages, sharing, tick=0.004):
    """The seconds of a step whose ranks share cores, in small ticks of time."""
    waiting, left, finished, now = {rank: list(actions) for rank, actions in order.items()}, {}, set(), 0.0
    while any(waiting.values()):
        active = []
        for rank, actions in waiting.items():
            kind, stage, index = actions[0] if actions else ("W", -1, 0)
            needed = {"F": ("F", stage - 1, index), "W": ("I", stage, index)}.get(kind, ("I", stage + 1, index))
            if actions and (needed in finished or not 0 <= needed[1] < len(stages)):
                forward, inputs, weights = stages[stage]
                left.setdefault(rank, {"F": forward, "B": inputs + weights, "I": inputs, "W": weights}[kind])
                active.append(rank)
        for rank in active:
            left[rank] -= tick * min(sharing, len(order) / len(active))
            if left[rank] <= 0:
                kind, stage, index = waiting[rank].pop(0)
                finished.add(("I" if kind == "B" else kind, stage, index))
                del left[rank]
        now += tick
    return now


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("ranks", "sharing"), [(4, 2.0), (3, 1.5), (2, 2.0), (2, 1.0)])
def test_ranks_that_wait_leave_their_part_of_the_cores_to_others(schedule, ranks, sharing):
    per_rank = 2 if schedule in ("interleaved", "zero_bubble") else 1
    stages = stages_of("any", ranks * per_rank, random.Random(3))
    expected = simulate_shared(order_of(schedule, ranks, per_rank, 2 * ranks), stages, sharing)
    found = shared_seconds(schedule, ranks, [StageTime(*each) for each in stages], 2 * ranks, sharing)
    assert found == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("schedule", ["interleaved", "zero_bubble"])
def test_long_steps_go_on_as_they_began(schedule, monkeypatch):
    stages = [(2.0, 3.1, 1.7)] * 7 + [(3.3, 4.4, 3.0)]
    seconds, busiest = simulate(order_of(schedule, 4, 2, 64), stages)
    monkeypatch.setattr("echelon.planner.axes.pipeline_schedule._MOST_ACTIONS", 320)  # 5 rounds of 16
    found = bubble_seconds(schedule, 4, [StageTime(*each) for each in stages], 64)
    assert found == pytest.approx(seconds - busiest, rel=0.01)


def test_a_round_is_that_of_pytorch():
    assert [round_size("interleaved", 4, count) for count in (3, 4, 10, 12)] == [3, 4, 5, 4]
