"""A replica dies while the others wait for it in NCCL, here a fake over gloo: they abort, and form the next groups."""

import os
import signal
import threading
from contextlib import nullcontext, suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from echelon.learn.distributed.joint_group import together
from echelon.learn.distributed.mesh import ViewChanged, wait_for
from echelon.learn.distributed.transport import end_waits
from echelon.run.lifecycle import view_group
from echelon.run.lifecycle.view_group import Inside, LossWatch, ViewMembership, form_inside
from echelon.run.supervise.board import MembershipStore
from tests import fake_nccl
from tests.parity.test_quorum_groups import NAMES, RETURNED, SECONDS, Kept, die, leave
from tests.workers import WARM

WAIT_ENDED = "wait of an aborted operation has ended"
CONNECTED = [("form", True), ("device is synchronized", True)]


def run_replica(member, port, moment, results):
    """Train through two views, of which the last replica of the first one is killed at a moment."""
    torch.set_num_threads(1)
    fake_nccl.plant()
    view_group.CONNECT_SECONDS = SECONDS
    store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=SECONDS))
    board, number, is_victim = MembershipStore(store), -1, member == NAMES[-1]
    form_inside(store, member, 0, 1)
    if is_victim and moment == "as it connects":
        fake_nccl.FakeNccl.__init__ = die
    while number < 1:
        view = board.await_view(number, member)
        number, found = view.number, torch.tensor(0.0)
        membership = ViewMembership(board, store, view, member, 3, Inside(), transport=fake_nccl.PLANTED)
        fake_nccl.ORDER.clear()
        try:
            everyone, outer = membership.form_groups()
            with together(outer) if moment == "among several" else nullcontext():
                for _ in range(2):
                    found = torch.tensor(2.0**membership.rank)
                    dist.all_reduce(found, group=outer)
                    if is_victim:
                        die()
            fake_nccl.note("vote")
            dist.all_reduce(found, group=everyone)
            error = None
        except RuntimeError as raised:
            with pytest.raises(ViewChanged):
                membership.raise_change(raised)
            error = "lost"
        except ViewChanged:
            error = "lost"
        membership.end()
        order = [*fake_nccl.ORDER]
        membership.leave()
        results.put((member, number, error, None if error else found.item(), order, fake_nccl.ORDER[len(order) :]))
    leave(results)


@pytest.mark.parametrize("moment", ["as it connects", "in an operation", "among several"])
def test_a_death_that_nccl_does_not_notice_ends_the_view_by_an_abort(moment):
    """No vote follows a sum that was aborted; a replica that is new forms the next group with the two others.

    The host waits for several sums at once, before the vote.
    """
    with Kept(run_replica, (*NAMES, RETURNED), moment) as kept:
        found = kept.replace_the_last()
    first, second = ([row for row in found if row[1] == number] for number in range(2))
    assert [row[0] for row in first] == list(NAMES[:2]) and len(second) == 3
    for _, _, error, _, order, after in first:
        assert error == "lost" and "vote" not in [event for event, _ in order]
        if moment != "as it connects":
            # On a busy machine a replica may begin the operation after the abort, or fail in the one before.
            assert order[:2] == CONNECTED and not after
            assert {event for event, _ in order[2:]} <= {CONNECTED[-1][0], "abort", WAIT_ENDED}
            assert [event for event, _ in order].count("abort") == 1
    for _, _, error, value, order, after in second:
        assert error is None and value == 3 * 7.0
        assert order == [*CONNECTED, *[CONNECTED[-1]] * (1 if moment == "among several" else 2), ("vote", True)]
        assert after == [("abort", True)], "all have left the last operation before one aborts"


def hang_in_an_abort():
    view_group.LEAVING_SECONDS = 0.1
    LossWatch(lambda: True, WARM.Event().wait).leave()


def test_a_process_whose_abort_does_not_end_ends_and_so_is_lost():
    process = WARM.Process(target=hang_in_an_abort, daemon=True)
    process.start()
    process.join(SECONDS)
    assert process.exitcode == 1


def join_two(path, rank):
    """Form a group of two; returns a message that does not fit the buffers of the kernel."""
    dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
    message = torch.zeros(100_000_000)
    dist.barrier()
    return message


def send_a_part(path, is_sent):
    """Send, and stand still meanwhile, as a machine that loses its power."""
    message = join_two(path, 1)
    threading.Timer(0.05, lambda: (is_sent.set(), os.kill(os.getpid(), signal.SIGSTOP))).start()
    dist.send(message, 0)


def wait_for_the_rest(path, is_sent, is_later):
    """Wait for the message of the other process, and end all waits when that stands still."""
    view_group.STUCK_SECONDS = 0.5
    message = join_two(path, 0)
    LossWatch(is_sent.is_set, lambda: end_waits([dist.group.WORLD]))
    with suppress(RuntimeError):  # which would end this process, too
        wait_for([dist.irecv(message, 1)]) if is_later else dist.recv(message, 1)


@pytest.mark.parametrize("is_later", [False, True], ids=["in a call", "after it"])
def test_a_process_that_waits_for_the_rest_of_a_message_ends_and_so_is_lost(tmp_path, is_later):
    """gloo does not end this wait when the connection is closed, here or by the other process.

    On a busy machine the other process may stand still before it sends, or after it has sent all: then the wait ends.
    """
    for number in range(8):
        is_sent, path = WARM.Event(), str(tmp_path / f"store-{number}")
        sending = WARM.Process(target=send_a_part, args=(path, is_sent), daemon=True)
        waiting = WARM.Process(target=wait_for_the_rest, args=(path, is_sent, is_later), daemon=True)
        sending.start()
        waiting.start()
        waiting.join(SECONDS)
        sending.kill()
        if waiting.exitcode != 0:
            break
    assert is_sent.is_set() and waiting.exitcode == 1
