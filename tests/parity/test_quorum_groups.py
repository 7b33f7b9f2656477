"""Replicas that die while the others form the group of a view with them: the others learn it at once, and go on."""

import os
import signal
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
