"""The meeting of several machines: addresses of stores, and ports of other programs."""

import logging
import socket
import threading
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from echelon.ground.errors import LaunchError
from echelon.ground.hosts import HostGroup, open_coordinator
from echelon.ground.sockets import answers_as_store, listen_at
from echelon.run.supervise import agent_votes as rendezvous
from echelon.run.supervise.agent_votes import AgentRendezvous
from echelon.run.supervise.restart import Restarts


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
