"""The heartbeat thread calls on_timeout when beats stop, and only then."""

import threading
import time

import pytest

from echelon.training import heartbeat
from echelon.training.heartbeat import Heartbeat, find_unresponsive_ranks


@pytest.fixture
def timeouts(monkeypatch):
    monkeypatch.setattr(heartbeat, "_TICK_SECONDS", 0.02)
    monkeypatch.setattr(heartbeat.faulthandler, "dump_traceback", lambda *arguments, **options: None)
    return []


def watch(timeouts, limit=0.2):
    heart = Heartbeat(limit, lambda what: (timeouts.append(what), heart.stop()))
    heart.start()
    return heart


def test_missing_beats_call_on_timeout(timeouts) -> None:
    heart = watch(timeouts)
    heart.beat("step 7")
    time.sleep(0.6)
    assert timeouts == ["step 7"]


@pytest.mark.parametrize("way", ["beats", "rests", "ended", "no limit"])
def test_no_timeout_with_beats_or_rests_or_after_the_end(timeouts, way) -> None:
    heart = watch(timeouts, None if way == "no limit" else 0.2)
    if way == "ended":
        heart.stop()
    if way == "rests":
        with heart.resting():
            time.sleep(0.6)
    for _ in range(30 if way == "beats" else 0):
        heart.beat("step")
        time.sleep(0.02)
    if way in ("ended", "no limit"):
        time.sleep(0.6)
    heart.stop()
    assert timeouts == []


def test_unresponsive_ranks_are_found(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(heartbeat, "_PEERS_SECONDS", 0.3)
    found = {}
    ranks = [
        threading.Thread(target=lambda rank=rank: found.update({rank: find_unresponsive_ranks(tmp_path, rank, 4)}))
        for rank in (0, 2)
    ]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    assert found == {0: [1, 3], 2: [1, 3]}
