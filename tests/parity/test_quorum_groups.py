"""Replicas that die while the others form the group of a view with them: the others learn it at once, and go on."""

import os
import signal
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from echelon.distributed import membership as module
from echelon.distributed.membership import Membership, ViewChanged, leave_group
from echelon.supervise.board import Board, View
from workers import WARM

NAMES = ("0.0", "1.0", "2.0")
RETURNED = "2.1"
SECONDS = 90
"""A tenth of a second is needed; gloo waits for an hour for what a dead peer was to do."""


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def run_replica(member, port, moment, results):
    """Train through two views as a replica does, of which the last of the first one is killed at a moment."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=SECONDS))
    board, number = Board(store), -1
    if member == NAMES[-1] and moment == "its address is published":
        publish = module._ViewStore.set
        module._ViewStore.set = lambda self, key, value: die(publish(self, key, value))
    while number < 1:
        view = board.await_view(number, member)
        number = view.number
        module._CONNECT_SECONDS = SECONDS
        membership = Membership(board, view, member, len(NAMES))
        if number == 0 and moment == "its address is published" and member != NAMES[-1]:
            module._CONNECT_SECONDS = 0.5  # it may have been the dead replica's part to connect
            store.wait(["dead"])
        try:
            if number == 0 and member == NAMES[-1] and moment == "none has an address":
                die()
            membership.form_group(store)
            if number == 0 and member == NAMES[-1]:
                die()
            others = membership.new_group()
            found = torch.tensor(2.0**membership.rank)
            dist.all_reduce(found, group=others)
            results.put((member, number, found.item()))
        except BaseException as error:
            if not isinstance(error, ViewChanged):
                with pytest.raises(ViewChanged):
                    membership.raise_change(error)
            results.put((member, number, None))
        leave_group()
    leave(results)


def leave(results):
    results.close()
    results.join_thread()
    os._exit(0)


@pytest.mark.parametrize("moment", ["none has an address", "its address is published", "the first group is formed"])
def test_a_death_while_a_group_connects_is_noticed_at_once(moment):
    """A replica that is new forms the next group with two for which one has failed."""
    keeper = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=SECONDS), wait_for_workers=False)
    board, results = Board(keeper), WARM.Queue()
    replicas = {
        name: WARM.Process(target=run_replica, args=(name, keeper.port, moment, results), daemon=True)
        for name in (*NAMES, RETURNED)
    }
    try:
        for each in replicas.values():
            each.start()
        board.publish(View(0, NAMES))
        replicas[NAMES[-1]].join(SECONDS)
        assert replicas[NAMES[-1]].exitcode == -signal.SIGKILL
        board.end(0)
        keeper.set("dead", "")
        board.publish(View(1, (*NAMES[:2], RETURNED)))
        found = [results.get(timeout=SECONDS) for _ in range(5)]
    finally:
        for each in replicas.values():
            each.kill()
            each.join()
    assert sorted(row for row in found if row[1] == 0) == [("0.0", 0, None), ("1.0", 0, None)]
    assert sorted(row for row in found if row[1] == 1) == [("0.0", 1, 7.0), ("1.0", 1, 7.0), ("2.1", 1, 7.0)]


def run_saving_replica(member, port, results):
    """In a thread the second one waits for the first, which waits for the second; the third is killed."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=SECONDS))
    board = Board(store)
    module._CONNECT_SECONDS = SECONDS
    membership = Membership(board, board.await_view(-1, member), member, len(NAMES))
    membership.form_group(store)
    saving = membership.new_group()
    if membership.rank == 2:
        store.wait(["saving"])
        die()
    thread = threading.Thread(target=receive, args=(0, saving), daemon=True)
    if membership.rank == 1:
        thread.start()
        store.set("saving", "")
        receive(2, dist.group.WORLD)
    else:
        receive(1, dist.group.WORLD)
    changed = board.is_over(0)
    membership.end()
    if membership.rank == 1:
        thread.join()
    results.put((member, changed))
    leave(results)


def receive(source, group):
    """Wait for a message that is never sent, until the connection is closed."""
    with pytest.raises(RuntimeError):
        dist.recv(torch.empty(1), group_src=source, group=group)


def test_a_save_that_waits_for_another_replica_ends_when_a_third_is_lost():
    keeper = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=SECONDS), wait_for_workers=False)
    board, results = Board(keeper), WARM.Queue()
    replicas = [
        WARM.Process(target=run_saving_replica, args=(name, keeper.port, results), daemon=True) for name in NAMES
    ]
    try:
        for each in replicas:
            each.start()
        board.publish(View(0, NAMES))
        replicas[-1].join(SECONDS)
        assert replicas[-1].exitcode == -signal.SIGKILL
        board.end(0)
        found = [results.get(timeout=20) for _ in NAMES[:2]]
    finally:
        for each in replicas:
            each.kill()
            each.join()
    assert sorted(found) == [("0.0", True), ("1.0", True)]
