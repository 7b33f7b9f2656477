"""Machines at loopback addresses of their own that have lost their coordinator: which one takes over, and when none."""

import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.multiprocessing import SignalException

from echelon.ground.hosts import HostGroup
from echelon.ground.sockets import find_free_port
from echelon.ground.stored import write_json
from echelon.run.folder.run_folder import RunFolder
from echelon.run.supervise import succession
from echelon.run.supervise.agent_votes import AgentRendezvous, MemberList
from echelon.run.supervise.news import stops_forwarded
from echelon.run.supervise.restart import Restarts
from echelon.run.supervise.succession import Claim, Fence, find_coordinator, succeed


def members(names):
    return tuple((name, f"127.0.7.{number}") for number, name in enumerate(names, 1))


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path, tmp_path)


@pytest.fixture
def group():
    return HostGroup(2, 4, "127.0.7.1", find_free_port("127.0.7.2"))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(succession, "_CLAIM_SECONDS", 0.01)


def succeed_all(group, folder, names, living, least=2, done=0, limit=3):
    """What each living machine finds after the loss of the first of these machines."""
    member_list = MemberList("job", 0, members(names))

    def act(name):
        lost = SimpleNamespace(group=group, member_list=member_list, host=name, coordinates=False)
        return succeed(lost, dict(member_list.members)[name], Restarts(limit, done), folder, least, 40)

    with ThreadPoolExecutor() as pool:
        found = dict(zip(living, pool.map(act, living), strict=True))
    for result in found.values():
        if result is not None:
            result[0].close()
    return found


def test_the_next_machine_takes_over_and_all_follow_its_decision(group, folder):
    found = succeed_all(group, folder, "abc", "bc")
    meetings, decisions = zip(*found.values(), strict=True)
    assert [rendezvous.coordinates for rendezvous in meetings] == [True, False]
    assert {(each.goes_on, each.restarts, each.step) for each in decisions} == {(True, 1, 40)}
    assert "has taken over, with 2 machines" in decisions[0].message
    claim = Claim.read(folder)
    assert (claim.job, claim.term, claim.address, claim.port) == ("job", 1, "127.0.7.2", group.port)


def test_a_machine_that_is_lost_too_is_passed_over(group, folder, monkeypatch):
    monkeypatch.setattr(succession, "_FIND_SECONDS", 2.5)
    monkeypatch.setattr(succession, "_SETTLE_SECONDS", 1.0)
    found = succeed_all(group, folder, "abcde", "cde")
    assert [found[name][0].coordinates for name in "cde"] == [True, False, False]
    assert "with 3 machines" in found["e"][1].message


@pytest.mark.parametrize(("names", "living", "least"), [("ab", "b", 1), ("abcd", "bc", 1), ("abc", "bc", 3)])
def test_too_few_machines_do_not_go_on(group, folder, monkeypatch, names, living, least):
    """Of a divided network this may be the smaller side; or the job needs more."""
    monkeypatch.setattr(succession, "_FIND_SECONDS", 1.0)
    monkeypatch.setattr(succession, "_SETTLE_SECONDS", 1.0)
    assert set(succeed_all(group, folder, names, living, least).values()) == {None}
    assert Claim.read(folder) is None


def test_without_a_restart_left_the_job_ends_on_all(group, folder):
    found = succeed_all(group, folder, "abc", "bc", done=3)
    assert {result[1].goes_on for result in found.values()} == {False}
    assert "fault.max_restarts=3 is reached; the same command resumes from step 40" in found["c"][1].message
    assert set(succeed_all(group, folder, "abc", "bc", limit=0).values()) == {None}


def test_a_quorum_goes_on_with_the_machines_that_are_there(group, folder):
    found = succeed_all(replace(group, min_nodes=4, lives_on=True), folder, "abcd", "bcd")
    assert found["b"][0].group.min_nodes == 3


def test_machines_without_shared_files_do_not_go_on(group, folder):
    """Nothing would stop the old coordinator."""
    assert set(succeed_all(replace(group, shares_files=False), folder, "abc", "bc").values()) == {None}


@pytest.mark.parametrize(("job", "term", "stops"), [("job", 1, True), ("job", 0, False), ("another", 1, False)])
def test_a_coordinator_stops_when_another_one_has_taken_over(folder, job, term, stops):
    heard = threading.Event()
    before = signal.signal(succession.FENCE_SIGNAL, lambda *_: heard.set())
    try:
        fence = Fence(SimpleNamespace(member_list=MemberList("job", 0)), folder)
        write_json(folder.claim_path, {"job": 5})
        time.sleep(0.05)
        write_json(folder.claim_path, asdict(Claim(job, term, "b", "127.0.7.2", 29400)))
        assert heard.wait(10 if stops else 0.3) == stops
        fence.end()
    finally:
        signal.signal(succession.FENCE_SIGNAL, before)
    assert folder.death_path.exists() == stops and fence.successor == ("b" if stops else None)


def test_a_machine_that_returns_finds_the_new_coordinator(group, folder):
    port = find_free_port("127.0.7.2")
    heir = AgentRendezvous(replace(group, host="127.0.7.2", port=port, coordinates=True), "b", Restarts(3), "127.0.7.2")
    try:
        claim = Claim(heir.member_list.job, 1, "b", "127.0.7.2", port)
        write_json(folder.claim_path, asdict(claim))
        deadline = time.monotonic() + 60
        while (found := find_coordinator(group, folder)) == group and time.monotonic() < deadline:
            time.sleep(0.05)
        assert (found.host, found.port, found.coordinates) == ("127.0.7.2", port, False)
        write_json(folder.claim_path, asdict(replace(claim, job="an earlier one")))
        assert find_coordinator(group, folder) == group
    finally:
        heir.close()


def test_a_claim_of_a_job_that_has_ended_is_ignored(group, folder, monkeypatch):
    monkeypatch.setattr(succession, "_ANSWER_SECONDS", 0.2)
    with socket.create_server(("127.0.7.2", 0)) as other:  # which is no store
        claim = Claim("job", 1, "b", "127.0.7.2", other.getsockname()[1])
        write_json(folder.claim_path, asdict(claim))
        assert find_coordinator(group, folder) == group
    assert find_coordinator(group, folder) == group


@pytest.mark.parametrize("damage", [{"port": -1}, {"port": 10**9}, {"address": "a b"}, {"address": "x" * 300}])
def test_a_damaged_claim_is_ignored(group, folder, damage):
    claim = Claim("job", 1, "b", "127.0.7.2", 29400)
    write_json(folder.claim_path, asdict(claim) | damage)
    assert find_coordinator(group, folder) == group


def test_the_fence_ends_the_wait_of_an_agent_at_once(folder):
    """It asks for no save, which would take up to `notice_seconds`."""
    with pytest.raises(SignalException), stops_forwarded(60.0, folder.stop_path):
        fence = Fence(SimpleNamespace(member_list=MemberList("job", 0)), folder)
        write_json(folder.claim_path, asdict(Claim("job", 1, "b", "127.0.7.2", 29400)))
        time.sleep(30)
    assert fence.successor == "b" and folder.death_path.exists() and not folder.stop_path.exists()
