"""Replicas that die while the others form the group of a view with them: the others learn it at once, and go on."""

import math
import os
import signal
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from echelon.learn.distributed.joint_group import OpenStep
from echelon.learn.distributed.mesh import ViewChanged
from echelon.learn.sync.pushes import Kind, Request, await_message, await_reply, post, receive, reply
from echelon.run.lifecycle import view_group as module
from echelon.run.lifecycle.view_group import Inside, ViewMembership, form_inside
from echelon.run.supervise.board import MembershipStore, View, await_true
from tests.workers import WARM

NAMES = ("0.0.0", "1.0.0", "2.0.0")
RETURNED = "2.1.0"
SECONDS = 90
"""A tenth of a second is needed; gloo waits for an hour for what a dead peer was to do."""


def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def run_replica(member, port, moment, results):
    """Train through two views as a replica does, of which the last of the first one is killed at a moment."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=SECONDS))
    board, number = MembershipStore(store), -1
    form_inside(store, member, 0, 1)
    if member == NAMES[-1] and moment == "its address is published":
        publish = module.ViewStore.set
        module.ViewStore.set = lambda self, key, value: die(publish(self, key, value))
    while number < 1:
        view = board.await_view(number, member)
        number = view.number
        module.CONNECT_SECONDS = SECONDS
        membership = ViewMembership(board, store, view, member, len(NAMES), Inside())
        if number == 0 and moment == "its address is published" and member != NAMES[-1]:
            module.CONNECT_SECONDS = 0.5  # it may have been the dead replica's part to connect
            store.wait(["dead"])
        try:
            if number == 0 and member == NAMES[-1] and moment == "none has an address":
                die()
            membership.form_groups()
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
        membership.end()
        membership.leave()
    leave(results)


def leave(results):
    results.close()
    results.join_thread()
    os._exit(0)


class Kept:
    """Replicas as processes, with their board and what they report."""

    def __init__(self, target, names, *arguments):
        self._keeper = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=SECONDS), wait_for_workers=False)
        self.board, self._results = MembershipStore(self._keeper), WARM.Queue()
        self._replicas = {
            name: WARM.Process(target=target, args=(name, self._keeper.port, *arguments, self._results), daemon=True)
            for name in names
        }

    def __enter__(self):
        for each in self._replicas.values():
            each.start()
        return self

    def __exit__(self, *_):
        for each in self._replicas.values():
            each.kill()
            each.join()

    def lose(self, name):
        """Wait until a replica of the first view has killed itself, and tell the others."""
        self._replicas[name].join(SECONDS)
        assert self._replicas[name].exitcode == -signal.SIGKILL
        self.board.end(0)
        self._keeper.set("dead", "")

    def replace_the_last(self):
        """What the replicas of two views report: the last one of the first is lost, and another one takes its place."""
        self.board.publish(View(0, NAMES))
        self.lose(NAMES[-1])
        self.board.publish(View(1, (*NAMES[:2], RETURNED)))
        return self.reports(5)

    def reports(self, count, seconds=SECONDS):
        return sorted(self._results.get(timeout=seconds) for _ in range(count))


@pytest.mark.parametrize("moment", ["none has an address", "its address is published", "the first group is formed"])
def test_a_death_while_a_group_connects_is_noticed_at_once(moment):
    """A replica that is new forms the next group with two for which one has failed."""
    with Kept(run_replica, (*NAMES, RETURNED), moment) as kept:
        found = kept.replace_the_last()
    assert sorted(row for row in found if row[1] == 0) == [(name, 0, None) for name in NAMES[:2]]
    assert sorted(row for row in found if row[1] == 1) == [(name, 1, 7.0) for name in (*NAMES[:2], RETURNED)]


def join(member, port):
    """The keeper's store, the membership of the first view, and its group."""
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=SECONDS))
    board = MembershipStore(store)
    view = board.await_view(-1, member)
    form_inside(store, member, 0, 1)
    membership = ViewMembership(board, store, view, member, len(view.members), Inside())
    everyone, _ = membership.form_groups()
    return store, membership, everyone


def run_saving_replica(member, port, results):
    """In a thread the second one waits for the first, which waits for the second; the third is killed."""
    module.CONNECT_SECONDS = SECONDS
    store, membership, everyone = join(member, port)
    saving = membership.new_group()
    if membership.rank == 2:
        store.wait(["saving"])
        die()
    thread = threading.Thread(target=await_in_vain, args=(0, saving), daemon=True)
    if membership.rank == 1:
        thread.start()
        store.set("saving", "")
        await_in_vain(2, everyone)
    else:
        await_in_vain(1, everyone)
    changed = await_true(membership.is_ending, SECONDS)
    membership.end()
    if membership.rank == 1:
        thread.join()
    results.put((member, changed))
    leave(results)


def await_in_vain(source, group):
    """Wait for a message that is never sent, until the connection is closed."""
    with pytest.raises(RuntimeError):
        dist.recv(torch.empty(1), group_src=source, group=group)


def test_a_save_that_waits_for_another_replica_ends_when_a_third_is_lost():
    with Kept(run_saving_replica, NAMES) as kept:
        kept.board.publish(View(0, NAMES))
        kept.lose(NAMES[-1])
        assert kept.reports(2, 20) == [(name, True) for name in NAMES[:2]]


def end_step(rank, world_size, failing):
    """End a step whose last sum has failed on some ranks of a replica; the bits that this rank has after it."""
    step, values = OpenStep(), torch.tensor([math.pi, -0.0, math.nan, -1e300], dtype=torch.float64)
    step.begin()
    if rank in failing:
        step.run(fail)
        values.fill_(7.0)
    try:
        return step.end(values, dist.group.WORLD).view(torch.int64).tolist(), values.view(torch.int64).tolist()
    except ConnectionError as error:
        return str(error)


def fail():
    raise ConnectionError("a peer is lost")


def test_a_rank_whose_sum_failed_gets_the_bits_of_one_of_its_replica(workers):
    for failing in ((), (0,), (1, 2)):
        found = workers.run(end_step, 3, failing)
        [right] = {tuple(own) for rank, (_, own) in enumerate(found) if rank not in failing}
        assert [tuple(agreed) for agreed, _ in found] == [right] * 3
    assert workers.run(end_step, 3, (0, 1, 2)) == ["a peer is lost"] * 3


def exchange_late(member, port, results):
    """Be a server whose worker pushes late, and gets a late reply; the times are longer than those of connections."""
    _, membership, _ = join(member, port)
    module.CONNECT_SECONDS = 2  # enough to connect on a busy machine
    group = membership.new_group("parameter servers")
    if membership.rank == 0:
        request = receive(1, 4, group)
        time.sleep(2.5)
        reply(torch.tensor([7.0]), 1, group)
        results.put((member, request.kind, request.values.tolist()))
    else:
        time.sleep(2.5)
        request = Request(Kind.PUSH, 1, (2.0,), torch.arange(4, dtype=torch.uint8))
        posted = post(request, 0, group)
        results.put((member, request.kind, await_reply(request, 0, 1, group).tolist()))
        for work in posted:
            await_message(work)
    leave(results)


def test_messages_may_take_longer_than_connections():
    """A worker computes for longer than a group may take to connect."""
    with Kept(exchange_late, NAMES[:2]) as kept:
        kept.board.publish(View(0, NAMES[:2]))
        assert kept.reports(2, 20) == [(NAMES[0], Kind.PUSH, [0, 1, 2, 3]), (NAMES[1], Kind.PUSH, [7.0])]
