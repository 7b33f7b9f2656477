"""The rendezvous of several machines: unpickling, addresses of stores, and ports of other programs."""

import base64
import logging
import pickle
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import psutil
import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters, RendezvousStateError
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from echelon.ground.errors import LaunchError
from echelon.ground.hosts import HostGroup, open_coordinator
from echelon.ground.sockets import answers_as_store, listen_at
from echelon.run.supervise import agent_votes as rendezvous
from echelon.run.supervise.agent_votes import AgentRendezvous
from echelon.run.supervise.rendezvous import ALONE, TOGETHER, check_state, register_backends
from echelon.run.supervise.restart import Restarts
from tests.hostile import hostile_pickle


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")  # as the agents use it
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))


def build_handler(store, backend=TOGETHER, **options):
    register_backends()
    place = {"backend": backend, "endpoint": f"127.0.0.1:{store.port}", "run_id": "echelon-0", "is_host": 0}
    return get_rendezvous_handler(RendezvousParameters(min_nodes=2, max_nodes=2, **place, **options))


def test_agents_unpickle_only_classes_of_torch(store):
    """The state of the installed torch passes: two agents complete a rendezvous and read each other's state."""
    handlers = [build_handler(store, local_addr=name) for name in ("a", "b")]
    with ThreadPoolExecutor() as pool:
        met = list(pool.map(lambda each: each.next_rendezvous(), handlers))
    assert [(each.rank, each.world_size) for each in met] == [(0, 2), (1, 2)]
    assert not any(each.is_closed() for each in handlers)
    assert all(each.shutdown() for each in handlers)


@pytest.mark.parametrize("moment", ["before", "while they work"])
def test_a_malicious_state_is_refused_and_not_executed(store, tmp_path, moment):
    handlers = [build_handler(store, local_addr=name) for name in ("a", "b")]
    if moment == "while they work":
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda each: each.next_rendezvous(), handlers))
    payload = hostile_pickle(tmp_path / "pwned")
    store.set("torch.rendezvous.echelon-0", base64.b64encode(payload).decode())
    with pytest.raises(RendezvousStateError, match=r"127.0.0.1:\d+ contains data that no agent wrote \(posix.mkdir\)"):
        handlers[0].next_rendezvous()
    assert not (tmp_path / "pwned").exists()
    pickle.loads(payload)
    assert (tmp_path / "pwned").exists()  # without protection, the attack works


@pytest.mark.parametrize(
    "state",
    [pickle.dumps(datetime.now(UTC)), b"no pickle", b"", pickle.dumps({"a": {1}})],
    ids=["another class", "no pickle", "nothing", "a dictionary"],
)
def test_an_invalid_state_is_refused(state):
    with pytest.raises(RendezvousStateError):
        check_state(state, "a:29400")


def test_the_only_agent_of_a_job_opens_no_socket(store):
    handler = build_handler(store, ALONE)
    before = psutil.Process().net_connections("inet")
    met = handler.next_rendezvous()
    assert (met.rank, met.world_size, met.bootstrap_store_info.master_addr) == (0, 1, "127.0.0.1")
    assert psutil.Process().net_connections("inet") == before
    with socket.create_server(("127.0.0.1", met.bootstrap_store_info.master_port)):
        pass


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
    monkeypatch.setattr(rendezvous, "_PATIENCE", timedelta(seconds=0.5))
    with serve(behave) as server:
        group = HostGroup(2, 2, "127.0.0.1", server.getsockname()[1])
        with pytest.raises(LaunchError, match=f"another program listens at the rendezvous endpoint {group.endpoint}; "):
            AgentRendezvous(group, "a", Restarts(0))
        told = HostGroup(2, 2, "127.0.0.1", group.port, coordinates=True)
        with pytest.raises(
            LaunchError, match=f"cannot listen at {group.endpoint}, the rendezvous endpoint .Address already in"
        ):
            AgentRendezvous(told, "a", Restarts(0))
    assert caplog.messages == [] and capfd.readouterr() == ("", "")


def test_a_store_is_recognised(store):
    with socket.create_connection(("127.0.0.1", store.port), 10) as line:
        assert answers_as_store(line)
