"""The votes of a quorum: whatever happens at which moment, all replicas learn the same."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from echelon.run.supervise.board import Change, MembershipStore, View

NAMES = ("0.0", "1.0", "2.0")


@pytest.fixture
def store():
    return TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=20), wait_for_workers=False)


@pytest.fixture
def boards(store):
    """One for each replica, and the keeper's."""
    clients = [TCPStore("127.0.0.1", store.port, None, False, timedelta(seconds=20)) for _ in NAMES]
    return [MembershipStore(each) for each in clients], MembershipStore(store)


def together(*calls):
    """Call functions at the same time, each in a thread; their results."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [each.result(10) for each in [pool.submit(call) for call in calls]]


def test_a_step_is_committed_once_all_have_voted(boards, store):
    replicas, keeper = boards
    view = View(0, NAMES)
    keeper.publish(view)
    for ballot in range(30):
        assert together(*(lambda each=each, ballot=ballot: each.vote(view, ballot) for each in replicas)) == [False] * 3
    assert store.num_keys() < 10, "old votes are removed"
    keeper.publish(View(1, NAMES))
    assert together(*(lambda each=each: each.vote(view, 30) for each in replicas)) == [True] * 3


def test_a_step_is_given_up_when_a_replica_is_lost_before_it_has_voted(boards):
    replicas, keeper = boards
    view = View(0, NAMES)
    keeper.publish(view)
    timer = threading.Timer(0.2, keeper.end, [0])
    timer.start()
    assert together(*(lambda each=each: each.vote(view, 0) for each in replicas[:2])) == [None, None]


def test_a_view_without_loss_gives_no_step_up(boards):
    """A replica that waits to join ends the view, after the step."""
    replicas, keeper = boards
    view = View(0, NAMES)
    keeper.publish(view)

    def late():
        time.sleep(0.2)
        return replicas[2].vote(view, 0)

    keeper.publish(View(1, (*NAMES, "3.0")))
    assert together(lambda: replicas[0].vote(view, 0), lambda: replicas[1].vote(view, 0), late) == [True] * 3


@pytest.mark.parametrize("delay", [0.0, 0.001, 0.002, 0.004])
def test_all_learn_the_same_of_a_loss_at_any_moment(boards, delay):
    replicas, keeper = boards
    for number in range(20):
        view = View(number, NAMES)
        keeper.publish(view)

        def lose(number=number):
            time.sleep(delay)
            keeper.end(number)

        votes = [lambda each=each, view=view: each.vote(view, 0) for each in replicas]
        *results, _ = together(*votes, lose)
        assert len(set(results)) == 1, results


def test_replicas_enter_a_view_together_or_skip_it(boards):
    replicas, keeper = boards
    keeper.publish(View(0, NAMES))

    def lose():
        time.sleep(0.2)
        keeper.end(0)
        keeper.publish(View(1, NAMES[:2], (Change(2, 77, 1.5, "was killed by SIGKILL"),)))

    entered = together(*(lambda n=n: replicas[n].await_view(-1, NAMES[n]) for n in range(2)), lose)[:2]
    assert entered == [View(1, NAMES[:2], (Change(2, 77, 1.5, "was killed by SIGKILL"),))] * 2


def test_the_end_waits_for_the_first_replica(boards):
    replicas, keeper = boards
    view = View(0, NAMES)

    def first():
        time.sleep(0.1)
        return replicas[0].await_end(view, is_first=True)

    assert together(first, lambda: replicas[1].await_end(view, is_first=False)) == [True, True]
    keeper.end(1)
    assert not replicas[1].await_end(View(1, NAMES), is_first=False)
