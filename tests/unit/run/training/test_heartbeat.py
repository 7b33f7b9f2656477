"""The heartbeat thread calls on_timeout when beats stop, and only then."""

import logging
import os
import threading
import time

import pytest
import torch

from echelon.learn.model.compilation import compilations_told
from echelon.run.supervise import hangs
from echelon.run.supervise.hangs import WaitingPeers
from echelon.run.training import heartbeat
from echelon.run.training.heartbeat import Heartbeat


@pytest.fixture
def timeouts(monkeypatch):
    monkeypatch.setattr(heartbeat, "_TICK_SECONDS", 0.02)
    monkeypatch.setattr(heartbeat.faulthandler, "dump_traceback", lambda *arguments, **options: None)
    return []


def watch(timeouts, limit=0.2):
    heartbeat = Heartbeat(limit, lambda what, seconds: (timeouts.append((what, seconds)), heartbeat.stop()))
    heartbeat.start()
    return heartbeat


def test_missing_beats_call_on_timeout(timeouts) -> None:
    heartbeat = watch(timeouts)
    heartbeat.beat("step 7")
    time.sleep(0.6)
    assert timeouts == [("step 7", 0.2)]


@pytest.mark.parametrize("way", ["beats", "rests", "nested rests", "ended", "no limit"])
def test_no_timeout_with_beats_or_rests_or_after_the_end(timeouts, way) -> None:
    heartbeat = watch(timeouts, None if way == "no limit" else 0.2)
    if way == "ended":
        heartbeat.stop()
    if way == "rests":
        with heartbeat.resting():
            time.sleep(0.6)
    if way == "nested rests":
        with heartbeat.resting():
            with heartbeat.resting():  # a compilation during a save
                pass
            time.sleep(0.6)
    for _ in range(30 if way == "beats" else 0):
        heartbeat.beat("step")
        time.sleep(0.02)
    if way in ("ended", "no limit"):
        time.sleep(0.6)
    heartbeat.stop()
    assert timeouts == []


def pass_seconds(heartbeat, seconds):
    """Let time pass, half a second at a time, until the limit is exceeded; return the seconds passed and the limit."""
    for tick in range(1, int(2 * seconds) + 1):
        if (limit := heartbeat.find_late()) is not None:
            return tick / 2, limit
    return seconds, None


def test_the_derived_limit(tmp_path, caplog) -> None:
    """600 s for ten steps, then 20 times the longest step, and at least 120 s; a rest is no part of a step."""
    caplog.set_level(logging.INFO)
    heartbeat = Heartbeat("auto", peers=WaitingPeers(tmp_path, 0, range(1)))
    heartbeat.beat("step 1")
    for number in range(2, 11):
        assert pass_seconds(heartbeat, 3) == (3, None)
        heartbeat.step(number)
    assert heartbeat.limit == 600 and not caplog.messages
    with heartbeat.resting():
        assert pass_seconds(heartbeat, 1000) == (1000, None)
    heartbeat.step(11)
    assert heartbeat.limit == 120
    assert [each for each in caplog.messages if "from now on 120 s without progress" in each] == caplog.messages
    assert pass_seconds(heartbeat, 6.5) == (6.5, None)
    heartbeat.step(12)
    assert pass_seconds(heartbeat, 500) == (130.5, 130)
    assert len(caplog.messages) == 1


def test_the_derived_limit_without_shared_files_stays_at_its_first_value() -> None:
    heartbeat = Heartbeat("auto")
    for number in range(12):
        heartbeat.step(number)
    assert pass_seconds(heartbeat, 1000) == (600.5, 600)


def test_a_rank_waits_for_a_peer_that_rests(tmp_path, monkeypatch) -> None:
    """A quarter of the limit passes before a rank looks; then no time counts until its peer goes on."""
    waiting, saving = (Heartbeat(8, peers=WaitingPeers(tmp_path, rank, range(2))) for rank in (0, 1))
    with saving.resting():
        assert saving.find_late() is None
        assert pass_seconds(waiting, 100) == (100, None)
    assert saving.find_late() is None and not list(tmp_path.iterdir())
    assert pass_seconds(waiting, 100) == (6, 8)


def test_a_rank_that_others_wait_for_in_a_save_is_not_excused_by_them(tmp_path) -> None:
    """A rank that has passed through the save waits for a peer still in it; one that never began it is late."""
    saving, late = (Heartbeat(8, peers=WaitingPeers(tmp_path, rank, range(2))) for rank in (0, 1))
    for expected in ((100, None), (8.5, 8)):
        with saving.resting_together():
            assert saving.find_late() is None
            if expected[1] is None:
                with late.resting_together():
                    pass
            assert pass_seconds(late, 100) == expected
            late.beat("step 2")


def test_a_peer_that_is_suspended_at_rest_is_not_waited_for(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(hangs, "_STALE_SECONDS", 0.0)
    WaitingPeers(tmp_path, 1, range(2)).show_rest(0)
    assert pass_seconds(Heartbeat(8, peers=WaitingPeers(tmp_path, 0, range(2))), 100) == (8.5, 8)


def test_a_rank_that_still_rests_renews_its_file(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(hangs, "_RENEWAL_SECONDS", 0.0)
    resting = WaitingPeers(tmp_path, 1, range(2))
    resting.show_rest(0)
    os.utime(tmp_path / "resting-1", (1, 1))
    resting.show_rest(0)
    assert (tmp_path / "resting-1").stat().st_mtime > 1


def test_ranks_with_different_limits_find_a_hang_together(tmp_path) -> None:
    """The second of them takes over the limit of the first, as soon as it has waited for a while itself."""
    first, second = (
        Heartbeat(limit, peers=WaitingPeers(tmp_path, rank, range(2))) for rank, limit in ((0, 8), (1, 400))
    )
    assert pass_seconds(first, 100) == (8.5, 8)
    assert pass_seconds(second, 100) == (31, 8)
    WaitingPeers(tmp_path, 0, range(2)).begin()  # a new process of rank 0 knows nothing of the old hang
    assert pass_seconds(Heartbeat(400, peers=WaitingPeers(tmp_path, 1, range(2))), 100) == (100, None)


def test_unresponsive_ranks_are_found(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(hangs, "_ANSWER_SECONDS", 0.3)
    found = {}
    ranks = [
        threading.Thread(
            target=lambda rank=rank: found.update({rank: WaitingPeers(tmp_path, rank, range(4)).find_unresponsive()})
        )
        for rank in (0, 2)
    ]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    assert found == {0: [1, 3], 2: [1, 3]}


def test_compilations_are_told() -> None:
    told = []

    def build(graph, inputs):
        told.append("compiles")
        return graph.forward

    try:
        with compilations_told(lambda: told.append("begin"), lambda: told.append("end")):
            compiled = torch.compile(lambda x: x + 1, backend=build, dynamic=False)
            compiled(torch.ones(2))
            compiled(torch.ones(2))
            assert told == ["begin", "compiles", "end"]
        compiled(torch.ones(3))
        assert told == ["begin", "compiles", "end", "compiles"]
    finally:
        torch.compiler.reset()
