"""The rendezvous of ranks started by `horovodrun`, which sets their ranks, but no address of rank 0.

It does run a key-value store, over HTTP, at HOROVOD_GLOO_RENDEZVOUS_ADDR and HOROVOD_GLOO_RENDEZVOUS_PORT, where
Horovod's own ranks meet. Rank 0 writes its address there, and the others wait for it.
"""

import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Mapping

from echelon.ground.errors import ConfigError, LaunchError
from echelon.ground.hosts import THIS_MACHINE, HostGroup, find_interface, find_own_address, join_endpoint

_FIRST_PORT, _NUM_PORTS = 20_000, 10_000
_KEY = "echelon/address-of-rank-0"
_WAIT_SECONDS = 120.0
_LOOK_SECONDS = 0.1
_REQUEST_SECONDS = 10.0
_MAX_BYTES = 256


def read_rendezvous(env: Mapping[str, str]) -> dict[str, str]:
    """The rendezvous and network variables for one rank of a horovodrun job.

    Raises ConfigError if the store's address is not set, and LaunchError if rank 0's address is not there in time.
    """
    size, local_size = int(env["HOROVOD_SIZE"]), int(env["HOROVOD_LOCAL_SIZE"])
    host, store_port = env.get("HOROVOD_GLOO_RENDEZVOUS_ADDR"), env.get("HOROVOD_GLOO_RENDEZVOUS_PORT")
    if not host or not store_port:
        raise ConfigError(
            f"HOROVOD_RANK is set, but HOROVOD_GLOO_RENDEZVOUS_ADDR is not, so {size} processes cannot meet; start "
            "them with horovodrun --gloo, or with mpirun."
        )
    endpoint = join_endpoint(host, int(store_port))
    own = THIS_MACHINE.host if size == local_size else find_own_address(HostGroup(1, size, host, int(store_port)))
    address = env.get("MASTER_ADDR") or (own if size == local_size else _exchange(endpoint, env["HOROVOD_RANK"], own))
    # Every rank derives the same port, below the range of ephemeral ports.
    port = env.get("MASTER_PORT") or str(_FIRST_PORT + zlib.crc32(endpoint.encode()) % _NUM_PORTS)
    variables = {"MASTER_ADDR": address, "MASTER_PORT": port}
    interface = find_interface(own)
    return variables if interface is None else {**variables, "GLOO_SOCKET_IFNAME": interface}


def _exchange(endpoint: str, rank: str, own: str) -> str:
    """Write rank 0's address to the store of horovodrun, or wait for it there."""
    url = f"http://{endpoint}/{_KEY}"
    try:
        if rank == "0":
            request = urllib.request.Request(url, data=own.encode(), method="PUT")
            urllib.request.urlopen(request, timeout=_REQUEST_SECONDS).close()
            return own
        return _await(url)
    except OSError as error:
        raise LaunchError(
            f"rank {rank} cannot reach the store of horovodrun at {endpoint} ({error}); check that no firewall is "
            "between the machines, or export MASTER_ADDR with the address of rank 0's machine."
        ) from error


def _await(url: str) -> str:
    until = time.monotonic() + _WAIT_SECONDS
    while time.monotonic() < until:
        try:
            with urllib.request.urlopen(url, timeout=_REQUEST_SECONDS) as answer:
                return str(answer.read(_MAX_BYTES).decode())
        except urllib.error.HTTPError as error:
            if error.code != 404:  # not there yet
                raise
        time.sleep(_LOOK_SECONDS)
    raise LaunchError(
        f"rank 0 did not write its address to the store of horovodrun within {_WAIT_SECONDS:.0f} seconds."
    )
