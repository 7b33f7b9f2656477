"""The rendezvous of ranks started by `mpirun`: Open MPI sets their ranks, but no address.

It does set where `mpirun` itself runs: Open MPI 4 in the addresses of its first daemon
(`OMPI_MCA_orte_hnp_uri=4711.0;tcp://10.0.0.1,192.168.0.1:44775`), Open MPI 5 in the job's name
(`PMIX_NAMESPACE=prterun-node-1-2114@1`). Rank 0 is on that machine unless the user maps ranks otherwise.
"""

import re
import socket
import zlib
from collections.abc import Mapping
from contextlib import suppress

from echelon.ground.errors import ConfigError, LaunchError
from echelon.ground.hosts import HostGroup, find_interface, find_own_address

_FIRST_PORT, _NUM_PORTS = 20_000, 10_000
_CONNECT_SECONDS = 3.0


def read_rendezvous(env: Mapping[str, str]) -> dict[str, str]:
    """The rendezvous and network variables for one rank of an mpirun job.

    Raises ConfigError if rank 0's machine is unknown, and LaunchError if it cannot be reached.
    """
    size, local_size = (int(env[f"OMPI_COMM_WORLD_{key}"]) for key in ("SIZE", "LOCAL_SIZE"))
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid", "")
    # Every rank derives the same port, below the range of ephemeral ports.
    port = int(env.get("MASTER_PORT") or _FIRST_PORT + zlib.crc32(job.encode()) % _NUM_PORTS)
    address = env.get("MASTER_ADDR") or ("127.0.0.1" if size == local_size else _find_address(env))
    variables = {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    own = find_own_address(HostGroup(1, size, address, port))
    interface = find_interface(own)
    if interface is not None and (size == local_size or not own.startswith("127.")):
        variables |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    return variables


def _find_address(env: Mapping[str, str]) -> str:
    """The address of mpirun's machine."""
    # Daemons are numbered; the one on mpirun's machine is 0.
    daemon = re.search(r"\.(\d+);", env.get("PMIX_SERVER_URI2", ""))
    if env["OMPI_COMM_WORLD_RANK"] == "0" and daemon is not None and daemon[1] != "0":
        raise ConfigError(
            "MASTER_ADDR is not set, and rank 0 runs on another machine than mpirun, so its address is unknown; "
            "add -x MASTER_ADDR=ADDRESS to mpirun, with the address of rank 0's machine."
        )
    if found := re.search(r";tcp://([^:;]+):(\d+)", env.get("OMPI_MCA_orte_hnp_uri", "")):
        return _find_reachable(found[1].split(","), int(found[2]))
    if found := re.fullmatch(r"prte(?:run)?-(.+)-\d+@\d+", env.get("PMIX_NAMESPACE", "")):
        return found[1]
    raise ConfigError(
        "MASTER_ADDR is not set, and mpirun does not give its own address; add -x MASTER_ADDR=ADDRESS to it, with "
        "the address of rank 0's machine."
    )


def _find_reachable(addresses: list[str], port: int) -> str:
    """The first of mpirun's addresses that this machine can reach; mpirun listens there."""
    if len(addresses) == 1:
        return addresses[0]
    for address in addresses:
        with suppress(OSError):
            socket.create_connection((address, port), _CONNECT_SECONDS).close()
            return address
    raise LaunchError(
        f"cannot reach any address of mpirun's machine ({', '.join(addresses)}); add -x MASTER_ADDR=ADDRESS "
        "to mpirun, with a reachable address."
    )
