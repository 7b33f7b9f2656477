"""The rendezvous of mpirun's ranks, from the variables of Open MPI 4.1.4 and 5.0.11 on machines of one network."""

import socket

import pytest

from echelon.ground import foreign_launchers
from echelon.ground.errors import ConfigError
from echelon.ground.foreign_launchers import read_mpirun_rendezvous

SIZES = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
FOUR = {
    **SIZES,
    "OMPI_COMM_WORLD_RANK": "1",
    "PMIX_NAMESPACE": "3949658113",
    "PMIX_SERVER_URI2": "3949658112.1;tcp4://127.0.0.1:46505",
    "OMPI_MCA_orte_hnp_uri": "3949658112.0;tcp://10.87.0.1:44775;tcp6://[fd00::2]:46089",
}
FIVE = {
    **SIZES,
    "OMPI_COMM_WORLD_RANK": "1",
    "PMIX_NAMESPACE": "prterun-node-1-2114@1",
    "PMIX_SERVER_URI2": "prterun-node-1-2114@0.1;tcp4://127.0.0.1:46081",
}


@pytest.fixture(autouse=True)
def network(monkeypatch):
    """Make 10.87.0.2 on eth0 the address of this machine."""
    own = {"127.0.0.1": "127.0.0.1"}
    monkeypatch.setattr(foreign_launchers, "find_own_address", lambda group: own.get(group.host, "10.87.0.2"))
    monkeypatch.setattr(foreign_launchers, "find_interface", {"127.0.0.1": "lo", "10.87.0.2": "eth0"}.get)


@pytest.mark.parametrize(("env", "address"), [(FOUR, "10.87.0.1"), (FIVE, "node-1")])
def test_several_machines_use_the_address_of_mpirun(env, address):
    found = read_mpirun_rendezvous(env)
    assert found["MASTER_ADDR"] == address
    assert found["GLOO_SOCKET_IFNAME"] == found["NCCL_SOCKET_IFNAME"] == "eth0"
    assert 20_000 <= int(found["MASTER_PORT"]) < 30_000
    # Rank 0 on the machine of mpirun finds the same address; another job gets another port.
    first = {"OMPI_COMM_WORLD_RANK": "0", "PMIX_SERVER_URI2": env["PMIX_SERVER_URI2"].replace(".1;", ".0;")}
    assert read_mpirun_rendezvous({**env, **first})["MASTER_PORT"] == found["MASTER_PORT"]
    assert (
        read_mpirun_rendezvous({**env, "PMIX_NAMESPACE": "prterun-node-1-7@1"})["MASTER_PORT"] != found["MASTER_PORT"]
    )


def test_one_machine_uses_loopback():
    found = read_mpirun_rendezvous({**FOUR, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"})
    assert (found["MASTER_ADDR"], found["GLOO_SOCKET_IFNAME"]) == ("127.0.0.1", "lo")


def test_given_variables_take_precedence():
    found = read_mpirun_rendezvous({**FIVE, "MASTER_ADDR": "10.9.9.9", "MASTER_PORT": "4711"})
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("10.9.9.9", "4711")


@pytest.mark.parametrize("env", [FOUR, FIVE])
def test_rank_zero_on_another_machine_requires_its_address(env):
    with pytest.raises(ConfigError, match="-x MASTER_ADDR=ADDRESS"):
        read_mpirun_rendezvous({**env, "OMPI_COMM_WORLD_RANK": "0"})


def test_an_mpirun_without_variables_requires_an_address():
    with pytest.raises(ConfigError, match="does not give its own address"):
        read_mpirun_rendezvous({**SIZES, "OMPI_COMM_WORLD_RANK": "1"})


def test_of_several_addresses_the_reachable_one_is_used():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        uri = f"1.0;tcp://127.0.0.2,127.0.0.1:{port}"
        assert read_mpirun_rendezvous({**FOUR, "OMPI_MCA_orte_hnp_uri": uri})["MASTER_ADDR"] == "127.0.0.1"
