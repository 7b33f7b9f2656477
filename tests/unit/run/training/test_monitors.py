"""Monitors, on values by hand: which rank is persistently slow, and whose weights differ by the hash."""

import random
import statistics
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from echelon.ground.stop_request import STRAGGLER
from echelon.run.training import replicas
from echelon.run.training.callbacks import FinishedStep
from echelon.run.training.replicas import ReplicaDifference, describe_differences, find_odd_ranks, hash_bits
from echelon.run.training.state import TrainState
from echelon.run.training.straggler import StragglerWatch, median_of_peers, read_own_time

HOSTS = ["one", "one", "two", "two"]


def watch(steps, stages=(0, 0, 0, 0), seconds=2.0):
    """What is found in steps with these own times of four ranks."""
    watching = StragglerWatch(HOSTS, stages)
    return [found for step, own in enumerate(steps, start=1) for found in watching.saw_step(step, own, seconds)]


def test_a_rank_that_is_slow_in_two_windows_is_named_once():
    [found] = watch([[1.0, 1.1, 1.5, 0.9]] * 200)
    assert (found.step, found.rank, found.host) == (50, 2, "two")
    assert (found.own_seconds, found.peer_seconds, found.step_seconds) == (1.5, 1.0, 2.0)
    assert found.describe() == (
        "rank 2 on two is slow: over the last 50 steps it needed 1500.0 ms for its own part of a step, 1.50 times "
        "those of others; the other ranks wait for it"
    )


def test_it_is_named_again_if_it_has_recovered():
    slow, even = [[1.0, 1.0, 1.0, 2.0]] * 50, [[1.0] * 4] * 25
    assert [found.step for found in watch(slow + even + slow)] == [50, 125]


def test_the_slow_one_of_two_ranks_is_named():
    watching = StragglerWatch(["one", "two"], [0, 0])
    found = [each for step in range(1, 51) for each in watching.saw_step(step, [1.0, 1.5], 2.0)]
    assert [(each.rank, each.peer_seconds) for each in found] == [(1, 1.0)]


@pytest.mark.parametrize(
    ("steps", "more"),
    [
        ([[1.0, 1.0, 1.2, 1.0]] * 200, {}),
        ([[0.010, 0.010, 0.015, 0.010]] * 200, {}),  # of a step of 2 s
        ([[1.0] * 4, [1.0, 1.0, 9.0, 1.0]] * 100, {}),  # the median of every second window
        (([[1.0, 1.0, 9.0, 1.0]] * 25 + [[1.0] * 4] * 25) * 4, {}),
        ([[1.0, 1.0, 1.6, 1.6]] * 200, {"stages": (0, 0, 1, 1)}),
    ],
    ids=["a little slower", "of little weight", "in some steps", "in some windows", "another stage"],
)
def test_nothing_else_is_named(steps, more):
    assert watch(steps, **more) == []


def test_waiting_for_data_counts_where_the_others_have_none():
    [found] = watch([[0.0, 0.5, 0.0, 0.0]] * 50)
    assert found.rank == 1 and "times those" not in found.describe()


def test_a_stage_with_one_rank_is_compared_with_none():
    assert watch([[1.0, 5.0, 1.0, 1.0]] * 100, stages=(0, 1, 2, 2)) == []


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5, 8, 33, 64])
@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_the_peers_are_all_other_ranks_of_the_stage(num_ranks, num_stages):
    draw = random.Random(num_ranks)
    own = [draw.choice([0.0, 0.1, 0.25, 1 / 3, draw.random()]) for _ in range(num_ranks)]  # some of them equal
    stages = [draw.randrange(num_stages) for _ in own]
    for rank, usual in enumerate(median_of_peers(np.array(own), np.array(stages))):
        peers = [own[other] for other in range(num_ranks) if other != rank and stages[other] == stages[rank]]
        assert usual == (statistics.median(peers) if peers else own[rank])


def test_a_row_names_the_slowest_of_many_ranks_and_their_median():
    watching = StragglerWatch(["one"] * 64, [0] * 64)
    steps = []
    for number in range(1, 26):
        metrics = SimpleNamespace(own_seconds=[float(rank) for rank in range(64)], wall_seconds=2.0)
        steps.append(FinishedStep(metrics, 2.0, TrainState(number)))
        watching.on_metrics(steps[-1])
    assert steps[-1].measured["rank_seconds"] == {str(rank): rank for rank in range(32, 64)} | {"median": 31.5}


def test_each_that_is_found_is_told():
    told = []
    watching = StragglerWatch(HOSTS, [0] * 4, tell=told.append)
    found = [each for step in range(1, 101) for each in watching.saw_step(step, [1.0, 1.0, 1.0, 2.0], 2.0)]
    assert found == told and [each.rank for each in told] == [3]


def test_own_time_is_that_of_this_thread_without_its_waits():
    began = read_own_time()
    time.sleep(0.2)
    slept = read_own_time() - began
    busy = threading.Thread(target=lambda: sum(range(3_000_000)))
    busy.start()
    busy.join()
    others = read_own_time() - began - slept
    cpu = time.thread_time()
    while time.thread_time() - cpu < 0.1:
        pass
    worked = read_own_time() - began - slept - others
    assert slept < 0.1 <= worked


@pytest.mark.parametrize(("stops", "cause"), [(False, None), (True, STRAGGLER)])
def test_a_window_is_reported_with_its_last_step_and_the_run_ends_if_it_should(stops, cause):
    watching, steps = StragglerWatch(["one", "two"], [0, 0], stops), []
    for number in range(1, 51):
        metrics = SimpleNamespace(own_seconds=[1.0, number / 3], wall_seconds=2.0)
        steps.append(FinishedStep(metrics, 2.0, TrainState(number)))
        watching.on_metrics(steps[-1])
    windows = {step.state.step: step.measured["rank_seconds"] for step in steps if step.measured}
    assert windows == {25: {"0": 1.0, "1": 4.333}, 50: {"0": 1.0, "1": 12.67}}
    assert [step.stop_cause for step in steps] == [None] * 49 + [cause]


WORD = 2**64 - 1


def mix(value):
    """SplitMix64's finalizer with Python integers."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & WORD
    return value ^ (value >> 31)


@pytest.mark.parametrize(
    ("dtype", "word"), [(torch.float32, torch.int32), (torch.bfloat16, torch.int16), (torch.float64, torch.int64)]
)
def test_equals_a_scalar_implementation(monkeypatch, dtype, word):
    monkeypatch.setattr(replicas, "_CHUNK", 7)
    tensor = torch.randn(5, 6, dtype=dtype).T
    bits = [int(each) & WORD for each in tensor.contiguous().flatten().view(word)]
    expected = sum(mix(each ^ (place * 0x9E3779B97F4A7C15 & WORD)) for place, each in enumerate(bits, start=1))
    assert int(hash_bits(tensor)) & WORD == expected & WORD


def test_every_bit_and_position_changes_the_hash():
    tensor = torch.randn(40)
    known = {int(hash_bits(tensor))}
    for place in (0, 17, 39):
        for bit in range(32):
            flipped = tensor.clone()
            flipped.view(torch.int32)[place] ^= 1 << bit if bit < 31 else -(2**31)
            known.add(int(hash_bits(flipped)))
    known |= {int(hash_bits(tensor.roll(1))), int(hash_bits(tensor[:39])), int(hash_bits(-tensor))}
    assert len(known) == 1 + 3 * 32 + 3
    assert int(hash_bits(torch.tensor([0.0]))) != int(hash_bits(torch.tensor([-0.0])))


def test_the_rank_that_differs_from_the_majority_is_named_or_both_of_two():
    same, other, third = (1, 2, 3), (1, 9, 3), (1, 2, 8)
    assert find_odd_ranks(dict.fromkeys((0, 1, 2, 3), same)) == ()
    assert find_odd_ranks({0: same, 1: same, 2: other}) == (2,)
    assert find_odd_ranks({0: same, 1: other}) == (0, 1)
    assert find_odd_ranks({1: third, 3: other, 5: same}) == (1, 3, 5)
    message = describe_differences([ReplicaDifference((2,), (0, 1, 2), "norm", 1)], 7)
    assert message.startswith("after step 7: rank 2 has other weights than rank 0, 1, and all must be equal")
