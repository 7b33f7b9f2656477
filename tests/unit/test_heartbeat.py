"""The heartbeat's thread: it cries when nothing beats, and only then."""

import threading
import time

import pytest

from echelon.training import heartbeat
from echelon.training.heartbeat import Heartbeat, name_the_silent


@pytest.fixture
def cries(monkeypatch):
    monkeypatch.setattr(heartbeat, "_TICK_SECONDS", 0.02)
    monkeypatch.setattr(heartbeat.faulthandler, "dump_traceback", lambda *arguments, **options: None)
    return []


def watch(cries, limit=0.2):
    heart = Heartbeat(limit, lambda what: (cries.append(what), heart.stop()))
    heart.start()
    return heart


def test_nothing_is_done(cries) -> None:
    heart = watch(cries)
    heart.beat("step 7")
    time.sleep(0.6)
    assert cries == ["step 7"]


@pytest.mark.parametrize("way", ["beats", "rests", "ended", "no limit"])
def test_all_is_well(cries, way) -> None:
    heart = watch(cries, None if way == "no limit" else 0.2)
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
    assert cries == []


def test_who_does_not_answer(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(heartbeat, "_PEERS_SECONDS", 0.3)
    found = {}
    ranks = [
        threading.Thread(target=lambda rank=rank: found.update({rank: name_the_silent(tmp_path, rank, 4)}))
        for rank in (0, 2)
    ]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    assert found == {0: [1, 3], 2: [1, 3]}
