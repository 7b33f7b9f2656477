"""Which worker gets which part of a batch when workers do not wait for each other."""

from echelon.learn.sync.weight_server import ShareQueue


def enter(queue, worker, step):
    queue.enter(worker, step)
    return queue.is_open(step)


def test_each_worker_has_its_own_share_of_the_first_step():
    queue = ShareQueue(3, 3, None)
    for worker in (2, 0, 1):
        assert enter(queue, worker, 7) and queue.take(worker, 7) == worker
        assert queue.take(worker, 7) is None


def test_a_later_share_goes_to_whoever_asks_first():
    queue = ShareQueue(2, 2, None)
    for worker in range(2):
        enter(queue, worker, 0)
        queue.take(worker, 0)
    enter(queue, 1, 1)
    assert [queue.take(1, 1) for _ in range(3)] == [0, 1, None]
    enter(queue, 1, 2)
    assert queue.take(1, 2) == 0
    enter(queue, 0, 1)
    assert queue.take(0, 1) is None, "the slow worker finds nothing left"
    enter(queue, 0, 2)
    assert queue.take(0, 2) == 1


def test_a_step_opens_once_nobody_is_too_far_behind():
    queue = ShareQueue(2, 2, 1)
    assert enter(queue, 0, 4) and enter(queue, 0, 5)
    assert not enter(queue, 0, 6), "worker 1 may still compute a share of step 4"
    enter(queue, 1, 5)
    assert queue.is_open(6) and not queue.is_open(7)
    queue.leave(1)
    queue.enter(0, 7)
    assert queue.is_open(8) and not queue.is_open(9)


def test_it_begins_anew_after_a_pause():
    queue = ShareQueue(2, 2, 1)
    for worker in range(2):
        enter(queue, worker, 0)
        queue.leave(worker)
    queue.clear()
    assert enter(queue, 1, 1) and queue.take(1, 1) == 1


def test_workers_that_are_left_take_the_shares_of_lost_ones():
    """Two of four workers are left: every one of the four shares of each step is handed out once."""
    queue = ShareQueue(2, 4, None)
    for step in (5, 6):
        for worker in range(2):
            enter(queue, worker, step)
        assert [queue.take(worker, step) for worker in (1, 0, 0, 1)] == ([1, 0, 2, 3] if step == 5 else [0, 1, 2, 3])
        assert queue.take(0, step) is queue.take(1, step) is None
    assert queue.newest == 6
