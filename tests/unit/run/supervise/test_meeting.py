"""The meeting of several machines: addresses of stores, and ports of other programs."""

import logging
import shutil
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from echelon.ground.errors import LaunchError
from echelon.ground.hosts import HostGroup, open_coordinator, parse_group
from echelon.ground.sockets import answers_as_store, find_free_port, listen_at
from echelon.run.supervise import meeting
from echelon.run.supervise.coordinator import MachineReport
from echelon.run.supervise.decision import HostReport, Restarts
from echelon.run.supervise.etcd_store import EtcdStore
from echelon.run.supervise.meeting import Meeting, TorchStore
from echelon.run.supervise.outcome import DONE, FAILED


@pytest.fixture
def store():
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))


def test_a_store_listens_at_one_address():
    found = listen_at("127.0.0.1", 0)
    with found:
        assert found.getsockname()[0] == "127.0.0.1"
        with pytest.raises(OSError, match="already in use"):
            listen_at("127.0.0.1", found.getsockname()[1])
    assert listen_at("203.0.113.9", 0) is None  # from a network reserved for documentation
    assert listen_at("localhost", 0, admits_loopback=False) is None


def test_the_coordinator_listens_where_the_others_connect():
    """If its own name resolves to loopback or to another machine, it listens on the interface that the others use."""
    with open_coordinator(HostGroup(2, 2, "127.0.0.2", 0)) as found:
        assert found.getsockname()[0] == "127.0.0.2"
    with open_coordinator(HostGroup(2, 2, "127.0.0.2", 0, interface="lo")) as found:
        assert found.getsockname()[0] == "127.0.0.1"
    with open_coordinator(HostGroup(2, 2, "203.0.113.9", 0, coordinates=True, interface="lo")) as found:
        assert found.getsockname()[0] == "127.0.0.1"
    assert open_coordinator(HostGroup(2, 2, "203.0.113.9", 0)) is None
    assert open_coordinator(HostGroup(2, 2, "127.0.0.2", 0, coordinates=False)) is None


def serve(behave):
    """Run a program that is not a store on a free port, until its listener is closed."""
    server = socket.create_server(("127.0.0.1", 0))

    def run():
        while True:
            try:
                line, _ = server.accept()
            except OSError:
                return
            behave(line)

    threading.Thread(target=run, daemon=True).start()
    return server


def answer_in_http(line):
    line.recv(100)
    line.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    line.close()


SILENT = []


@pytest.mark.parametrize("behave", [SILENT.append, socket.socket.close, answer_in_http])
def test_a_port_used_by_another_program_is_reported_in_one_message(behave, monkeypatch, capfd, caplog):
    caplog.set_level(logging.INFO, "echelon")
    monkeypatch.setattr(meeting, "_HELLO_SECONDS", 0.5)
    with serve(behave) as server:
        group = HostGroup(2, 2, "127.0.0.1", server.getsockname()[1])
        with pytest.raises(LaunchError, match=f"another program listens at the rendezvous endpoint {group.endpoint}; "):
            Meeting(group, "a", Restarts(0))
        told = HostGroup(2, 2, "127.0.0.1", group.port, coordinates=True)
        with pytest.raises(
            LaunchError, match=f"cannot listen at {group.endpoint}, the rendezvous endpoint .Address already in"
        ):
            Meeting(told, "a", Restarts(0))
    assert caplog.messages == [] and capfd.readouterr() == ("", "")


def test_a_store_is_recognised(store):
    with socket.create_connection(("127.0.0.1", store.port), 10) as line:
        assert answers_as_store(line)


class Machines:
    """Agents of a job in threads of this process, which meet in a store of torch, or in a real etcd."""

    def __init__(self, group):
        self.group, self.all = group, {}

    def meet(self, *names, fault=None):
        for name in names:
            self.all[name] = Meeting(self.group, name, Restarts(3), fault)
        return [self.all[name] for name in names]

    def present(self, *names):
        """Let machines offer to take part; each waits for an answer to its question for the time."""
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda name: self.all[name].present(MachineReport(name=name)), names))
        return {name: self.all[name].await_news(lambda news: news.team) for name in names}

    def end_attempt(self, *names, code=FAILED):
        for name in names:
            meeting = self.all[name]
            meeting.end_attempt(HostReport(meeting.host, code, "a peer was lost", False, 2, 0.0, 5))
        return [self.all[name].await_decision() for name in names]

    def close(self):
        with ThreadPoolExecutor() as pool:
            list(pool.map(Meeting.close, self.all.values()))


@pytest.fixture(scope="module")
def etcd(tmp_path_factory):
    """The port of a real etcd."""
    if shutil.which("etcd") is None:
        pytest.skip("etcd is not installed; run make launchers")
    port, folder = find_free_port("127.0.0.1"), tmp_path_factory.mktemp("etcd")
    url = f"http://127.0.0.1:{port}"
    places = ["--listen-client-urls", url, "--advertise-client-urls", url]
    places += ["--listen-peer-urls", f"http://127.0.0.1:{find_free_port('127.0.0.1')}", "--data-dir", str(folder)]
    process = subprocess.Popen(["etcd", *places], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    yield port
    process.kill()
    process.wait()


@pytest.fixture(params=["torch", "etcd"])
def together(request):
    """Machines that meet, by the text of `--nodes`."""
    made = []

    def build(nodes):
        if request.param == "torch":
            place = f"127.0.0.1:{find_free_port('127.0.0.1')}"
        else:
            place = f"etcd://127.0.0.1:{request.getfixturevalue('etcd')}/job-{time.time_ns()}"
        made.append(Machines(parse_group(nodes, place)))
        return made[-1]

    yield build
    for machines in made:
        machines.close()


def test_machines_agree_on_a_team_its_end_and_the_next_attempt(together):
    machines = together("2+1")
    machines.meet("a", "b", "c")
    teams = machines.present("a", "b", "c")
    assert teams["a"] == teams["b"] == teams["c"] and len(teams["a"]) == 2
    [spare] = machines.all["a"].await_news(lambda news: news.spares or None)
    assert sorted(each.host for each in machines.all.values()) == sorted([spare, *(host for host, _ in teams["a"])])
    team = [name for name, each in machines.all.items() if each.host != spare]
    machines.all[team[1]].post("call", words="here")
    assert machines.all[team[0]].await_news(lambda news: news.call) == "here"
    decisions = machines.end_attempt(*team)
    assert decisions[0] == decisions[1] and decisions[0].goes_on and decisions[0].step == 5
    [waiting] = set("abc") - set(team)
    assert machines.all[waiting].await_decision() == decisions[0] and machines.all[waiting].attempt == 1
    assert machines.present("a", "b", "c")["a"] == teams["a"], "what trained before goes on"
    assert [each.goes_on for each in machines.end_attempt(*team, code=DONE)] == [False, False]
    machines.all[waiting].await_decision()


def test_a_machine_that_comes_later_is_in_the_present_attempt(together):
    machines = together("1:2")
    machines.meet("a")
    machines.present("a")
    assert machines.end_attempt("a")[0].goes_on
    [late] = machines.meet("late")
    assert late.attempt == 1
    assert len(machines.present("a", "late")["late"]) == 2


def test_a_message_that_no_agent_wrote_ends_the_job_in_one_sentence(together):
    foreign = [("inbox", "[1"), ("inbox", '{"kind": "present"}'), ("news", '{"kind": "decision", "decision": 3}')]
    for kind, text in foreign:
        machines = together("2")
        machines.meet("a", "b")
        machines.present("a", "b")
        group = machines.group
        if group.store_name is None:
            TorchStore(TCPStore(group.host, group.port, wait_for_workers=False)).append(kind, text)
        else:
            EtcdStore(group).append(kind, text)
        with pytest.raises(LaunchError, match="contains a message that no agent wrote"):
            while True:
                for agent in machines.all.values():
                    agent.check()
                time.sleep(0.02)


FIRST = """
import sys, time
from echelon.ground.hosts import parse_group
from echelon.run.supervise.coordinator import MachineReport
from echelon.run.supervise.decision import Restarts
from echelon.run.supervise.etcd_store import EtcdStore
from echelon.run.supervise.meeting import Meeting, TorchStore
meeting = Meeting(parse_group("2+1", sys.argv[1]), "first", Restarts(3))
while not meeting.coordinates:
    time.sleep(0.05)
print(meeting.host, flush=True)
meeting.present(MachineReport(name="first"))
time.sleep(600)
"""


def test_another_machine_coordinates_where_the_store_is_outside(etcd):
    """The first coordinator is killed, so it answers no more: its lease ends. The spare may be the next one."""
    place = f"etcd://127.0.0.1:{etcd}/job-{time.time_ns()}"
    first = subprocess.Popen([sys.executable, "-c", FIRST, place], stdout=subprocess.PIPE, text=True)
    lost = first.stdout.readline().strip()
    machines = Machines(parse_group("2+1", place))
    machines.meet("b", "c")
    machines.present("b", "c")
    first.kill()
    first.communicate()
    for agent in machines.all.values():
        agent.await_news(lambda news: True if news.is_dead else None)
    [trained] = [name for name, meeting in machines.all.items() if meeting.now().takes_part(meeting.host)]
    [decision] = machines.end_attempt(trained)
    assert decision.message == f"1 of 2 machines stopped responding: {lost}" and decision.goes_on
    [spare] = {"b", "c"} - {trained}
    machines.all[spare].await_decision()
    assert len(machines.present("b", "c")[trained]) == 2
    assert sum(meeting.coordinates for meeting in machines.all.values()) == 1
    machines.end_attempt("b", "c", code=DONE)
    machines.close()


def test_a_job_leaves_nothing_in_etcd(etcd):
    from etcd3gw.client import Etcd3Client

    name = f"job-{time.time_ns()}"
    machines = Machines(parse_group("2", f"etcd://127.0.0.1:{etcd}/{name}"))
    machines.meet("a", "b")
    machines.present("a", "b")
    client = Etcd3Client(port=etcd)
    assert client.get_prefix(f"echelon/{name}/")
    machines.end_attempt("a", "b", code=DONE)
    machines.close()
    assert client.get_prefix(f"echelon/{name}/") == []


def test_without_etcd_one_sentence_says_so(monkeypatch):
    monkeypatch.setattr("echelon.run.supervise.etcd_store._RETRY_SECONDS", 0.5)
    group = parse_group("2", f"etcd://127.0.0.1:{find_free_port('127.0.0.1')}/job")
    with pytest.raises(LaunchError, match=f"etcd does not answer at {group.endpoint} "):
        Meeting(group, "a", Restarts(0))
